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
        """Of the truncated negative binomial, found by bisection: its mean falls from infinity to 1."""
        if self.mean == 1:
            return 1.0
        low, high = -math.log(self.mean) - 60.0, 0.0  # of log gamma
        while high - low > 1e-14 * max(1.0, -low):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if self._mean_at(middle) > self.mean else (low, middle)
        return math.exp(low)  # the smaller one: no cheaper than the law that is drawn from

    def _mean_at(self, log_gamma: float) -> float:
        odds = math.expm1(-log_gamma)  # 1 / gamma - 1
        if self.shape == 0:
            return odds / -log_gamma if log_gamma else 1.0
        share = -math.expm1(self.shape * log_gamma)  # 1 - gamma^eta
        return self.shape * odds / share if share else 1.0

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """(k, P(K = k)) from the smallest k on, without end."""
        if self.shape == math.inf:
            k, p = 0, math.exp(-self.mean)
            while True:
                yield k, p
                k, p = k + 1, p * self.mean / (k + 1)
        if self.gamma == 1:
            k, p = 1, 1.0
        elif self.shape == 0:
            k, p = 1, (1 - self.gamma) / -math.log(self.gamma)
        else:
            k, p = 1, (1 - self.gamma) * self.shape / math.expm1(-self.shape * math.log(self.gamma))
        while True:
            yield k, p
            k, p = k + 1, p * (1 - self.gamma) * (k + self.shape) / (k + 1)

    def at_most(self, probability: float) -> int:
        """The least k with P(K <= k) >= probability: public, since only the law is."""
        if not 0 <= probability < 1:
            raise InvalidArgument(f"probability={probability} must be at least 0 and below 1.")
        total = 0.0
        for k, p in self.probabilities():
            total += p
            # Rounding may keep the sum below a probability next to 1; what is left then is less than the rounding.
            if total >= probability or (k > self.mean and p < 1e-18):
                return k
        raise AssertionError

    def draw(self, rng: np.random.Generator) -> int:
        """K, by inversion, to within 2^-53 of its law; `rng` is the door's secret generator, and K must not leave."""
        return self.at_most(float(rng.random()))

    # ------------------------------------------------------------------------------------------ what it costs

    def choosing(self, order: float, divergence: float) -> float:
        """(1 + eta) ((1 - 1/lambda^) epsilon^ + log(1/gamma)/lambda^) of Theorem 2; any one order lambda^ >= 1 will do.

        For Poisson that term is E[K] delta^ of Theorem 6, which depends on the order of the bound: see `poisson`.
        """
        return (1 + self.shape) * ((1 - 1 / order) * divergence - math.log(self.gamma) / order)

    def divergence(self, order: float, trial: float, choosing: float) -> float:
        """The bound of Theorems 2 and 6: at `order`, of a trial with divergence `trial` there."""
        return trial + choosing + math.log(self.mean) / (order - 1)
