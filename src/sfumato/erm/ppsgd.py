"""PPSGD, Private-Public Stochastic Gradient Descent (paper 001, Algorithm 1), for linear models.

Stage 1 is noisy SGD on the private rows whose noise and clip norm follow the gradient of the few public rows; stage 2
fits the public rows near its result ("model reuse"). Line numbers are the paper's. Deviations:

1. `accounting="modern"` (the default) does without truncated concentrated DP: about a quarter of the noise, or less.
   `accounting="tcdp"` is the paper's, with Theorem 4's conditions enforced.
2. A grown step takes at most 1/50 of the budget, and the clip norm stays above 1/20 of its first value: as printed, one
   step may take a quarter of everything, and the clip norm collapses.
3. rho_0 is not a parameter: without growth the budget lasts `max_iter` steps. Where nothing can grow the noise is not
   adaptive, and all steps are planned and composed by PLD; else a Rényi filter composes the true mechanism. With modern
   accounting nothing grows or shrinks unless asked for: with the noise it leaves, equal steps were at least as good,
   and a plan needs less noise than a filter.
4. Line 11 takes the gradient of the loss alone; l2 |w|^2 / 2, if wanted, enters lines 9 and 25.
5. Before anything else the public rows choose the coordinates (`coordinates`), and the first weights: a third use of
   them, and the best. `head_start=False` leaves it out.
6. The result of stage 1 is the mean of its last iterates, and settings that are not given follow from public quantities
   (`recipe`), lambda too: stage 2 holds on to a result the more firmly, the less noise is in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.budgets import (
    Allowance,
    FilteredAllowance,
    PlannedAllowance,
    TruncatedAllowance,
    filtered_noise,
    truncated_filter,
)
from sfumato.erm.coordinates import public_coordinates, steepest
from sfumato.erm.descent import Average, TunedDescent, hundredth
from sfumato.erm.losses import Loss, Square
from sfumato.erm.minimise import mean_gradient, minimise
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.recipe import Circumstances, Recipe
from sfumato.erm.rows import Rows
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy import tcdp
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Private

_LARGEST_SHARE = 1 / 50  # of the budget, for a step that grew
_CLIP_FLOOR = 0.05  # of the first clip norm
_TRUNCATED_STEPS = 500  # by default, and more where Theorem 4 needs them
_START = 0.1  # of |w|^2 / 2, times the smoothness, to hold on to 0 where public rows are few
_FIRMNESS = 10.0  # lambda, times the public rows and the variance of a weight's noise; 1 would be a Bayesian's, who
# takes the model for true and the noise for spread over all directions alike


@dataclass(kw_only=True, eq=False, repr=False)
class _PPSGD(TunedDescent):
    growth: float | None = None
    growth_ratio: float = 10.0
    shrink: float | None = None
    shrink_ratio: float | None = None
    reuse: float | None = None
    head_start: bool = True
    accounting: str = "modern"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.accounting not in ("modern", "tcdp"):
            raise InvalidArgument(f"accounting={self.accounting!r} must be 'modern' or 'tcdp'.")
        if self.growth is not None and not (math.isfinite(self.growth) and self.growth >= 0):
            raise InvalidArgument(f"growth={self.growth} must be at least 0: the budget of a step grows by that share.")
        if self.shrink is not None and not 0 <= self.shrink < 1:
            raise InvalidArgument(f"shrink={self.shrink} must lie in [0, 1): the clip norm shrinks by that share.")
        for name in ("growth_ratio", "shrink_ratio", "reuse"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(f"{name}={value} must be a finite number of at least 0.")

    def _coordinates(self, public: Rows) -> Tensor | None:
        return public_coordinates(public.X, constant=self.fit_intercept) if self.head_start else None

    @property
    def _alpha(self) -> float:
        return self._usual if self.growth is None else self.growth

    @property
    def _beta(self) -> float:
        return self._usual if self.shrink is None else self.shrink

    @property
    def _usual(self) -> float:
        return 0.0 if self.accounting == "modern" else 0.3

    def _varphi(self, loss: Loss) -> float:
        if self.shrink_ratio is not None:
            return self.shrink_ratio
        if not isinstance(loss, Square):
            return 100.0
        return 10.0 if self.epsilon >= 0.3 else 5.0

    def _kind_of_allowance(
        self, public: Rows | None
    ) -> type[PlannedAllowance | FilteredAllowance | TruncatedAllowance]:
        if self.accounting == "tcdp":
            return TruncatedAllowance
        return PlannedAllowance if public is None or self._alpha == 0 else FilteredAllowance

    def _filter(self, size: int, public: Rows | None) -> Filter | None:
        budget, kind = Budget(self.epsilon, self.delta), self._kind_of_allowance(public)
        if kind is FilteredAllowance:
            assert public is not None
            recipe = self._with_public(size, public.X.shape[1], self._loss(), public)
            return filtered_noise(budget, recipe.sampler, recipe.steps, Adjacency(self.adjacency))[1]
        return truncated_filter(budget) if kind is TruncatedAllowance else None

    def _with_public(self, size: int, width: int, loss: Loss, public: Rows | None) -> Recipe:
        return self._recipe(size, width, loss, steepest(public.X) if public is not None and self.head_start else 1.0)

    def _steps(self, given: Circumstances, clip: float) -> int:
        if self.accounting == "modern":
            return super()._steps(given, clip)
        total, q = tcdp.budget(self.epsilon, self.delta), self._batch(given, 0) / given.size
        return max(_TRUNCATED_STEPS, tcdp.minimum_steps(total, q) if q <= 0.1 else 0)

    def _batch(self, given: Circumstances, steps: int) -> int:
        if self.accounting == "modern":
            return super()._batch(given, steps)
        return hundredth(given.size) if self.batch_size is None else self.batch_size

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        kind, budget = self._kind_of_allowance(public), Budget(self.epsilon, self.delta)
        recipe = self._with_public(private.size, width, loss, public)
        with kind(
            private, LinearGradientMean, recipe.sampler, budget=budget, steps=recipe.steps
        ) as allowance:  # line 1
            w_T, T = self._stage_1(allowance, recipe, public, loss, self._first(public, loss, width))
        if public is None or self.reuse == 0:
            return Learned(w_T, T, allowance.epsilon)
        # Line 25: (1/n) sum l + lambda |w - w_T|^2, and l2 |w|^2 / 2, as one square around a point between w_T and 0.
        moved = recipe.rate(allowance.noise) * recipe.moved(allowance.noise)
        reuse = _FIRMNESS / (len(public.y) * moved**2) if self.reuse is None else self.reuse
        strength = 2 * reuse + self.l2
        near = minimise(loss, public, strength=strength, centre=2 * reuse / strength * w_T, tolerance=1e-8)
        return Learned(near.w, T, allowance.epsilon)

    def _first(self, public: Rows | None, loss: Loss, width: int) -> Tensor:
        zero = torch.zeros(width, dtype=torch.float64)
        if public is None or not self.head_start or self._alpha > 0 or self._beta > 0:
            return zero  # a public gradient that begins at its least would steer nothing
        strength = _START * (loss.smoothness or 1.0)
        return minimise(loss, public, strength=strength, centre=zero, tolerance=1e-3).w

    def _stage_1(
        self, allowance: Allowance, recipe: Recipe, public: Rows | None, loss: Loss, w: Tensor
    ) -> tuple[Tensor, int]:
        """Lines 2 to 24 from w, with the noise multiplier z ~ 1 / sqrt(rho) in the place of rho."""
        alpha, phi, beta, varphi = self._alpha, self.growth_ratio, self._beta, self._varphi(loss)
        z, C, t = allowance.noise, recipe.clip, 0  # lines 2, 3
        eta, iterates = recipe.rate(z), Average(self.average)
        while t < recipe.steps:
            try:
                g = allowance.ask(LinearGradientMean(loss, w, C), z)  # lines 5 to 8
            except BudgetExceeded:  # line 4
                if t == 0:
                    raise
                break
            w = self._stepped(w, g, eta)  # line 9
            t += 1
            iterates.add(w)
            if public is not None and (alpha > 0 or beta > 0):
                length = float(mean_gradient(loss, w, public).norm())  # line 11
                root_mse = math.sqrt(len(w)) * z * C / recipe.sampler.expected  # line 12
                less = z / math.sqrt(1 + alpha)
                if phi * length < root_mse and less < z and allowance.share(less) <= _LARGEST_SHARE:  # line 13
                    z = less  # line 14: rho_{t+1} = (1 + alpha) rho_t
                if varphi * length < C:  # line 18
                    C = max((1 - beta) * C, _CLIP_FLOOR * recipe.clip)  # line 19
        return iterates.result(), t


@dataclass(kw_only=True, eq=False, repr=False)
class PPSGDClassifier(Classifier, _PPSGD):
    """PPSGD for two classes: differentially private SGD steered, and finished, by a few public rows.

    Beside the arguments of `PrivateLinear` and `TunedDescent`:

    Args:
        growth, growth_ratio: alpha and phi. Where phi |public gradient| is below the noise, the budget of a step grows
            by alpha; the run then ends earlier.
        shrink, shrink_ratio: beta and varphi. Where varphi |public gradient| is below the clip norm, that shrinks by
            beta. varphi=None is the paper's: 10 for the square loss (5 for epsilon below 0.3) and 100 for others.
            growth and shrink None are 0 with modern accounting, and else the paper's 0.3.
        reuse: lambda, how strongly the last stage holds on to the private result; 0 leaves it out. None follows from
            the noise and the number of public rows.
        head_start: whether public rows also centre and scale all rows, and (unless something grows or shrinks) choose
            the first weights; l2, radius and clip are then about rows and weights in those coordinates.
        accounting: "modern", or "tcdp" as in the paper (needs sampling="fixed" and replace-one).

    Without public rows it is plain DP-SGD.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (3000, 4))
    >>> y = X[:, 0] + X[:, 1] > 0
    >>> model = PPSGDClassifier(epsilon=1.0)
    >>> model = model.fit(X[50:], y[50:], X_public=X[:50], y_public=y[:50])
    >>> bool(model.score(X, y) > 0.9), bool(0.99 < model.epsilon_ <= 1.0)
    (True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class PPSGDRegressor(Regressor, _PPSGD):
    """PPSGD for linear regression; see `PPSGDClassifier`. Scale targets to about [-1, 1] by a declared range."""
