"""What an attack proves: lower bounds on epsilon and mu from how often it guessed right, with exact confidence.

An attacker sees an output and guesses if somebody's row was in. If the mechanism is (epsilon, delta)-DP, then every
attack has TPR <= e^epsilon FPR + delta (Kairouz, Oh and Viswanath 2015); if it is mu-GDP, it has Phi^-1(TPR) -
Phi^-1(FPR) <= mu (Dong, Roth and Su 2022). Rates are replaced by Clopper-Pearson bounds, so that a bound is wrong with
probability at most 1 - confidence, however few the trials are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.optimize import brentq

from sfumato.errors import InvalidArgument

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often an attack said "in": of `positives` trials with the row in, and of `negatives` without."""

    true_positives: int
    positives: int
    false_positives: int
    negatives: int

    def __post_init__(self) -> None:
        for said, trials in ((self.true_positives, self.positives), (self.false_positives, self.negatives)):
            if not 0 <= said <= trials or trials < 1:
                raise InvalidArgument(
                    f"{said} of {trials} trials is not possible: give counts, and at least one trial."
                )

    def bounds(self, confidence: float) -> tuple[float, float, float, float]:
        """(least TPR, greatest TPR, least FPR, greatest FPR); any two of them hold together with this confidence."""
        tpr = clopper_pearson(self.true_positives, self.positives, confidence)
        fpr = clopper_pearson(self.false_positives, self.negatives, confidence)
        return *tpr, *fpr


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The exact interval of a probability, each end wrong with probability at most (1 - confidence) / 2.

    >>> low, high = clopper_pearson(0, 100, 0.95)
    >>> low, round(high, 4)
    (0.0, 0.0362)
    """
    if not 0 < confidence < 1:
        raise InvalidArgument(f"confidence={confidence} must lie between 0 and 1, such as 0.95.")
    wrong = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(stats.beta.ppf(wrong, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.isf(wrong, successes + 1, trials - successes))
    return low, high


def all_right(trials: int) -> Rates:
    """Of an attack that never errs: more than it proves, so many trials cannot."""
    return Rates(true_positives=trials, positives=trials, false_positives=0, negatives=trials)


def check_power(trials: int, most: float, claimed: float) -> None:
    """Raise if the best attack would not prove more than is claimed: an audit that cannot fail says nothing."""
    if not most > claimed:
        raise InvalidArgument(
            f"trials={trials} prove at most epsilon={most:.3g} at this confidence, and {claimed:.3g} is claimed, so "
            "nothing could be found: give more trials, or audit with more noise."
        )


def off_by(successes: npt.ArrayLike, trials: npt.ArrayLike, claimed: npt.ArrayLike, confidence: float) -> float:
    """How far, at the least, one of many probabilities is from what it is claimed to be; 0 if none is proven to be off.

    If all are as claimed, it is more than 0 with probability at most 1 - confidence, however they depend on each other.

    >>> off_by([500, 480], 1000, 0.5, 0.999), round(off_by([500, 300], 1000, 0.5, 0.999), 2)
    (0.0, 0.15)
    """
    k, n, p = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (successes, trials, claimed)))
    wrong = (1 - confidence) / (2 * k.size)
    with np.errstate(invalid="ignore"):
        low = np.where(k == 0, 0.0, stats.beta.ppf(wrong, k, n - k + 1))
        high = np.where(k == n, 1.0, stats.beta.isf(wrong, k + 1, n - k))
    return max(0.0, float(np.max(np.maximum(low - p, p - high))))


def epsilon_lower_bound(rates: Rates, *, delta: float, confidence: float = 0.95) -> float:
    """The least epsilon that these rates allow at delta; 0 if they prove nothing.

    >>> rates = Rates(true_positives=990, positives=1000, false_positives=10, negatives=1000)
    >>> 3.5 < epsilon_lower_bound(rates, delta=0.0) < math.log(99)
    True
    """
    least_tpr, greatest_tpr, least_fpr, greatest_fpr = rates.bounds(confidence)
    # The attack itself, and the one that says the opposite: TNR <= e^epsilon FNR + delta.
    pairs = ((least_tpr, greatest_fpr), (1 - greatest_fpr, 1 - least_tpr))
    other = ((least_fpr, greatest_tpr), (1 - greatest_tpr, 1 - least_fpr))
    ratios = [(low - delta) / high for low, high in (*pairs, *other) if low > delta and high > 0]
    return max(0.0, *(math.log(ratio) for ratio in ratios)) if ratios else 0.0


def mu_lower_bound(rates: Rates, *, confidence: float = 0.95) -> float:
    """The least mu of Gaussian DP that these rates allow; far stronger than epsilon where the noise is Gaussian.

    >>> rates = Rates(true_positives=840, positives=1000, false_positives=160, negatives=1000)
    >>> 1.7 < mu_lower_bound(rates) < 2.0
    True
    """
    least_tpr, greatest_tpr, least_fpr, greatest_fpr = rates.bounds(confidence)
    found = [
        float(stats.norm.ppf(low) - stats.norm.ppf(high))
        for low, high in ((least_tpr, greatest_fpr), (least_fpr, greatest_tpr))
        if low > 0 and high < 1
    ]
    return max(0.0, *found) if found else 0.0


def epsilon_of_mu(mu: float, delta: float) -> float:
    """What mu-GDP costs at delta, exactly (Balle and Wang 2018; Dong et al. 2022, corollary 2.13).

    >>> round(epsilon_of_mu(0.5, 1e-5), 2)
    1.99
    """
    if not (0 < delta < 1 and mu >= 0 and math.isfinite(mu)):
        raise InvalidArgument(f"mu={mu} must be a number of at least 0, and delta={delta} must lie between 0 and 1.")

    def excess(epsilon: float) -> float:
        tail = stats.norm.logcdf(-epsilon / mu - mu / 2) + epsilon
        return float(stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(tail)) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-10))


def told_apart(values: Scores) -> Scores:
    """(trials, columns) -> (trials, 3 * columns) finite numbers: what is not finite is seen as what it is.

    A NaN tells as much as a number: where one person's row makes an answer NaN, everybody sees that. Compared as it is,
    it would be neither above nor below anything, and hide whatever stands beside it.

    >>> told_apart(np.array([[0.5, np.nan, -np.inf]])).tolist()
    [[0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0]]
    """
    infinite = np.where(np.isinf(values), np.sign(values), 0.0)
    return np.concatenate([np.where(np.isfinite(values), values, 0.0), np.isnan(values).astype(float), infinite], 1)


def split(outs: Scores, ins: Scores, *, share: float = 0.5, gaussian: bool = True) -> Rates:
    """Rates of the best threshold: chosen on the first `share` of the trials, counted on the others.

    `outs` and `ins` are an attack's scores without and with the row, larger where it believes that the row was in. The
    best one proves the most mu if the noise is `gaussian`, and else the most epsilon, which is often a rare event's.
    """
    first = int(share * len(outs)), int(share * len(ins))
    if min(first) < 1 or first[0] == len(outs) or first[1] == len(ins):
        raise InvalidArgument(f"{len(outs)} and {len(ins)} scores are too few to be split at {share}: give more.")
    threshold = _threshold(np.sort(outs[: first[0]]), np.sort(ins[: first[1]]), gaussian)
    rest_out, rest_in = outs[first[0] :], ins[first[1] :]
    return Rates(
        true_positives=int((rest_in > threshold).sum()),
        positives=len(rest_in),
        false_positives=int((rest_out > threshold).sum()),
        negatives=len(rest_out),
    )


def _threshold(outs: Scores, ins: Scores, gaussian: bool) -> float:
    """That which proves the most on these trials: extreme ones look best, and prove least."""
    at = np.unique(np.concatenate([outs, ins]))
    hits = len(ins) - np.searchsorted(ins, at, side="right")
    alarms = len(outs) - np.searchsorted(outs, at, side="right")
    wrong = 0.025 if gaussian else 1e-6  # of rare events, those that look best are the luckiest: be severe with them
    with np.errstate(invalid="ignore"):
        least = np.where(hits == 0, 0.0, stats.beta.ppf(wrong, hits, len(ins) - hits + 1))
        most = np.where(alarms == len(outs), 1.0, stats.beta.isf(wrong, alarms + 1, len(outs) - alarms))
        measure = stats.norm.ppf if gaussian else lambda p: np.log(np.maximum(p, 1e-300))
        proven = np.nan_to_num(measure(least) - measure(most), nan=-np.inf)
    return float(at[int(np.argmax(proven))])
