"""A figure of a convex experiment as SVG, from the records: one panel per group of rows, one curve per column."""

from __future__ import annotations

from pathlib import Path

from sfumato.errors import InvalidArgument
from sfumato.experiments import figures
from sfumato.experiments.convex.spec import Spec
from sfumato.experiments.convex.table import entries
from sfumato.experiments.figures import Point
from sfumato.experiments.records import COMMITTED


def measured(spec: Spec, folder: Path = COMMITTED) -> bool:
    """Whether there is anything to draw."""
    return spec.figure is not None and any(entry.ours is not None for entry in entries(spec, folder))


def draw(spec: Spec, path: Path, folder: Path = COMMITTED) -> None:
    """Means with bars of two standard errors. The same records give the same file, byte by byte."""
    if spec.figure is None:
        raise InvalidArgument(f"name={spec.name!r} is a table and no figure: leave --plot away.")
    columns = dict.fromkeys(cell.column for cell in spec.cells)
    panels: dict[str, dict[str, list[Point]]] = {cell.panel: {c: [] for c in columns} for cell in spec.cells}
    for cell, entry in zip(spec.cells, entries(spec, folder), strict=True):
        if cell.x is not None and entry.ours is not None:
            panels[cell.panel][cell.column].append(Point(cell.x, entry.ours, 2 * (entry.stderr or 0.0)))
    figures.draw(spec.name, spec.figure, panels, path)
