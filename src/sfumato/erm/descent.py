"""Noisy gradient descent on linear models: what its methods share, and DP-SGD, which is nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from sklearn.base import is_classifier
from torch import Tensor

from sfumato.data.samplers import FixedSize, FullBatch, Poisson, Sampler
from sfumato.erm.base import Classifier, Learned, PrivateLinear, Regressor
from sfumato.erm.budgets import PlannedAllowance
from sfumato.erm.losses import Loss
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.recipe import Circumstances, Recipe
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Private


@dataclass(kw_only=True, eq=False, repr=False)
class NoisySteps(PrivateLinear):
    """What does not depend on how the settings were found.

    Beside the arguments of `PrivateLinear`:

    Args:
        sampling: "poisson" (each row joins by itself), or "fixed" (without replacement; replace-one only).
        radius: weights are projected to this norm after every step; None leaves them.
        average: the share of the last iterates that is averaged; 0 takes the last one. It costs nothing.
    """

    sampling: str = "poisson"
    radius: float | None = None
    average: float = 0.0

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.radius is not None and not self.radius > 0:
            raise InvalidArgument(f"radius={self.radius} must be positive: weights are projected to it.")
        if self.sampling not in ("poisson", "fixed"):
            raise InvalidArgument(f"sampling={self.sampling!r} must be 'poisson' or 'fixed'.")
        if not 0 <= self.average <= 1:
            raise InvalidArgument(f"average={self.average} must lie between 0 and 1: it is a share of the iterates.")

    def _batches(self, size: int, batch: int) -> Sampler:
        return (Poisson if self.sampling == "poisson" else FixedSize)(size=size, batch_size=batch)

    def _stepped(self, w: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """One step; the regulariser is public, so its gradient comes after the noise."""
        moved = torch.add(w * (1 - rate * self.l2), gradient, alpha=-rate)
        return moved if self.radius is None else moved * min(1.0, self.radius / (float(moved.norm()) + 1e-300))


@dataclass(kw_only=True, eq=False, repr=False)
class Descent(NoisySteps):
    """Steps w <- w - learning_rate (noisy clipped gradient + l2 w), from w = 0, with the settings that are given.

    Beside the arguments of `NoisySteps`:

    Args:
        max_iter: how many steps; the noise follows from it.
        batch_size: rows per step, in the mean; None is a hundredth of the rows, at least 16.
        clip: the most that one row contributes to a gradient sum.
    """

    max_iter: int = 1000
    batch_size: int | None = None
    learning_rate: float = 0.5
    clip: float = 1.0

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_settings(self.max_iter, self.learning_rate, self.clip)

    def _sampler(self, size: int) -> Sampler:
        return self._batches(size, hundredth(size) if self.batch_size is None else self.batch_size)

    def _moved(self, w: Tensor, gradient: Tensor) -> Tensor:
        return self._stepped(w, gradient, self.learning_rate)


def hundredth(size: int) -> int:
    """The rows of a batch where nothing better is known."""
    return min(size, max(16, round(size / 100)))


def check_settings(max_iter: int | None, learning_rate: float | None, clip: float | None) -> None:
    """Raise for what is out of range; None is chosen elsewhere."""
    if max_iter is not None and max_iter < 1:
        raise InvalidArgument(f"max_iter={max_iter} must be a whole number of at least 1.")
    for name, value in (("learning_rate", learning_rate), ("clip", clip)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidArgument(f"{name}={value} must be positive and finite.")


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
class TunedDescent(NoisySteps):
    """`Descent` whose settings, where they are left at None, follow from public quantities: see `recipe`.

    Beside the arguments of `NoisySteps`:

    Args:
        max_iter: how many steps; the noise follows from it. None: what stability needs, 128 to 512.
        batch_size: rows per step, in the mean. None: so many that sampling adds little to the noise, or all.
        learning_rate: None: what the noise and the curvature of the loss allow.
        clip: the most that one row contributes to a gradient sum. None: the longest first gradient of a row of norm 1,
            or somewhat more where the noise leaves room.
    """

    max_iter: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    clip: float | None = None
    average: float = 0.5

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_settings(self.max_iter, self.learning_rate, self.clip)

    def _recipe(self, size: int, width: int, loss: Loss, steepest: float = 1.0) -> Recipe:
        given = Circumstances(
            budget=Budget(self.epsilon, self.delta),
            adjacency=Adjacency(self.adjacency),
            size=size,
            width=width,
            loss=loss,
            classes=is_classifier(self),
            steepest=steepest,
        )
        clip = given.clip() if self.clip is None else self.clip
        steps = self._steps(given, clip) if self.max_iter is None else int(self.max_iter)
        batch = self._batch(given, steps) if self.batch_size is None else self.batch_size
        everyone = self.batch_size is None and batch == size
        return Recipe(
            steps=steps,
            sampler=FullBatch(size=size) if everyone else self._batches(size, batch),
            clip=clip,
            reach=given.reach,
            longest=given.longest,
            most=given.most,
            learning_rate=self.learning_rate,
        )

    def _steps(self, given: Circumstances, clip: float) -> int:
        return given.steps(clip, self.learning_rate)

    def _batch(self, given: Circumstances, steps: int) -> int:
        return given.batch(steps)


@dataclass(kw_only=True, eq=False, repr=False)
class _DPSGD(TunedDescent):
    _merges_public = True

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        w, iterates = torch.zeros(width, dtype=torch.float64), Average(self.average)
        budget, recipe = Budget(self.epsilon, self.delta), self._recipe(private.size, width, loss)
        with PlannedAllowance(
            private, LinearGradientMean, recipe.sampler, budget=budget, steps=recipe.steps
        ) as allowance:
            rate = recipe.rate(allowance.noise)
            for _ in range(recipe.steps):
                g = allowance.ask(LinearGradientMean(loss, w, recipe.clip), allowance.noise)
                w = self._stepped(w, g, rate)
                iterates.add(w)
        return Learned(iterates.result(), recipe.steps, allowance.epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDClassifier(Classifier, _DPSGD):
    """Plain DP-SGD (Abadi et al. 2016) for two classes, planned and composed by PLD. Public rows join the private ones.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
    >>> model = DPSGDClassifier(epsilon=2.0).fit(X, X[:, 0] > 0)
    >>> bool(1.9 < model.epsilon_ <= 2.0), bool(model.score(X, X[:, 0] > 0) > 0.9)
    (True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDRegressor(Regressor, _DPSGD):
    """Plain DP-SGD for linear regression, planned and composed by PLD. Public rows join the private ones."""
