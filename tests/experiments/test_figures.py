"""Pictures: whatever the number of curves, the legend lies inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sfumato.experiments.figures import Figure, Point, draw

pytest.importorskip("matplotlib")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("curves", [1, 8, 30])
@pytest.mark.parametrize("panels", [1, 3])
@pytest.mark.parametrize("name", ["method", "a method whose name is as long as those of some papers, and then some"])
def test_the_legend_lies_inside(tmp_path: Path, curves: int, panels: int, name: str) -> None:
    points = {f"{name} {k}": [Point(1, k, 0.1), Point(2, k + 1, 0.1)] for k in range(curves)}
    path = tmp_path / "a.svg"
    draw("some", Figure(x="labels", y="accuracy"), {f"panel {p}": points for p in range(panels)}, path)
    text = path.read_text()
    width, height = (float(v) for v in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    legend = text[text.index('<g id="legend_1">') :]
    places = re.findall(r'<text [^>]*x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]+)<', legend)
    names = [(float(x), float(y), said) for x, y, said in places if said.startswith(name)]
    assert len(names) == curves
    for x, y, said in names:
        assert 0 < x < x + 4.2 * len(said) < width, said  # at least, for letters of 8 points
        assert 0 < y < height, said
    assert len({(x, y) for x, y, _ in names}) == curves


def test_curves_of_a_later_panel_are_in_the_legend(tmp_path: Path) -> None:
    panels = {"one": {"first": [Point(1, 1, 0.1)]}, "two": {"second": [Point(1, 1, 0.1)]}}
    draw("some", Figure(x="x", y="y"), panels, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(f">{name}<" in text[text.index('<g id="legend_1">') :] for name in ("first", "second"))
