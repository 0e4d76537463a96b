"""Figures as SVG that takes its colours from the page: readable in light and dark, and by sign and dashes alone.

Letters are sized for a phone: one drawing, 420 units wide, is shown 330 to 520 pixels wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sfumato.report.figures import Axis, Figure, Series, log_ticks, ticks
from sfumato.report.markup import Attribute, Markup, tag, together

WIDTH, HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 44
_LETTER = 8  # a wide one, since nobody knows which font the page is shown in
_ROW = 44  # of an axis with names
COLOURS = 7  # of Okabe and Ito, without the yellow, which is not seen on white: --c0 to --c6 of the page
_DASHES = (None, "7 3", "2 3", "9 3 2 3")
_MARKED = 40  # signs on one line at most
_SIGNS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
    lambda x, y: f"M{x - 3.6:.1f} {y - 3.6:.1f}h7.2v7.2h-7.2z",  # square
    lambda x, y: f"M{x:.1f} {y - 5:.1f}l4.8 8.6h-9.6z",  # triangle
    lambda x, y: f"M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z",  # diamond
    lambda x, y: f"M{x:.1f} {y + 5:.1f}l4.8 -8.6h-9.6z",  # triangle on its tip
    lambda x, y: f"M{x - 1.5:.1f} {y - 4.5:.1f}h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # cross
    lambda x, y: f"M{x - 5:.1f} {y - 2.4:.1f}h10v4.8h-10z",  # bar
    lambda x, y: f"M{x - 2.4:.1f} {y - 5:.1f}h4.8v10h-4.8z",  # upright bar
)


def draw(figure: Figure) -> Markup:
    """The whole plot, with what it shows in words for who cannot see it."""
    height = _TOP + _BOTTOM + _ROW * len(figure.y.names) if figure.y.names else HEIGHT
    values = [y for s in figure.series for y in (*(y for _, y in s.points), *(v for pair in s.band for v in pair))]
    up = _Scale(figure.y, values, height - _BOTTOM, _TOP)
    left = _left(figure, up)
    across = _Scale(figure.x, [x for s in figure.series for x, _ in s.points], left, WIDTH - _RIGHT)
    inside = [*_grid(figure, across, up, left, height), *(_drawn(s, across, up) for s in figure.series)]
    return tag(
        "svg",
        tag("title", f"{figure.title}. {figure.about}"),
        *inside,
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=f"{figure.title}: {_described(figure)}",
        class_="plot",
    )


def key(series: Series) -> Markup:
    """The sign of a legend."""
    return tag(
        "svg",
        _line([(1.0, 8.0), (33.0, 8.0)], series) if series.line else "",
        _sign(series, 17.0, 8.0),
        viewBox="0 0 34 16",
        class_="key",
        aria_hidden="true",
    )


class _Scale:
    """From a value to its place."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self._start, self._end = axis, start, end
        if axis.names:
            self.low, self.high = -0.5, len(axis.names) - 0.5
            self._start, self._end = end, start  # the first name on top
            return
        low, high = min(values, default=0.0), max(values, default=1.0)
        if axis.logarithmic:
            self.low, self.high = low / 1.6, high * 1.6
            return
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        self.low = low - margin if axis.lowest is None else min(axis.lowest, low)
        self.high = high + margin if axis.highest is None else max(axis.highest, high)

    def __call__(self, value: float) -> float:
        ends = (self.low, self.high, value)
        low, high, at = map(math.log, ends) if self.axis.logarithmic else ends
        return self._start + (at - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self.axis.names:
            return []
        return log_ticks(self.low, self.high) if self.axis.logarithmic else ticks(self.low, self.high)


def _left(figure: Figure, up: _Scale) -> float:
    """Room for the widest number of the axis beside its label."""
    if figure.y.names:
        return 12
    widest = max((len(_number(v, figure.y)) for v in up.ticks()), default=0)
    return max(_LEFT, 24 + _LETTER * widest)


def _below(across: _Scale, y: float) -> list[Markup]:
    """The numbers below an axis, none of them cut at an edge; one that would touch another is left out."""
    found, free = [], 0.0
    for value in across.ticks():
        text = _number(value, across.axis)
        half = _LETTER * len(text) / 2
        x = min(max(across(value), half), WIDTH - half)
        if x - half >= free:
            found.append(_text(x, y, text, text_anchor="middle"))
            free = x + half
    return found


def _grid(figure: Figure, across: _Scale, up: _Scale, left: float, height: float) -> list[Markup]:
    right, bottom = WIDTH - _RIGHT, height - _BOTTOM
    found = [_rule(across(v), _TOP, across(v), bottom) for v in across.ticks()]
    found += [_rule(left, up(v), right, up(v)) for v in up.ticks()]
    found.append(tag("path", d=f"M{left} {_TOP}V{bottom}H{right}", class_="axis"))
    found += _below(across, bottom + 16)
    found += [_text(left - 6, up(v) + 4, _number(v, figure.y), text_anchor="end") for v in up.ticks()]
    for k, name in enumerate(figure.y.names):
        found.append(_rule(left, up(k) + 8, right, up(k) + 8))
        found.append(_text(left + 6, up(k) - 6, _shortened(name), class_="name"))
    found.append(_text((left + right) / 2, height - 8, figure.x.label, text_anchor="middle", class_="label"))
    if not figure.y.names:
        turned = f"rotate(-90 12 {(bottom + _TOP) / 2:g})"
        label = _text(12, (bottom + _TOP) / 2, figure.y.label, text_anchor="middle", transform=turned, class_="label")
        found.append(label)
    return found


def _drawn(series: Series, across: _Scale, up: _Scale) -> Markup:
    lower = 8.0 if up.axis.names else 0.0  # signs stand on the line below the name
    places = [(across(x), up(y) + lower) for x, y in series.points]
    parts: list[Markup] = []
    if series.band:
        ends = [(x, up(low), up(high)) for (x, _), (low, high) in zip(places, series.band, strict=True)]
        edge = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
        parts.append(tag("path", d=_path(edge) + "z", class_=f"band {_colour(series)}"))
    if series.line and len(places) > 1:
        parts.append(_line(places, series))
    every = max(1, math.ceil(len(places) / _MARKED)) if series.line else 1
    last = len(places) - 1
    parts += [_sign(series, *place) for k, place in enumerate(places) if k == last or (last - k) % every == 0]
    return together(*parts)


def _line(places: Sequence[tuple[float, float]], series: Series) -> Markup:
    dashes = _DASHES[series.style % len(_DASHES)]
    return tag("path", d=_path(places), class_=f"line {_colour(series)}", stroke_dasharray=dashes)


def _sign(series: Series, x: float, y: float) -> Markup:
    shape = _SIGNS[series.style % len(_SIGNS)](x, y)
    return tag("path", d=shape, class_=f"{'hollow' if series.hollow else 'sign'} {_colour(series)}")


def _colour(series: Series) -> str:
    return "quiet" if series.quiet else f"c{series.style % COLOURS}"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", class_="rule")


def _text(x: float, y: float, text: str, **attributes: Attribute) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), **attributes)


def _number(value: float, axis: Axis) -> str:
    return f"{100 * value:.6g} %" if axis.percent else f"{value:.6g}"


def _shortened(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"


def _described(figure: Figure) -> str:
    """Ends of every series, in words."""
    said = []
    for s in figure.series:
        if figure.y.names:
            values = ", ".join(f"{_number(x, figure.x)} for {figure.y.names[round(y)]}" for x, y in s.points)
            said.append(f"{s.name}: {values}")
        elif s.points:
            first, last = s.points[0][1], s.points[-1][1]
            how = f"from {_number(first, figure.y)} to " if len(s.points) > 1 and s.line else "at "
            said.append(f"{s.name} {how}{_number(last, figure.y)}")
    return "; ".join(said[:12]) + ("; and others" if len(said) > 12 else "") + ". The table below has all numbers."
