"""Exact samplers of the discrete Laplace and the discrete Gaussian, in integer arithmetic.

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithms 1 to 3, vectorised. Every
decision compares uniform integers with integers, so no rounding can tell neighbouring counts apart, which the textbook
floating-point samplers allow. A float is a dyadic rational, so the law drawn is that of the very scale asked for. How
long a draw takes depends on the noise (never on the data): do not publish timings of single answers.

Only `privacy.noise` calls this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# A scale below 2^-8 is raised to it; even then the noise is zero except with probability exp(-256). Up to 2^40 every
# int64 below holds its number, unless a geometric draw exceeds 2^9, which has probability exp(-512).
_SMALLEST, _LARGEST = 2.0**-8, 2.0**40


def discrete_laplace(scale: float, size: int, rng: np.random.Generator) -> Integers:
    """`size` independent integers with P(z) proportional to exp(-|z| / scale)."""
    exact = _rational(scale)
    return _collect(lambda m: _laplace_candidates(exact.numerator, exact.denominator, m, rng), size)


def discrete_gaussian(sigma: float, size: int, rng: np.random.Generator) -> Integers:
    """`size` independent integers with P(z) proportional to exp(-z^2 / (2 sigma^2))."""
    exact = _rational(sigma)
    return _collect(lambda m: _gaussian_candidates(exact**2, math.floor(exact) + 1, m, rng), size)


def _rational(scale: float) -> Fraction:
    if not 0 < scale <= _LARGEST:
        raise InvalidArgument(f"the noise's scale * unit = {scale} must lie between 0 and 2^40: ask for less noise.")
    return Fraction(max(float(scale), _SMALLEST))


def _collect(candidates: Callable[[int], Integers], size: int) -> Integers:
    """The first `size` accepted of an endless row of independent candidates; what is left over is thrown away."""
    accepted = [np.empty(0, dtype=np.int64)]
    missing = size
    while missing > 0:
        accepted.append(candidates(2 * missing + 16)[:missing])
        missing -= len(accepted[-1])
    return np.concatenate(accepted)


def _laplace_candidates(t: int, s: int, m: int, rng: np.random.Generator) -> Integers:
    """Algorithm 2: what is accepted of `m` candidates for the discrete Laplace of scale t/s."""
    U = rng.integers(0, t, m)
    U = U[_bernoulli_exp(U, t, rng)]
    Y = (U + t * _geometric(len(U), rng)) // s
    negative = rng.integers(0, 2, len(Y)) == 1
    keep: Bools = (Y != 0) | ~negative  # else zero would count twice
    return np.where(negative, -Y, Y)[keep]


def _gaussian_candidates(variance: Fraction, t: int, m: int, rng: np.random.Generator) -> Integers:
    """Algorithm 3: candidates from the discrete Laplace of scale t, accepted with probability exp(-gamma)."""
    Y = _laplace_candidates(t, 1, m, rng)
    p, q = variance.numerator, variance.denominator
    # gamma = (|Y| - p/(q t))^2 / (2 p/q), over one denominator; Python integers, since it has some 300 bits.
    size, where = np.unique(np.abs(Y), return_inverse=True)
    above = (size.astype(object) * (q * t) - p) ** 2
    below = 2 * p * q * t * t
    whole = (above // below).astype(np.int64)[where]
    rest = (above % below)[where]
    # exp(-whole) is the chance that exp(-1) succeeds `whole` times in a row, exp(-rest / below) is Algorithm 1.
    accept = _geometric(len(Y), rng) >= whole
    accept[accept] = _bernoulli_exp(rest[accept], below, rng)
    return Y[accept]


def _geometric(size: int, rng: np.random.Generator) -> Integers:
    """How often Bernoulli(exp(-1)) succeeds before it first fails."""
    successes = np.zeros(size, dtype=np.int64)
    alive = np.arange(size)
    while len(alive):
        alive = alive[_bernoulli_exp(np.ones(len(alive), dtype=np.int64), 1, rng)]
        successes[alive] += 1
    return successes


def _bernoulli_exp(above: npt.NDArray[Any], below: int, rng: np.random.Generator) -> Bools:
    """Algorithm 1: Bernoulli(exp(-gamma)) for gamma = above / below in [0, 1]."""
    answer = np.empty(len(above), dtype=np.bool_)
    alive = np.arange(len(above))
    K = 1
    while len(alive):
        A = _bernoulli(above[alive], below * K, rng)
        answer[alive[~A]] = K % 2 == 1
        alive = alive[A]
        K += 1
    return answer


def _bernoulli(above: npt.NDArray[Any], below: int, rng: np.random.Generator) -> Bools:
    """Bernoulli(above / below), for integers of any length."""
    if below < 2**63:
        return rng.integers(0, below, len(above)) < above.astype(np.int64)
    # A uniform real is below above/below if its first 62-bit digit is smaller, or equal and the later digits decide.
    shifted = above << 62
    digit = (shifted // below).astype(np.int64)
    U = rng.integers(0, 2**62, len(above))
    answer = digit > U
    tie = digit == U
    if tie.any():
        answer[tie] = _bernoulli((shifted % below)[tie], below, rng)
    return answer
