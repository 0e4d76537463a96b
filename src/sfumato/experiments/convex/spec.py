"""A convex experiment as a TOML file; see `runner` for the format. Reading it loads neither torch nor scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.settings import Settings, read_settings
from sfumato.experiments.figures import Figure, read_figure
from sfumato.experiments.reading import merged, read, suggestion
from sfumato.experiments.spec import Place, by_name, in_order, read_toml

SPECS = Path(__file__).parent / "specs"
_SETTINGS = tuple(f.name for f in fields(Settings))
_TEXTS = ("title", "paper", "where", "note", "score")
_TOP = (*_TEXTS, "repeats", "figure", "compare", "settings", "when", "row", "sweep", "column")
_ROW = ("name", "paper", "panel", "x", *_SETTINGS)
_COLUMN = ("name", "compare", "when", *_SETTINGS)
_CONDITIONS = ("data", "loss", "epsilon", "estimator")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Which columns are set against which others, problem by problem."""

    ours: tuple[str, ...]
    others: tuple[str, ...]
    errors: tuple[str, ...] = ()  # data whose score is an error: less is better


@dataclass(frozen=True, kw_only=True)
class Cell(Place):
    """One number."""

    panel: str = ""
    x: float | None = None  # its place in a figure
    settings: Settings = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One table or figure."""

    name: str
    title: str
    paper: str  # its number
    where: str  # in the paper
    note: str
    score: str  # what the numbers are, for a reader
    repeats: int
    figure: Figure | None
    compare: Compare | None
    cells: tuple[Cell, ...] = field(repr=False)

    def select(self, rows: list[str], columns: list[str]) -> list[Cell]:
        """The cells with these names of rows and columns, or whose names contain them if none has them exactly."""
        found = by_name(self.cells, rows, columns)
        if not found:
            known = [f"{what} {', '.join(dict.fromkeys(getattr(c, what) for c in self.cells))}" for what in _PARTS]
            raise InvalidArgument(
                f"--row={rows} --column={columns} name no cell of {self.name}, which has {'; '.join(known)}."
            )
        return found


_PARTS = ("row", "column")


def convex_names() -> list[str]:
    return in_order(path.stem for path in SPECS.glob("*.toml"))


@cache
def find_convex(name: str) -> Spec:
    """The spec of that name.

    >>> find_convex("001-table2").cells[0].paper
    0.7882
    """
    if name not in convex_names():
        raise InvalidArgument(f"name={name!r} is no convex experiment{suggestion(name, convex_names())}")
    return load_convex(SPECS / f"{name}.toml")


def load_convex(path: Path) -> Spec:
    """Read and check a file; InvalidArgument names the file, the part and the key."""
    where = f"{path.name}:"
    raw = read_toml(path)
    _known(raw, _TOP, where)
    texts = {name: raw.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or not (text.strip() or name == "note"):
            raise InvalidArgument(f"{where} {name}={text!r} must be a string that says something.")
    repeats = raw.get("repeats", 20)
    if not isinstance(repeats, int) or repeats < 1:
        raise InvalidArgument(f"{where} repeats={repeats!r} must be a whole number of at least 1.")
    columns = _parts(raw, "column", _COLUMN, where)
    rows = _parts(raw, "row", _ROW, where) if "row" in raw else []
    rows += [row for sweep in raw.get("sweep", []) for row in _swept(sweep, where)]
    if not rows:
        raise InvalidArgument(f"{where} has no [[row]] and no [[sweep]]: add one.")
    shared, changes = raw.get("settings", {}), raw.get("when", [])
    _known(shared, _SETTINGS, f"{where} [settings]")
    cells = [_cell(row, column, shared, changes, where) for row in rows for column in columns]
    for names in ([row["name"] for row in rows], [column["name"] for column in columns]):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(f"{where} has the name {twice!r} twice: name them differently.")
    return Spec(
        name=path.stem,
        cells=tuple(cells),
        repeats=repeats,
        figure=read_figure(raw.get("figure"), where),
        compare=_compare(raw.get("compare"), [column["name"] for column in columns], where),
        **{name: text.strip() for name, text in texts.items()},
    )


def _compare(raw: Any, columns: list[str], where: str) -> Compare | None:
    if raw is None:
        return None
    found: Compare = read(Compare, raw, f"{where} [compare]")
    if unknown := [name for name in (*found.ours, *found.others) if name not in columns]:
        raise InvalidArgument(
            f"{where} [compare] names {unknown[0]!r}, which is no column{suggestion(unknown[0], columns)}"
        )
    return found


def _known(raw: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(raw, Mapping):
        raise InvalidArgument(f"{where} is {raw!r}: it must be a table.")
    for key in raw:
        if key not in known:
            raise InvalidArgument(f"{where} has no key {key!r}{suggestion(key, known)}")


def _parts(raw: Mapping[str, Any], kind: str, known: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    found = raw.get(kind)
    if not isinstance(found, list) or not found:
        raise InvalidArgument(f"{where} has no [[{kind}]]: add one.")
    for part in found:
        _known(part, known, f"{where} [[{kind}]]")
        if not isinstance(part.get("name"), str) or not part["name"].strip():
            raise InvalidArgument(f"{where} [[{kind}]] has name={part.get('name')!r}: it must be a string.")
    return found


def _swept(raw: Any, where: str) -> list[dict[str, Any]]:
    """One row per value, which is put where `key` says, such as epsilon, options.reuse or data.dimension."""
    here = f"{where} [[sweep]]"
    _known(raw, ("key", "values", *_ROW), here)
    key, values = raw.get("key"), raw.get("values")
    if not isinstance(key, str) or key.split(".")[0] not in _SETTINGS:
        raise InvalidArgument(f"{here} has key={key!r}: it must name what is swept, such as 'options.reuse'.")
    if not isinstance(values, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise InvalidArgument(f"{here} has values={values!r}: it must be a list of numbers.")
    rest = {name: value for name, value in raw.items() if name not in ("key", "values", "name")}
    label = raw.get("name", key)
    rows = []
    for value in values:
        own: Any = value
        for part in reversed(key.split(".")):
            own = {part: own}
        rows.append(merged(rest, own, {"name": f"{label} {value:g}", "x": value}))
    return rows


def _cell(
    row: Mapping[str, Any], column: Mapping[str, Any], shared: Mapping[str, Any], changes: Any, where: str
) -> Cell:
    """Later ones win: what is shared, the row, what the file changes for it, the column, and what that changes."""
    here = f"{where} cell {row['name']!r} | {column['name']!r}"
    full = merged(shared, _own(row))
    full = merged(full, *_changes(changes, full, f"{where} [[when]]"))
    known = merged(full, _own(column))
    full = merged(known, *_changes(column.get("when", []), known, f"{where} [[column.when]] of {column['name']!r}"))
    papers = row.get("paper", {})
    if not isinstance(papers, Mapping) or not all(isinstance(v, int | float) for v in papers.values()):
        raise InvalidArgument(f"{here} has paper={papers!r}: it must be a table of numbers by column.")
    paper = papers.get(column.get("compare", column["name"]))
    x = row.get("x")
    return Cell(
        row=row["name"],
        column=column["name"],
        paper=None if paper is None else float(paper),
        panel=str(row.get("panel", "")),
        x=None if x is None else float(x),
        settings=read_settings(full, here),
    )


def _own(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key in _SETTINGS}


def _changes(raw: Any, full: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The settings of those entries whose conditions hold."""
    found = []
    for change in raw if isinstance(raw, list) else [raw]:
        _known(change, ("if", *_SETTINGS), where)
        condition = change.get("if")
        _known(condition, _CONDITIONS, f"{where}, if")
        facts = {**full, "data": full.get("data", {}).get("name")}
        if all(facts.get(key) in (v if isinstance(v, list) else [v]) for key, v in condition.items()):
            found.append(_own(change))
    return found
