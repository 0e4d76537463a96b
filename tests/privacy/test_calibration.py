"""Calibration against published noise multipliers, and against accounting: what it returns fits, and barely."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.data.samplers import FixedSize, FullBatch, Poisson, Sampler
from sfumato.errors import InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.calibration import batch_size, noise_multiplier, steps
from sfumato.privacy.mechanisms import (
    Adjacency,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Mechanism,
)

AR, RO = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
CIFAR = Poisson(size=48000, batch_size=4096)
ADULT = 26022
COUNT = Mechanism(question="support", noise=DiscreteLaplace(2.0), sampler=FullBatch(size=48000))


def cost(noise: float, sampler: Sampler, times: int, adjacency: Adjacency, delta: float, *extra: Mechanism) -> float:
    train = Mechanism(question="train", noise=Gaussian(noise), sampler=sampler, times=times)
    return accounting.epsilon([*extra, train], delta=delta, adjacency=adjacency).epsilon


@pytest.fixture(scope="module", autouse=True)
def _import_dp_accounting() -> None:
    """Its import takes a second or two, once per process; the times below are without it."""
    cost(1.0, CIFAR, 1, AR, 1e-5)


@pytest.mark.parametrize(
    ("epsilon", "times", "golden"),
    [(1, 176, 4.396), (2, 352, 3.346), (3, 352, 2.406), (4, 352, 1.932), (6, 235, 1.269)],
)
def test_golden_noise(epsilon: float, times: int, golden: float) -> None:
    begin = time.perf_counter()
    found = noise_multiplier(epsilon=epsilon, delta=1e-5, sampler=CIFAR, steps=times, adjacency=AR)
    seconds = time.perf_counter() - begin
    print(f"epsilon={epsilon}: noise_multiplier={found:.4f} in {seconds:.2f} s")
    assert found == pytest.approx(golden, abs=0.002)
    assert epsilon * 0.999 <= cost(found, CIFAR, times, AR, 1e-5) <= epsilon
    assert seconds < 30  # a third of a second on an idle machine


@pytest.mark.parametrize(
    ("sampler", "adjacency", "golden"),
    [
        (FixedSize(size=ADULT, batch_size=260), RO, 4.97),
        (Poisson(size=ADULT, batch_size=260), RO, 2.12),
        (Poisson(size=ADULT, batch_size=260), AR, 1.40),
    ],
)
def test_golden_noise_of_ppsgd(sampler: Sampler, adjacency: Adjacency, golden: float) -> None:
    found = noise_multiplier(epsilon=0.5, delta=1e-6, sampler=sampler, steps=169, adjacency=adjacency)
    assert found == pytest.approx(golden, rel=6e-3)
    assert cost(found, sampler, 169, adjacency, 1e-6) <= 0.5


@pytest.mark.parametrize(
    ("epsilon", "batch", "noise", "fixed", "poisson"),
    [
        (0.1, 260, 22.1, 183, 928),
        (0.1, 260, 84.8, 2830, 13243),
        (0.5, 260, 9.94, 768, 3800),
        (0.5, 260, 17.1, 2349, 11223),
    ],
)
def test_golden_steps_at_the_noise_of_tcdp(epsilon: float, batch: int, noise: float, fixed: int, poisson: int) -> None:
    for sampler, golden in (
        (FixedSize(size=ADULT, batch_size=batch), fixed),
        (Poisson(size=ADULT, batch_size=batch), poisson),
    ):
        found = steps(epsilon=epsilon, delta=1e-6, noise_multiplier=noise, sampler=sampler, adjacency=RO)
        assert golden * 0.99 <= found <= golden * 1.04  # published on coarser grids, which allow fewer
        assert cost(noise, sampler, found, RO, 1e-6) <= epsilon < cost(noise, sampler, found + 1, RO, 1e-6)


@pytest.mark.parametrize("factor", [2.0, math.sqrt(2)])
def test_full_batch_noise_is_the_analytic_gaussian(factor: float) -> None:
    from dp_accounting import get_sigma_gaussian

    sampler = FullBatch(size=100)
    exact = get_sigma_gaussian(epsilon=0.5, delta=1e-5)
    for times in (1, 100):
        found = noise_multiplier(
            epsilon=0.5, delta=1e-5, sampler=sampler, steps=times, adjacency=RO, replace_factor=factor
        )
        assert exact * factor <= found / math.sqrt(times) <= exact * factor * 1.001


def test_extra_mechanisms_are_paid_from_the_same_budget() -> None:
    alone = noise_multiplier(epsilon=2, delta=1e-5, sampler=CIFAR, steps=352, adjacency=AR)
    begin = time.perf_counter()
    found = noise_multiplier(epsilon=2, delta=1e-5, sampler=CIFAR, steps=352, adjacency=AR, extra=[COUNT])
    print(f"with extra: {time.perf_counter() - begin:.2f} s")
    assert found > alone
    assert 1.998 <= cost(found, CIFAR, 352, AR, 1e-5, COUNT) <= 2
    # Composed once, not summed: cheaper than training for what basic composition would leave.
    assert found < noise_multiplier(epsilon=1.5, delta=1e-5, sampler=CIFAR, steps=352, adjacency=AR)


def test_steps_and_batch_size_are_the_largest() -> None:
    found = steps(epsilon=2, delta=1e-5, noise_multiplier=3.346, sampler=CIFAR, adjacency=AR, extra=[COUNT])
    assert found < 352
    assert cost(3.346, CIFAR, found, AR, 1e-5, COUNT) <= 2 < cost(3.346, CIFAR, found + 1, AR, 1e-5, COUNT)

    batch = batch_size(epsilon=2, delta=1e-5, noise_multiplier=3.346, size=48000, steps=352, adjacency=AR)
    assert batch == pytest.approx(4096, rel=2e-3)
    assert cost(3.346, Poisson(size=48000, batch_size=batch), 352, AR, 1e-5) <= 2
    assert cost(3.346, Poisson(size=48000, batch_size=batch + 1), 352, AR, 1e-5) > 2


def test_the_whole_data_set_is_the_largest_batch() -> None:
    assert batch_size(epsilon=2, delta=1e-5, noise_multiplier=100, size=500, steps=10, adjacency=AR) == 500


def test_few_steps_are_found_exactly() -> None:
    sampler = FullBatch(size=10)
    found = steps(epsilon=1.0, delta=1e-5, noise_multiplier=8.0, sampler=sampler, adjacency=AR)
    assert cost(8.0, sampler, found, AR, 1e-5) <= 1.0 < cost(8.0, sampler, found + 1, AR, 1e-5)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    epsilon=st.floats(0.3, 8.0),
    delta=st.floats(1e-8, 1e-4),
    rate=st.floats(0.01, 1.0),
    times=st.integers(1, 200),
    adjacency=st.sampled_from([AR, RO]),
)
def test_noise_always_fits_and_barely(
    epsilon: float, delta: float, rate: float, times: int, adjacency: Adjacency
) -> None:
    sampler = Poisson(size=1000, batch_size=1000 * rate)
    found = noise_multiplier(epsilon=epsilon, delta=delta, sampler=sampler, steps=times, adjacency=adjacency)
    assert epsilon * 0.998 <= cost(found, sampler, times, adjacency, delta) <= epsilon


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_impossible_epsilon(epsilon: float) -> None:
    with pytest.raises(InvalidArgument, match="epsilon="):
        noise_multiplier(epsilon=epsilon, delta=1e-5, sampler=CIFAR, steps=10, adjacency=AR)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan, -1e-5])
def test_impossible_delta(delta: float) -> None:
    with pytest.raises(InvalidArgument, match="delta="):
        steps(epsilon=1.0, delta=delta, noise_multiplier=1.0, sampler=CIFAR, adjacency=AR)


def test_a_rate_is_no_sampler() -> None:
    with pytest.raises(InvalidArgument, match=r"sampler=0\.1 must be a Sampler, such as private\.poisson"):
        noise_multiplier(epsilon=1.0, delta=1e-5, sampler=0.1, steps=10, adjacency=AR)  # type: ignore[arg-type]


@pytest.mark.parametrize(("epsilon", "delta", "named"), [("2", 1e-5, "epsilon='2'"), (2.0, "1e-5", "delta='1e-5'")])
def test_a_budget_is_made_of_numbers(epsilon: Any, delta: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{named} must be a number"):
        Budget(epsilon, delta)


def test_budgets_that_leave_nothing() -> None:
    with pytest.raises(InvalidArgument, match="extra costs epsilon=0"):
        noise_multiplier(epsilon=0.4, delta=1e-5, sampler=CIFAR, steps=10, adjacency=AR, extra=[COUNT])
    with pytest.raises(InvalidArgument, match="one step"):
        steps(epsilon=0.1, delta=1e-5, noise_multiplier=1.0, sampler=FullBatch(size=10), adjacency=AR)
    with pytest.raises(InvalidArgument, match="batches of 1"):
        batch_size(epsilon=0.1, delta=1e-5, noise_multiplier=0.5, size=10, steps=10, adjacency=AR)
    with pytest.raises(InvalidArgument, match="with any noise"):
        noise_multiplier(epsilon=1e-9, delta=1e-9, sampler=FullBatch(size=10), steps=100, adjacency=AR)
    with pytest.raises(InvalidArgument, match="next to no noise"):
        noise_multiplier(epsilon=1e5, delta=1e-5, sampler=CIFAR, steps=1, adjacency=AR)
    with pytest.raises(InvalidArgument, match="noise=0"):
        steps(epsilon=1.0, delta=1e-5, noise_multiplier=0.0, sampler=CIFAR, adjacency=AR)


def test_what_cannot_be_accounted_cannot_be_calibrated() -> None:
    with pytest.raises(UnsupportedAccounting, match="FixedSize"):
        noise_multiplier(epsilon=1.0, delta=1e-5, sampler=FixedSize(size=100, batch_size=10), steps=10, adjacency=AR)
    sampled = Mechanism(question="votes", noise=DiscreteGaussian(2.0), sampler=CIFAR)
    with pytest.raises(UnsupportedAccounting, match="votes"):
        noise_multiplier(epsilon=1.0, delta=1e-5, sampler=CIFAR, steps=10, adjacency=AR, extra=[sampled])
