"""The exact discrete samplers, against their exact laws."""

from __future__ import annotations

import secrets
from fractions import Fraction

import numpy as np
import pytest

from sfumato.errors import InvalidArgument
from sfumato.privacy import discrete
from sfumato.privacy.discrete import discrete_gaussian, discrete_laplace
from tests.statistics import FALSE_ALARM, binomial_p, counts_p, smallest


def fresh() -> np.random.Generator:
    return np.random.default_rng(secrets.randbits(128))


def law(kind, scale, edge):
    """Exact probabilities of -edge..edge, then of everything else."""
    z = np.arange(-40 * edge, 40 * edge + 1, dtype=np.float64)
    weight = np.exp(-np.abs(z) / scale) if kind is discrete_laplace else np.exp(-(z**2) / (2 * scale**2))
    inside = weight[np.abs(z) <= edge] / weight.sum()
    return np.append(inside, 1 - inside.sum())


def tally(z, edge):
    inside = np.bincount(z[np.abs(z) <= edge] + edge, minlength=2 * edge + 1)
    return np.append(inside, len(z) - inside.sum())


# 0.6: mostly zero; 1.95: 53-bit numerator; 3.0: an integer, so that small integers decide; 10.3: a wide law
@pytest.mark.parametrize("scale", [0.6, 1.95, 3.0, 10.3])
@pytest.mark.parametrize("kind", [discrete_laplace, discrete_gaussian])
def test_law_is_exact_and_five_percent_off_is_seen(kind, scale):
    """False alarm 1e-6: chi2 over all cells."""
    edge = 2 + int(4 * scale)
    right = law(kind, scale, edge)
    for factor, accepted in ((1.0, True), (0.95, False), (1.05, False)):
        z = kind(factor * scale, 200_000, fresh())
        assert (counts_p(tally(z, edge), right) > FALSE_ALARM) is accepted, f"{factor} x the scale"


@pytest.mark.parametrize("kind", [discrete_laplace, discrete_gaussian])
def test_large_scales(kind):
    """Above 2^31 too, by the share within one scale; 1.05 x is seen. False alarm 1e-6."""
    scale = 3.3e9
    share = 1 - np.exp(-1) if kind is discrete_laplace else 0.6826894921370859
    for factor, accepted in ((1.0, True), (0.95, False), (1.05, False)):
        z = kind(factor * scale, 100_000, fresh())
        p = smallest(
            [
                binomial_p(np.sum(np.abs(z) <= scale), len(z), share),
                binomial_p(np.sum(z < 0), len(z), 0.5),
                binomial_p(np.sum(z % 2), len(z), 0.5),
            ]
        )
        assert (p > FALSE_ALARM) is accepted


@pytest.mark.parametrize("kind", [discrete_laplace, discrete_gaussian])
def test_draws_are_independent_along_the_array(kind):
    """Neighbours in the array and whole halves: sign agreement is a fair coin. False alarm 1e-6."""
    z = kind(40.5, 100_000, fresh())
    sign = z > 0  # P(z > 0) is not a half, so compare with the exact probability
    q = law(kind, 40.5, 400)[401:-1].sum()
    agree = q**2 + (1 - q) ** 2
    pairs = [(sign[0::2], sign[1::2]), (sign[:50_000], sign[50_000:])]
    assert smallest(binomial_p(np.sum(a == b), 50_000, agree) for a, b in pairs) > FALSE_ALARM
    assert binomial_p(np.sum(sign[:50_000] == sign[:50_000]), 50_000, agree) < FALSE_ALARM


@pytest.mark.parametrize(
    ("above", "below"),
    [(3, 10), (1, 3), (2**80 // 3, 2**80), (10**40 // 7, 10**40)],
)
def test_bernoulli_of_long_fractions(above, below):
    """False alarm 1e-6; 0.95 and 1.05 of the probability are seen."""
    wins = discrete._bernoulli(np.full(400_000, above, dtype=object), below, fresh()).sum()
    assert binomial_p(wins, 400_000, above / below) > FALSE_ALARM
    assert binomial_p(wins, 400_000, 0.95 * above / below) < FALSE_ALARM
    assert binomial_p(wins, 400_000, 1.05 * above / below) < FALSE_ALARM


def test_bernoulli_decides_ties_by_later_digits():
    class Tied:
        """First digits all tie; the next are zero, then as large as can be."""

        def __init__(self, digits):
            self.digits = digits

        def integers(self, low, high, size):
            return np.full(size, self.digits.pop(0), dtype=np.int64)

    below = 2**124
    above = np.array([5 * 2**62 + 9], dtype=object)  # digits 5, then 9
    for second, expected in ((8, True), (10, False)):
        assert discrete._bernoulli(above, below, Tied([5, second]))[0] == expected


def test_edges():
    rng = fresh()
    for kind in (discrete_laplace, discrete_gaussian):
        assert kind(2.0, 0, rng).shape == (0,)
        assert kind(2.0, 7, rng).dtype == np.int64
        assert not kind(1e-300, 1000, rng).any()  # raised to 2^-8, where a non-zero has probability exp(-256)
        for wrong in (0.0, -1.0, float("nan"), float("inf"), 2.0**41):
            with pytest.raises(InvalidArgument, match="must lie between 0 and 2\\^40"):
                kind(wrong, 3, rng)
    assert discrete._rational(1.95) == Fraction(1.95)
