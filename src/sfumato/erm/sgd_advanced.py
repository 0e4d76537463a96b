"""SgdAdv, SGD with strong composition (Bassily, Smith and Thakurta 2014; as in Lee and Kifer 2018), for linear models.

The noise of the historical formula: a step on a batch of rate q with sensitivity 2 C is (eps0, delta0)-DP by the
classical Gaussian mechanism, sigma = 2 C sqrt(2 ln(1.25 / delta0)) / eps0, which needs eps0 <= 1; sampling makes it
(2 q eps0, q delta0), which needs eps0 <= 1, too; and T steps by strong composition (Dwork, Rothblum and Vadhan 2010)

    eps = e sqrt(2 T ln(1 / delta')) + T e (exp(e) - 1), e = 2 q eps0,   delta = T q delta0 + delta'.

delta is halved between delta' and T q delta0. What the ledger is charged is not that formula but what the noise costs
in truth (PLD, or Rényi divergences where there is none), which is far less than epsilon. Adjacency of the formula:
replace-one. `accounting="modern"` takes the least noise that fits the budget: plain DP-SGD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.budgets import planned_noise
from sfumato.erm.descent import Average, TunedDescent, hundredth
from sfumato.erm.losses import Loss
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.recipe import Circumstances, Recipe
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private

_HISTORICAL_STEPS = 1000  # the formula holds for many steps only


def historical_noise(budget: Budget, q: float, T: int) -> float:
    """The formula's noise multiplier sigma / C; refused where the formula does not hold.

    >>> round(historical_noise(Budget(0.5, 1e-6), 0.01, 500), 1)
    56.0
    """

    def composed(eps0: float) -> float:
        e = 2 * q * eps0
        return e * math.sqrt(2 * T * math.log(2 / budget.delta)) + T * e * math.expm1(e)

    if composed(1.0) < budget.epsilon:
        raise UnsupportedAccounting(
            f"max_iter={T} at rate {q:.4g} would need eps0 > 1 for epsilon={budget.epsilon}, where the formula does "
            "not hold: use more steps, larger batches, or accounting='modern'."
        )
    low, high = 0.0, 1.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if composed(middle) <= budget.epsilon else (low, middle)
    delta0 = min(1.0, budget.delta / (2 * T * q))
    return 2 * math.sqrt(2 * math.log(1.25 / delta0)) / low


@dataclass(kw_only=True, eq=False, repr=False)
class _SgdAdvanced(TunedDescent):
    accounting: str = "historical"

    _merges_public = True

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.accounting not in ("historical", "modern"):
            raise InvalidArgument(f"accounting={self.accounting!r} must be 'historical' or 'modern'.")
        if self.accounting == "historical" and self.adjacency != Adjacency.REPLACE_ONE:
            raise InvalidArgument(
                f"adjacency={self.adjacency!r} is not that of the historical formula: use 'replace-one', or "
                "accounting='modern'."
            )

    def _steps(self, given: Circumstances, clip: float) -> int:
        return super()._steps(given, clip) if self.accounting == "modern" else _HISTORICAL_STEPS

    def _batch(self, given: Circumstances, steps: int) -> int:
        return super()._batch(given, steps) if self.accounting == "modern" else hundredth(given.size)

    def _noise(self, recipe: Recipe) -> float:
        budget, sampler = Budget(self.epsilon, self.delta), recipe.sampler
        if self.accounting == "modern":
            return planned_noise(budget, sampler, recipe.steps, Adjacency(self.adjacency))
        return historical_noise(budget, sampler.expected / sampler.size, recipe.steps)

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        recipe, kind = self._recipe(private.size, width, loss), LinearGradientMean
        noise = self._noise(recipe)
        steps = Mechanism(question=kind.kind(), noise=Gaussian(noise), sampler=recipe.sampler, times=recipe.steps)
        cost = accounting.epsilon([steps], delta=self.delta, adjacency=private.adjacency).epsilon
        if cost > self.epsilon:
            raise UnsupportedAccounting(
                f"accounting={self.accounting!r} would cost {cost:.4g} and not epsilon={self.epsilon}: use 'modern'."
            )
        plan = private.plan(Planned(kind, noise, recipe.sampler, recipe.steps))
        try:
            w, iterates, rate = torch.zeros(width, dtype=torch.float64), Average(self.average), recipe.rate(noise)
            for _ in range(recipe.steps):
                w = self._stepped(w, private.ask(kind(loss, w, recipe.clip)), rate)
                iterates.add(w)
        finally:
            plan.close()
        return Learned(iterates.result(), recipe.steps, cost)


@dataclass(kw_only=True, eq=False, repr=False)
class SgdAdvancedClassifier(Classifier, _SgdAdvanced):
    """SGD for two classes with the noise of 2014, or with today's. Public rows join the private ones.

    Beside the arguments of `PrivateLinear` and `TunedDescent`; the formula needs many steps, so it has 1000 by default:

    Args:
        accounting: "historical", noise by the formula of strong composition, or "modern", the least that PLD allows.

    `epsilon_` and the ledger say what the noise costs in truth.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (3000, 3))
    >>> model = SgdAdvancedClassifier(epsilon=1.0, max_iter=200, batch_size=60).fit(X, X[:, 0] > 0)
    >>> bool(0 < model.epsilon_ < 0.3)
    True
    """


@dataclass(kw_only=True, eq=False, repr=False)
class SgdAdvancedRegressor(Regressor, _SgdAdvanced):
    """SGD for linear regression with the noise of 2014, or with today's; see `SgdAdvancedClassifier`."""
