"""Public coordinates: a linear map that public rows decide on, applied row by row, and undone in the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from sfumato.erm import DPSGDClassifier, PPSGDClassifier, PPSGDRegressor
from sfumato.erm.coordinates import moved, public_coordinates, steepest
from sfumato.erm.rows import unit_rows


def uniform(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (n, d)))


def lopsided(n: int, seed: int = 0) -> np.ndarray:
    """Rows that mostly point the same way, with columns of very different widths, two of which move together."""
    z = np.random.default_rng(seed).uniform(-1, 1, (n, 4))
    z[:, 3] = 0.9 * z[:, 2] + 0.4 * z[:, 3]
    return np.asarray([0.5, -0.3, 0.25, 0.15] + z * [0.2, 0.02, 0.1, 0.1])


@pytest.mark.parametrize("width", [1, 4, 9, 13, 53, 124])
def test_a_row_is_moved_the_same_in_every_company(width: int) -> None:
    X, M = uniform(700, width), uniform(width, width, 1)
    together = moved(X, M)
    assert torch.allclose(together, X @ M.T, rtol=1e-5, atol=1e-5)
    for start, stop in ((0, 1), (3, 10), (255, 257), (256, 700), (17, 18), (1, 699)):
        assert torch.equal(moved(X[start:stop], M), together[start:stop])
    shuffled = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    assert torch.equal(moved(X[shuffled], M), together[shuffled])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    X, M = uniform(300, 5), uniform(5, 5, 1)
    spoilt = X.clone()
    spoilt[7, 2], spoilt[280] = math.nan, math.inf
    new = moved(spoilt, M)
    others = [i for i in range(300) if i not in (7, 280)]
    assert torch.equal(new[others], moved(X, M)[others])
    assert not torch.isfinite(new[[7, 280]]).any()


def test_public_rows_are_centred_and_about_one_long_with_half_for_the_constant() -> None:
    X = unit_rows(lopsided(60), constant=True)
    new = moved(X, public_coordinates(X, constant=True))
    assert torch.allclose(new[:, :-1].mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(new[:, -1], torch.full((60,), 0.5, dtype=torch.float64))
    assert float(new.norm(dim=1).median()) == pytest.approx(1.0, rel=1e-5)
    # Rounder than before, on rows that had no part in it, too.
    others = unit_rows(lopsided(2000, 1), constant=True)

    def widest_to_narrowest(rows: Tensor) -> float:
        values = torch.linalg.eigvalsh(torch.cov(rows.T))
        return float(values[-1] / values[0])

    before, after = others[:, :-1], moved(others, public_coordinates(X, constant=True))[:, :-1]
    assert widest_to_narrowest(before) > 50
    assert widest_to_narrowest(after) < 12


def test_a_shift_of_all_rows_is_no_change_where_there_is_an_intercept() -> None:
    x = torch.from_numpy(lopsided(40))
    shift = torch.tensor([0.05, -0.1, 0.2, 0.0], dtype=torch.float64)

    def with_constant(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) / math.sqrt(2)

    here, there = with_constant(x), with_constant(x + shift)
    new = [moved(rows, public_coordinates(rows, constant=True)) for rows in (here, there)]
    assert torch.allclose(new[0], new[1], atol=1e-5)


def test_without_an_intercept_what_rows_have_in_common_is_shortened() -> None:
    X = unit_rows(lopsided(60), constant=False)
    new = moved(X, public_coordinates(X, constant=False))
    assert float(new.mean(0).norm()) == pytest.approx(0.5, rel=1e-5)
    balanced = torch.cat([X - X.mean(0), X.mean(0) - X])  # has nothing in common: nothing is to be shortened
    again = moved(balanced, public_coordinates(balanced, constant=False))
    assert float(again.norm(dim=1).median()) == pytest.approx(math.sqrt(0.75), rel=1e-5)


def test_a_column_that_never_varies_in_public_rows_is_not_magnified() -> None:
    X = torch.cat([uniform(20, 3) * torch.tensor([0.3, 0.1, 0.03]), torch.zeros(20, 1)], 1).double()
    lengths = public_coordinates(X, constant=False).norm(dim=0)
    assert lengths[3] < lengths[2]
    assert lengths[0] < lengths[1] < lengths[2]


def test_rows_that_tell_nothing_change_nothing() -> None:
    one = unit_rows(lopsided(1), constant=True)
    for X in (one, one.expand(5, -1)):
        assert torch.equal(public_coordinates(X, constant=True), torch.eye(5, dtype=torch.float64))


def test_the_steepest_direction_is_the_largest_eigenvalue() -> None:
    X = uniform(30, 6)
    assert steepest(X) == pytest.approx(float(torch.linalg.eigvalsh(X.T @ X / 30)[-1]))


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_weights_are_those_of_the_rows_as_they_were(fit_intercept: bool) -> None:
    """With next to no noise, the regression is scikit-learn's, in whatever coordinates it was found."""
    X = lopsided(3000)
    y = X @ [1.0, 2.0, -1.0, 0.5] + (0.1 if fit_intercept else 0.0)
    options: dict[str, Any] = {"epsilon": 400.0, "clip": 2.0, "max_iter": 300, "learning_rate": 0.9, "average": 0.1}
    model = PPSGDRegressor(fit_intercept=fit_intercept, batch_size=2940, reuse=0.0, **options)
    model.fit(X[60:], y[60:], X[:60], y[:60])
    oracle = LinearRegression(fit_intercept=fit_intercept).fit(X, y)
    assert np.allclose(model.predict(X), X @ model.coef_ + model.intercept_)
    off = np.mean((model.predict(X) - oracle.predict(X)) ** 2)
    assert off < 0.05 * np.var(y)


def test_public_coordinates_are_worth_more_than_the_same_rows_among_the_private_ones() -> None:
    ours, plain = [], []
    for seed in range(4):
        X = lopsided(3050, seed)
        y = 30 * (X[:, 1] + 0.3) + 2 * (X[:, 0] - 0.5) > 0
        options: dict[str, Any] = {"epsilon": 0.5, "not_private_seed": seed}
        data = (X[50:], y[50:], X[:50], y[:50])
        ours.append(PPSGDClassifier(**options).fit(*data).score(X, y))
        plain.append(DPSGDClassifier(**options).fit(*data).score(X, y))
    assert np.mean(ours) > 0.85
    assert np.mean(ours) > np.mean(plain) + 0.15
