"""Auditing with one training run (Steinke, Nasr and Jagielski 2023): many canaries, each in with probability a half.

The attacker guesses for some of m canaries if they were in. If the training is (epsilon, delta)-DP, the number of right
guesses is no larger, but for delta, than that of coins that fall right with probability e^epsilon / (1 + e^epsilon).
A smoke test of a whole training: it misses leaks that all canaries share, such as one in the direction of the origin.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import expit

from sfumato.audit.bounds import check_power
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.errors import InvalidArgument


def p_value(*, canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, if the training is (epsilon, delta)-DP (their theorem 5.2)."""
    q = float(expit(epsilon))
    at_least = float(stats.binom.sf(right - 1, guesses, q))
    # With delta each canary may have slipped through: the worst way to spend 2 m delta over how far back one looks.
    back = np.arange(1, right + 1)
    sums = np.cumsum(stats.binom.pmf(right - back, guesses, q))
    slope = float(np.max(sums / back)) if right else 0.0
    return min(1.0, at_least + 2 * canaries * delta * slope)


def epsilon_one_run(*, canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many right guesses rule out; 0 if they prove nothing.

    >>> round(epsilon_one_run(canaries=1000, guesses=100, right=100, delta=0.0), 3)  # 0.05 ** 0.01 to be right
    3.493
    """
    if not 0 <= right <= guesses <= canaries or canaries < 1:
        raise InvalidArgument(
            f"right={right} of guesses={guesses} about canaries={canaries} is not possible: give right <= guesses <= "
            "canaries."
        )

    def ruled_out(epsilon: float) -> bool:
        told = {"canaries": canaries, "guesses": guesses, "right": right}
        return p_value(**told, epsilon=epsilon, delta=delta) <= 1 - confidence

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low


def guessed(scores: npt.NDArray[np.float64], included: npt.NDArray[np.bool_], guesses: int) -> int:
    """Right guesses of the attacker who is surest of the largest and of the smallest scores, half of them each."""
    if len(scores) != len(included) or not 0 < guesses <= len(scores):
        raise InvalidArgument(f"guesses={guesses} must be among {len(scores)} canaries, each with a score and a truth.")
    order = np.argsort(scores, kind="stable")
    few, many = guesses // 2, guesses - guesses // 2
    return int((~included[order[:few]]).sum() + included[order[len(order) - many :]].sum())


def _guesses(canaries: int) -> list[int]:
    counts = sorted({max(2, math.ceil(canaries * share)) for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)})
    return [count for count in counts if count <= canaries]


def best_of(
    scores: npt.NDArray[np.float64], included: npt.NDArray[np.bool_], *, delta: float, confidence: float = 0.95
) -> tuple[float, int]:
    """(epsilon, guesses) over some numbers of guesses, each with its part of what may go wrong."""
    counts = _guesses(len(scores))
    each = 1 - (1 - confidence) / len(counts)
    found = [
        epsilon_one_run(
            canaries=len(scores), guesses=n, right=guessed(scores, included, n), delta=delta, confidence=each
        )
        for n in counts
    ]
    best = int(np.argmax(found))
    return found[best], counts[best]


Training = Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.float64]]
"""A whole training, with those canaries that are included, and then a score of each: larger if it looks included."""


def one_run(
    training: Training,
    *,
    canaries: int,
    epsilon: float,
    delta: float,
    name: str,
    audit: str = "one run",
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Train once, with each canary in or out by a coin of the operating system, and count what is guessed right.

    >>> rng = np.random.default_rng(0)
    >>> plain = {"canaries": 400, "epsilon": 1.0, "delta": 1e-10, "name": "without noise"}
    >>> one_run(lambda included: included + rng.normal(0, 0.1, 400), **plain).holds
    False
    """
    included = np.random.default_rng().random(canaries) < 0.5
    return verdict_on(
        training(included),
        included,
        epsilon=epsilon,
        delta=delta,
        name=name,
        audit=audit,
        confidence=confidence,
    )


def verdict_on(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    *,
    epsilon: float,
    delta: float,
    name: str,
    audit: str,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """What scores of canaries prove that were included by fair coins."""
    if not 4 * len(scores) * delta < 1 - confidence:
        # With probability delta each the canaries may all be betrayed: then no number of right guesses is surprising.
        raise InvalidArgument(
            f"delta={delta} is too large for {len(scores)} canaries and confidence={confidence}, so that nothing could "
            f"be proven: state epsilon at a delta below {(1 - confidence) / (4 * len(scores)):.1e}."
        )
    n, each = len(scores), 1 - (1 - confidence) / len(_guesses(len(scores)))
    check_power(n, epsilon_one_run(canaries=n, guesses=n, right=n, delta=delta, confidence=each), epsilon)
    proven, guesses = best_of(scores, included, delta=delta, confidence=confidence)
    return Verdict(
        method=name,
        audit=audit,
        claimed=epsilon,
        lower_bound=proven,
        confidence=confidence,
        trials=len(scores),
        told=f"{guessed(scores, included, guesses)} of {guesses} guesses were right.",
    )
