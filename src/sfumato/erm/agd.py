"""DP-AGD, gradient descent with an adaptive privacy budget per step (Lee and Kifer 2018, Algorithm 2).

Every iteration measures the gradient on all rows and then, by a noisy minimum over step sizes 0, ..., alpha_max along
it, whether it leads down. If step 0 wins, the gradient was too noisy: its budget grows by gamma, it is measured once
more with the difference, and the two measurements are averaged. Both kinds of question are charged, and what is left is
checked before each of them. Adjacency: either; replace-one moves a sum of clipped gradients by twice the clip norm, and
a loss in [0, B] by B. Deviations:

1. The noisy minimum is over Gaussian sums of clipped losses (the door has no Laplace noise for real numbers).
2. A filter at one Rényi order stands in for zCDP: for Gaussian noise the same argument, and a sharper conversion.
3. l2 w belongs to the gradient that is normalised, and l2 |w|^2 / 2 to the objective; both are public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sfumato.data.samplers import FullBatch
from sfumato.erm.base import Classifier, Learned, PrivateLinear, Regressor
from sfumato.erm.budgets import filtered_noise
from sfumato.erm.losses import Loss
from sfumato.erm.minimise import minimise
from sfumato.erm.questions import LinearGradientMean, is_ours
from sfumato.erm.rows import Rows
from sfumato.erm.sealed import ROUNDING
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.gradients.rowwise import check_row_map
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, RenyiFilter
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Planned, Private
from sfumato.questions import Exact, Question, Sample

_WIDEN, _EVERY, _FIRST_STEP = 1.1, 10, 2.0  # eta, tau and the first alpha_max of the authors' experiments
_SLAB = 16  # answers of one kind that are reserved at a time, at most
_ROWS = 2**13  # whose losses of all candidates are computed at a time
_PUBLIC_L2 = 1e-6  # where none is asked for, so that the public rows have a minimiser


@dataclass(frozen=True, kw_only=True, eq=False)
class BestStep(Question):
    """Which of `start - lengths * direction` has the least mean loss, cut to [0, bound], plus its public `penalty`.

    *Formal guarantee.* The sums of all candidates are made noisy, and only the index of the least leaves. A row's K
    losses lie in a box of side `bound`, whose diagonal is the unit: adding a row, and exchanging it, moves by no more.
    """

    loss: Loss
    start: Tensor
    direction: Tensor
    lengths: Tensor
    penalty: Tensor
    bound: float

    replace_factor: ClassVar[float] = 1.0
    draws: ClassVar[bool] = False

    @property
    def unit(self) -> float:
        return self.bound * math.sqrt(len(self.lengths)) * ROUNDING

    def check(self, sample: Sample) -> None:
        rows = sample.first_rows()
        if rows is not None and not is_ours(self.loss):
            check_row_map(lambda batch: self._losses(*batch), rows)

    def _losses(self, X: Tensor, y: Tensor) -> Tensor:
        """(rows, K). Along a line two products with X serve all candidates."""
        z, slope = torch.stack([self.start, self.direction]) @ X.T
        # A row with an entry that is not finite has no finite score: zero times infinity is NaN.
        usable = torch.isfinite(z + slope + y)
        losses = self.loss.value(z - self.lengths[:, None] * slope, y)
        losses = losses.nan_to_num(nan=self.bound).clamp_(0.0, self.bound)
        return (losses if usable.all() else torch.where(usable, losses, 0.0)).T

    def exact(self, sample: Sample) -> Exact:
        total = torch.zeros(len(self.lengths), dtype=torch.float64)
        for (X, y), units in sample.parts(lend=is_ours(self.loss)):
            if units.weights is None:  # few rows at a time, so that what is computed of them stays in the cache
                for few in zip(X.split(_ROWS), y.split(_ROWS), strict=True):
                    total = total + self._losses(*few).sum(0)
                continue
            losses = self._losses(X, y) * units.weights.to(X)[:, None]
            losses = losses.reshape(-1, units.records, losses.shape[1]).sum(1)  # of a user: cut once more
            total = total + losses.clamp_(0.0, self.bound).sum(0)
        return total

    def release(self, noisy: Any, expected: float) -> int:
        return int((noisy / expected + self.penalty).argmin())


def _whole(budget: Budget, adjacency: Adjacency) -> tuple[float, RenyiFilter]:
    """The noise of one answer that takes all of the budget, and its filter; how many rows there are plays no part."""
    return filtered_noise(budget, FullBatch(size=1), 1, adjacency)


class _Held(NamedTuple):
    """Answers of one kind that are reserved, and what share of the budget each of them takes."""

    plan: Plan
    share: float
    times: int


class _Purse:
    """The budget of a fit: one Gaussian answer of multiplier `whole` would take all of it, one of z takes (whole/z)^2.

    That is so for every Rényi order, since the divergence of a Gaussian on all rows is order / 2 (moved / z)^2. Answers
    are reserved a few at a time, since a reservation takes longer than many an answer; `close` gives back the rest.
    """

    def __init__(self, private: Private, budget: Budget) -> None:
        self._private, self._everyone = private, private.everyone()
        self._whole, _ = _whole(budget, private.adjacency)
        self._spent: list[float] = []
        self._held: dict[str, _Held] = {}

    def ask(self, question: Question, share: float) -> Any:
        """One answer for that share; BudgetExceeded, with nothing drawn, if it is not covered."""
        if math.fsum([*self._spent, share]) > 1 + 1e-12:
            raise BudgetExceeded(f"share={share:.3g} of the budget is more than is left of this fit: it ends here.")
        held = self._held.get(question.kind())
        if held is None or held.share != share or not held.plan.remaining():
            self._reserve(question, share)
        answer = self._private.ask(question)
        self._spent.append(share)
        return answer

    def _reserve(self, question: Question, share: float) -> None:
        """Twice as many as the last time, and no more than half of what is left."""
        kind = question.kind()
        before, left = self._held.get(kind), 1 + 1e-12 - math.fsum(self._spent)
        others = math.fsum(held.share * held.plan.remaining() for name, held in self._held.items() if name != kind)
        if share + others > left:
            self.close()
            others = 0.0
        times = 1
        if before is not None and before.share == share:
            times = max(1, min(2 * before.times, _SLAB, math.floor((left - others) / share / 2)))
        # `whole` was found for questions that a replaced row moves by two units.
        moved = question.replace_factor / 2 if self._private.adjacency is Adjacency.REPLACE_ONE else 1.0
        noise = self._whole * moved / math.sqrt(share)
        try:
            plan = self._private.reserve(Planned(question, noise, self._everyone, times))
        except BudgetExceeded:  # of an account that other fits share: it may still cover one
            times = 1
            plan = self._private.reserve(Planned(question, noise, self._everyone, times))
        self._held[kind] = _Held(plan, share, times)

    def close(self) -> None:
        for held in self._held.values():
            held.plan.close()
        self._held = {}


@dataclass(kw_only=True, eq=False, repr=False)
class _AGD(PrivateLinear):
    max_iter: int = 60
    growth: float = 0.1
    candidates: int = 20
    clip: float = 1.0
    loss_bound: float = 2.0

    _merges_public = True

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name in ("max_iter", "candidates"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be a whole number of at least 1.")
        for name in ("growth", "clip", "loss_bound"):
            if not 0 < getattr(self, name) < 1e100:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be positive and finite.")

    def _filter(self, size: int, public: Rows | None) -> Filter | None:
        return _whole(Budget(self.epsilon, self.delta), Adjacency(self.adjacency))[1]

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        purse = _Purse(private, Budget(self.epsilon, self.delta))
        rho_nmax = rho_ng = 0.5 / self.max_iter  # as shares of rho
        w, t, chosen, alpha_max = torch.zeros(width, dtype=torch.float64), 0, [], _FIRST_STEP
        try:
            while True:
                g = purse.ask(LinearGradientMean(loss, w, self.clip), rho_ng)
                t += 1
                while True:
                    u, alphas = _unit(g + self.l2 * w), _steps(alpha_max, self.candidates)
                    points = w - alphas[:, None] * u
                    penalty, B = self.l2 / 2 * points.square().sum(1), self.loss_bound
                    search = BestStep(loss=loss, start=w, direction=u, lengths=alphas, penalty=penalty, bound=B)
                    best = purse.ask(search, rho_nmax)
                    if best > 0:
                        break
                    rho_old, rho_ng = rho_ng, (1 + self.growth) * rho_ng
                    g_2 = purse.ask(LinearGradientMean(loss, w, self.clip), rho_ng - rho_old)
                    g = (rho_old * g + (rho_ng - rho_old) * g_2) / rho_ng  # GradAvg
                w = points[best]
                chosen.append(float(alphas[best]))
                if t % _EVERY == 0:
                    alpha_max, chosen = min(_FIRST_STEP, _WIDEN * max(chosen)), []
        except BudgetExceeded:
            if t == 0:
                raise
        finally:
            purse.close()
        return Learned(w, t, self.epsilon)


def _steps(longest: float, candidates: int) -> Tensor:
    return torch.linspace(0, longest, candidates + 1, dtype=torch.float64)


def _unit(direction: Tensor) -> Tensor:
    return direction / (float(direction.norm()) + 1e-300)


@dataclass(kw_only=True, eq=False, repr=False)
class _AGDAverage(_AGD):
    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        learned = super()._learn(private, public, loss, width)
        if public is None:
            return learned
        zero = torch.zeros(width, dtype=torch.float64)
        alone = minimise(loss, public, strength=max(self.l2, _PUBLIC_L2), centre=zero, tolerance=1e-8)
        return learned._replace(w=(learned.w + alone.w) / 2)


@dataclass(kw_only=True, eq=False, repr=False)
class AGDClassifier(Classifier, _AGD):
    """DP-AGD for two classes. Public rows join the private ones.

    Beside the arguments of `PrivateLinear`:

    Args:
        max_iter: how many iterations the budget would last if no gradient had to be measured again.
        growth: gamma, by which the budget of gradients grows where no step along one leads down.
        candidates: how many step sizes are compared with staying.
        clip, loss_bound: the most that one row contributes to a gradient sum, and to a sum of losses.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (5000, 3))
    >>> model = AGDClassifier(epsilon=2.0, max_iter=10).fit(X, X[:, 0] > 0)
    >>> bool(model.n_iter_ <= 10), model.epsilon_, bool(model.score(X, X[:, 0] > 0) > 0.8)
    (True, 2.0, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class AGDRegressor(Regressor, _AGD):
    """DP-AGD for linear regression; see `AGDClassifier`. Scale targets to about [-1, 1] by a declared range."""


@dataclass(kw_only=True, eq=False, repr=False)
class AGDAverageClassifier(Classifier, _AGDAverage):
    """The mean of the weights of `AGDClassifier` and of `PublicOnlyClassifier`, at the cost of the first.

    Without public rows it is the first alone.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class AGDAverageRegressor(Regressor, _AGDAverage):
    """The mean of the weights of `AGDRegressor` and of `PublicOnlyRegressor`, at the cost of the first."""
