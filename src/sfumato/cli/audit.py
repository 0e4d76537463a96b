"""`sfumato audit`: the package's own methods, or a user's model before it is trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import InvalidArgument
from sfumato.reading import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sfumato.audit.verdict import Verdict


_OWN_EXPERIMENTS = (
    "Claimed epsilons are those of the audit's own small experiments, not the epsilon of your training, which its "
    "privacy statement says."
)


def audit(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A TOML file of sfumato train, or module:function that returns (module, loss, rows): your own model "
            "is examined. After --methods, further methods."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Methods of the package: all, or their names, one after the other.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also whole trainings on MNIST with 1,000 canaries; needs SFUMATO_DATA.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look for leaks: what is claimed against what an attack proves. Status 1 if a claim is broken."""
    if methods is None and what:
        if len(what) > 1 or full:
            raise InvalidArgument(
                "Your own model is examined one at a time: give one target, and neither more nor --full."
            )
        found: Sequence[Verdict] = _examined(what[0])
    else:
        found = _audited(_chosen([*(methods or ["all"]), *(what or [])]), full, workers or os.cpu_count() or 1)
    if as_json:
        typer.echo(json.dumps([verdict.to_json() for verdict in found]))
    else:
        _show(found)
        typer.echo(_OWN_EXPERIMENTS)
    if not all(verdict.holds for verdict in found):
        raise typer.Exit(1)


def _chosen(wanted: list[str]) -> list[str]:
    from sfumato.audit.subjects import subjects

    known = [subject.name for subject in subjects()]
    if wanted == ["all"]:
        return known
    for name in wanted:
        if name not in known:
            raise InvalidArgument(f"methods={name!r} is not known{suggestion(name, [*known, 'all'])}")
    return wanted


def _audited(names: list[str], full: bool, workers: int) -> list[Verdict]:
    """In several processes, since most of it is Python; what takes longest first."""
    if len(names) == 1 or workers == 1:
        return [verdict for name in names for verdict in _subject(name, full)]
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(workers, len(names)), mp_context=get_context("spawn")) as pool:
        parts = {name: pool.submit(_subject, name, full, True) for name in sorted(names, key=_long_first)}
        return [verdict for name in names for verdict in parts[name].result()]


def _long_first(name: str) -> bool:
    return name not in ("dp-sgd", "dope-sgd")  # which train


def _subject(name: str, full: bool, alone: bool = False) -> list[Verdict]:
    import torch

    from sfumato.audit.subjects import subjects

    if alone:
        torch.set_num_threads(1)  # there is a process for every core
    subject = next(one for one in subjects() if one.name == name)
    return [*subject.audits(), *(subject.full() if full and subject.full is not None else [])]


def _examined(target: str) -> list[Verdict]:
    from sfumato.cli.audit_target import examined_config, examined_function

    if target.endswith(".toml"):
        return examined_config(Path(target))
    if ":" in target:
        return examined_function(target)
    raise InvalidArgument(f"target={target!r} must be a TOML file or module:function; methods go after --methods.")


def _show(found: Iterable[Verdict]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "audit", "claimed", "lower bound", "unit", "trials", "verdict"):
        right = column in ("claimed", "lower bound", "trials")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    broken = []
    for verdict in found:
        said = "holds" if verdict.holds else "BROKEN"
        numbers = f"{verdict.claimed:.4g}", f"{verdict.lower_bound:.4g}"
        table.add_row(verdict.method, verdict.audit, *numbers, verdict.unit, str(verdict.trials), said)
        broken += [] if verdict.holds else [verdict]
    console = Console()
    # What is piped into a file should not be broken into narrow columns.
    (console if console.is_terminal else Console(width=160)).print(table)
    for verdict in broken:
        typer.echo(f"{verdict.method}, {verdict.audit}: {verdict.told or 'more is proven than is claimed.'}")
    typer.echo("1 finding." if len(broken) == 1 else f"{len(broken) or 'No'} findings.")
