"""Samplers: which privacy units (rows or users) take part in one answer.

A sampler is frozen public knowledge. It draws the indices *and* states its own accounting event, so that what is
drawn and what is charged cannot disagree. Its denominators are declared constants: `size` is the declared number of
units, `expected` the declared batch; neither is ever read off the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

Indices = npt.NDArray[np.int64]

_SPARSE = 1 / 64  # below this rate, skipping units is faster than deciding about each
_ENDS = 256
_DEVIATIONS = 3  # by which a batch rarely exceeds its mean: once in 700


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Draws the units of one answer out of `size` declared units."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidArgument(f"size={self.size} must be at least 1: declare how many privacy units the data has.")

    @property
    @abstractmethod
    def expected(self) -> float:
        """The declared, public denominator of a mean over one batch."""

    def largest(self, processes: int = 1) -> int:
        """Units that one of so many processes rarely draws more than; public, as all that is declared."""
        return math.ceil(self.expected / processes)

    @abstractmethod
    def draw(self, present: int, rng: np.random.Generator) -> Indices:
        """Indices of the sampled units, out of `present` (private!) units; `rng` is the door's secret generator."""


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampler):
    """Each unit joins independently with probability `batch_size / size`."""

    batch_size: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batch(self.batch_size, self.size, Real)

    @property
    def rate(self) -> float:
        """The inclusion probability q of every unit."""
        return self.batch_size / self.size

    @property
    def expected(self) -> float:
        return self.batch_size

    def largest(self, processes: int = 1) -> int:
        mean = self.batch_size / processes
        return math.ceil(mean + _DEVIATIONS * math.sqrt(mean * (1 - self.rate)))

    def draw(self, present: int, rng: np.random.Generator) -> Indices:
        if self.rate < _SPARSE:
            return self._skipping(present, rng)
        # 16 random bits decide for almost every unit, four units to a 64-bit word; in a tie 53 more do, so that the
        # probability is the rate to within 2^-69, at a quarter of the cost of one uniform float per unit.
        words = rng.integers(0, 2**64, size=-(-present // 4), dtype=np.uint64)
        bits = words.view(np.uint16)[:present]
        fraction, whole = math.modf(self.rate * 2**16)
        joins = bits < int(whole)
        tie = np.flatnonzero(bits == int(whole))
        joins[tie] = rng.random(len(tie)) < fraction
        return np.flatnonzero(joins)

    def _skipping(self, present: int, rng: np.random.Generator) -> Indices:
        """The same law from one 64-bit number per unit that joins: how many before it do not.

        The numbers are compared with whole numbers, no logarithm is rounded: given all before it, a unit joins with
        probability `rate` to within 2^-60.
        """
        ends = _skip_ends(self.rate)
        found, at = [np.empty(0, np.int64)], 0
        while at < present:
            needed = (present - at) * self.rate / -math.expm1(len(ends) * math.log1p(-self.rate))  # in the mean
            numbers = rng.integers(0, 2**64, size=int(needed + 4 * math.sqrt(needed)) + 16, dtype=np.uint64)
            skipped = ends.searchsorted(numbers, side="right")
            joins = skipped < len(ends)  # else nobody joins for so many units, and the next number goes on from there
            after = at + np.cumsum(skipped + joins)
            found.append(after[joins] - 1)
            at = int(after[-1])
        units = np.concatenate(found)
        return units[: units.searchsorted(present)]


@lru_cache(maxsize=64)
def _skip_ends(rate: float) -> npt.NDArray[np.uint64]:
    """More than k units are skipped or met (k = 1, 2, ...) if a random 64-bit number is at least entry k - 1.

    That has probability (1 - rate)^k, computed exactly and cut to 64 bits. The last k is about 2 / rate, where a tenth
    of all numbers is left, so that the cut stays small beside them.
    """
    p, q = (1 - Fraction(rate)).as_integer_ratio()
    return np.array([2**64 - (2**64 * p**k) // q**k for k in range(1, min(_ENDS, round(2 / rate)) + 1)], np.uint64)


@dataclass(frozen=True, kw_only=True)
class FixedSize(Sampler):
    """Exactly `batch_size` distinct units, uniformly; sound only under replace-one, where `size` is exact."""

    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batch(self.batch_size, self.size, Integral)

    @property
    def expected(self) -> float:
        return float(self.batch_size)

    def draw(self, present: int, rng: np.random.Generator) -> Indices:
        if present != self.size:
            raise InvalidArgument(
                f"size={self.size} is not the number of units in the data, which FixedSize needs exactly: "
                "declare the exact size, or use Poisson."
            )
        return np.sort(rng.choice(present, size=self.batch_size, replace=False, shuffle=False)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampler):
    """All units, every time."""

    @property
    def expected(self) -> float:
        return float(self.size)

    def draw(self, present: int, rng: np.random.Generator) -> Indices:
        return np.arange(present, dtype=np.int64)


def _check_batch(batch_size: float, size: int, kind: type) -> None:
    if not isinstance(batch_size, kind):
        remedy = f"give a {'whole number' if kind is Integral else 'number'}"
    elif batch_size > size:
        remedy = "lower batch_size"
    elif not batch_size > 0:  # also catches NaN
        remedy = "raise batch_size"
    else:
        return
    raise InvalidArgument(f"batch_size={batch_size!r} must lie between 1 and size={size}: {remedy}.")
