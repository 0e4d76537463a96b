"""A plot as data: axes, series and the table behind it. `svg` draws it, `page` puts the table beside it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction. With `names` it counts rows, of which each has one."""

    label: str
    logarithmic: bool = False
    percent: bool = False
    lowest: float | None = None  # where it begins, else a little below the points
    highest: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together. `style` is its colour, sign and dashes, the same for one run in all plots."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: int
    band: tuple[tuple[float, float], ...] = ()  # lowest and highest y at every point
    line: bool = True
    quiet: bool = False  # drawn in grey: not a run of this report
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot. `columns` and `rows` are everything behind it, also what is too much to draw."""

    key: str  # for names of files and places in the page
    title: str
    about: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "about": self.about,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
        }

    def to_csv(self) -> str:
        """
        >>> axis = Axis(label="step")
        >>> rows = (("a, b", 1, 0.5), ("c", 2, None))
        >>> names = ("run", "step", "epsilon")
        >>> figure = Figure(key="", title="", about="", x=axis, y=axis, series=(), columns=names, rows=rows)
        >>> print(figure.to_csv().replace(chr(13), ""), end="")
        run,step,epsilon
        "a, b",1,0.5
        c,2,
        """
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return out.getvalue()


def finite(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Those that can be drawn."""
    return tuple((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers from low to high.

    >>> ticks(0.0, 2.1), ticks(0.905, 0.95)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.91, 0.92, 0.93, 0.94, 0.95])
    """
    raw = (high - low) / 6
    ten = 10.0 ** math.floor(math.log10(raw))
    step = next(step for step in (ten, 2 * ten, 2.5 * ten, 5 * ten, 10 * ten) if step >= raw * 0.999)
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [round(k * step, digits) for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and where there are few of them their double and fivefold.

    >>> log_ticks(0.02, 3.0), log_ticks(1e-4, 1e4)
    ([0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0], [0.0001, 0.01, 1.0, 100.0, 10000.0])
    """
    lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = highest - lowest
    factors = (1, 2, 5) if decades <= 3 else (1,)
    every = 1 if decades <= 6 else math.ceil(decades / 5)
    found = [float(f"{factor}e{k}") for k in range(lowest, highest + 1, every) for factor in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]
