"""What the tests of sealed methods share: tables and their neighbours, a sample in one part, and laws of noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from torch import Tensor

from sfumato import Ledger
from sfumato.erm import Logistic
from sfumato.erm.sealed import SealedLinear
from sfumato.errors import InvalidArgument
from sfumato.gradients import Units

D, N = 5, 40  # of `neighbours`


class Batch:
    """A sample in one part, as questions see it inside the door."""

    objective, performance, reduction, expected = None, None, "mean", None

    def __init__(self, X: Tensor, y: Tensor, units: Units | None = None) -> None:
        self.rows, self.units = (X, y), units or Units()

    def parts(self, *, lend: bool = False) -> Iterator[tuple[tuple[Tensor, Tensor], Units]]:
        yield self.rows, self.units

    def first_rows(self) -> tuple[Tensor, Tensor]:
        return self.rows


def table(n: int = 300, d: int = D, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(seed).uniform(-1, 1, (n, d)) / math.sqrt(d)
    return X, X[:, 0] + X[:, 1] > 0


def neighbours(seed: int) -> list[tuple[Tensor, Tensor]]:
    """One table, and the same with its first row exchanged for others, some of them out of bounds."""
    g = torch.Generator().manual_seed(seed)
    X = 2 * torch.rand(N, D, dtype=torch.float64, generator=g) - 1
    y = torch.sign(torch.rand(N, dtype=torch.float64, generator=g) - 0.5)
    if seed == 1:
        X[1:] = 0.0  # nobody else pulls
    if seed == 2:
        X, y = torch.eye(D, dtype=torch.float64)[:1].repeat(N, 1), torch.ones(N, dtype=torch.float64)  # all the same
    rows = [[1.0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0], [1e8] * D, [-1e200] * D, [math.nan] * D, [0.0] * D]
    tables = [(X, y)]
    for row in rows:
        for target in (1.0, -1.0, 1e30):
            other_X, other_y = X.clone(), y.clone()
            other_X[0], other_y[0] = torch.tensor(row, dtype=torch.float64), target
            tables.append((other_X, other_y))
    return tables


def ran(question: SealedLinear, X: Tensor, y: Tensor) -> Tensor:
    """The weights before the noise."""
    w = question.run(Batch(X, y), lambda exact: exact)  # type: ignore[arg-type]
    assert isinstance(w, Tensor)
    return w


def assert_refused_before_the_door_opens(estimator: Any, message: str) -> None:
    X, y = table()
    ledger = Ledger(None)
    estimator.set_params(ledger=ledger)
    with pytest.raises(InvalidArgument, match=message):
        estimator.fit(X, y)
    assert not ledger.account_names()


def mu_of(epsilon: float, delta: float) -> float:
    """The Gaussian mechanism with that (epsilon, delta), in closed form (Balle and Wang 2018)."""

    def excess(mu: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 1e-4, 50.0))


def assert_std(noise: np.ndarray, std: float) -> None:
    """Accepts the claimed standard deviation and rejects 0.8 of it, and 1.25 times it."""
    low, high = chi2.ppf([1e-6, 1 - 1e-6], noise.size)
    assert low < ((noise / std) ** 2).sum() < high
    for wrong in (0.8, 1.25):
        assert not low < ((noise / (wrong * std)) ** 2).sum() < high, "too few samples to tell"


class Bent(Logistic):
    """Newton's method fails on it."""

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, math.nan)


class Stuck(Logistic):
    """No slope is a number: neither Newton's method nor descent gets anywhere."""

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, math.nan)
