"""PPSGD, Private-Public Stochastic Gradient Descent (paper 001, Algorithm 1), for linear models.

Stage 1 is noisy SGD on the private rows whose noise and clip norm follow the gradient of the few public rows; stage 2
fits the public rows near its result ("model reuse"). Line numbers are the paper's. Deviations:

1. `accounting="modern"` (the default) does without truncated concentrated DP: a Rényi filter composes the true
   mechanism, at about a quarter of the noise. `accounting="tcdp"` is the paper's, with Theorem 4's conditions enforced.
2. A grown step takes at most 1/50 of the budget, and the clip norm stays above 1/20 of its first value: as printed, one
   step may take a quarter of everything, and the clip norm collapses.
3. rho_0 is not a parameter: without growth the budget lasts `max_iter` steps. Where nothing can grow (growth=0, or no
   public rows) the noise is not adaptive, and all steps are planned and composed by PLD.
4. Line 11 takes the gradient of the loss alone; l2 |w|^2 / 2, if wanted, enters lines 9 and 25.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.data.samplers import Sampler
from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.budgets import (
    Allowance,
    FilteredAllowance,
    PlannedAllowance,
    TruncatedAllowance,
    filtered_noise,
    truncated_filter,
)
from sfumato.erm.descent import Average, Descent
from sfumato.erm.losses import Loss, Square
from sfumato.erm.minimise import mean_gradient, minimise
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.rows import Rows
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Private

_LARGEST_SHARE = 1 / 50  # of the budget, for a step that grew
_CLIP_FLOOR = 0.05  # of the first clip norm


@dataclass(kw_only=True, eq=False, repr=False)
class _PPSGD(Descent):
    growth: float = 0.3
    growth_ratio: float = 10.0
    shrink: float = 0.3
    shrink_ratio: float | None = None
    reuse: float = 0.1
    accounting: str = "modern"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.accounting not in ("modern", "tcdp"):
            raise InvalidArgument(f"accounting={self.accounting!r} must be 'modern' or 'tcdp'.")
        if not (math.isfinite(self.growth) and self.growth >= 0):
            raise InvalidArgument(f"growth={self.growth} must be at least 0: the budget of a step grows by that share.")
        if not 0 <= self.shrink < 1:
            raise InvalidArgument(f"shrink={self.shrink} must lie in [0, 1): the clip norm shrinks by that share.")
        for name in ("growth_ratio", "shrink_ratio", "reuse"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(f"{name}={value} must be a finite number of at least 0.")

    def _kind_of_allowance(
        self, public: Rows | None
    ) -> type[PlannedAllowance | FilteredAllowance | TruncatedAllowance]:
        if self.accounting == "tcdp":
            return TruncatedAllowance
        return PlannedAllowance if public is None or self.growth == 0 else FilteredAllowance

    def _filter(self, size: int, public: Rows | None) -> Filter | None:
        budget, kind = Budget(self.epsilon, self.delta), self._kind_of_allowance(public)
        if kind is FilteredAllowance:
            return filtered_noise(budget, self._sampler(size), self.max_iter, Adjacency(self.adjacency))[1]
        return truncated_filter(budget) if kind is TruncatedAllowance else None

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        kind, budget, sampler = (
            self._kind_of_allowance(public),
            Budget(self.epsilon, self.delta),
            self._sampler(private.size),
        )
        with kind(private, LinearGradientMean, sampler, budget=budget, steps=self.max_iter) as allowance:  # line 1
            w_T, T = self._stage_1(allowance, sampler, public, loss, width)
        if public is None or self.reuse == 0:
            return Learned(w_T, T, allowance.epsilon)
        # Line 25: (1/n) sum l + lambda |w - w_T|^2, and l2 |w|^2 / 2, as one square around a point between w_T and 0.
        strength = 2 * self.reuse + self.l2
        near = minimise(loss, public, strength=strength, centre=2 * self.reuse / strength * w_T, tolerance=1e-8)
        return Learned(near.w, T, allowance.epsilon)

    def _stage_1(
        self, allowance: Allowance, sampler: Sampler, public: Rows | None, loss: Loss, width: int
    ) -> tuple[Tensor, int]:
        """Lines 2 to 24, with the noise multiplier z ~ 1 / sqrt(rho) in the place of rho."""
        alpha, phi, beta = self.growth, self.growth_ratio, self.shrink
        varphi = (5.0 if isinstance(loss, Square) else 100.0) if self.shrink_ratio is None else self.shrink_ratio
        w, z, C, t = torch.zeros(width, dtype=torch.float64), allowance.noise, self.clip, 0  # lines 2, 3
        iterates = Average(self.average)
        while t < self.max_iter:
            try:
                g = allowance.ask(LinearGradientMean(loss, w, C), z)  # lines 5 to 8
            except BudgetExceeded:  # line 4
                if t == 0:
                    raise
                break
            w = self._moved(w, g)  # line 9
            t += 1
            iterates.add(w)
            if public is not None:
                length = float(mean_gradient(loss, w, public).norm())  # line 11
                root_mse = math.sqrt(width) * z * C / sampler.expected  # line 12
                less = z / math.sqrt(1 + alpha)
                if phi * length < root_mse and less < z and allowance.share(less) <= _LARGEST_SHARE:  # line 13
                    z = less  # line 14: rho_{t+1} = (1 + alpha) rho_t
                if varphi * length < C:  # line 18
                    C = max((1 - beta) * C, _CLIP_FLOOR * self.clip)  # line 19
        return iterates.result(), t


@dataclass(kw_only=True, eq=False, repr=False)
class PPSGDClassifier(Classifier, _PPSGD):
    """PPSGD for two classes: differentially private SGD steered, and finished, by a few public rows.

    Args (beside those of `PrivateLinear` and `Descent`):
        growth, growth_ratio: alpha and phi. Where phi |public gradient| is below the noise, the budget of a step grows
            by alpha; the run then ends earlier.
        shrink, shrink_ratio: beta and varphi. Where varphi |public gradient| is below the clip norm, that shrinks by
            beta. varphi=None is 5 for the square loss and 100 for others.
        reuse: lambda, how strongly the last stage holds on to the private result; 0 leaves it out.
        accounting: "modern", or "tcdp" as in the paper (needs sampling="fixed" and replace-one).

    Without public rows it is plain DP-SGD.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (3000, 4))
    >>> y = X[:, 0] + X[:, 1] > 0
    >>> model = PPSGDClassifier(epsilon=1.0, max_iter=60, learning_rate=4.0)
    >>> model = model.fit(X[50:], y[50:], X_public=X[:50], y_public=y[:50])
    >>> bool(model.score(X, y) > 0.7), model.epsilon_
    (True, 1.0)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class PPSGDRegressor(Regressor, _PPSGD):
    """PPSGD for linear regression; see `PPSGDClassifier`. Scale targets to about [-1, 1] by a declared range."""
