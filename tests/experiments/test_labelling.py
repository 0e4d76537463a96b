"""Labels for chosen public rows, at smoke scale: what is shared, what is asked, what is paid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.errors import InvalidArgument
from sfumato.experiments.data import load_rows
from sfumato.experiments.labelling import before_labels, make_strategy, split
from sfumato.experiments.records import reported
from sfumato.experiments.runner import Job, run_job
from sfumato.experiments.settings import STRATEGIES, Selection
from sfumato.experiments.spec import SPECS, Cell, find_spec, load_spec
from sfumato.experiments.table import drawn, entries
from sfumato.selection import NearPrivate

CPU = torch.device("cpu")


def job(row: str, out: Path, name: str = "004-figure3", seed: int = 0) -> Job:
    spec = find_spec(name)
    cell = next(c for c in spec.cells if c.row == row)
    return Job(spec=spec, cell=cell, seed=seed, scale="smoke", out=out)


def test_strategies_start_from_one_training_and_leave_a_curve(tmp_path: Path) -> None:
    records = [run_job(job(row, tmp_path), device=CPU) for row in ("random", "entropy", "DiversePublic")]
    assert len({json.dumps(r["before"]) for r in records}) == 1
    assert len(list(tmp_path.glob("004-figure3/smoke/before-labels-*.json"))) == 1
    for record in records:
        assert set(record["metrics"]) == set(record["polluted"]) == {"20", "50"}
        assert record["statement"]["epsilon"] <= 3.2
    random = records[0]["polluted"]
    assert 0 < random["50"] < 0.5  # 200 of 900 rows are noise
    shown = [e for e in entries(find_spec("004-figure3"), "smoke", tmp_path) if e.row == "random"]
    assert shown[0].to_json()["polluted"] == random["20"]
    assert shown[0].text().endswith(f"(1), {100 * random['20']:.0f} % polluted")
    found = {e.column: e.ours for e in shown}
    assert found["500 labels (smoke: 20 labels)"] == records[0]["metrics"]["20"]["test"]
    assert found["7,000 labels (smoke: 50 labels)"] == records[0]["metrics"]["50"]["test"]
    assert drawn(find_spec("004-figure3"), tmp_path / "figure.svg", "smoke", tmp_path)
    picture = (tmp_path / "figure.svg").read_text()
    assert "DiversePublic" in picture
    assert ">labels (smoke scale)<" in picture
    assert ">7000<" not in picture  # nobody gave so many
    assert not drawn(find_spec("004-figure1"), tmp_path / "nothing.svg", "smoke", tmp_path / "empty")


def test_near_private_pays_for_all_that_it_rests_on(tmp_path: Path) -> None:
    near = job("NearPrivate", tmp_path)
    record = run_job(near, device=CPU)
    statement = record["statement"]
    assert 3.19 < statement["epsilon"] <= 3.2
    asked = {line["question"]: line for line in statement["mechanisms"]}
    assert {line["plan"] for line in asked.values()} == {1}  # composed as one
    counted = {question: line["answers_counted"] for question, line in asked.items()}
    assert counted == {"GradientMean": near.settings.training.steps, "Gram": 1, "Histogram": 1}
    advice = split(near.settings)
    assert advice is not None
    assert asked["GradientMean"]["noise"]["scale"] == advice.training
    begun = before_labels(near.settings)
    assert begun.training.noise == advice.training
    assert begun.training.epsilon is None
    assert begun.selection is None
    alone = split(job("random", tmp_path).settings)
    assert alone is None


def test_the_split_is_what_accounting_says(tmp_path: Path) -> None:
    settings = job("NearPrivate", tmp_path).settings
    advice = split(settings)
    assert advice is not None
    assert advice.pca_alone == pytest.approx(0.3, abs=1e-3)
    assert advice.support_alone == pytest.approx(0.7, abs=1e-6)
    assert advice.training_alone < 3.2 < advice.training_alone + 0.3 + 0.7  # together they cost less than their sum


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "none"])
def test_every_strategy_has_its_options(name: str) -> None:
    made = make_strategy(Selection(strategy=name, labels=(5,), uncertain=3.0, each=2, quantile=0.25), seed=7)
    assert getattr(made, "seed", 7) == 7
    assert getattr(made, "uncertain", 3.0) == 3.0
    assert getattr(made, "each", 2) == 2
    if isinstance(made, NearPrivate):
        assert made.voters.quantile == 0.25  # type: ignore[union-attr]


def test_pollution_comes_last_and_is_not_trained_on() -> None:
    settings = find_spec("004-figure3").cells[0].settings["smoke"]
    rows = load_rows(settings.data, CPU)
    clean = load_rows(replace(settings.data, pollution=0), CPU)
    assert rows.pollution == 200
    assert len(rows.public[0]) == len(clean.public[0]) + 200
    torch.testing.assert_close(rows.public[0][:-200], clean.public[0])
    torch.testing.assert_close(rows.private[0], clean.private[0])
    assert before_labels(settings).data.pollution == 0


def test_a_curve_is_one_training_for_all_its_points(tmp_path: Path) -> None:
    curve = [c for c in find_spec("004-figure1").cells if c.row == "entropy"]
    assert [c.x for c in curve] == [500, 1000, 2000, 4000, 7000]
    assert [c.report for c in curve] == ["500", "1000", "2000", "4000", "7000"]
    assert len({c.settings["paper"].key() for c in curve}) == 1
    text = (SPECS / "004-figure1.toml").read_text()
    (tmp_path / "bases").symlink_to(SPECS / "bases")
    wrong = text.replace('strategy = "random"', 'strategy = "randm"', 1)
    (tmp_path / "wrong.toml").write_text(wrong)
    with pytest.raises(InvalidArgument, match="did you mean 'random'"):
        load_spec(tmp_path / "wrong.toml")


def test_a_number_of_labels_that_was_not_tried_is_refused(tmp_path: Path) -> None:
    cell: Cell = next(c for c in find_spec("004-figure1").cells if c.row == "random")
    record = {"scale": "paper", "metrics": {"500": {"test": 90.0}}, "chosen": None}
    assert reported(record, cell) == 90.0
    with pytest.raises(InvalidArgument, match="run the cell again"):
        reported(record, replace(cell, report="2000"))
