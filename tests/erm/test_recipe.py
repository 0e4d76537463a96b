"""Settings that nobody tuned: what the noise allows, what stability needs, and nothing of private rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sfumato.data.samplers import FixedSize, FullBatch, Poisson
from sfumato.erm import DPSGDClassifier, DPSGDRegressor, Hinge, Huber, HuberisedHinge, Logistic, PPSGDClassifier, Square
from sfumato.erm.budgets import planned_noise
from sfumato.erm.losses import Loss
from sfumato.erm.recipe import Recipe
from sfumato.privacy import tcdp
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency

ADULT, COLUMNS = 26022, 124


def noise_of(recipe: Recipe, epsilon: float) -> float:
    return planned_noise(Budget(epsilon, 1e-6), recipe.sampler, recipe.steps, Adjacency.REPLACE_ONE)


@pytest.mark.parametrize("max_iter", [None, 100, 500])
@pytest.mark.parametrize("batch_size", [None, 1000])
def test_the_noise_of_all_steps_moves_a_score_by_one_however_many_there_are(
    max_iter: int | None, batch_size: int | None
) -> None:
    """One row of length 1, with weights that are nothing but the noise of all steps: a standard deviation of 1."""
    model = DPSGDClassifier(epsilon=0.1, max_iter=max_iter, batch_size=batch_size)
    recipe = model._recipe(ADULT, COLUMNS, Hinge())
    z = noise_of(recipe, 0.1)
    per_step = recipe.rate(z) * z * recipe.clip / recipe.sampler.expected
    assert per_step * math.sqrt(recipe.steps) == pytest.approx(1.0)
    # And the learning rates add up to nearly the same.
    assert recipe.rate(z) * recipe.steps == pytest.approx(359, rel=0.03)


@pytest.mark.parametrize("loss", [Square(), Huber(0.5), Hinge(), Logistic(), HuberisedHinge()], ids=str)
def test_steps_do_not_run_away_where_there_is_next_to_no_noise(loss: Loss) -> None:
    model = (DPSGDRegressor if loss.regression else DPSGDClassifier)(epsilon=8.0)
    recipe = model._recipe(10**6, 20, loss, steepest=0.3)
    rate = recipe.rate(1e-9)
    if loss.regression:
        assert loss.smoothness is not None
        assert rate * loss.smoothness * 0.3 <= 1
    else:
        assert rate * 0.3 <= 4
    assert rate * recipe.steps <= 30 * 20 / (loss.smoothness or 1.0) * (1 + 1e-9)
    assert 128 <= recipe.steps <= 512


def test_batches_are_so_large_that_sampling_adds_a_twenty_fifth_to_the_variance() -> None:
    for epsilon in (0.1, 0.5):
        recipe = DPSGDClassifier(epsilon=epsilon)._recipe(ADULT, COLUMNS, Hinge())
        assert isinstance(recipe.sampler, Poisson)
        batch, z = recipe.sampler.batch_size, noise_of(recipe, epsilon)
        sampling, privacy = 1 / batch, COLUMNS * (z / batch) ** 2
        assert sampling / privacy == pytest.approx(1 / 25, rel=0.1)
    few = DPSGDClassifier(epsilon=0.5)._recipe(15000, 9, Hinge())
    assert few.sampler == FullBatch(size=15000)
    fixed = DPSGDClassifier(epsilon=0.1, sampling="fixed")._recipe(ADULT, COLUMNS, Hinge())
    assert isinstance(fixed.sampler, FixedSize)


@pytest.mark.parametrize(("size", "times"), [(1_000, 1.0), (4_000, 1.0), (50_000, 2.0), (10**7, 2.0)])
def test_less_is_clipped_where_the_noise_leaves_room(size: int, times: float) -> None:
    for loss, first in ((Hinge(), 1.0), (Logistic(), 0.5)):
        recipe = DPSGDClassifier(epsilon=0.5)._recipe(size, 20, loss)
        assert recipe.clip == pytest.approx(first * times)
    assert DPSGDClassifier()._recipe(100, 20, Square()).clip == 3.0
    assert DPSGDRegressor()._recipe(100, 20, Square()).clip == 2.0
    assert DPSGDRegressor()._recipe(100, 20, Huber(0.25)).clip == 0.25


def test_what_is_given_is_kept() -> None:
    given: dict[str, Any] = {"max_iter": 7, "batch_size": 40, "learning_rate": 0.3, "clip": 0.2}
    recipe = DPSGDClassifier(**given)._recipe(900, 3, Hinge())
    assert (recipe.steps, recipe.sampler, recipe.clip) == (7, Poisson(size=900, batch_size=40), 0.2)
    assert recipe.rate(1.0) == recipe.rate(100.0) == 0.3


def test_the_papers_accounting_gets_the_steps_and_batches_that_theorem_4_needs() -> None:
    for epsilon in (0.1, 0.5, 2.0):
        model = PPSGDClassifier(epsilon=epsilon, accounting="tcdp", sampling="fixed")
        recipe = model._recipe(ADULT, COLUMNS, Hinge())
        assert recipe.sampler == FixedSize(size=ADULT, batch_size=260)
        assert recipe.steps >= max(500, tcdp.minimum_steps(tcdp.budget(epsilon, 1e-6), 260 / ADULT))


def test_private_values_play_no_part() -> None:
    X = np.random.default_rng(0).uniform(-0.5, 0.5, (400, 3))
    asked = []
    for rows in (X, X * 1e-3, -X, np.full_like(X, np.nan)):
        model = PPSGDClassifier(epsilon=0.3, classes=(False, True)).fit(rows, X[:, 0] > 0, X[:20].copy(), X[:20, 0] > 0)
        asked.append([(line.mechanism, line.answers) for line in model.ledger_.asked])
    assert all(lines == asked[0] for lines in asked)
