"""How often a search runs its trials: a secret random number, whose law decides what the choice of the best one costs.

Nicolas Papernot and Thomas Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022. A mechanism is
run K times, independently, and only the best of its outcomes leaves. Whoever saw K, or any other outcome, would know
more than is charged. The paper's symbols: eta is the shape, gamma the parameter of the truncated negative binomial,
lambda a Renyi order, epsilon the trial's divergence at that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sfumato.errors import InvalidArgument

LOGARITHMIC, GEOMETRIC, POISSON = 0.0, 1.0, math.inf
"""Shapes. The logarithmic law is the cheapest; Poisson is dear unless the mean is small, and may give no trial."""
_LIFT = 1e100


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """The law of the number of trials: truncated negative binomial (Definition 1), or Poisson for shape=inf.

    >>> law = Repetitions(mean=10.0)
    >>> law.at_most(0.5), law.at_most(0.99)
    (4, 81)
    """

    mean: float
    shape: float = LOGARITHMIC

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise InvalidArgument(f"mean={self.mean} must be a finite number of at least 1: it is of trials.")
        if not self.shape >= 0:
            raise InvalidArgument(
                f"shape={self.shape} must not be negative: 0 is logarithmic, 1 geometric, inf Poisson."
            )

    @cached_property
    def gamma(self) -> float:
        """Of the truncated negative binomial."""
        return math.exp(self._log_gamma)

    @cached_property
    def _log_gamma(self) -> float:
        """By bisection, as far as numbers go: with large shapes gamma is near 1. The mean falls from infinity to 1."""
        if self.mean == 1:
            return 0.0
        low, high = -math.log(self.mean) - 60.0, 0.0
        while (middle := (low + high) / 2) not in (low, high):
            low, high = (middle, high) if self._mean_at(middle) > self.mean else (low, middle)
        return low  # the smaller one: no cheaper than the law that is drawn from

    def _mean_at(self, log_gamma: float) -> float:
        odds = math.expm1(-log_gamma)  # 1 / gamma - 1
        if self.shape == 0:
            return odds / -log_gamma if log_gamma else 1.0
        share = -math.expm1(self.shape * log_gamma)  # 1 - gamma^eta
        return self.shape * odds / share if share else 1.0

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """(k, P(K = k)) from the smallest k on, without end."""
        poisson, log_gamma = self.shape == math.inf, 0.0 if self.shape == math.inf else self._log_gamma
        others = -math.expm1(log_gamma)  # 1 - gamma
        if poisson:
            k, log_p = 0, -self.mean
        elif log_gamma == 0:
            k, log_p = 1, 0.0
        elif self.shape == 0:
            k, log_p = 1, math.log(others / -log_gamma)
        else:  # (1 - gamma) eta / (gamma^-eta - 1)
            power = -self.shape * log_gamma
            k, log_p = 1, math.log(others) + math.log(self.shape) - power - math.log(-math.expm1(-power))
        # p = lifted * exp(log_p): with a large mean the first ones are no numbers, and all others are made of them.
        lifted = 1.0
        while True:
            yield k, lifted * math.exp(log_p)
            lifted *= self.mean / (k + 1) if poisson else others * (k + self.shape) / (k + 1)
            k += 1
            if lifted > _LIFT:
                lifted, log_p = lifted / _LIFT, log_p + math.log(_LIFT)

    def at_most(self, probability: float) -> int:
        """The least k with P(K <= k) >= probability: public, since only the law is."""
        if not 0 <= probability < 1:
            raise InvalidArgument(f"probability={probability} must be at least 0 and below 1.")
        total = 0.0
        for k, p in self.probabilities():
            total += p
            # Rounding may keep the sum below a probability next to 1. What is left, at most p (k + 1) from
            # shape 1 on and p / gamma below, is less than the rounding.
            if total >= probability or (
                k > self.mean and p * max(k + 1, 1.0 if self.shape >= 1 else 1 / self.gamma) < 1e-18
            ):
                return k
        raise AssertionError

    def draw(self, rng: np.random.Generator) -> int:
        """K, by inversion, but for rounding; `rng` is the door's secret generator, and K must not leave."""
        return self.at_most(float(rng.random()))

    # ------------------------------------------------------------------------------------------ what it costs

    def choosing(self, order: float, divergence: float) -> float:
        """(1 + eta) ((1 - 1/lambda^) epsilon^ + log(1/gamma)/lambda^) of Theorem 2; any one order lambda^ >= 1 will do.

        For Poisson that term is E[K] delta^ of Theorem 6, which depends on the order of the bound: see `poisson`.
        """
        return (1 + self.shape) * ((1 - 1 / order) * divergence - self._log_gamma / order)

    def divergence(self, order: float, trial: float, choosing: float) -> float:
        """The bound of Theorems 2 and 6: at `order`, of a trial with divergence `trial` there."""
        return trial + choosing + math.log(self.mean) / (order - 1)
