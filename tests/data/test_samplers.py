"""Which units are drawn: rates per unit, independence, sizes."""

from __future__ import annotations

import secrets
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from sfumato.data.samplers import _SPARSE, FixedSize, FullBatch, Poisson, _skip_ends
from sfumato.errors import InvalidArgument
from tests.statistics import FALSE_ALARM, binomial_p, counts_p, smallest

DRAWS = 30_000


def fresh() -> np.random.Generator:
    return np.random.default_rng(secrets.randbits(128))


def members(sampler, draws=DRAWS):
    """One row per draw, one column per unit."""
    rng = fresh()
    rows = np.zeros((draws, sampler.size), dtype=bool)
    for row in rows:
        row[sampler.draw(sampler.size, rng)] = True
    return rows


def rates_p(rows, rate):
    return smallest(binomial_p(count, len(rows), rate) for count in rows.sum(axis=0))


def pairs_p(rows, rate):
    both = rows.T.astype(np.float64) @ rows.astype(np.float64)
    upper = both[np.triu_indices(len(both), 1)]
    return smallest(binomial_p(count, len(rows), rate**2) for count in upper)


def sizes_p(rows, rate):
    units = rows.shape[1]
    sizes = np.bincount(rows.sum(axis=1), minlength=units + 1)
    return counts_p(sizes, stats.binom.pmf(np.arange(units + 1), units, rate))


def test_poisson_rates_pairs_and_sizes():
    """Unit at rate q, pair at q^2, size Binomial. False alarm 5e-6 in all; 0.95 q, 1.05 q, fixed size are seen."""
    q, units = 0.5, 12
    rows = members(Poisson(size=units, batch_size=q * units))
    assert rates_p(rows, q) > FALSE_ALARM
    assert pairs_p(rows, q) > FALSE_ALARM
    assert sizes_p(rows, q) > FALSE_ALARM
    for factor in (0.95, 1.05):
        wrong = members(Poisson(size=units, batch_size=factor * q * units), 20_000)
        assert rates_p(wrong, q) < FALSE_ALARM
        assert sizes_p(wrong, q) < FALSE_ALARM
    fixed = members(FixedSize(size=units, batch_size=units // 2), 20_000)  # right rates, wrong in pairs and in sizes
    assert rates_p(fixed, q) > FALSE_ALARM
    assert pairs_p(fixed, q) < FALSE_ALARM
    assert sizes_p(fixed, q) < FALSE_ALARM


def test_poisson_draws_are_independent_over_time():
    """A unit in this draw says nothing of the next. False alarm 1e-6; a repeated draw is seen."""
    rows = members(Poisson(size=12, batch_size=6), 20_000)
    again = [np.sum(a & b) for a, b in zip(rows[:-1:2].T, rows[1::2].T, strict=True)]
    assert smallest(binomial_p(count, 10_000, 0.25) for count in again) > FALSE_ALARM
    assert binomial_p(np.sum(rows[::2, 0] & rows[::2, 0]), 10_000, 0.25) < FALSE_ALARM


def test_poisson_draws_empty_batches():
    """False alarm 1e-6: an empty batch comes with probability (1-q)^n and is returned like any other."""
    sampler = Poisson(size=20, batch_size=1.0)
    empty = np.sum(~members(sampler, 20_000).any(axis=1))
    assert binomial_p(empty, 20_000, 0.95**20) > FALSE_ALARM
    assert binomial_p(0, 20_000, 0.95**20) < FALSE_ALARM  # empty batches skipped
    assert binomial_p(empty, 20_000, (1 - 0.05 * 0.85) ** 20) < FALSE_ALARM
    assert sampler.draw(0, fresh()).shape == (0,)


@pytest.mark.parametrize("rate", [0.01, 0.0123456])
def test_poisson_rate_on_many_units(rate):
    """False alarm 1e-6 on 2e7 coins; 0.95 and 1.05 of the rate are seen."""
    units, rng = 1_000_001, fresh()
    sampler = Poisson(size=units, batch_size=rate * units)
    drawn = [sampler.draw(units, rng) for _ in range(20)]
    assert all(d.dtype == np.int64 and (np.diff(d) > 0).all() and d[-1] < units for d in drawn)
    total = sum(map(len, drawn))
    assert binomial_p(total, 20 * units, rate) > FALSE_ALARM
    assert binomial_p(total, 20 * units, 0.95 * rate) < FALSE_ALARM
    assert binomial_p(total, 20 * units, 1.05 * rate) < FALSE_ALARM


@pytest.mark.parametrize("rate", [0.6 / 2**16, 1 / 5000, 0.0012345, 0.01, np.nextafter(_SPARSE, 0)])
def test_skips_give_every_unit_the_exact_rate(rate):
    """In fractions: given that nobody before it joined, a unit joins with probability `rate` to within 2^-60."""
    left = [2**64, *(2**64 - int(end) for end in _skip_ends(float(rate)))]
    assert len(left) > 60
    assert left[-1] > 2**64 / 10
    for before, after in pairwise(left):
        assert abs(1 - Fraction(after, before) - Fraction(float(rate))) < Fraction(1, 2**60)


def test_skips_are_poisson_sampling():
    """Also where a number skips as many units as it can, every 133. False alarm 3e-6; a wrong rate is seen."""
    q, units = 0.015, 450
    rows = members(Poisson(size=units, batch_size=q * units), 10_000)
    assert rates_p(rows, q) > FALSE_ALARM
    assert sizes_p(rows, q) > FALSE_ALARM
    near = [(rows[:, :-lag] & rows[:, lag:]).sum() for lag in range(1, 150)]
    assert smallest(binomial_p(n, 10_000 * (units - lag), q**2) for lag, n in enumerate(near, 1)) > FALSE_ALARM
    wrong = members(Poisson(size=units, batch_size=1.05 * q * units), 10_000)
    assert sizes_p(wrong, q) < FALSE_ALARM


def test_skips_repeat_with_the_generator_and_reach_the_end():
    sampler = Poisson(size=1000, batch_size=10)
    a, b = (sampler.draw(5000, np.random.default_rng(3)) for _ in range(2))
    assert a.dtype == np.int64
    assert a.tolist() == b.tolist()
    rng = fresh()
    drawn = [sampler.draw(present, rng) for present in [0, 1, 7, 5000] * 500]
    assert 4900 <= max(d[-1] for d in drawn if len(d)) < 5000
    assert all((np.diff(d) > 0).all() for d in drawn)
    assert [len(d) for d in drawn[::4]] == [0] * 500
    assert {tuple(d) for d in drawn[1::4]} <= {(), (0,)}


def test_poisson_rate_below_sixteen_bits():
    """Rates that are far below the shortest table of skips. False alarm 1e-6."""
    units, rng, rate = 1_000_000, fresh(), 0.6 / 2**16
    total = sum(len(Poisson(size=units, batch_size=rate * units).draw(units, rng)) for _ in range(100))
    assert binomial_p(total, 100 * units, rate) > FALSE_ALARM
    for wrong in (0.3, 1.0):
        assert binomial_p(total, 100 * units, wrong / 2**16) < FALSE_ALARM


def test_poisson_rate_is_declared_not_observed():
    """The data may hold more or fewer units than declared: the rate stays batch_size / size."""
    sampler, rng = Poisson(size=1000, batch_size=500), fresh()
    for present in (20_000, 40_001):
        count = len(sampler.draw(present, rng))
        assert binomial_p(count, present, 0.5) > FALSE_ALARM
    assert len(Poisson(size=1000, batch_size=1000).draw(1234, rng)) == 1234


def test_fixed_size_is_uniform_over_subsets():
    """False alarm 2e-6: every one of the C(6,2) subsets alike, hence every unit; favouring one unit by 5% is seen."""
    sampler, draws = FixedSize(size=6, batch_size=2), 60_000
    rng = fresh()
    drawn = np.stack([sampler.draw(6, rng) for _ in range(draws)])
    assert (drawn[:, 0] < drawn[:, 1]).all()
    subsets = list(combinations(range(6), 2))
    counts = np.array([np.sum((drawn == subset).all(axis=1)) for subset in subsets])
    even = np.full(15, 1 / 15)
    assert counts_p(counts, even) > FALSE_ALARM
    assert smallest(binomial_p(np.sum(drawn == unit), draws, 1 / 3) for unit in range(6)) > FALSE_ALARM

    favoured = np.array([1.05 if 0 in subset else 1.0 for subset in subsets])
    wrong = rng.choice(15, size=600_000, p=favoured / favoured.sum())
    assert counts_p(np.bincount(wrong), even) < FALSE_ALARM


def test_fixed_size_needs_the_exact_size():
    with pytest.raises(InvalidArgument, match="size=6"):
        FixedSize(size=6, batch_size=2).draw(5, fresh())


def test_batches_rarely_exceed_the_largest():
    sampler, rng = Poisson(size=5000, batch_size=250), fresh()
    assert 250 + 2.9 * 15.4 < sampler.largest() < 250 + 3.1 * 15.4
    above = sum(len(sampler.draw(5000, rng)) > sampler.largest() for _ in range(2000))
    assert above < 20  # 3.2 on average
    assert sampler.largest(2) < sampler.largest() < 2 * sampler.largest(2)  # two processes draw a half each
    assert FixedSize(size=6, batch_size=2).largest() == 2
    assert FullBatch(size=7).largest(2) == 4


def test_full_batch_is_everyone():
    assert FullBatch(size=5).draw(4, fresh()).tolist() == [0, 1, 2, 3]
    assert FullBatch(size=5).expected == 5.0


@pytest.mark.parametrize(
    ("kind", "batch", "remedy"),
    [
        (Poisson, 11, "lower batch_size"),
        (Poisson, 0, "raise batch_size"),
        (Poisson, -1, "raise batch_size"),
        (Poisson, float("nan"), "raise batch_size"),
        (Poisson, "5", "give a number"),
        (FixedSize, 11, "lower batch_size"),
        (FixedSize, 0, "raise batch_size"),
        (FixedSize, 2.5, "give a whole number"),
    ],
)
def test_impossible_batches_are_refused(kind, batch, remedy):
    with pytest.raises(InvalidArgument, match=f"batch_size=.*: {remedy}\\."):
        kind(size=10, batch_size=batch)
    assert kind(size=10, batch_size=np.int64(5)).expected == 5.0
