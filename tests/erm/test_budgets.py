"""Budgets of fits: the least noise, adaptive runs recomputed by dp-accounting, and Theorem 4 by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from sfumato import Budget, Ledger, Private
from sfumato.data.samplers import FixedSize, Poisson, Sampler
from sfumato.erm.budgets import (
    FilteredAllowance,
    PlannedAllowance,
    TruncatedAllowance,
    filtered_noise,
    planned_noise,
    truncated_filter,
)
from sfumato.erm.losses import Hinge
from sfumato.erm.questions import LinearGradientMean
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy.filters import Filter
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

ADULT = 26022
QUESTION = LinearGradientMean(Hinge(), torch.zeros(2, dtype=torch.float64), 1.0)


def table(budget: Budget, rows: int = 4000, *, adjacency: str = "replace-one", **options: Any) -> Private:
    data = (torch.full((rows, 2), 0.5, dtype=torch.float64), torch.ones(rows, dtype=torch.float64))
    options = {"ledger": None, "name": "table", **options}
    return Private(data, size=rows, budget=budget, adjacency=adjacency, **options)


@pytest.mark.parametrize(
    ("epsilon", "adjacency"),
    [
        (0.1, Adjacency.REPLACE_ONE),
        (0.5, Adjacency.ADD_REMOVE),
        (0.5, Adjacency.REPLACE_ONE),
        (2.0, Adjacency.REPLACE_ONE),
    ],
)
def test_the_noise_of_a_filter_is_enough_for_the_steps_and_hardly_more(epsilon: float, adjacency: Adjacency) -> None:
    budget, sampler, steps = Budget(epsilon, 1e-6), Poisson(size=ADULT, batch_size=260), 500
    noise, filter = filtered_noise(budget, sampler, steps, adjacency)

    def fits(scale: float) -> bool:
        once = Mechanism(question="g", noise=Gaussian(scale), sampler=sampler, times=steps)
        (price,) = filter.price([once], adjacency=adjacency, budget=budget, delta_share=None)
        return filter.fits(price, budget)

    assert fits(noise)
    assert not fits(noise * 0.999)
    # A filter pays for adaptivity: not much, but for little noise under replace-one, where Rényi divergences are loose.
    planned = planned_noise(budget, sampler, steps, adjacency)
    assert planned < noise < (1.4 if epsilon == 2.0 else 1.15) * planned


def test_a_tiny_epsilon_is_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidArgument, match="raise epsilon, or plan"):
        filtered_noise(Budget(1e-5, 1e-9), Poisson(size=100, batch_size=10), 10, Adjacency.ADD_REMOVE)


def test_modern_accounting_allows_many_times_the_steps_of_the_papers() -> None:
    """Items 19-22, table A: at the paper's noise and batch on adult, at least four times the iterations."""
    for epsilon, papers_noise in ((0.1, 84.8), (0.5, 17.1)):
        budget = Budget(epsilon, 1e-6)
        fixed, poisson = FixedSize(size=ADULT, batch_size=260), Poisson(size=ADULT, batch_size=260)
        private = table(budget, ADULT)
        papers = TruncatedAllowance(private, LinearGradientMean, fixed, budget=budget, steps=500)
        assert papers.noise == pytest.approx(papers_noise, rel=5e-3)
        for sampler in (fixed, poisson) if epsilon == 0.5 else (poisson,):
            ours = FilteredAllowance(private, LinearGradientMean, sampler, budget=budget, steps=500)
            assert 1 / ours.share(papers.noise) >= 4 * 500, sampler


# ------------------------------------------------------------------------------------------------ adaptive runs


def fall(allowance: FilteredAllowance | TruncatedAllowance, factor: float, most: int = 3000) -> list[float]:
    """Asks with less and less noise until nothing is left."""
    noise, used = allowance.noise, []
    with allowance:
        while len(used) < most:
            try:
                allowance.ask(QUESTION, noise)
            except BudgetExceeded:
                break
            used.append(noise)
            if math.isfinite(allowance.share(noise / factor)):
                noise /= factor
    return used


def test_falling_noise_stays_within_the_budget_by_dp_accountings_own_numbers() -> None:
    budget, sampler, steps = Budget(0.3, 1e-6), Poisson(size=4000, batch_size=80), 120
    _, filter = filtered_noise(budget, sampler, steps, Adjacency.ADD_REMOVE)
    private = table(budget, adjacency="add-remove", filter=filter)
    allowance = FilteredAllowance(private, LinearGradientMean, sampler, budget=budget, steps=steps)
    used = fall(allowance, 1.02)
    assert 10 < len(used) < steps / 2
    accountant = RdpAccountant(list(filter.orders), NeighboringRelation.ADD_OR_REMOVE_ONE)
    for z in used:
        accountant.compose(PoissonSampledDpEvent(80 / 4000, GaussianDpEvent(z)))
    assert 0.5 * budget.epsilon < accountant.get_epsilon(budget.delta) <= budget.epsilon
    # What the ledger counts is what was asked.
    asked = private.statement().asked
    assert sorted(z for a in asked for z in [a.mechanism.noise.scale] * a.answers) == sorted(used)
    # And one more answer of the last noise would have been too much.
    accountant.compose(PoissonSampledDpEvent(80 / 4000, GaussianDpEvent(used[-1] / 1.02)))
    assert accountant.get_epsilon(budget.delta) > budget.epsilon


def test_without_any_change_exactly_the_declared_steps_can_be_had_in_few_slabs() -> None:
    budget, sampler = Budget(1.0, 1e-6), Poisson(size=4000, batch_size=80)
    _, filter = filtered_noise(budget, sampler, 300, Adjacency.REPLACE_ONE)
    private = table(budget, filter=filter)
    used = fall(FilteredAllowance(private, LinearGradientMean, sampler, budget=budget, steps=300), 1.0)
    assert len(used) == 300
    assert len(private.statement().asked) <= 12  # 1, 2, 4, ..., 64, 64, 64, and the rest
    assert sum(line.answers for line in private.statement().asked) == 300


def test_a_run_that_stops_early_gives_back_the_rest_of_its_slab(tmp_path: Path) -> None:
    budget, sampler = Budget(1.0, 1e-6), Poisson(size=4000, batch_size=80)
    private = table(budget, ledger=Ledger(tmp_path / "ledger.db"))
    with FilteredAllowance(private, LinearGradientMean, sampler, budget=budget, steps=300) as allowance:
        for _ in range(9):  # slabs of 1, 2, 4 and 8
            allowance.ask(QUESTION, allowance.noise)
    statement = Ledger(tmp_path / "ledger.db").account("table").statement()
    assert [line.answers for line in statement.asked] == [1, 2, 4, 2]


def test_an_account_with_less_left_ends_a_run_before_its_own_filter_does() -> None:
    budget, sampler = Budget(0.6, 1e-6), Poisson(size=4000, batch_size=80)
    private = table(Budget(0.3, 1e-6))
    allowance = FilteredAllowance(private, LinearGradientMean, sampler, budget=budget, steps=1000)
    used = fall(allowance, 1.0)
    assert 100 < len(used) < 400
    assert private.statement().epsilon == 0.3


def test_planned_answers_are_one_composition_by_pld() -> None:
    budget, sampler = Budget(1.0, 1e-6), Poisson(size=4000, batch_size=80)
    private = table(budget)
    with PlannedAllowance(private, LinearGradientMean, sampler, budget=budget, steps=5) as allowance:
        for _ in range(5):
            allowance.ask(QUESTION, allowance.noise)
        with pytest.raises(BudgetExceeded):
            allowance.ask(QUESTION, allowance.noise)
    assert "PLD" in private.statement().composition
    assert 0.99 < allowance.epsilon <= 1.0
    assert math.isinf(allowance.share(allowance.noise * 0.9))


# ------------------------------------------------------------------------------------------------ tCDP


def truncated(budget: Budget, sampler: Sampler, steps: int, **options: Any) -> TruncatedAllowance:
    made: Filter = truncated_filter(budget)
    private = table(budget, sampler.size, filter=made, **options)
    return TruncatedAllowance(private, LinearGradientMean, sampler, budget=budget, steps=steps)


def test_every_step_is_within_theorem_4_however_fast_the_noise_falls() -> None:
    """The conditions written out; the growth of item 20 breaks the last of them without a cap."""
    epsilon, delta, m, s = 0.5, 1e-6, 4000, 200
    q, L = s / m, math.log(1 / delta)
    rho_total = epsilon + 2 * L - 2 * math.sqrt(L * (epsilon + L))  # eq. (3), fine in double precision
    omega_total = math.sqrt(L / rho_total) + 1
    allowance = truncated(Budget(epsilon, delta), FixedSize(size=m, batch_size=s), 200)
    used = fall(allowance, math.sqrt(1.3))
    assert 3 < len(used) < 200
    spent = 0.0
    for z in used:
        rho_s = 2 / z**2  # Theorem 1: sensitivity 2 over noise z
        assert rho_s <= 0.1
        assert math.log(1 / q) >= 3 * rho_s * (2 + math.log2(1 / rho_s))
        assert math.log(1 / q) / (4 * rho_s) >= omega_total * (1 - 1e-9)
        spent += 13 * q**2 * rho_s
    assert 0.5 * rho_total < spent <= rho_total * (1 + 1e-9)
    assert used[-1] < used[0] / 2, "the noise was meant to fall until a condition holds it"


@pytest.mark.parametrize(
    ("sampler", "steps", "adjacency", "message"),
    [
        (FixedSize(size=1000, batch_size=101), 500, "replace-one", "q=0.101 breaks Theorem 4"),
        (FixedSize(size=4000, batch_size=40), 100, "replace-one", "use at least 169"),
        (Poisson(size=4000, batch_size=40), 500, "replace-one", "use adjacency='replace-one' and sampling='fixed'"),
        (Poisson(size=4000, batch_size=40), 500, "add-remove", "use adjacency='replace-one' and sampling='fixed'"),
    ],
)
def test_tcdp_refuses_what_theorem_4_does_not_cover(sampler: Sampler, steps: int, adjacency: str, message: str) -> None:
    with pytest.raises(UnsupportedAccounting, match=message):
        truncated(Budget(0.5, 1e-6), sampler, steps, adjacency=adjacency)
