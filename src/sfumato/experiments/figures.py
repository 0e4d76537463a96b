"""Curves as SVG, from records: one panel beside the other, one curve per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sfumato.errors import InvalidArgument
from sfumato.experiments.reading import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 3.4, 3.0  # inches, of one panel
_ALONE = 4.8  # wide, if it is the only one
_LINE, _KEY, _LETTER = 0.17, 0.5, 0.062  # inches: high and wide, of a line of the legend, its sign and one letter
_MARKERS = "os^vDP*Xd<>h"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The labels of the axes. Where `x` is empty, it is the panel's name."""

    x: str
    y: str
    logarithmic: str = ""  # which axes are: "x", "y" or "xy"


class Point(NamedTuple):
    x: float | None  # None for a level, drawn from side to side
    y: float
    bar: float  # its half length


Panel = Mapping[str, Sequence[Point]]  # by the name of the curve


def read_figure(raw: Any, where: str) -> Figure | None:
    """From a table `[figure]`."""
    if raw is None:
        return None
    found: Figure = read(Figure, raw, f"{where} [figure]")
    return found


def draw(name: str, figure: Figure, panels: Mapping[str, Panel], path: Path) -> None:
    """Write one SVG. The same points give the same file, byte by byte; `name` seeds the identifiers in it."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise InvalidArgument("--plot needs matplotlib: install it with pip install matplotlib.") from None
    names = list(dict.fromkeys(curve for panel in panels.values() for curve in panel))
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8}):
        width = _ALONE if len(panels) == 1 else _WIDTH * len(panels)
        longest = _KEY + _LETTER * max(map(len, names), default=0)
        columns = min(2 * len(panels), max(1, int(width / longest)), max(1, len(names)))
        height = _HEIGHT + _LINE * math.ceil(len(names) / columns)
        drawing = Drawing(figsize=(max(width, longest), height), layout="constrained")
        for number, (title, panel) in enumerate(panels.items()):
            axes = drawing.add_subplot(1, len(panels), number + 1)
            _panel(axes, figure, title, panel, names)
        every = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in drawing.axes]
        found = {label: handle for pairs in every for handle, label in pairs}
        drawing.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, figure: Figure, title: str, panel: Panel, names: Sequence[str]) -> None:
    for name, points in panel.items():
        number = names.index(name)
        style: dict[str, Any] = {"color": f"C{number}", "label": name, "linewidth": 1}
        for level in (point for point in points if point.x is None):
            axes.axhline(level.y, linestyle="--", **style)
        if placed := sorted(point for point in points if point.x is not None):
            x, y, bars = zip(*placed, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            axes.errorbar(x, y, yerr=bars, marker=marker, markersize=3, capsize=2, **style)
    axes.set_xlabel(title if title and figure.x == "" else figure.x)
    axes.set_ylabel(figure.y)
    axes.set_title(title)
    if "x" in figure.logarithmic:
        axes.set_xscale("log")
    if "y" in figure.logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, linewidth=0.3)
