"""Tables and figures of convex experiments, from the records: as data, and as Markdown."""

from __future__ import annotations

from pathlib import Path

from sfumato.experiments.convex.records import all_records, settings_of
from sfumato.experiments.convex.spec import Spec
from sfumato.experiments.records import COMMITTED
from sfumato.experiments.table import Entry, measured

_DIGITS = 4  # as many as the paper gives


def entries(spec: Spec, folder: Path = COMMITTED) -> list[Entry]:
    """All cells, from the records in a folder."""
    known = [(settings_of(record), record["scores"]) for record in all_records(folder, spec).values()]
    found: list[Entry] = []
    for cell in spec.cells:
        scores: list[float] = next((scores for settings, scores in known if settings == cell.settings), [])
        found.append(measured(cell, scores, digits=_DIGITS))
    return found


def markdown(spec: Spec, folder: Path = COMMITTED) -> str:
    """Methods down, problems across: one table per data set or panel, per problem the paper's number and ours."""
    found = entries(spec, folder)
    groups: dict[str, list[int]] = {}
    for number, cell in enumerate(spec.cells):
        groups.setdefault(cell.panel or cell.settings.data.name, []).append(number)
    parts = []
    for group, numbers in groups.items():
        rows = list(dict.fromkeys(spec.cells[n].row for n in numbers))
        columns = list(dict.fromkeys(spec.cells[n].column for n in numbers))
        by_name = {(found[n].row, found[n].column): found[n] for n in numbers}
        with_paper = any(entry.paper is not None for entry in by_name.values())
        lines = [_line([f"**{group}**", *(h for row in rows for h in _heads(row, group, with_paper))])]
        lines.append("|" + " --- |" * (1 + len(rows) * (1 + with_paper)))
        for column in columns:
            texts = [t for row in rows for t in _texts(by_name[row, column], with_paper)]
            lines.append(_line([column, *texts]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heads(row: str, group: str, with_paper: bool) -> list[str]:
    name = row.removeprefix(group).lstrip(", ")
    return [f"{name}: paper", "ours"] if with_paper else [name]


def _texts(entry: Entry, with_paper: bool) -> list[str]:
    paper = "–" if entry.paper is None else f"{entry.paper:.{_DIGITS}f}"
    return [paper, entry.text()] if with_paper else [entry.text()]
