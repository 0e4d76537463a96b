"""P-values for tests of randomness. Tests draw from real entropy, so each states how often it may fail by chance.

A test accepts the right law if `p > FALSE_ALARM` and must reject a wrong one, shown in the same test. Where it looks at
several p-values it passes them through `smallest`, so that the whole test keeps the stated false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

FALSE_ALARM = 1e-6


def smallest(p_values: Iterable[float]) -> float:
    """One p-value for many (Bonferroni): valid whatever their dependence."""
    values = list(p_values)
    return min(1.0, len(values) * min(values))


def variance_p(x: Any, std: float) -> float:
    """Two-sided chi2 test that x is N(0, std^2), exact; 40,000 values tell std from 0.95 and 1.05 std."""
    x = np.asarray(x, dtype=np.float64).ravel()
    statistic = float(np.sum((x / std) ** 2))
    return 2 * min(stats.chi2.cdf(statistic, len(x)), stats.chi2.sf(statistic, len(x)))


def mean_p(x: Any, std: float) -> float:
    """Two-sided test that normals of this standard deviation have mean zero, exact."""
    x = np.asarray(x, dtype=np.float64).ravel()
    return float(2 * stats.norm.sf(abs(x.mean()) * np.sqrt(len(x)) / std))


def normal_p(x: Any, std: float) -> float:
    """Kolmogorov-Smirnov test of the whole law N(0, std^2)."""
    return float(stats.kstest(np.asarray(x, dtype=np.float64).ravel() / std, "norm", method="asymp").pvalue)


def correlation_p(x: Any, y: Any) -> float:
    """Test that two rows of normals are uncorrelated, exact."""
    return float(stats.pearsonr(np.asarray(x).ravel(), np.asarray(y).ravel()).pvalue)


def binomial_p(successes: int, trials: int, probability: float) -> float:
    """Exact two-sided binomial test."""
    return float(stats.binomtest(int(successes), trials, probability).pvalue)


def counts_p(observed: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> float:
    """Chi2 test of counts against cell probabilities; the last cell may stand for the rest.

    Cells expected fewer than 50 times are merged, so that the chi2 law holds far into its tail.
    """
    expected = probabilities * observed.sum()
    rare = expected < 50
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 50:
        into = int(np.argmin(expected[:-1]))
        observed[into] += observed[-1]
        expected[into] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chi2.sf(np.sum((observed - expected) ** 2 / expected), len(expected) - 1))
