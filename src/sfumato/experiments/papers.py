"""Every table and figure of the five papers, and its state here: specs and records say it, `papers.toml` the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.spec import Cell as ConvexCell
from sfumato.experiments.convex.spec import Spec as ConvexSpec
from sfumato.experiments.convex.spec import convex_names, find_convex
from sfumato.experiments.convex.table import entries as convex_entries
from sfumato.experiments.reading import read, suggestion
from sfumato.experiments.records import COMMITTED, all_records, by_settings
from sfumato.experiments.spec import Cell, Scale, Spec, find_spec, in_order, read_toml, spec_names
from sfumato.experiments.table import Entry, entries_among

FILE = Path(__file__).parent / "papers.toml"
State = Literal["measured", "partly", "ready", "needs data", "not planned", "no result"]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """How many tables and figures it numbers, and which of them hold no result."""

    number: str
    title: str
    tables: int
    figures: int
    without_results: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Data or weights that are not at hand."""

    name: str
    why: str
    reader: str = ""  # the function that reads its official files
    spec_name: str = ""  # what cells of a spec call it

    def __str__(self) -> str:
        return f"{self.name} ({self.why}{f'; {self.reader} reads it' if self.reader else ''})"


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Other data than the paper's, in all cells of a spec."""

    spec: str
    here: str  # what the cells call it
    text: str


@dataclass(frozen=True, kw_only=True)
class RunsOf:
    """Cells of a spec, by their names or parts of them, whose records hold something under a key."""

    spec: str
    key: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unplanned:
    """A table or figure without a spec. It has one of `needs`, `reason` and `runs_of`."""

    name: str
    title: str
    needs: tuple[str, ...] = ()
    reason: str = ""
    runs_of: RunsOf | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All of `papers.toml`."""

    paper: tuple[Paper, ...]
    data: tuple[Missing, ...]
    stand_in: tuple[StandIn, ...]
    item: tuple[Unplanned, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure as it stands here."""

    name: str
    paper: str
    title: str
    where: str
    state: State
    cells: int = 0
    measured: int = 0
    needs: tuple[str, ...] = ()  # not at hand
    why: str = ""
    stand_in: str = ""
    runs_of: str = ""  # the spec whose records it has; its own name if it is one

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def progress(self) -> str:
        return f"{self.state}, {self.measured} of {self.cells}" if self.state in ("partly", "ready") else self.state

    @property
    def what(self) -> str:
        """What it shows, and what a reader should know of its state."""
        ours = "" if self.name.startswith(self.paper) else "no table of the paper"
        instead = f"here {self.stand_in}" if self.stand_in else ""
        needs = f"needs {', '.join(self.needs)}" if self.needs else self.why
        return "; ".join(part for part in (self.title, ours, instead, needs) if part)


@cache
def listing(path: Path = FILE) -> Listing:
    """Read and check the file.

    >>> [paper.figures for paper in listing().paper]
    [6, 3, 8, 7, 5]
    """
    raw, kinds = read_toml(path), {"paper": Paper, "data": Missing, "stand_in": StandIn, "item": Unplanned}
    parts: dict[str, list[Any]] = {name: [] for name in kinds}
    for name, tables in raw.items():
        if name not in kinds:
            raise InvalidArgument(f"{path.name}: has no table [[{name}]]{suggestion(name, kinds)}")
        parts[name] = [read(kinds[name], table, f"{path.name}: [[{name}]] {_called(table)}") for table in tables]
    known = [missing.name for missing in parts["data"]]
    for item in parts["item"]:
        if sum(map(bool, (item.needs, item.reason, item.runs_of))) != 1:
            raise InvalidArgument(f"{path.name}: {item.name!r} must have one of needs, reason and runs_of.")
        for name in item.needs:
            if name not in known:
                raise InvalidArgument(f"{path.name}: {item.name!r} needs {name!r}{suggestion(name, known)}")
    return Listing(**{name: tuple(found) for name, found in parts.items()})


def _called(table: Any) -> str:
    return next((repr(table[key]) for key in ("name", "number", "spec") if key in table), "")


def numbers() -> list[str]:
    """Of the papers."""
    return [paper.number for paper in listing().paper]


def names() -> list[str]:
    """All that is listed, also what cannot be run."""
    without = [f"{p.number}-{part}" for p in listing().paper for part in p.without_results]
    return in_order({*spec_names(), *convex_names(), *(item.name for item in listing().item), *without})


def items(scale: Scale = "paper", folder: Path = COMMITTED, convex: Path = COMMITTED) -> list[Item]:
    """All of all papers, from the records in a folder, and those of convex experiments in another.

    >>> [item.needs for item in items() if item.name == "002-table7"]
    [('CIFAR-100', 'CrossViT and DeiT weights')]
    """
    records = by_settings(all_records(folder, scale).values())
    deep = [Cells(s, s.cells, entries_among(s, scale, records)) for s in map(find_spec, spec_names())]
    linear = [Cells(s, s.cells, convex_entries(s, convex)) for s in map(find_convex, convex_names())]
    specs = {one.spec.name: one for one in (*deep, *linear)}
    found = {name: of_spec(cells) for name, cells in specs.items()}
    for raw in listing().item:
        if raw.name not in found:  # a spec knows better
            found[raw.name] = _without_spec(raw, specs)
    for paper in listing().paper:
        for part, title in paper.without_results.items():
            name = f"{paper.number}-{part}"
            found[name] = Item(name=name, paper=paper.number, title=title, where=_where(name), state="no result")
    return sorted((found[name] for name in in_order(found)), key=_place)


def _place(item: Item) -> tuple[str, int]:
    """By paper: its tables, its figures, and what is ours."""
    kinds = (f"{item.paper}-table", f"{item.paper}-figure")
    return item.paper, next((n for n, kind in enumerate(kinds) if item.name.startswith(kind)), len(kinds))


@dataclass(frozen=True)
class Cells:
    """Cells of a spec, and what was measured of each."""

    spec: Spec | ConvexSpec
    cells: Sequence[Cell | ConvexCell]
    entries: Sequence[Entry]

    @property
    def measured(self) -> int:
        return sum(entry.ours is not None for entry in self.entries)

    @property
    def state(self) -> State:
        return "measured" if self.measured == len(self.cells) else "partly" if self.measured else "ready"

    def missing(self) -> list[Missing]:
        """What the cells need that were not measured."""
        left = {_data(cell) for cell, entry in zip(self.cells, self.entries, strict=True) if entry.ours is None}
        return [one for one in listing().data if one.spec_name in left]

    def select(self, runs: RunsOf) -> Cells:
        chosen = {(cell.row, cell.column) for cell in self.spec.select(list(runs.rows), list(runs.columns))}
        kept = [n for n, cell in enumerate(self.cells) if (cell.row, cell.column) in chosen]
        return Cells(self.spec, [self.cells[n] for n in kept], [self.entries[n] for n in kept])


def _data(cell: Cell | ConvexCell) -> str:
    return (cell.settings["paper"] if isinstance(cell, Cell) else cell.settings).data.name


def of_spec(cells: Cells) -> Item:
    """The state of a spec with all its cells."""
    spec, missing = cells.spec, cells.missing()
    nowhere = {_data(cell) for cell in cells.cells} <= {one.spec_name for one in missing}
    return Item(
        name=spec.name,
        paper=spec.paper,
        title=spec.title,
        where=spec.where,
        state="needs data" if nowhere else cells.state,
        cells=len(cells.cells),
        measured=cells.measured,
        needs=tuple(one.name for one in missing),
        why="; ".join(map(str, missing)),
        stand_in="; ".join(one.text for one in listing().stand_in if one.spec == spec.name),
        runs_of=spec.name,
    )


def _without_spec(raw: Unplanned, specs: Mapping[str, Cells]) -> Item:
    item = Item(name=raw.name, paper=raw.name[:3], title=raw.title, where=_where(raw.name), state="not planned")
    if raw.needs:
        why = "; ".join(str(one) for one in listing().data if one.name in raw.needs)
        return replace(item, state="needs data", needs=raw.needs, why=why)
    if raw.runs_of is None:
        return replace(item, why=raw.reason)
    runs = raw.runs_of.spec
    if runs not in specs:
        raise InvalidArgument(f"{raw.name!r} has runs of {runs!r}, which is no experiment{suggestion(runs, specs)}")
    cells = specs[runs].select(raw.runs_of)
    why, count = f"in the records of {runs}, under {raw.runs_of.key}", len(cells.cells)
    return replace(item, state=cells.state, cells=count, measured=cells.measured, why=why, runs_of=runs)


def _where(name: str) -> str:
    """000-table10 is Table 10."""
    found = re.match(r"\d+-(table|figure)(\w+)", name)
    return f"{found[1].capitalize()} {found[2]}" if found else name


def counts(found: Iterable[Item]) -> str:
    """How many are in which state, in words."""
    states = Counter(item.state for item in found)
    words = {"needs data": "need data", "no result": "without a result"}
    return ", ".join(f"{states[state]} {words.get(state, state)}" for state in get_args(State) if states[state])


def footnotes(found: Iterable[Item]) -> list[str]:
    """Under a list: what is not at hand, and where there is nothing to measure."""
    every = list(found)
    missing = [str(one) for one in listing().data if any(one.name in item.needs for item in every)]
    nothing = [f"{item.where.lower()} ({item.title})" for item in every if item.state == "no result"]
    return [f"{name}: {', '.join(parts)}." for name, parts in (("Missing", missing), ("No results", nothing)) if parts]


def markdown(found: Iterable[Item]) -> str:
    """A list for a page, with links to where our numbers are; names of papers' pages are their numbers."""
    every = list(found)
    lines = ["| | state | what |", "| --- | --- | --- |"]
    for item in every:
        if item.state != "no result":
            name = f"[{item.name}]({item.paper}.md)" if item.runs_of else item.name
            lines.append(f"| {name} | {item.progress} | {item.what} |")
    return "\n".join([f"{counts(every)}.", "", *lines, "", *(f"{note}\n" for note in footnotes(every))]).rstrip()
