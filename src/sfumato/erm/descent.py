"""Noisy gradient descent on linear models: what its methods share, and DP-SGD, which is nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.data.samplers import FixedSize, Poisson, Sampler
from sfumato.erm.base import Classifier, Learned, PrivateLinear, Regressor
from sfumato.erm.budgets import PlannedAllowance
from sfumato.erm.losses import Loss
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.private import Private


@dataclass(kw_only=True, eq=False, repr=False)
class Descent(PrivateLinear):
    """Steps w <- w - learning_rate (noisy clipped gradient + l2 w), from w = 0.

    Args (beside those of `PrivateLinear`):
        max_iter: how many steps; the noise follows from it.
        batch_size: rows per step, in the mean; None is a hundredth of the rows, at least 16.
        sampling: "poisson" (each row joins by itself), or "fixed" (without replacement; replace-one only).
        clip: the most that one row contributes to a gradient sum.
        radius: weights are projected to this norm after every step; None leaves them.
        average: the share of the last iterates that is averaged; 0 takes the last one. It costs nothing.
    """

    max_iter: int = 1000
    batch_size: int | None = None
    sampling: str = "poisson"
    learning_rate: float = 0.5
    clip: float = 1.0
    radius: float | None = None
    average: float = 0.0

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not (isinstance(self.max_iter, int) and self.max_iter >= 1):
            raise InvalidArgument(f"max_iter={self.max_iter} must be a whole number of at least 1.")
        for name in ("learning_rate", "clip"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidArgument(f"{name}={getattr(self, name)} must be positive and finite.")
        if self.radius is not None and not self.radius > 0:
            raise InvalidArgument(f"radius={self.radius} must be positive: weights are projected to it.")
        if self.sampling not in ("poisson", "fixed"):
            raise InvalidArgument(f"sampling={self.sampling!r} must be 'poisson' or 'fixed'.")
        if not 0 <= self.average <= 1:
            raise InvalidArgument(f"average={self.average} must lie between 0 and 1: it is a share of the iterates.")

    def _sampler(self, size: int) -> Sampler:
        batch = self.batch_size
        if batch is None:
            batch = min(size, max(16, round(size / 100)))
        return (Poisson if self.sampling == "poisson" else FixedSize)(size=size, batch_size=batch)

    def _moved(self, w: Tensor, gradient: Tensor) -> Tensor:
        """One step; the regulariser is public, so its gradient comes after the noise."""
        moved = torch.add(w * (1 - self.learning_rate * self.l2), gradient, alpha=-self.learning_rate)
        return moved if self.radius is None else moved * min(1.0, self.radius / (float(moved.norm()) + 1e-300))


class Average:
    """The mean of the last `share` of all iterates, or the last one; it keeps no more than it needs."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._sums: list[tuple[int, Tensor]] = []  # (iterates so far, their sum), at a few places along the way
        self._count, self._sum, self._last = 0, torch.zeros(()), torch.zeros(())

    def add(self, w: Tensor) -> None:
        self._last = w
        if self._share > 0:
            self._count, self._sum = self._count + 1, self._sum + w
            self._sums.append((self._count, self._sum))
            if len(self._sums) > 512:  # every second place is enough
                del self._sums[::2]

    def result(self) -> Tensor:
        if not self._sums:
            return self._last
        before = [place for place in self._sums if place[0] <= (1 - self._share) * self._count]
        skipped, total = before[-1] if before else (0, torch.zeros(()))
        return (self._sum - total) / (self._count - skipped)


@dataclass(kw_only=True, eq=False, repr=False)
class _DPSGD(Descent):
    _merges_public = True

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        w, iterates = torch.zeros(width, dtype=torch.float64), Average(self.average)
        budget, sampler = Budget(self.epsilon, self.delta), self._sampler(private.size)
        with PlannedAllowance(private, LinearGradientMean, sampler, budget=budget, steps=self.max_iter) as allowance:
            for _ in range(self.max_iter):
                w = self._moved(w, allowance.ask(LinearGradientMean(loss, w, self.clip), allowance.noise))
                iterates.add(w)
        return Learned(iterates.result(), self.max_iter, allowance.epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDClassifier(Classifier, _DPSGD):
    """Plain DP-SGD (Abadi et al. 2016) for two classes, planned and composed by PLD. Public rows join the private ones.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
    >>> model = DPSGDClassifier(epsilon=2.0, max_iter=50, learning_rate=4.0).fit(X, X[:, 0] > 0)
    >>> model.n_iter_, bool(1.9 < model.epsilon_ <= 2.0), bool(model.score(X, X[:, 0] > 0) > 0.6)
    (50, True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDRegressor(Regressor, _DPSGD):
    """Plain DP-SGD for linear regression, planned and composed by PLD. Public rows join the private ones."""
