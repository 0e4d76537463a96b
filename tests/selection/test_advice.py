"""Budget advice: it fits, it is no larger than it must be, and a plan made from it is what it says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from sfumato import Budget, GradientMean, Planned, Private
from sfumato.data.samplers import Poisson
from sfumato.errors import InvalidArgument
from sfumato.privacy.mechanisms import Adjacency
from sfumato.selection import Advice, NearPrivate, Threshold, TopK, advise, advise_questions

BUDGET = Budget(3.2, 1e-5)
BATCHES = Poisson(size=60_000, batch_size=600)


@cache
def advice(near: NearPrivate | None = None, **options: Any) -> Advice:
    defaults: dict[str, Any] = {"budget": BUDGET, "sampler": BATCHES, "points": 10_000}
    if "noise" not in options:
        defaults["steps"] = 1000
    return advise(near or NearPrivate(), **(defaults | options))


def planned(found: Advice, near: NearPrivate, adjacency: str) -> float:
    """What the ledger charges for a plan made from the advice."""
    private = Private(torch.zeros(1, 1), name="p", size=60_000, budget=Budget(100.0, 1e-5))
    if adjacency == "replace-one":
        private = Private(torch.zeros(60_000, 1), name="p", budget=Budget(100.0, 1e-5), adjacency=adjacency)
    lines = near.lines(private, pca=found.pca, support=found.support)
    private.plan(Planned(GradientMean, found.training, BATCHES, found.steps), *lines)
    return private.account.epsilon_spent()


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("near", [NearPrivate(), NearPrivate(voters=TopK())], ids=["threshold", "top k"])
def test_a_plan_made_from_it_costs_what_it_says(near: NearPrivate, adjacency: Adjacency) -> None:
    found = advice(near, adjacency=adjacency)
    assert 0.999 * BUDGET.epsilon < found.together <= BUDGET.epsilon
    assert planned(found, near, adjacency) == pytest.approx(found.together, rel=1e-3)
    assert found.together < found.training_alone + found.pca_alone + found.support_alone
    assert found.pca_alone == pytest.approx(0.32, rel=1e-3)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("near", [NearPrivate(), NearPrivate(voters=TopK())], ids=["threshold", "top k"])
def test_a_trained_model_is_asked_for_all_that_is_left(near: NearPrivate, adjacency: Adjacency) -> None:
    budget = Budget(1.0, 1e-5)
    found = advise_questions(near, budget=budget, size=60_000, support=0.4, adjacency=adjacency)
    rows = torch.zeros(60_000 if adjacency is Adjacency.REPLACE_ONE else 1, 1)
    private = Private(rows, name="p", size=60_000, budget=Budget(100.0, 1e-5), adjacency=adjacency)
    gram, votes = near.lines(private, pca=found.pca, support=found.support)
    private.plan(gram, votes)
    assert private.account.epsilon_spent() == pytest.approx(found.together, rel=1e-3)
    assert 0.999 < found.together <= 1.0
    twice = adjacency is Adjacency.REPLACE_ONE and isinstance(near.voters, Threshold)
    assert found.support == pytest.approx((2 if twice else 1) / 0.4)  # pure epsilon, in units of one person's votes


@pytest.mark.parametrize("support", [0.0, 1.0, math.nan])
def test_a_share_that_leaves_one_of_them_nothing_is_refused(support: float) -> None:
    with pytest.raises(InvalidArgument, match="above 0 and below 1"):
        advise_questions(NearPrivate(), budget=BUDGET, size=100, support=support)


def test_the_golden_split() -> None:
    """DP-SGD worth 2.2, PCA worth 0.5, and what the total of 3.2 then leaves for the support: 1.035 (see the plan)."""
    found = advice(steps=4000, pca=0.5, support=1 / 1.035)
    assert found.pca == pytest.approx(7.034, abs=0.005)
    assert found.training_alone == pytest.approx(2.2, abs=0.01)
    assert found.spread == pytest.approx(math.sqrt(2) * 1.035)


def test_steps_follow_from_noise_and_noise_from_steps() -> None:
    given = advice()
    back = advice(noise=given.training)
    assert back.steps == pytest.approx(1000, abs=2)
    assert back.together <= BUDGET.epsilon
    assert replace(back, steps=1000).to_text().splitlines()[-1] == given.to_text().splitlines()[-1]


def test_the_support_gets_no_more_than_its_votes_are_worth() -> None:
    few, many = advice(points=500, steps=50), advice(points=20_000, steps=50)
    assert few.support > many.support  # many votes per row stand more noise
    assert few.votes == pytest.approx(0.2 * 60_000 / 500)
    assert few.support_alone == pytest.approx(0.05 * 3.2)
    assert many.support_alone == pytest.approx(0.25 * 3.2)
    between = advice(points=4000, steps=50)
    assert between.spread == pytest.approx(between.votes)
    assert few.training < many.training  # what is not spent on the support, the training has
    top = advice(NearPrivate(voters=TopK(k=12_000)), points=4000, support=0.4, steps=50)
    assert top.spread == pytest.approx(2 * math.sqrt(2) / 0.4)  # twice that of a threshold


def test_the_text_names_all_numbers() -> None:
    found = advice()
    text = found.to_text()
    for number in (found.training, found.pca, found.support):
        assert f"{number:.4g}" in text
    assert "epsilon = 3.2 at delta = 1e-05" in text
    assert "step 1000, the last" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noise": 1.0, "steps": 5}, "either steps or noise"),
        ({"points": 0}, "points=0 must be"),
        ({"pca": 3.3}, "pca=3.3 must be positive and below epsilon=3.2"),
        ({"support": 0.0}, "support=0.0 must be positive"),
        ({"pca": 2.0, "support": 3.0}, "extra costs epsilon="),
        ({"noise": 0.05}, "makes one step cost more than epsilon=3.2"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        advice(**options)
