"""A table of a paper as a TOML file: its cells, the paper's numbers, and how each cell is made at two scales.

`[data]`, `[model]`, `[synthesis]`, `[warm_up]` and `[training]` are shared by all cells; a `[[cell]]` adds or changes
keys of `[training]`, and of the others as tables of their own. `[smoke.*]`, and after that a cell's table `smoke` of
keys of `[training]`, changes them once more, for a trial on a CPU. `base` names a file in `bases/` to begin with.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from sfumato.errors import InvalidArgument
from sfumato.experiments.figures import Figure, read_figure
from sfumato.experiments.reading import check_keys, merged, suggestion
from sfumato.experiments.settings import (
    OPTIONS,
    Data,
    Federated,
    Model,
    Selection,
    Settings,
    Synthesis,
    Text,
    Training,
    WarmUp,
    read_settings,
)

SPECS = Path(__file__).parent / "specs"
Scale = Literal["paper", "smoke"]
SCALES: tuple[Scale, ...] = get_args(Scale)
CANDIDATES = ("last", "ema", "mean", "vote", "logits")
REPORTED = (*CANDIDATES, "mirrored")  # the last is the moving average's mean output for an image and its mirror image
MEASURES = ("accuracy", "loss", "perplexity")
CHOSEN = "chosen"  # that of the candidates which is the best on public rows that were held out
_SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "model": Model,
    "text": Text,
    "synthesis": Synthesis,
    "selection": Selection,
    "federated": Federated,
    "warm_up": WarmUp,
    "training": Training,
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a number stands, and what the paper has there."""

    row: str
    column: str
    paper: float | None = None  # null where the paper has no such number

    @property
    def slug(self) -> str:
        """For names of files."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.row} {self.column}".lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Cell(Place):
    """One number of a table. `settings` has one entry per scale."""

    report: str = CHOSEN  # which average of the iterates is compared with the paper's number
    measure: str = MEASURES[0]
    x: float | None = None  # its place in a figure; without, a level
    settings: Mapping[Scale, Settings] = field(repr=False)

    def labels_at(self, scale: Scale) -> int | None:
        """How many labels the number is of, if it is of any: at smoke scale there are fewer."""
        paper, own = (self.settings[s].selection for s in ("paper", scale))
        if paper is None or own is None:
            return None
        return own.labels[min(paper.labels.index(int(self.report)), len(own.labels) - 1)]

    def column_at(self, scale: Scale) -> str:
        """The column's name, with the true number of labels where it says another."""
        labels = self.labels_at(scale)
        true = labels is None or str(labels) == self.report
        return self.column if true else f"{self.column} ({scale}: {labels:,} labels)"

    def x_at(self, scale: Scale) -> float | None:
        labels = self.labels_at(scale)
        return self.x if labels is None or self.x != int(self.report) else float(labels)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One table."""

    name: str
    title: str
    paper: str  # its number
    where: str  # in the paper
    note: str = ""  # what a reader should know, above all where we had to choose
    measure: str = MEASURES[0]
    cells: tuple[Cell, ...] = field(repr=False)
    figure: Figure | None = None

    def select(self, rows: list[str], columns: list[str]) -> list[Cell]:
        """The cells with these names of rows and columns, or whose names contain them if none has them exactly."""
        found = by_name(self.cells, rows, columns)
        if not found:
            asked = " ".join(
                f"--{what} {name!r}" for what, names in (("row", rows), ("column", columns)) for name in names
            )
            known = _some(c.row for c in self.cells) if rows else _some(c.column for c in self.cells)
            raise InvalidArgument(f"{asked} names no cell of {self.name}, which has {known}: --show prints them all.")
        return found


_FEW = 6


def _some(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW else ""
    return f"{', '.join(map(repr, every[:_FEW]))}{more}"


Placed = TypeVar("Placed", bound=Place)


def by_name(cells: Sequence[Placed], rows: list[str], columns: list[str]) -> list[Placed]:
    """The cells with these names of rows and columns, or whose names contain them if none has them exactly."""
    found = [c for c in cells if _named(c.row, rows, {d.row for d in cells})]
    return [c for c in found if _named(c.column, columns, {d.column for d in cells})]


def _named(name: str, wanted: list[str], known: set[str]) -> bool:
    exactly = {n.casefold() for n in known} & {w.casefold() for w in wanted}
    if exactly:
        return name.casefold() in exactly
    return not wanted or any(w.casefold() in name.casefold() for w in wanted)


def spec_names() -> list[str]:
    """In the order of the papers: table 9 comes before table 15."""
    return in_order(path.stem for path in SPECS.glob("*.toml"))


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in _parts(name)])


def _parts(name: str) -> list[str]:
    return re.findall(r"\d+|\D+", name)


@cache
def find_spec(name: str) -> Spec:
    """The spec of that name.

    >>> find_spec("000-table1").cells[0].paper
    64.9
    """
    if name not in spec_names():
        raise InvalidArgument(f"name={name!r} is no experiment{suggestion(name, spec_names())}")
    return load_spec(SPECS / f"{name}.toml")


def load_spec(path: Path) -> Spec:
    """Read and check a file; InvalidArgument names the file, the table and the key."""
    raw = read_toml(path)
    base = raw.pop("base", None)
    begun = {} if base is None else read_toml(path.parent / "bases" / f"{base}.toml")
    shared = merged(begun, {k: v for k, v in raw.items() if k in (*_SECTIONS, "smoke")})
    smoke = shared.pop("smoke", {})
    where = f"{path.name}:"
    for name, tables in (("", shared), ("smoke.", smoke)):
        for section, table in tables.items():
            if section not in _SECTIONS:
                raise InvalidArgument(f"{where} has no table [{name}{section}]{suggestion(section, _SECTIONS)}")
            check_keys(_SECTIONS[section], table, f"{where} [{name}{section}]")
    known = (
        "title",
        "paper",
        "where",
        "note",
        "report",
        "measure",
        "base",
        "figure",
        *_SECTIONS,
        "smoke",
        "cell",
        "curve",
    )
    for key in raw:
        if key not in known:
            raise InvalidArgument(f"{where} has no key {key!r}{suggestion(key, known)}")
    texts = {name: _text(raw, name, where, required=name != "note") for name in ("title", "paper", "where", "note")}
    parts = raw.get("cell", []), raw.get("curve", [])
    if not any(parts) or not all(isinstance(part, dict) for tables in parts for part in tables):
        raise InvalidArgument(f"{where} has no [[cell]]: add one per number of the table.")
    every = [*parts[0], *(cell for curve in parts[1] for cell in _points(curve, shared, where))]
    measure = raw.get("measure", MEASURES[0])
    if measure not in MEASURES:
        raise InvalidArgument(f"{where} measure={measure!r} is not known{suggestion(str(measure), MEASURES)}")
    cells = [replace(_cell(part, shared, smoke, raw, where), measure=measure) for part in every]
    if any((cell.settings["paper"].text is None) != (measure == MEASURES[0]) for cell in cells):
        raise InvalidArgument(f"{where} has measure={measure!r}: images have an accuracy, text a loss or a perplexity.")
    slugs = [cell.slug for cell in cells]  # under which their runs are filed
    for cell in cells:
        if slugs.count(cell.slug) > 1:
            raise InvalidArgument(f"{where} has two cells {cell.row!r} | {cell.column!r}: name them differently.")
    figure = read_figure(raw.get("figure"), where)
    return Spec(name=path.stem, cells=tuple(cells), figure=figure, measure=measure, **texts)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidArgument(f"{str(path)!r} cannot be read: give the path of a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{str(path)!r} is not valid TOML: {error}.") from None


def _text(raw: Mapping[str, Any], name: str, where: str, *, required: bool = True) -> str:
    found = raw.get(name, "")
    if not isinstance(found, str) or (required and not found):
        raise InvalidArgument(f"{where} {name}={found!r} must be a string that says something.")
    return found.strip()


def _points(curve: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A curve of accuracy against labels: one cell for each number of them, and one training for all."""
    selection = merged(shared.get("selection", {}), curve.get("selection", {}))
    labels = selection.get("labels")
    if not isinstance(labels, list) or not all(isinstance(n, int) for n in labels):
        raise InvalidArgument(f"{where} [[curve]] {curve.get('row')!r} needs labels, a list of numbers, in selection.")
    return [{**curve, "column": f"{n:,} labels", "report": str(n), "x": n} for n in labels]


def _cell(
    raw: Mapping[str, Any], shared: Mapping[str, Any], smoke: Mapping[str, Any], spec: Mapping[str, Any], where: str
) -> Cell:
    row, column = (_text(raw, name, f"{where} [[cell]]") for name in ("row", "column"))
    here = f"{where} cell {row!r} | {column!r}"
    own = {"row", "column", "paper", "report", "x"}
    tables = {name: raw[name] for name in _SECTIONS if name != "training" and name in raw}
    small = raw.get("smoke", {})
    training = {key: value for key, value in raw.items() if key not in own and key not in (*tables, "smoke")}
    paper, report = raw.get("paper"), raw.get("report", spec.get("report", CHOSEN))
    most = 100 if spec.get("measure", MEASURES[0]) == MEASURES[0] else math.inf
    if paper is not None and not (isinstance(paper, int | float) and 0 <= paper <= most):
        what = "percentage" if most == 100 else "positive number"
        raise InvalidArgument(f"{here} has paper={paper!r}: it must be a {what}, or left out.")
    unknown = sorted(set(training) - {f.name for f in fields(Training)})
    if unknown:
        names = (*own, *_SECTIONS, "smoke", *(f.name for f in fields(Training)))
        raise InvalidArgument(f"{here} has no key {unknown[0]!r}{suggestion(unknown[0], names)}")
    check_keys(Training, training, here)
    check_keys(Training, small, f"{here}, smoke")
    for name, table in tables.items():
        check_keys(_SECTIONS[name], table, f"{here}, {name}")
    full = merged(shared, tables, {"training": training})
    made = read_settings(full, here)
    settings: dict[Scale, Settings] = {
        "paper": made,
        "smoke": read_settings(merged(full, smoke, {"training": small}), f"{here}, at smoke scale"),
    }
    labels = () if made.selection is None else map(str, made.selection.labels)
    known = (*labels,) or (CHOSEN, *REPORTED)
    if report not in known:
        raise InvalidArgument(f"{here} has report={report!r}{suggestion(str(report), known)}")
    for method, options in OPTIONS.items():
        if options in training and method not in made.training.method:
            raise InvalidArgument(f"{here} gives {options}, but its method is {list(made.training.method)}: drop it.")
    if report == CHOSEN and not made.data.hold_out:
        raise InvalidArgument(f"{here} chooses on public rows, but hold_out is 0: hold some out, or give report.")
    return Cell(
        row=row,
        column=column,
        paper=None if paper is None else float(paper),
        report=report,
        x=None if raw.get("x") is None else float(raw["x"]),
        settings=settings,
    )
