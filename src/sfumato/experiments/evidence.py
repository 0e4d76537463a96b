"""What was measured for each answer of docs/choosing.md: `evidence.toml` names the cells, records have the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.spec import Cell as ConvexCell
from sfumato.experiments.convex.spec import Spec as ConvexSpec
from sfumato.experiments.convex.spec import convex_names, find_convex
from sfumato.experiments.convex.table import entries as convex_entries
from sfumato.experiments.reading import read, suggestion
from sfumato.experiments.records import COMMITTED, Record, all_records, by_settings
from sfumato.experiments.settings import Settings
from sfumato.experiments.spec import Cell, Spec, find_spec, read_toml
from sfumato.experiments.table import Entry, entry

FILE = Path(__file__).parent / "evidence.toml"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A cell of an experiment, and what a reader calls it."""

    cell: tuple[str, ...]  # its row and its column
    name: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the page: the numbers without and with what an answer advises."""

    answer: int
    data: str
    experiment: str
    without: Named | None = None
    used: Named


@cache
def lines(path: Path = FILE) -> tuple[Line, ...]:
    """Read and check the file, in the order of the answers.

    >>> lines()[0].used.name
    'cold DP-SGD'
    """
    raw = read_toml(path)
    for key in raw:
        if key != "line":
            raise InvalidArgument(f"{path.name}: has no table [[{key}]]{suggestion(key, ['line'])}")
    found: list[Line] = [read(Line, one, f"{path.name}: [[line]] {number}") for number, one in enumerate(raw["line"])]
    for line in found:
        for named in (line.without, line.used):
            if named is not None:
                _cell(line, named)
    return tuple(sorted(found, key=lambda line: line.answer))


def _spec(name: str) -> Spec | ConvexSpec:
    return find_convex(name) if name in convex_names() else find_spec(name)


def _cell(line: Line, named: Named) -> Cell | ConvexCell:
    spec = _spec(line.experiment)
    places = {(cell.row, cell.column): cell for cell in spec.cells}
    if named.cell not in places:
        known = [" | ".join(place) for place in places]
        wanted = " | ".join(named.cell)
        raise InvalidArgument(f"{line.experiment} has no cell {wanted!r}{suggestion(wanted, known)}")
    return places[named.cell[0], named.cell[1]]


class _Measured:
    """Entries and epsilons of cells, from the records in a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[Settings, list[Record]] = by_settings(all_records(folder, "paper").values())
        self._convex: dict[str, dict[tuple[str, str], Entry]] = {}

    def entry(self, line: Line, named: Named) -> Entry:
        cell = _cell(line, named)
        if isinstance(cell, Cell):
            return entry(cell, self._records.get(cell.settings["paper"], ()))
        if line.experiment not in self._convex:
            found = convex_entries(find_convex(line.experiment), self._folder)
            self._convex[line.experiment] = {(e.row, e.column): e for e in found}
        return self._convex[line.experiment][cell.row, cell.column]

    def epsilon(self, line: Line) -> float | None:
        """As the cell declares it; where it declares the noise instead, as the ledger said."""
        cell = _cell(line, line.used)
        if not isinstance(cell, Cell):
            return cell.settings.epsilon
        settings = cell.settings["paper"]
        declared = settings.training.epsilon
        return declared or next((r["statement"]["epsilon"] for r in self._records.get(settings, ())), None)


def markdown(folder: Path = COMMITTED, path: Path = FILE) -> str:
    """A table for the page; lines with a cell that is not measured are left out."""
    measured = _Measured(folder)
    rows = ["| | data | epsilon | without | with | from |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines(path):
        pair = [(named, measured.entry(line, named)) for named in (line.without, line.used) if named is not None]
        if any(found.ours is None for _, found in pair):
            continue
        texts = [f"{named.name} {found.text()}" for named, found in pair]
        epsilon = measured.epsilon(line)
        cells: list[Any] = [f"({line.answer})", line.data, "" if epsilon is None else f"{epsilon:.3g}"]
        cells += texts if len(texts) == 2 else ["", *texts]
        rows.append(f"| {' | '.join(cells)} | [{line.experiment}](papers/{_spec(line.experiment).paper}.md) |")
    return "\n".join(rows)
