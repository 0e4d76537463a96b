"""tCDP against the published tables of PPSGD's noise, and against the conditions of its Theorem 4."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.data.samplers import FixedSize
from sfumato.errors import InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting, tcdp
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.privacy.tcdp import TCDP

M = 26022  # private rows of adult-a
QUICK = settings(max_examples=30, deadline=None, derandomize=True)
epsilons = st.floats(0.01, 5.0)
deltas = st.floats(1e-10, 1e-3)


@pytest.mark.parametrize(
    ("epsilon", "s", "T", "noise"),
    [
        (0.1, 64, 425, 19.3),
        (0.1, 260, 34, 22.1),
        (0.1, 260, 500, 84.8),
        (0.1, 1024, 500, 334),
        (0.5, 64, 2136, 8.69),
        (0.5, 260, 169, 9.94),
        (0.5, 260, 500, 17.1),
        (0.5, 1024, 500, 67.3),
    ],
)
def test_golden_noise_of_equal_steps(epsilon: float, s: int, T: int, noise: float) -> None:
    total = tcdp.budget(epsilon, 1e-6)
    q = s / M
    # Two of the published T are the minimum rounded down, at which a step just misses the condition.
    steps = max(T, tcdp.minimum_steps(total, q))
    assert steps <= T + 1
    assert tcdp.step_noise(total.rho / steps, q, total.omega) == pytest.approx(noise, rel=4e-3)


@pytest.mark.parametrize(
    ("epsilon", "golden"),
    [
        (0.1, {26: 2235, 64: 424, 128: 120, 260: 34, 512: 10, 1024: 3}),
        (0.5, {26: 11252, 64: 2136, 128: 604, 260: 169, 512: 51, 1024: 15}),
    ],
)
def test_golden_minimum_steps(epsilon: float, golden: dict[int, int]) -> None:
    total = tcdp.budget(epsilon, 1e-6)
    for s, steps in golden.items():
        assert abs(tcdp.minimum_steps(total, s / M) - steps) <= 1, s


@pytest.mark.parametrize(
    ("epsilon", "golden"),
    [(0.1, (2231, 34, 2.1)), (0.3, (6717, 101, 6.2, 2)), (0.5, (11235, 169, 10, 3.4)), (0.7, (15783, 237, 15, 4.7))],
)
def test_golden_minimum_steps_by_rate(epsilon: float, golden: tuple[float, ...]) -> None:
    total = tcdp.budget(epsilon, 1e-6)
    for q, steps in zip((0.001, 0.01, 0.05, 0.1), golden, strict=False):
        assert total.rho / tcdp.largest_step(q, total.omega) == pytest.approx(steps, rel=0.01, abs=0.6), q


def test_it_is_sound_but_loose() -> None:
    total = tcdp.budget(0.5, 1e-6)
    noise = tcdp.step_noise(total.rho / 500, 260 / M, total.omega)
    sampler = FixedSize(size=M, batch_size=260)
    plan = [Mechanism(question="gradients", noise=Gaussian(noise), sampler=sampler, times=500)]
    assert 0.1 < accounting.epsilon(plan, delta=1e-6, adjacency=Adjacency.REPLACE_ONE).epsilon < 0.3


def test_budget_does_not_cancel() -> None:
    with mpmath.workdps(60):
        for epsilon, delta in ((0.1, 1e-9), (0.01, 1e-9), (1e-7, 1e-9), (3.0, 1e-5)):
            L = -mpmath.log(mpmath.mpf(delta))
            printed = epsilon + 2 * L - 2 * mpmath.sqrt(L * (epsilon + L))
            assert tcdp.budget(epsilon, delta).rho == pytest.approx(float(printed), rel=1e-12)


@QUICK
@given(epsilon=epsilons, delta=deltas)
def test_budget_and_epsilon_are_inverse(epsilon: float, delta: float) -> None:
    total = tcdp.budget(epsilon, delta)
    assert tcdp.epsilon(total, delta) == pytest.approx(epsilon, rel=1e-9)
    # Theorem 2's condition on delta holds with equality.
    assert delta == pytest.approx(math.exp(-((total.omega - 1) ** 2) * total.rho), rel=1e-9)


@QUICK
@given(epsilon=epsilons, delta=deltas, q=st.floats(1e-4, 0.1))
def test_the_largest_step_meets_every_condition_and_is_the_largest(epsilon: float, delta: float, q: float) -> None:
    omega_total = tcdp.budget(epsilon, delta).omega
    rho_t = tcdp.largest_step(q, omega_total)
    rho_s = rho_t / (13 * q**2)
    amplified = tcdp.subsample(TCDP(rho=rho_s * (1 - 1e-12), omega=math.inf), q)
    assert amplified.rho == pytest.approx(rho_t)
    assert amplified.omega >= omega_total * (1 - 1e-9)
    assert tcdp.step_noise(rho_t, q, omega_total) == pytest.approx(2 / math.sqrt(2 * rho_s))
    with pytest.raises(UnsupportedAccounting, match="rho_t"):
        tcdp.step_noise(rho_t * 1.001, q, omega_total)


def test_fewer_orders_than_theorem_2_wants_cost_more() -> None:
    enough = TCDP(rho=0.01, omega=math.inf)
    few = TCDP(rho=0.01, omega=5.0)
    L = math.log(1e6)
    assert tcdp.epsilon(enough, 1e-6) == pytest.approx(0.01 + 2 * math.sqrt(0.01 * L))
    assert tcdp.epsilon(few, 1e-6) == pytest.approx(0.01 * 5 + L / 4)
    assert tcdp.epsilon(few, 1e-6) > tcdp.epsilon(enough, 1e-6)


def test_compose_adds_rho_and_keeps_the_smaller_order() -> None:
    assert tcdp.compose(TCDP(rho=1.0, omega=9.0), TCDP(rho=2.0, omega=7.0)) == TCDP(rho=3.0, omega=7.0)


@pytest.mark.parametrize(
    ("rho", "omega", "q", "condition"),
    [
        (0.05, math.inf, 0.2, "q <= 0.1"),
        (0.2, math.inf, 0.05, "rho <= 0.1"),
        (0.05, 10.0, 0.05, r"omega >= log\(1/q\)"),
    ],
)
def test_theorem_4_refuses_what_it_does_not_cover(rho: float, omega: float, q: float, condition: str) -> None:
    with pytest.raises(UnsupportedAccounting, match=condition):
        tcdp.subsample(TCDP(rho=rho, omega=omega), q)


def test_theorem_4s_third_condition_never_binds_inside_the_others() -> None:
    rho = np.linspace(1e-6, 0.1, 10_000)
    assert np.max(3 * rho * (2 + np.log2(1 / rho))) < math.log(1 / 0.1)


def test_a_step_that_grows_without_a_cap_is_refused() -> None:
    """The paper's growth rule, rho_{t+1} = 1.3 rho_t, leaves Theorem 4 long before its budget is spent."""
    total = tcdp.budget(0.5, 1e-6)
    steps = [total.rho / 2000 * 1.3**t for t in range(24)]
    assert sum(steps) < 2 * total.rho
    largest = tcdp.largest_step(64 / M, total.omega)
    refused = [rho_t for rho_t in steps if rho_t > largest]
    assert refused
    for rho_t in refused:
        with pytest.raises(UnsupportedAccounting, match="spend less"):
            tcdp.step_noise(rho_t, 64 / M, total.omega)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_budgets(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidArgument, match=r"epsilon=|delta="):
        tcdp.budget(epsilon, delta)


@pytest.mark.parametrize(("rho", "omega"), [(0.0, 2.0), (math.nan, 2.0), (1.0, 1.0), (1.0, math.nan)])
def test_impossible_guarantees(rho: float, omega: float) -> None:
    with pytest.raises(InvalidArgument, match=r"rho=|omega="):
        TCDP(rho=rho, omega=omega)
