"""Noise and samplers: right ones pass, and each way to be wrong is found by the test that is there for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.audit.bounds import off_by
from sfumato.audit.doors import open_door, rows_objective
from sfumato.audit.ledger import least_cost, ledger_audit
from sfumato.audit.noise import noise_audit, pure_noise, resumed_noise
from sfumato.audit.sampler import drawn_through, sampler_audit
from sfumato.data.samplers import Poisson
from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.questions import NoisyMean

OBJECTIVE, NOBODY = rows_objective(200), torch.zeros(0, 200, dtype=torch.float64)
RNG = np.random.default_rng(5)


def failed(noises: Any, noise: float = 1.0) -> list[str]:
    return [v.audit.split(" over ")[0] for v in noise_audit(noises, noise=noise, name="x") if not v.holds]


def normals(std: float = 1.0, answers: int = 4, size: int = 600) -> list[dict[str, torch.Tensor]]:
    return [
        {"w": torch.from_numpy(RNG.normal(0, std, size)), "b": torch.from_numpy(RNG.normal(0, std, 5))}
        for _ in range(answers)
    ]


def test_the_doors_noise_is_what_was_charged() -> None:
    assert failed(pure_noise(OBJECTIVE, NOBODY, noise=1.5, steps=4), noise=1.5) == []
    assert failed(resumed_noise(OBJECTIVE, NOBODY, noise=1.0, steps=2)) == []


def test_a_lower_bound_is_near_the_truth() -> None:
    found = noise_audit(normals(answers=20, size=5000), noise=1.0, name="x")[0]
    assert 0.95 * found.claimed < found.lower_bound <= found.claimed


def test_too_little_noise_in_one_tensor_of_one_answer_is_found() -> None:
    noises = normals()
    noises[2] = {**noises[2], "w": noises[2]["w"] * 0.7}
    assert "noise, variance" in failed(noises)
    noises[2] = {**noises[2], "w": noises[2]["w"] * 0}
    found = noise_audit(noises, noise=1.0, name="x")[0]
    assert found.lower_bound == np.inf
    assert "w of answer 2" in found.told


def test_another_law_of_the_same_variance_is_found() -> None:
    uniform = [{"w": torch.from_numpy(RNG.uniform(-(3**0.5), 3**0.5, 2000))} for _ in range(3)]
    assert failed(uniform) == ["noise, law"]


def test_noise_that_is_used_again_is_found_after_a_resume_and_in_another_process() -> None:
    first = normals(answers=3)
    assert failed([*first, *normals(answers=2), first[1]]) == ["noise, correlation"]
    mixed = [{"w": 0.8 * a["w"] + 0.6 * b["w"]} for a, b in zip(first, normals(answers=3), strict=True)]
    assert failed([{"w": a["w"]} for a in first] + mixed) == ["noise, correlation"]

    def replayed(objective: Any, rows: Any, noise: float, times: int, folder: Path) -> Any:
        return [open_door(objective, rows, noise, times, seed=3) for _ in range(2)]

    assert failed(resumed_noise(OBJECTIVE, NOBODY, noise=1.0, steps=2, resume=replayed)) == ["noise, correlation"]


def test_one_answer_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgument, match="1 answers"):
        noise_audit(normals(answers=1), noise=1.0, name="x")


# ------------------------------------------------------------------------------------------------ samplers


def wrong(draw: Any, present: int = 20, rate: float = 0.1, draws: int = 2000) -> list[str]:
    found = sampler_audit(draw, present=present, rate=rate, name="x", draws=draws)
    return [v.audit.removeprefix("sampler, ") for v in found if not v.holds]


def poisson(present: int = 20, rate: Any = 0.1) -> Any:
    return np.flatnonzero(RNG.random(present) < rate)


def test_right_samplers_pass() -> None:
    assert wrong(poisson) == []
    assert wrong(partial(Poisson(size=200, batch_size=20.0).draw, 20, np.random.default_rng())) == []
    assert wrong(drawn_through(present=12, batch=1.2, draws=150), present=12, draws=150) == []


def test_who_is_drawn_more_often_is_found() -> None:
    rates = np.full(20, 0.1)
    rates[7] = 0.2
    assert "rate of each person" in wrong(lambda: poisson(rate=rates))


def test_people_who_come_together_are_found() -> None:
    def draw() -> Any:
        units = poisson()
        return np.union1d(units[units != 3], [3]) if 4 in units else units[units != 3]

    assert "pairs" in wrong(draw)


def test_draws_that_repeat_are_found() -> None:
    kept: list[Any] = []

    def draw() -> Any:
        if kept:
            return kept.pop()
        kept.append(poisson())
        return kept[0]

    assert "successive draws" in wrong(draw)


def test_skipped_empty_batches_and_fixed_sizes_are_found() -> None:
    def never_empty() -> Any:
        while not len(units := poisson()):
            pass
        return units

    assert "batch sizes" in wrong(never_empty)
    assert "batch sizes" in wrong(lambda: RNG.choice(20, 2, replace=False))


def test_a_door_that_draws_more_than_it_is_charged_for_is_found() -> None:
    door = partial(open_door, size=12, batch=2.4)
    draw = drawn_through(door, present=12, batch=2.4, draws=200)
    assert "rate of each person" in wrong(draw, present=12, rate=0.05, draws=200)


def test_probabilities_that_are_as_claimed_alarm_rarely() -> None:
    alarms = sum(off_by(RNG.binomial(200, 0.3, 50), 200, 0.3, 0.9) > 0 for _ in range(200))
    assert alarms <= 45  # 20 are expected at the most; so many have probability 1e-7
    assert off_by([0, 200], 200, [0.0, 1.0], 0.999) == 0.0
    with pytest.raises(InvalidArgument, match="rate=0"):
        wrong(poisson, rate=0.0)


# ------------------------------------------------------------------------------------------------ ledger


def test_the_ledger_says_enough_also_after_a_crash() -> None:
    found = ledger_audit(name="x", steps=6)
    assert all(v.holds for v in found)
    assert found[1].trials >= found[0].trials == 3
    assert 0.8 * found[1].claimed < least_cost(Poisson(size=1000, batch_size=100.0), 1.0, 6) <= found[1].claimed


def test_a_ledger_that_forgets_the_answers_before_a_crash_is_found() -> None:
    def forgetful(path: Path, again: bool) -> Any:
        ledger = path.with_name("after.db" if again else "before.db")
        private = Private(torch.zeros(3, 1), name="x", size=1000, ledger=ledger, budget=Budget(1e4, 1e-6))
        private.plan((NoisyMean, 1.0, private.poisson(100.0), 3))
        return private

    assert [v.holds for v in ledger_audit(name="x", steps=6, opened=forgetful)] == [True, False]
