"""The papers' numbers beside a run: those of the same data and network, at the epsilon that the paper spends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from sfumato.errors import InvalidArgument
from sfumato.experiments.records import COMMITTED, Record, all_records
from sfumato.experiments.settings import Settings, read_settings
from sfumato.experiments.spec import Cell, Spec, find_spec, spec_names
from sfumato.experiments.table import entry
from sfumato.report.contents import Training


@dataclass(frozen=True, kw_only=True)
class PaperPoint:
    """One cell of a paper's table; accuracies are shares of one."""

    spec: str
    where: str  # "paper 000, Table 9"
    row: str
    column: str
    epsilon: float
    paper: float | None
    ours: float | None  # from the committed runs
    stderr: float | None


def paper_points(trainings: Iterable[Training], beside: Sequence[str] = ()) -> list[PaperPoint]:
    """All tables in `beside`, and for records of experiments those cells of their table that can be compared."""
    wanted: dict[str, dict[str, Cell]] = {name: {c.slug: c for c in find_spec(name).cells} for name in beside}
    spent: dict[tuple[str, str], float] = {}  # where the paper gives the noise, the run knows what it costs
    for training in trainings:
        if training.cell is None or training.cell[0] not in spec_names():
            continue
        spec = find_spec(training.cell[0])
        own = next((c for c in spec.cells if (c.row, c.column) == training.cell[1:]), None)
        if own is None:
            continue
        if training.epsilon is not None:
            spent[spec.name, own.slug] = training.epsilon
        wanted.setdefault(spec.name, {}).update({c.slug: c for c in spec.cells if _comparable(c, own)})
    return [point for name, cells in wanted.items() for point in _points(find_spec(name), cells.values(), spent)]


def _comparable(cell: Cell, own: Cell) -> bool:
    """The same rows are private, and the same network is trained."""
    mine, other = own.settings["paper"], cell.settings["paper"]
    same = (mine.data.name, mine.data.private, mine.model) == (other.data.name, other.data.private, other.model)
    return same and other.selection == mine.selection


def _points(spec: Spec, cells: Iterable[Cell], spent: dict[tuple[str, str], float]) -> list[PaperPoint]:
    committed = _committed()
    found = []
    for cell in cells:
        epsilon = cell.settings["paper"].training.epsilon or spent.get((spec.name, cell.slug))
        own = {record["seed"]: record for settings, record in committed if settings == cell.settings["paper"]}
        measured = entry(cell, own.values())
        if epsilon is None or (cell.paper is None and measured.ours is None):
            continue
        found.append(
            PaperPoint(
                spec=spec.name,
                where=f"paper {spec.paper}, {spec.where}" if spec.paper.isdigit() else spec.title,
                row=cell.row,
                column=cell.column,
                epsilon=epsilon,
                paper=_share(cell.paper),
                ours=_share(measured.ours),
                stderr=_share(measured.stderr),
            )
        )
    return found


@cache
def _committed() -> list[tuple[Settings, Record]]:
    """Every committed run with its settings, which take long to read: once, and not for every cell."""
    found = []
    for record in all_records(COMMITTED, "paper").values():
        with suppress(InvalidArgument):  # made by a version that knew other keys
            found.append((read_settings(record["config"], "config"), record))
    return found


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
