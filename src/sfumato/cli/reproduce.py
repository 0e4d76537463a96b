"""`sfumato reproduce`: tables and figures of the papers, run again."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sfumato.cli.device import DeviceName, find_device
from sfumato.cli.interruption import interruptible, kept
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.experiments.convex.spec import Spec as ConvexSpec
    from sfumato.experiments.spec import Spec
    from sfumato.experiments.table import Entry

ScaleName = Literal["smoke", "paper"]
_OUT = Path("runs/reproduce")


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table or figure, such as 000-table1, or a paper to list alone, such as 002.")
    ] = None,
    scale: Annotated[
        ScaleName | None, typer.Option(help="smoke: on a CPU, in minutes; paper: as in the paper, on a GPU.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the table as measured; run nothing.")] = False,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows, by name or a part of it.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only these columns, by name or a part of it.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds to run: 1 by default, 20 in convex experiments.")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for records and work, runs/reproduce by default; with --show, the one to read."),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where to train.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Also run what was run already, and replace it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of a convex experiment; by default one per core.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw the experiment as SVG, if it is a figure.")] = None,
) -> None:
    """List the papers' tables and figures, run one again, or show what was measured beside the paper's numbers."""
    from sfumato.experiments.convex.spec import convex_names, find_convex
    from sfumato.experiments.papers import numbers
    from sfumato.experiments.spec import find_spec, spec_names

    if name is None or name in numbers():
        if show or row or column:
            raise InvalidArgument("--show, --row and --column need the name of an experiment: give one.")
        _list(name, out, scale or "paper", as_json)
        return
    if name not in (*spec_names(), *convex_names()):
        raise InvalidArgument(_no_experiment(name))
    if name in convex_names():
        if scale == "smoke":
            raise InvalidArgument(f"--scale=smoke is not there for {name}: give --seeds 2 and --out for a trial.")
        convex = find_convex(name)
        names = (row or [], column or [])
        if show:
            _show_convex(convex, names, out, plot, as_json)
            return
        chosen = range(first_seed, first_seed + (seeds or convex.repeats))
        with interruptible(kept(out or _OUT, again=again)):
            _run_convex(convex, names, chosen, out or _OUT, workers, again=again, as_json=as_json)
        _show_convex(convex, names, out or _OUT, plot, as_json)
        return
    if workers is not None:
        raise InvalidArgument(f"--workers is for convex experiments, and {name} is none: leave it away.")
    spec = find_spec(name)
    if plot is not None and spec.figure is None:
        raise InvalidArgument(f"name={name!r} is a table and no figure: leave --plot away.")
    if show:
        _show(spec, out, plot, scale or "paper", as_json)
        return
    if scale is None:
        raise InvalidArgument("--scale is missing: smoke (CPU, minutes) or paper (GPU), or --show to run nothing.")
    chosen = range(first_seed, first_seed + (seeds or 1))
    with interruptible(kept(out or _OUT, again=again)):
        _run(spec, scale, (row or [], column or []), chosen, out or _OUT, device, again=again, as_json=as_json)
    if plot is not None:
        _draw(spec, plot, scale, out or _OUT)


def _list(paper: str | None, out: Path | None, scale: ScaleName, as_json: bool) -> None:
    from sfumato.experiments.papers import counts, footnotes, items, listing
    from sfumato.experiments.records import COMMITTED

    every = items(scale, out or (COMMITTED if scale == "paper" else _OUT), out or COMMITTED)
    if as_json:
        typer.echo(json.dumps([item.to_json() for item in every if paper in (None, item.paper)]))
        return
    for one in listing().paper:
        if paper in (None, one.number):
            found = [item for item in every if item.paper == one.number]
            rows = [(item.name, item.progress, item.what) for item in found if item.state != "no result"]
            state = "state" if scale == "paper" else f"state at {scale} scale"
            notes = [*footnotes(found), f"In all: {counts(found)}."]
            _print(f"Paper {one.number}: {one.title}", ("name", state, "what"), rows, notes)


def _no_experiment(name: str) -> str:
    """Why it cannot be run, in a sentence."""
    from sfumato.experiments.papers import items, names, numbers

    if name not in names():
        close = difflib.get_close_matches(name, [*names(), *numbers()], n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`sfumato reproduce` lists them all."
        return f"name={name!r} is no table or figure of the papers: {hint}"
    item = next(item for item in items() if item.name == name)
    if item.runs_of:
        return f"name={name!r} has no runs of its own: run or show {item.runs_of}, whose records hold it."
    told = "has no result to measure" if item.state == "no result" else f"cannot be run ({item.state})"
    return f"name={name!r} {told}: {item.why or item.title}."


def _draw(spec: Spec, path: Path, scale: ScaleName, out: Path) -> None:
    from sfumato.experiments.table import drawn

    if not drawn(spec, path, scale, out):
        raise InvalidArgument(f"name={spec.name!r} has nothing measured at {scale} scale to draw: run it first.")


def _show(spec: Spec, out: Path | None, plot: Path | None, scale: ScaleName, as_json: bool) -> None:
    from sfumato.experiments.records import COMMITTED
    from sfumato.experiments.table import entries

    folder = out or (COMMITTED if scale == "paper" else _OUT)
    found = entries(spec, scale, folder)
    if plot is not None:
        _draw(spec, plot, scale, folder)
    if as_json:
        typer.echo(json.dumps([entry.to_json() for entry in found]))
    else:
        _print_table(spec, scale, found)


def _run(
    spec: Spec,
    scale: ScaleName,
    names: tuple[list[str], list[str]],
    seeds: range,
    out: Path,
    device: DeviceName,
    *,
    again: bool,
    as_json: bool,
) -> None:
    cells = spec.select(*names)

    from sfumato.experiments.runner import jobs, run_job
    from sfumato.experiments.table import entries

    where = find_device(device)
    told = not as_json
    ran: list[dict[str, Any]] = []
    for job in jobs(spec, cells, scale, list(seeds), out, again=again):
        before = job.finished() is not None and not again
        record = run_job(job, device=where, again=again, progress=told and sys.stdout.isatty())
        ran.append({"row": job.cell.row, "column": job.cell.column_at(scale), "seed": job.seed, "ran": not before})
        if told:
            _tell(ran[-1], record)
    found = entries(spec, scale, out)
    if as_json:
        table = [entry.to_json() for entry in found]
        typer.echo(json.dumps({"spec": spec.name, "scale": scale, "out": str(out), "cells": ran, "table": table}))
    else:
        _print_table(spec, scale, found)


Names = tuple[list[str], list[str]]  # of rows and columns


def _run_convex(
    spec: ConvexSpec, names: Names, repeats: range, out: Path, workers: int | None, *, again: bool, as_json: bool
) -> None:
    """Make what is missing, with a bar that shows how far it is."""
    cells = spec.select(*names)

    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    from sfumato.experiments.convex.runner import Runner

    runner = Runner(spec, cells, list(repeats), out, again=again)
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=as_json or not sys.stdout.isatty()) as bar:
        task = bar.add_task(f"{spec.name}, fits", total=runner.fits)
        for finished in runner.run(workers or os.cpu_count() or 1):
            bar.advance(task, finished)
    for sentence in runner.left_out.values():
        typer.echo(f"Left out: {sentence}", err=True)


def _show_convex(spec: ConvexSpec, names: Names, out: Path | None, plot: Path | None, as_json: bool) -> None:
    from sfumato.experiments.convex.comparison import pairs
    from sfumato.experiments.convex.figures import draw
    from sfumato.experiments.convex.table import entries
    from sfumato.experiments.records import COMMITTED

    chosen = {(cell.row, cell.column) for cell in spec.select(*names)}
    found = [entry for entry in entries(spec, out or COMMITTED) if (entry.row, entry.column) in chosen]
    if plot is not None:
        draw(spec, plot, out or COMMITTED)
    if as_json:
        typer.echo(json.dumps([entry.to_json() for entry in found]))
        return
    _print_table(spec, "paper", found)
    if not any(names) and (ahead := pairs(spec, out or COMMITTED)):
        rows = [(pair.row, pair.ours, pair.other, f"{pair.ahead:+.4f} ± {pair.stderr:.4f}") for pair in ahead]
        _print("Against the best of the others", ("problem", "ours", "best of the others", "ahead by"), rows)
        for method in dict.fromkeys(pair.ours for pair in ahead):
            mine = [pair.ahead > 0 for pair in ahead if pair.ours == method]
            typer.echo(f"{method}: ahead in {sum(mine)} of {len(mine)} problems.")


def _tell(done: dict[str, Any], record: Any) -> None:
    scores = ", ".join(f"{name} {parts['test']:.2f}" for name, parts in record["metrics"].items())
    how = f"{record['seconds']:.0f} s" if done["ran"] else "from before"
    typer.echo(f"{done['row']} | {done['column']} | seed {done['seed']}: {scores} ({how})")


def _print_table(spec: Spec | ConvexSpec, scale: ScaleName, found: list[Entry]) -> None:
    title = f"{spec.name}: {spec.title}"
    measured = ["" if e.ours is None else e.text() for e in found]
    if scale == "smoke":
        rows = [(e.row, e.column, ours, e.state) for e, ours in zip(found, measured, strict=True)]
        _print(title, ("row", "column", "smoke", "state"), rows)
        typer.echo("Small networks on handwritten digits: this shows that the code runs, and nothing of the paper's.")
        return
    papers = ["" if e.paper is None else f"{e.paper:g}" for e in found]
    cells = [(e.row, e.column, p, o, e.state) for e, p, o in zip(found, papers, measured, strict=True)]
    _print(title, ("row", "column", "paper", "ours", "state"), cells)


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if notes:
        console.print()
