"""A table with the paper's numbers and ours beside them, as data, for a terminal and as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sfumato.experiments.figures import Point, draw
from sfumato.experiments.records import COMMITTED, Record, all_records, by_settings, polluted, reported
from sfumato.experiments.settings import Settings
from sfumato.experiments.spec import Cell, Place, Scale, Spec


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell as measured."""

    row: str
    column: str
    paper: float | None
    ours: float | None  # the mean over the seeds
    stderr: float | None  # of that mean; None below two seeds
    seeds: int
    state: str
    digits: int = 2  # after the point, in text
    polluted: float | None = None  # which share of the rows chosen for labelling did not belong there

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("row", "column", "paper", "ours", "stderr", "seeds")}
        return facts if self.polluted is None else {**facts, "polluted": self.polluted}

    def text(self) -> str:
        if self.ours is None:
            return self.state
        spread = "" if self.stderr is None else f" ± {self.stderr:.{self.digits}f}"
        chosen = "" if self.polluted is None else f", {100 * self.polluted:.0f} % polluted"
        return f"{self.ours:.{self.digits}f}{spread} ({self.seeds}){chosen}"


def entries(spec: Spec, scale: Scale, folder: Path = COMMITTED) -> list[Entry]:
    """All cells of a table, from the records in a folder."""
    return entries_among(spec, scale, by_settings(all_records(folder, scale).values()))


def entries_among(spec: Spec, scale: Scale, records: Mapping[Settings, Sequence[Record]]) -> list[Entry]:
    """The same from records that were read once for several tables."""
    found = [entry(cell, records.get(cell.settings[scale], ())) for cell in spec.cells]
    return [replace(e, column=cell.column_at(scale)) for e, cell in zip(found, spec.cells, strict=True)]


_DIGITS = {"accuracy": 2, "loss": 4, "perplexity": 1}


def entry(cell: Cell, records: Iterable[Record]) -> Entry:
    found = list(records)
    shares = [share for record in found if (share := polluted(record, cell)) is not None]
    return replace(
        measured(cell, [reported(record, cell) for record in found], digits=_DIGITS[cell.measure]),
        polluted=round(statistics.fmean(shares), 4) if shares else None,
    )


def measured(place: Place, values: Sequence[float], *, digits: int = 2) -> Entry:
    """The mean of the values, one per seed."""
    return Entry(
        row=place.row,
        column=place.column,
        paper=place.paper,
        ours=round(statistics.fmean(values), digits + 2) if values else None,
        stderr=round(statistics.stdev(values) / math.sqrt(len(values)), digits + 2) if len(values) > 1 else None,
        seeds=len(values),
        state="measured" if values else "not run",
        digits=digits,
    )


def drawn(spec: Spec, path: Path, scale: Scale = "paper", folder: Path = COMMITTED) -> bool:
    """Draw a table that is a figure, one curve per row with bars of two standard errors; False if there is nothing."""
    found = entries(spec, scale, folder)
    if spec.figure is None or all(e.ours is None for e in found):
        return False
    curves: dict[str, list[Point]] = {}
    for cell, e in zip(spec.cells, found, strict=True):
        if e.ours is not None:
            point = Point(cell.x_at(scale), e.ours, 2 * (e.stderr or 0.0))
            if point not in curves.setdefault(cell.row, []):  # several columns may be one at smoke scale
                curves[cell.row].append(point)
    figure = spec.figure if scale == "paper" else replace(spec.figure, x=f"{spec.figure.x} ({scale} scale)")
    draw(spec.name, figure, {"": curves}, path)
    return True


def grid(found: list[Entry]) -> tuple[list[str], list[tuple[str, list[Entry | None]]]]:
    """The names of the columns, and each row with its entries; None where the table has no such cell."""
    columns = list(dict.fromkeys(e.column for e in found))
    rows = list(dict.fromkeys(e.row for e in found))
    by_name = {(e.row, e.column): e for e in found}
    return columns, [(row, [by_name.get((row, column)) for column in columns]) for row in rows]


def markdown(spec: Spec, scale: Scale = "paper", folder: Path = COMMITTED) -> str:
    """The table for a page: per column one with our numbers, and one with the paper's if it has any."""
    columns, rows = grid(entries(spec, scale, folder))
    printed = [any(e is not None and e.paper is not None for e in of) for of in zip(*(f for _, f in rows), strict=True)]
    names = [
        name
        for column, paper in zip(columns, printed, strict=True)
        for name in ((f"{column}: paper", "ours") if paper else (column,))
    ]
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for row, found in rows:
        cells = [text for e, paper in zip(found, printed, strict=True) for text in _texts(e)[0 if paper else 1 :]]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _texts(e: Entry | None) -> tuple[str, str]:
    """The paper's number and ours."""
    return ("", "") if e is None else ("–" if e.paper is None else f"{e.paper:g}", e.text())
