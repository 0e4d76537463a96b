"""The numbers behind the plots, against the files they come from and against formulas; and where they are drawn."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sfumato.errors import InvalidArgument
from sfumato.experiments.records import COMMITTED
from sfumato.experiments.spec import find_spec
from sfumato.report import report
from sfumato.report.assemble import Report
from sfumato.report.figures import Axis, Figure, Series, log_ticks, ticks
from sfumato.report.svg import COLOURS, draw

Changed = Callable[..., Path]
TABLE9 = sorted((COMMITTED / "000-table9" / "paper").glob("*.json"))


def figure(found: Report, key: str) -> Figure:
    return next(one for one in found.figures if one.key == key)


def raw(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return read


# ------------------------------------------------------------------------------------------------ numbers


def test_epsilon_and_accuracy_are_those_of_the_evaluations(examples: Path) -> None:
    found = report([examples / "dp-sgd", examples / "averaged"])
    for name in ("dp-sgd", "averaged"):
        history = raw(examples / name)["history"]
        spent = [row[1:] for row in figure(found, "epsilon").rows if row[0] == name]
        assert spent == [(e["step"], e["epsilon"]) for e in history]
        assert spent[0] == (0, 0.0)
        good = [row[1:] for row in figure(found, "test-accuracy-against-epsilon").rows if row[0] == name]
        assert good == [(e["step"], e["epsilon"], e["test_accuracy"]) for e in history]


def test_every_run_keeps_its_style_in_all_plots(examples: Path) -> None:
    found = report([examples])
    styles: dict[str, set[int]] = {}
    for one in found.figures:
        for series in one.series:
            if series.name in {t.name for t in found.trainings}:
                styles.setdefault(series.name, set()).add(series.style)
    assert all(len(style) == 1 for style in styles.values())
    assert len({frozenset(style) for style in styles.values()}) == len(styles) == 3


def test_ensembles_are_those_that_were_measured(examples: Path) -> None:
    last = raw(examples / "averaged")["metrics"]
    rows = {row[1]: row[2] for row in figure(report([examples / "averaged"]), "ensembles").rows}
    assert rows["last weights"] == last["test_accuracy"]
    assert rows["moving average of the weights"] == last["test_ema_accuracy"]
    assert rows["vote of the last weights"] == last["test_vote_accuracy"]
    assert len(rows) == 5


def test_signal_and_noise_follow_from_what_was_declared(examples: Path) -> None:
    """sigma 4, clip norm 0.5, 300 of 1000 expected, 6 steps, 64 x 10 + 10 parameters."""
    one = figure(report([examples / "dope-sgd"]), "signal-and-noise")
    found = dict(zip(one.columns, one.rows[0], strict=True))
    assert found["clip"] == 0.5
    assert found["noise one direction"] == pytest.approx(4 * 0.5 / 300)
    assert found["noise length"] == pytest.approx(4 * 0.5 / 300 * math.sqrt(650))
    assert found["noise of all steps"] == pytest.approx(4 * 0.5 / 300 / math.sqrt(6))


@pytest.mark.parametrize(
    ("config", "clip"),
    [
        ({"clip": 2.0, "method_options": {"clip": 1.0}}, 2.0),  # as measured on public rows
        ({"method_options": {"clip": "Clip(norm=0.25, origin=None, scale=None, stability=0.01)"}}, 0.25),
        ({"method_options": {"clip": 9.0, "method": {"name": "dp_sgd", "clip": 3.0}}}, 3.0),
        ({"method_options": {}}, None),
        ({}, None),
    ],
)
def test_no_clip_norm_is_guessed(changed: Changed, config: dict[str, Any], clip: float | None) -> None:
    def edit(run: dict[str, Any]) -> None:
        run["config"].pop("clip", None)
        run["config"].pop("method_options")
        run["config"] |= config

    found = [one for one in report([changed("dp-sgd", edit)]).figures if one.key == "signal-and-noise"]
    assert [one.rows[0][5] for one in found] == ([] if clip is None else [clip])


def test_agreement_has_all_steps_and_draws_at_most_sixty(changed: Changed) -> None:
    entries = [[k + 1, 0.5 + 0.3 * (-1) ** k, -0.1, 0.9] for k in range(600)]
    one = figure(report([changed("dp-sgd", lambda run: run.update(alignment=entries))]), "agreement")
    assert [list(row[1:]) for row in one.rows] == entries
    (series,) = one.series
    assert len(series.points) == 60
    assert [middle for _, middle in series.points] == pytest.approx([0.5] * 60)
    assert series.points[0][0] == pytest.approx(5.5)
    assert series.band[7] == pytest.approx((-0.1, 0.9))


def test_numbers_that_are_not_finite_are_left_out(changed: Changed) -> None:
    def diverge(run: dict[str, Any]) -> None:
        run["history"][-1] |= {"test_loss": math.nan, "test_accuracy": math.inf, "public_loss": None}

    found = report([changed("dp-sgd", diverge)])
    assert "nan" not in draw(figure(found, "epsilon"))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["runs"][0]["judged_by"] == "public_accuracy"
    (before,) = [one for one in found.figures if one.key.endswith("against-epsilon")]
    assert before.key == "public-accuracy-against-epsilon"


def test_a_regression_is_judged_by_its_loss(changed: Changed) -> None:
    def regression(run: dict[str, Any]) -> None:
        run["history"] = [{k: v for k, v in e.items() if "accuracy" not in k} for e in run["history"]]

    keys = [one.key for one in report([changed("dp-sgd", regression)]).figures]
    assert keys == ["epsilon", "test-loss-against-epsilon", "agreement", "signal-and-noise"]


def test_what_is_missing_is_left_out(changed: Changed, examples: Path) -> None:
    def bare(run: dict[str, Any]) -> None:
        run |= {"history": [], "alignment": []}
        run["config"] = {"finetuned": {}}

    found = report([changed("dp-sgd", bare)])
    assert found.figures == ()
    assert 'id="plots"' not in found.to_html()
    assert report([examples / "synthetic"]).promises == ()
    assert 'id="privacy"' not in report([examples / "synthetic"]).to_html()


# ------------------------------------------------------------------------------------------------ papers


def test_a_record_stands_beside_its_own_table() -> None:
    one = figure(report(TABLE9[:1]), "test-accuracy-against-epsilon")
    printed = {(row[0], row[2]): row[4] for row in one.rows if row[4] is not None}
    for cell in find_spec("000-table9").cells:
        place = f"paper 000, Table 9, appendix B: {cell.row}, {cell.column}", cell.settings["paper"].training.epsilon
        assert cell.paper is not None
        assert printed.pop(place) == pytest.approx(cell.paper / 100)
    assert not printed
    hollow = {series.name for series in one.series if series.hollow}
    assert len(hollow) == 8
    assert all(series.quiet for series in one.series if series.hollow)


def test_other_networks_are_not_compared() -> None:
    """backbone-head trains heads of frozen features, which the networks of 000's tables are not."""
    records = sorted((COMMITTED / "backbone-head" / "paper").glob("*.json"))[:1]
    names = [series.name for series in figure(report(records), "test-accuracy-against-epsilon").series]
    assert not [name for name in names if "paper 000" in name]


def test_own_runs_stand_beside_a_table_when_asked(examples: Path) -> None:
    alone = figure(report([examples / "dp-sgd"]), "test-accuracy-against-epsilon")
    beside = figure(report([examples / "dp-sgd"], beside=["000-table9"]), "test-accuracy-against-epsilon")
    assert len(alone.series) == 1
    assert len([series for series in beside.series if series.hollow]) == 8
    with pytest.raises(InvalidArgument, match="did you mean '000-table9'"):
        report([examples / "dp-sgd"], beside=["000-tabel9"])


# ------------------------------------------------------------------------------------------------ drawing


def made(points: list[tuple[float, float]], **options: Any) -> Figure:
    x, y = options.pop("x", Axis(label="x")), options.pop("y", Axis(label="y"))
    series = (Series(name="a", points=tuple(points), style=0, **options),)
    return Figure(key="f", title="F", about="", x=x, y=y, series=series, columns=(), rows=())


def line(one: Figure) -> list[tuple[float, float]]:
    """Where the line of the first series is drawn."""
    paths = [e for e in ET.fromstring(draw(one)).iter("path") if "line" in e.attrib["class"].split()]
    pairs = re.findall(r"([\d.-]+) ([\d.-]+)", paths[0].attrib["d"])
    return [(float(x), float(y)) for x, y in pairs]


def tick_places(one: Figure, anchor: str) -> dict[str, float]:
    side = "x" if anchor == "middle" else "y"
    texts = [e for e in ET.fromstring(draw(one)).iter("text") if "class" not in e.attrib]
    return {e.text or "": float(e.attrib[side]) for e in texts if e.attrib["text-anchor"] == anchor}


def test_points_stand_where_the_ticks_say() -> None:
    one = made([(0.0, 10.0), (5.0, 20.0), (10.0, 40.0)])
    places, across, up = line(one), tick_places(one, "middle"), tick_places(one, "end")
    assert [x for x, _ in places] == pytest.approx(
        [across["0"], (across["0"] + across["10"]) / 2, across["10"]], abs=0.2
    )
    assert [y + 4 for _, y in places] == pytest.approx([up["10"], up["20"], up["40"]], abs=0.2)
    assert up["40"] < up["10"], "upwards is more"


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances() -> None:
    places = line(made([(0.01, 1.0), (0.1, 2.0), (1.0, 3.0)], x=Axis(label="x", logarithmic=True)))
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[1][0] - places[0][0] > 50


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 0.0)],
        [(3.0, 5.0)],
        [(0.0, -1.0), (1.0, -1.0)],
        [(1e-9, 1e9), (2e-9, 1e9 + 1)],
        [(0.0, 1e308), (1.0, 0.0)],
    ],
)
def test_whatever_is_drawn_lies_inside(points: list[tuple[float, float]]) -> None:
    drawn = draw(made(points))
    assert "nan" not in drawn
    assert "inf" not in drawn
    numbers = [float(n) for path in re.findall(r' d="M([\d.-]+ [\d.-]+)', drawn) for n in path.split()]
    assert all(-1 <= number <= 421 for number in numbers)


def extents(one: Figure, letter: float) -> list[tuple[float, float]]:
    """From where to where the numbers below the axis reach, where every letter is so wide."""
    return [(x - letter * len(text) / 2, x + letter * len(text) / 2) for text, x in tick_places(one, "middle").items()]


def test_the_numbers_of_an_axis_stand_clear_of_its_label() -> None:
    one = made([(0.0, 0.832), (1.0, 0.848)], y=Axis(label="accuracy", percent=True))
    texts = [e for e in ET.fromstring(draw(one)).iter("text") if e.attrib.get("text-anchor") == "end"]
    widest = max(texts, key=lambda e: len(e.text or ""))
    assert len(widest.text or "") >= len("83.5 %")
    assert float(widest.attrib["x"]) - 7.6 * len(widest.text or "") > 12 + 4, (
        "the label's baseline and what hangs below"
    )


@pytest.mark.parametrize("low", [0.0008, 0.00021, 0.0051])
@pytest.mark.parametrize("high", [0.9, 600.0])
def test_no_number_below_an_axis_is_cut_or_touches_another(low: float, high: float) -> None:
    rows = Axis(label="run", names=("a",))
    found = extents(made([(low, 0.0), (high, 0.0)], x=Axis(label="x", logarithmic=True), y=rows, line=False), 7.6)
    assert len(found) >= 3
    assert all(start >= 0 and end <= 420 for start, end in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


def test_series_differ_by_more_than_colour() -> None:
    """By the sign too, and of the first twenty-eight none has sign, dashes and colour of another."""
    looks = []
    for style in range(28):
        one = made([(0.0, 0.0), (1.0, 1.0)])
        series = (Series(name="a", points=one.series[0].points, style=style),)
        root = ET.fromstring(draw(Figure(**{**vars(one), "series": series})))
        paths = [e for e in root.iter("path") if re.search(r"line|sign", e.attrib["class"])]
        shapes = [re.sub(r"^M[\d.]+ [\d.]+", "", e.attrib["d"]) for e in paths[1:2]]
        looks.append((paths[0].attrib.get("stroke-dasharray"), *shapes, paths[0].attrib["class"]))
    assert len(set(looks)) == len(looks)
    assert len({look[1] for look in looks[:8]}) == 8
    assert len({look[2] for look in looks}) == COLOURS


@pytest.mark.parametrize("low", [-3.0, 0.0, 0.9051, 99.0, 1e-6])
@pytest.mark.parametrize("width", [1e-6, 0.013, 1.0, 7.0, 12345.0])
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 3 <= len(found) <= 7
    assert low - 1e-3 * width <= found[0] <= found[-1] <= low + width * 1.001
    steps = [b - a for a, b in pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)
    logs = log_ticks(1.0 + abs(low), 2.1 + abs(low) * 100)
    assert 1 <= len(logs) <= 12
