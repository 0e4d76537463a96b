"""Convex experiments: specs, paired rows that leak nothing, records that are resumed, tables and figures."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato import erm
from sfumato.cli.main import main
from sfumato.data.tabular import TabularData
from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.comparison import pairs
from sfumato.experiments.convex.estimators import make_estimator
from sfumato.experiments.convex.figures import draw
from sfumato.experiments.convex.problems import Problem, _from_table, _table, problem
from sfumato.experiments.convex.records import read_record
from sfumato.experiments.convex.runner import Runner
from sfumato.experiments.convex.settings import Data, read_settings
from sfumato.experiments.convex.spec import Cell, Compare, Spec, convex_names, find_convex, load_convex
from sfumato.experiments.convex.table import entries, markdown
from sfumato.experiments.page import convex_block
from sfumato.experiments.records import write_record

SMALL = """
title = "A small figure"
paper = "001"
where = "Figure 0"
score = "Test accuracy"
repeats = 3

[settings]
delta = 1e-4
data = { name = "gaussian-classes", private_rows = 300, public_rows = 20, test_rows = 200, dimension = 3 }
options = { fit_intercept = false }

[figure]
x = "epsilon"
y = "accuracy"

[compare]
ours = ["PPSGD"]
others = ["OutPert", "OnlyPub"]

[[when]]
if = { epsilon = 8 }
options = { l2 = 0.01 }

[[row]]
name = "square, epsilon 2"
loss = "Square"
epsilon = 2
x = 2
paper = { PPSGD = 0.8 }

[[sweep]]
name = "hinge, epsilon"
key = "epsilon"
values = [4, 5, 8]
loss = "Hinge"

[[column]]
name = "PPSGD"
estimator = "PPSGD"
options = { max_iter = 20, batch_size = 30, learning_rate = 2 }

[[column]]
name = "OutPert"
compare = "PPSGD"
estimator = "OutputPerturbation"

[[column.when]]
if = { loss = "Hinge" }
loss = "HuberisedHinge"
loss_options = { h = 0.2 }

[[column.when]]
if = { loss = "Square" }
options = { radius = 2 }

[[column]]
name = "OnlyPub"
estimator = "PublicOnly"
private = false

[[column.when]]
if = { epsilon = [4, 5] }
options = { l2 = 0.05 }
"""


def written(folder: Path, text: str = SMALL) -> Spec:
    path = folder / "small.toml"
    path.write_text(text)
    return load_convex(path)


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return written(tmp_path)


def cell(spec: Spec, row: str, column: str) -> Cell:
    return next(c for c in spec.cells if (c.row, c.column) == (row, column))


def run(spec: Spec, out: Path, repeats: int, cells: list[Cell] | None = None, **options: Any) -> Runner:
    made = Runner(spec, cells or spec.cells, range(repeats), out, **options)
    assert sum(made.run(workers=1)) == made.fits
    return made


# ------------------------------------------------------------------------------------------------ specs


def test_the_papers_numbers() -> None:
    found = {(c.row, c.column): c.paper for c in find_convex("001-table2").cells}
    for row, numbers in {
        "adult-a, hinge": (0.7882, 0.8241),
        "adult-a, square": (0.7941, 0.8231),
        "ipums-br, hinge": (0.7170, 0.7588),
        "magic04, hinge": (0.7549, 0.7842),
        "skin, hinge": (0.9069, 0.9072),
    }.items():
        assert tuple(found[f"{row}, epsilon {e}", "PPSGD"] for e in (0.1, 0.5)) == numbers
    for row, numbers in {"cadata, square": (0.1027, 0.0996), "stability, square": (0.0604, 0.0558)}.items():
        assert tuple(found[f"{row}, epsilon {e}", "PPSGD"] for e in (0.3, 0.7)) == numbers
    assert found["mini-boo-ne, square, epsilon 0.5", "AgdAvg"] == 0.7589
    assert (
        found["ipums-us, hinge, epsilon 0.1", "OnlyPub"] == found["ipums-us, hinge, epsilon 0.5", "OnlyPub"] == 0.5958
    )
    assert found["cadata, square, epsilon 0.7", "NonPriv"] == 0.0948
    assert found["skin, square, epsilon 0.5", "DP-SGD"] is None
    assert found["skin, square, epsilon 0.5", "PPSGD, tCDP"] == found["skin, square, epsilon 0.5", "PPSGD"] == 0.9077


@pytest.mark.parametrize("name", convex_names())
def test_every_cell_can_be_built_and_has_the_papers_setting(name: str) -> None:
    for c in find_convex(name).cells:
        settings = c.settings
        made = make_estimator(settings, classification=settings.data.name not in ("cadata", "stability"), size=9950)
        made._check_parameters()
        made._loss()  # each method refuses losses that its proof does not cover
        if settings.private and name.startswith("001"):
            assert (made.epsilon, made.delta) == (settings.epsilon, 1e-6)
        if name == "001-table2":
            few = settings.data.name in ("skin", "mini-boo-ne")
            assert (settings.data.train, settings.data.public) == (0.8, 0.0001 if few else 0.001)
            if c.column.startswith("PPSGD"):
                assert settings.loss == ("Hinge" if "hinge" in c.row else "Square")


def test_later_parts_win(spec: Spec) -> None:
    ppsgd = cell(spec, "hinge, epsilon 8", "PPSGD").settings
    assert ppsgd.options == {"fit_intercept": False, "l2": 0.01, "max_iter": 20, "batch_size": 30, "learning_rate": 2}
    assert (ppsgd.epsilon, ppsgd.loss, ppsgd.data.dimension) == (8.0, "Hinge", 3)
    assert "l2" not in cell(spec, "hinge, epsilon 4", "PPSGD").settings.options
    other = cell(spec, "hinge, epsilon 4", "OutPert").settings
    assert (other.loss, other.loss_options) == ("HuberisedHinge", {"h": 0.2})
    assert make_estimator(other, classification=True, size=1).loss == erm.HuberisedHinge(h=0.2)
    square = cell(spec, "square, epsilon 2", "OutPert")
    assert (square.settings.loss, square.settings.options["radius"], square.paper) == ("Square", 2, 0.8)
    assert [c.x for c in spec.cells if c.column == "PPSGD"] == [2, 4, 5, 8]


def test_a_method_without_a_budget_is_one_cell_for_all_of_them(spec: Spec) -> None:
    first, second = (cell(spec, f"hinge, epsilon {e}", "OnlyPub") for e in (4, 5))
    assert first.settings == second.settings
    assert first.settings.epsilon is None


def test_settings_survive_json(spec: Spec) -> None:
    for c in (*spec.cells, *find_convex("001-table2").cells):
        assert read_settings(json.loads(json.dumps(c.settings.to_json())), "here") == c.settings


def test_the_declared_size_goes_with_the_adjacency_that_hides_it() -> None:
    spec = find_convex("001-table2")
    row = "magic04, hinge, epsilon 0.1"
    hidden = make_estimator(cell(spec, row, "PPSGD, add/remove").settings, classification=True, size=777)
    assert (hidden.adjacency, hidden.size) == ("add-remove", 777)
    assert make_estimator(cell(spec, row, "PPSGD").settings, classification=True, size=777).size is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[settings]", "[setings]", "did you mean 'settings'"),
        ("delta = 1e-4", "deltas = 1e-4", "did you mean 'delta'"),
        ("delta = 1e-4", "", "delta=None must be positive"),
        ('data = { name = "gaussian-classes"', 'data = { name = "gaussian-class"', "did you mean 'gaussian-classes'"),
        ("dimension = 3", "dimensions = 3", "did you mean 'dimension'"),
        (", dimension = 3", "", "dimension=None must be at least 1"),
        ("dimension = 3", "dimension = 3, public = 1.5", "must be a share"),
        ("dimension = 3", 'dimension = 3, ranges = "private"', "'declared' or 'public'"),
        ("if = { epsilon = 8 }", "if = { epsilons = 8 }", "did you mean 'epsilon'"),
        ('key = "epsilon"', 'key = "epsilons"', "must name what is swept"),
        ("values = [4, 5, 8]", 'values = ["4"]', "list of numbers"),
        ('name = "OutPert"', 'name = "PPSGD"', "'PPSGD' twice"),
        ('compare = "PPSGD"', 'compares = "PPSGD"', "did you mean 'compare'"),
        ("paper = { PPSGD = 0.8 }", "paper = 0.8", "table of numbers"),
        ("epsilon = 2\n", "epsilon = -2\n", "epsilon=-2.0 must be positive"),
        ('score = "Test accuracy"', "", "score"),
        ("repeats = 3", "repeats = 0", "repeats=0"),
        ('y = "accuracy"', "", "lacks the key 'y'"),
        ('others = ["OutPert"', 'others = ["OutPerd"', "did you mean 'OutPert'"),
        ('ours = ["PPSGD"]', 'mine = ["PPSGD"]', "[compare] has no key 'mine'"),
        ("[figure]", "[figure", "not valid TOML"),
    ],
)
def test_what_is_not_right_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert SMALL.count(old) >= 1
    with pytest.raises(InvalidArgument) as refusal:
        written(tmp_path, SMALL.replace(old, new, 1))
    assert said in str(refusal.value)
    assert "small.toml" in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"estimator": "PPSDG"}, "did you mean 'PPSGD'"),
        ({"loss": "Hing"}, "did you mean 'Hinge'"),
        ({"loss": "PublicScaler"}, "is no loss"),
        ({"options": {"max_iters": 3}}, "did you mean 'max_iter'"),
        ({"loss_options": {"h": 3}}, "Hinge has no parameter 'h'"),
    ],
)
def test_an_estimator_that_is_none_is_refused(spec: Spec, change: dict[str, Any], said: str) -> None:
    settings = replace(cell(spec, "hinge, epsilon 4", "PPSGD").settings, **change)
    with pytest.raises(InvalidArgument, match=said):
        make_estimator(settings, classification=True, size=10)


# ------------------------------------------------------------------------------------------------ rows


def table(rows: int = 1000) -> TabularData:
    rng = np.random.default_rng(5)
    X = rng.uniform(-3, 7, (rows, 2))
    return TabularData(
        X=X,
        y=X[:, 0] * 2 + rng.uniform(-1, 1, rows),
        lower=np.array([-3.0, -3.0]),
        upper=np.array([7.0, 7.0]),
        y_range=(-10.0, 16.0),
    )


def parts(found: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(found.X, found.y), (found.X_public, found.y_public), (found.X_test, found.y_test)]


def test_repeats_differ_and_methods_see_the_same_rows() -> None:
    data = find_convex("001-figure3").cells[0].settings.data
    again = problem(data, 3)
    problem(data, 4), problem(data, 5)  # no cache can hold all of them
    for (X, y), (X_again, y_again) in zip(parts(problem(data, 3)), parts(again), strict=True):
        np.testing.assert_array_equal(X, X_again)
        np.testing.assert_array_equal(y, y_again)
    assert not np.array_equal(problem(data, 4).X, again.X)
    assert again.sizes == {"private": 9950, "public": 50, "test": 10000}


def test_the_split_is_the_papers() -> None:
    data = Data(name="stability")
    found = _from_table(table(32561), data, 0)
    assert found.sizes == {"private": 26022, "public": 26, "test": 6513}  # those of adult-a
    everything = np.concatenate([X for X, _ in parts(found)])
    assert len(np.unique(everything, axis=0)) == 32561
    np.testing.assert_allclose(np.linalg.norm(everything, axis=1), 1)


@pytest.mark.parametrize("ranges", ["declared", "public"])
def test_no_private_row_has_a_say_in_how_the_others_are_scaled(ranges: str) -> None:
    data, before = Data(name="stability", public=0.02, ranges=ranges), table()
    found = _from_table(before, data, 1)
    private = np.flatnonzero(
        before.y == before.y[np.random.default_rng(1).permutation(1000)[16]]
    )  # the first private row
    X, y = before.X.copy(), before.y.copy()
    X[private], y[private] = 1e6, 15.0
    after = _from_table(replace(before, X=X, y=y), data, 1)
    assert not np.array_equal(after.X[0], found.X[0])
    np.testing.assert_array_equal(after.X[1:], found.X[1:])
    np.testing.assert_array_equal(after.y[1:], found.y[1:])
    np.testing.assert_array_equal(after.X_test, found.X_test)
    np.testing.assert_array_equal(after.X_public, found.X_public)


def test_public_ranges_are_those_of_the_public_rows() -> None:
    data, whole = Data(name="stability", public=0.02, ranges="public"), table()
    order = np.random.default_rng(2).permutation(1000)
    low, high = whole.X[order[:16]].min(0), whole.X[order[:16]].max(0)
    row = np.clip((whole.X[order[900]] - low) / (high - low), 0, 1) * 2 - 1
    np.testing.assert_allclose(_from_table(whole, data, 2).X_test[100], row / np.linalg.norm(row))


def test_the_lower_end_may_be_zero() -> None:
    whole = replace(table(), X=(table().X > 0).astype(float), lower=np.zeros(2), upper=np.ones(2))
    found = _from_table(whole, Data(name="stability", lower_end=0.0), 0)
    assert {tuple(np.round(row, 6)) for row in found.X_test} == {(0, 0), (1, 0), (0, 1), (0.707107, 0.707107)}


def test_errors_are_those_of_targets_that_span_the_unit_interval() -> None:
    whole = table()
    found = _from_table(whole, Data(name="stability"), 0)
    test = whole.y[np.random.default_rng(0).permutation(1000)[800:]]
    spanned = 2 * (whole.y - whole.y.min()) / np.ptp(whole.y) - 1
    predicted = np.full(200, 2 * (np.mean(whole.y) + 10) / 26 - 1)  # the same number in the declared unit
    paper = np.mean((2 * (test - whole.y.min()) / np.ptp(whole.y) - 1 - spanned.mean()) ** 2)
    assert found.score(predicted) == pytest.approx(paper)
    narrow = _from_table(replace(whole, y_range=(0.0, 1.0)), Data(name="stability"), 0)
    assert np.abs(narrow.y).max() == 1  # what is learned from is cut, what is tested is not
    assert np.abs(narrow.y_test).max() > 1


def test_the_made_up_classes_can_be_told_apart_as_well_as_theory_says() -> None:
    data = Data(name="gaussian-classes", private_rows=1, public_rows=1, test_rows=20000, dimension=50, separation=1.5)
    found = problem(data, 0)
    mean = (found.y_test[:, None] * found.X_test).mean(0)
    assert found.score(np.where(found.X_test @ mean > 0, 1, -1)) == pytest.approx(0.9332, abs=0.01)  # Phi(1.5)
    assert np.mean(found.y_test) == pytest.approx(0, abs=0.03)


# ------------------------------------------------------------------------------------------------ runs


def test_a_record_has_all_repeats_and_what_they_cost(spec: Spec, tmp_path: Path) -> None:
    run(spec, tmp_path, 2)
    record = read_record(tmp_path / "small" / "square-epsilon-2-ppsgd.json")
    assert record["repeats"] == [0, 1]
    assert record["rows"] == {"private": 300, "public": 20, "test": 200}
    assert all(0 < e <= 2 for e in record["epsilons"])
    assert record["accounting"]["delta"] == 1e-4
    assert record["accounting"]["adjacency"] == "replace-one"
    assert record["accounting"]["private"] is True
    assert record["parameters"]["growth_ratio"] == 10.0  # a default, written down
    public = read_record(tmp_path / "small" / "square-epsilon-2-onlypub.json")
    assert "No private row" in public["accounting"]

    # Without noise the score can be computed beside the runner.
    rows = problem(spec.cells[0].settings.data, 1)
    model = erm.PublicOnlyClassifier(loss=erm.Square(), fit_intercept=False, classes=(-1, 1))
    model.fit(rows.X, rows.y, rows.X_public, rows.y_public)
    assert public["scores"][1] == pytest.approx(float(np.mean(model.predict(rows.X_test) == rows.y_test)))
    # Two of the rows differ in epsilon only, which it has not: they share a record.
    names = {path.name for path in (tmp_path / "small").glob("*-onlypub.json")}
    assert names == {f"{row}-onlypub.json" for row in ("square-epsilon-2", "hinge-epsilon-4", "hinge-epsilon-8")}
    assert {e.seeds for e in entries(spec, tmp_path)} == {2}


def test_what_is_finished_is_not_run_again(spec: Spec, tmp_path: Path) -> None:
    ppsgd = [cell(spec, "square, epsilon 2", "PPSGD")]
    path = tmp_path / "small" / "square-epsilon-2-ppsgd.json"
    assert run(spec, tmp_path, 2, ppsgd).fits == 2
    before = read_record(path)
    assert run(spec, tmp_path, 2, ppsgd).fits == 0
    assert read_record(path) == before
    assert run(spec, tmp_path, 3, ppsgd).fits == 1
    after = read_record(path)
    assert after["repeats"] == [0, 1, 2]
    assert after["scores"][:2] == before["scores"]
    assert run(spec, tmp_path, 2, ppsgd, again=True).fits == 2
    assert read_record(path)["seconds"] != after["seconds"]
    assert read_record(path)["repeats"] == [0, 1]


def test_a_record_of_other_settings_is_not_taken_for_this_one(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [cell(spec, "square, epsilon 2", "PPSGD")]
    run(spec, tmp_path, 1, chosen)
    changed = written(tmp_path, SMALL.replace("learning_rate = 2", "learning_rate = 3"))
    assert entries(spec, tmp_path)[0].seeds == 1
    assert entries(changed, tmp_path)[0].seeds == 0
    with pytest.raises(InvalidArgument, match="other settings"):
        Runner(changed, changed.cells[:1], range(1), tmp_path)
    monkeypatch.setattr(
        erm.PPSGDClassifier.__init__, "__kwdefaults__", {**erm.PPSGDClassifier.__init__.__kwdefaults__, "shrink": 0.4}
    )
    with pytest.raises(InvalidArgument, match="other defaults"):
        Runner(spec, chosen, range(2), tmp_path)
    run(changed, tmp_path, 1, list(changed.cells[:1]), again=True)
    assert entries(changed, tmp_path)[0].seeds == 1


def test_one_refusal_does_not_stop_the_others(tmp_path: Path) -> None:
    spec = written(tmp_path, SMALL.replace('loss = "HuberisedHinge"\nloss_options = { h = 0.2 }', ""))
    made = Runner(spec, spec.cells, range(1), tmp_path)
    with pytest.raises(
        InvalidArgument, match=r"3 of 11 cells were refused.*'hinge, epsilon 4' \| 'OutPert'.*HuberisedHinge"
    ):
        list(made.run(workers=1))
    states = {(e.row, e.column): e.state for e in entries(spec, tmp_path)}
    assert [key for key, state in states.items() if state == "not run"] == [
        ("hinge, epsilon 4", "OutPert"),
        ("hinge, epsilon 5", "OutPert"),
        ("hinge, epsilon 8", "OutPert"),
    ]


def test_data_that_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    (tmp_path / "tabular").mkdir()
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 255, (3000, 3)).astype(np.uint8)
    np.savez(tmp_path / "tabular" / "skin.npz", X=X, y=np.where(X[:, 0] > 100, 1, 2))
    spec = find_convex("001-table2")
    chosen = spec.select(["skin", "mini-boo-ne"], ["OnlyPub"])
    _table.cache_clear()
    made = Runner(spec, chosen, range(1), tmp_path / "out")
    assert list(made.left_out) == ["mini-boo-ne"]
    assert "MiniBooNE_PID.txt" in made.left_out["mini-boo-ne"]
    assert made.fits == 2  # one per loss
    with pytest.raises(InvalidArgument, match="put MiniBooNE_PID"):
        Runner(spec, spec.select(["mini-boo-ne"], []), range(1), tmp_path / "out")
    _table.cache_clear()


@pytest.mark.slow
def test_two_processes_do_what_one_does(spec: Spec, tmp_path: Path) -> None:
    chosen = [c for c in spec.cells if c.column == "OnlyPub"]
    for workers in (1, 2):
        made = Runner(spec, chosen, range(3), tmp_path / str(workers))
        assert sum(made.run(workers=workers)) == made.fits
    assert entries(spec, tmp_path / "1") == entries(spec, tmp_path / "2")


# ------------------------------------------------------------------------------------------------ tables


def made_up(spec: Spec, folder: Path, row: str, column: str, scores: list[float]) -> None:
    c = cell(spec, row, column)
    others = {name: list(range(len(scores))) for name in ("repeats", "epsilons", "iterations", "seconds")}
    write_record(folder / spec.name / f"{c.slug}.json", {"settings": c.settings.to_json(), **others, "scores": scores})


def test_a_table_has_mean_and_standard_error(spec: Spec, tmp_path: Path) -> None:
    scores = [0.81, 0.84, 0.79]
    made_up(spec, tmp_path, "square, epsilon 2", "PPSGD", scores)
    made_up(spec, tmp_path, "hinge, epsilon 4", "OutPert", [0.5])
    found = {(e.row, e.column): e.to_json() for e in entries(spec, tmp_path)}
    assert found["square, epsilon 2", "PPSGD"] == {
        "row": "square, epsilon 2",
        "column": "PPSGD",
        "paper": 0.8,
        "ours": pytest.approx(np.mean(scores), abs=1e-6),
        "stderr": pytest.approx(statistics.stdev(scores) / math.sqrt(3), abs=1e-6),
        "seeds": 3,
    }
    assert (found["hinge, epsilon 4", "OutPert"]["ours"], found["hinge, epsilon 4", "OutPert"]["stderr"]) == (0.5, None)
    lines = markdown(spec, tmp_path).splitlines()
    assert lines[0].startswith("| **gaussian-classes** | square, epsilon 2: paper | ours |")
    assert lines[2].startswith("| PPSGD | 0.8000 | 0.8133 ± 0.0145 (3) | – | not run |")
    assert len({line.count("|") for line in lines}) == 1
    path = tmp_path / "small" / "square-epsilon-2-ppsgd.json"
    path.write_text(path.read_text().replace("0.81,", ""))
    with pytest.raises(InvalidArgument, match="no record"):
        entries(spec, tmp_path)


def test_methods_are_set_against_the_best_of_the_others_repeat_by_repeat(spec: Spec, tmp_path: Path) -> None:
    row = "square, epsilon 2"
    made_up(spec, tmp_path, row, "PPSGD", [0.7, 0.9, 0.8])
    made_up(spec, tmp_path, row, "OutPert", [0.6, 0.7])  # the third is still to come
    assert pairs(spec, tmp_path) == []  # one of the others is not measured at all
    made_up(spec, tmp_path, row, "OnlyPub", [0.5, 0.5, 0.5])
    (pair,) = pairs(spec, tmp_path)
    assert (pair.row, pair.ours, pair.other, pair.repeats) == (row, "PPSGD", "OutPert", 2)
    assert pair.ahead == pytest.approx(0.15)
    assert pair.stderr == pytest.approx(statistics.stdev([0.1, 0.2]) / math.sqrt(2))
    as_error = replace(
        spec, compare=Compare(ours=("PPSGD",), others=("OutPert", "OnlyPub"), errors=("gaussian-classes",))
    )
    (pair,) = pairs(as_error, tmp_path)
    assert (pair.other, pair.ahead) == ("OnlyPub", pytest.approx(-0.3))
    assert "| square, epsilon 2 | OutPert | +0.1500 ± 0.0500 |" in convex_block(spec, tmp_path)
    assert "| ahead in | | 1 of 1 |" in convex_block(spec, tmp_path)


def test_a_figure_is_drawn_from_the_records(spec: Spec, tmp_path: Path) -> None:
    assert ".svg" not in convex_block(spec, tmp_path)
    for row, score in (("square, epsilon 2", 0.7), ("hinge, epsilon 4", 0.8), ("hinge, epsilon 8", 0.9)):
        made_up(spec, tmp_path, row, "PPSGD", [score, score + 0.02])
    draw(spec, tmp_path / "a.svg", tmp_path)
    draw(spec, tmp_path / "b.svg", tmp_path)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ">PPSGD<" in text
    assert ">OutPert<" not in text  # which was not measured
    assert "![A small figure](small.svg)" in convex_block(spec, tmp_path)
    with pytest.raises(InvalidArgument, match="no figure"):
        draw(replace(spec, figure=None), tmp_path / "c.svg", tmp_path)


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_runs_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--row", "hinge, epsilon 0.05", "--column", "OnlyPub", "--out", str(tmp_path)]
    plot = ["--plot", str(tmp_path / "a.svg")]
    assert main(["reproduce", "001-figure3", *chosen, "--seeds", "2", "--workers", "1", "--json", *plot]) == 0
    (ran,) = json.loads(capsys.readouterr().out)
    assert (ran["row"], ran["column"], ran["paper"], ran["seeds"]) == ("hinge, epsilon 0.05", "OnlyPub", None, 2)
    assert ran["ours"] > 0.6
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert main(["reproduce", "001-figure3", "--show", *chosen, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [ran]
    assert (
        main(["reproduce", "001-table2", "--show", "--out", str(tmp_path), "--row", "skin", "--column", "PPSGD"]) == 0
    )
    shown = capsys.readouterr().out
    assert "0.9069" in shown
    assert "not run" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["001-tabel2", "--show"], "did you mean '001-table2'"),
        (["001-table2", "--scale", "smoke"], "--seeds 2"),
        (["001-table2", "--show", "--row", "wine"], "no cell"),
        (["001-table2", "--show", "--plot", "a.svg"], "no figure"),
        (["000-table1", "--show", "--workers", "2"], "--workers"),
    ],
)
def test_wrong_commands_are_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
