"""A figure of a convex experiment as SVG, from the records: one panel per group of rows, one curve per column."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.spec import Spec
from sfumato.experiments.convex.table import entries
from sfumato.experiments.records import COMMITTED
from sfumato.experiments.table import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 3.4, 3.0  # inches, of one panel
_MARKERS = "os^vDP*Xd<>h"


def measured(spec: Spec, folder: Path = COMMITTED) -> bool:
    """Whether there is anything to draw."""
    return spec.figure is not None and any(entry.ours is not None for entry in entries(spec, folder))


def draw(spec: Spec, path: Path, folder: Path = COMMITTED) -> None:
    """Means with bars of two standard errors. The same records give the same file, byte by byte."""
    if spec.figure is None:
        raise InvalidArgument(f"name={spec.name!r} is a table and no figure: leave --plot away.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("--plot needs matplotlib: install it with pip install matplotlib.") from None
    found = entries(spec, folder)
    panels = list(dict.fromkeys(cell.panel for cell in spec.cells))
    with matplotlib.rc_context({"svg.hashsalt": spec.name, "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
        for number, panel in enumerate(panels):
            _panel(figure.add_subplot(1, len(panels), number + 1), spec, found, panel)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(3 * len(panels), max(1, len(labels))), frameon=False
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, spec: Spec, found: list[Entry], panel: str) -> None:
    assert spec.figure is not None
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for cell, entry in zip(spec.cells, found, strict=True):
        if cell.panel == panel and cell.x is not None and entry.ours is not None:
            curves.setdefault(cell.column, []).append((cell.x, entry.ours, 2 * (entry.stderr or 0.0)))
    names = list(dict.fromkeys(cell.column for cell in spec.cells))
    for name, points in curves.items():
        x, y, bars = zip(*sorted(points), strict=True)
        style: dict[str, Any] = {
            "marker": _MARKERS[names.index(name) % len(_MARKERS)],
            "color": f"C{names.index(name)}",
        }
        axes.errorbar(x, y, yerr=bars, label=name, markersize=3, linewidth=1, capsize=2, **style)
    axes.set_xlabel(panel if panel and spec.figure.x == "" else spec.figure.x)
    axes.set_ylabel(spec.figure.y)
    axes.set_title(panel)
    if "x" in spec.figure.logarithmic:
        axes.set_xscale("log")
    if "y" in spec.figure.logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, linewidth=0.3)
