"""The statement says what was asked, in numbers and in words, and what is not covered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato.data.samplers import FixedSize, FullBatch, Poisson
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget, at_most
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.privacy.statement import NOT_PRIVATE

BUDGET = Budget(epsilon=2.0, delta=1e-5)
TRAIN = Mechanism(question="gradient", noise=Gaussian(3.0), sampler=Poisson(size=48_000, batch_size=512), times=100)
GRAM = Mechanism(question="gram", noise=Gaussian(30.0), sampler=FullBatch(size=48_000))


def account(where: Path | None = None, **changes: object) -> Account:
    values = {"unit": "user", "adjacency": Adjacency.ADD_REMOVE, "budget": BUDGET} | changes
    return Ledger(where).account("clinic", **values)  # type: ignore[arg-type]


def test_nothing_asked() -> None:
    said = account().statement()
    assert said.to_json()["epsilon"] == 0
    assert said.to_json()["left"] == 2.0
    assert "Nothing has been asked" in said.to_text()


def test_much_noise_is_not_the_same_as_nothing_asked() -> None:
    clinic = account()
    with clinic.plan([Mechanism(question="sum", noise=Gaussian(1e5), sampler=FullBatch(size=48_000))]) as plan:
        plan.take("sum")
    said = clinic.statement()
    assert said.epsilon == 0
    assert "Nothing has been asked" not in said.to_text()
    assert "at most 1 times as likely" in said.to_text()


def test_a_promise_is_not_rounded_down() -> None:
    assert at_most(1.00001) == "1.0001"
    assert float(at_most(0.1623101)) >= 0.1623101


def test_a_plan_is_stated_in_full_even_if_it_ended_early(tmp_path: Path) -> None:
    clinic = account(tmp_path / "ledger.db")
    plan = clinic.plan([TRAIN, GRAM], note="first training")
    for _ in range(7):
        plan.take("gradient")
    plan.close()
    data = clinic.statement().to_json()
    assert data == json.loads(json.dumps(data))
    cost = accounting.epsilon([TRAIN, GRAM], delta=1e-5, adjacency=Adjacency.ADD_REMOVE)
    assert data["epsilon"] == cost.epsilon
    assert data["composition"] == f"planned, {cost.accountant}"
    assert "PLD" in data["composition"]
    assert data["delta"] == 1e-5
    assert data["unit"] == "user"
    assert data["adjacency"] == "add-remove"
    assert data["budget"] == {"epsilon": 2.0, "delta": 1e-5}
    assert set(data["versions"]) == {"sfumato", "dp-accounting", "torch", "python"}
    assert data["dataset"] == "clinic"
    assert data["warnings"] == []
    train, gram = data["mechanisms"]
    assert (train["question"], train["times_planned"], train["answers_counted"]) == ("gradient", 100, 7)
    assert (gram["question"], gram["times_planned"], gram["answers_counted"]) == ("gram", 1, 0)
    assert train["noise"] == {"kind": "Gaussian", "scale": 3.0}
    assert train["sampler"] == {"kind": "Poisson", "size": 48_000, "batch_size": 512}
    assert train["note"] == "first training"


def test_under_a_filter_the_promise_is_the_budget(tmp_path: Path) -> None:
    clinic = account(tmp_path / "ledger.db")
    clinic.plan([TRAIN]).close()  # no answer taken: never asked
    clinic.charge(GRAM)
    clinic.charge(GRAM)
    data = clinic.statement().to_json()
    assert data["epsilon"] == 2.0
    assert data["composition"].startswith("filter, Renyi orders ")
    assert 0 < data["left"] < 2.0
    assert [m["answers_counted"] for m in data["mechanisms"]] == [0, 1, 1]


def test_the_words_name_person_numbers_questions_and_limits() -> None:
    clinic = account()
    with clinic.plan([TRAIN, GRAM]) as plan:
        plan.take("gram")
    text = clinic.statement().to_text()
    epsilon = clinic.epsilon_spent()
    for words in (
        "'clinic'",
        "one person, with all of that person's records,",
        "is in the dataset or not",
        f"epsilon = {at_most(epsilon)}",
        "delta = 1e-05",
        "also if it ended early",
        "1 of 1 planned answers",
        "0 of 100 planned answers",
        "does not cover",
        "hyper-parameter search",
        "Floating-point",
        "Timing",
        "public data",
        "one name was used for two datasets",
        "in memory only",
    ):
        assert words in text, words


def test_other_units_and_adjacencies_are_worded() -> None:
    records = account(unit="example", adjacency=Adjacency.REPLACE_ONE)
    fixed = Mechanism(
        question="gradient", noise=Gaussian(40.0), sampler=FixedSize(size=48_000, batch_size=512), times=9
    )
    records.plan([fixed])
    text = records.statement().to_text()
    assert "one record is exchanged for any other" in text
    assert "512 of exactly 48000 units" in text
    assert "RDP" in text


def test_a_stamp_is_durable_said_once_and_voids_the_promise(tmp_path: Path) -> None:
    clinic = account(tmp_path / "ledger.db")
    clinic.plan([GRAM]).take("gram")
    assert clinic.statement().private
    for _ in range(2):
        clinic.stamp(NOT_PRIVATE, "noise came from seed 0")
        clinic.stamp("note", "rerun after repair")
    said = Ledger(tmp_path / "ledger.db").account("clinic").statement()
    assert not said.private
    assert said.to_json()["private"] is False
    assert said.warnings == ("NOT PRIVATE: noise came from seed 0", "rerun after repair")
    assert "There is no promise" in said.to_text()
    assert "What is promised" not in said.to_text()


@pytest.mark.parametrize(("size", "warned"), [(99_000, False), (100_000, True)])
def test_delta_must_be_below_one_over_the_size(tmp_path: Path, size: int, warned: bool) -> None:
    clinic = account(tmp_path / "ledger.db")
    clinic.charge(Mechanism(question="sum", noise=Gaussian(30.0), sampler=FullBatch(size=size)))
    assert any("one over the declared size" in text for text in clinic.statement().warnings) == warned


@pytest.mark.parametrize(("noise", "weak"), [(3.0, False), (0.3, True)])
def test_a_weak_promise_is_called_so(noise: float, weak: bool) -> None:
    one = account(budget=Budget(epsilon=100.0, delta=1e-5))
    one.plan([Mechanism(question="gram", noise=Gaussian(noise), sampler=FullBatch(size=48_000))])
    assert (one.statement().epsilon > 8) is weak
    assert ("is a weak promise" in one.statement().to_text()) is weak
