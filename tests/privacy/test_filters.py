"""The filters refuse what the budget does not cover, admit what it does, and are fixed before the first answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sfumato.data.samplers import FullBatch, Poisson
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, RenyiFilter, SumFilter
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism, SealedGaussian

ADD_REMOVE = Adjacency.ADD_REMOVE
BUDGET = Budget(epsilon=1.0, delta=1e-5)


def gaussian(scale: float, times: int = 1) -> Mechanism:
    return Mechanism(question="sum", noise=Gaussian(scale), sampler=FullBatch(size=1000), times=times)


def account(filter: Filter | None = None) -> Account:
    return Ledger.in_memory().account("d", unit="user", adjacency=ADD_REMOVE, budget=BUDGET, filter=filter)


@pytest.mark.parametrize("epsilon", [0, -1, math.inf, math.nan])
def test_budget_needs_a_positive_epsilon(epsilon: float) -> None:
    with pytest.raises(InvalidArgument, match="epsilon="):
        Budget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan])
def test_budget_needs_a_delta_between_0_and_1(delta: float) -> None:
    with pytest.raises(InvalidArgument, match="delta="):
        Budget(1.0, delta)


@pytest.mark.parametrize("orders", [(), (1.0,), (math.inf,), tuple(range(2, 13))])
def test_renyi_orders_are_few_and_above_one(orders: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="orders="):
        RenyiFilter(orders=orders)


@pytest.mark.parametrize("filter", [SumFilter(), RenyiFilter(orders=(2.0, 8.5))])
def test_filters_survive_storage(filter: Filter) -> None:
    assert Filter.from_json(filter.to_json()) == filter


@pytest.mark.parametrize("epsilon", [0.001, 0.01, 0.1, 1, 10, 100, 10_000])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_the_default_grid_is_usable_at_every_budget(epsilon: float, delta: float) -> None:
    budget = Budget(epsilon, delta)
    filter = RenyiFilter.around(budget)
    assert len(set(filter.orders)) == 8
    assert filter.fits([1e-12 * epsilon] * 8, budget)


def test_the_default_grid_asks_for_little_more_noise_than_hindsight() -> None:
    # One question at the least noise that a single order, known beforehand and with all of delta, would allow.
    orders = np.linspace(2, 80, 400)
    for sampler in (FullBatch(size=10**5), Poisson(size=10**5, batch_size=1000)):
        for scale in np.geomspace(0.8, 8, 60):
            ask = Mechanism(
                question="q", noise=Gaussian(scale), sampler=sampler, times=1 if sampler.expected > 1e4 else 300
            )
            rdp = accounting.renyi([ask], orders.tolist(), ADD_REMOVE)
            best = min(accounting.renyi_to_epsilon(r, a, BUDGET.delta) for r, a in zip(rdp, orders, strict=True))
            if best <= BUDGET.epsilon:
                break
        wider = Mechanism(question="q", noise=Gaussian(scale * 1.15), sampler=sampler, times=ask.times)
        account().charge(wider)


def test_one_order_with_budget_left_is_enough_and_none_is_refused() -> None:
    filter = RenyiFilter(orders=(4.0, 16.0))
    limits = [accounting.renyi_budget(BUDGET.epsilon, BUDGET.delta / 2, order) for order in filter.orders]
    assert limits[0] < 0 < limits[1]
    assert filter.fits([math.inf, limits[1]], BUDGET)
    assert not filter.fits([-1.0, limits[1] * 1.001], BUDGET), "an order without a positive limit can never admit"
    # The union bound: each order has delta / 2, not delta.
    full = accounting.renyi_budget(BUDGET.epsilon, BUDGET.delta, 16.0)
    assert limits[1] < full
    assert not filter.fits([math.inf, full], BUDGET)


def test_charges_stop_exactly_where_the_best_order_runs_out() -> None:
    ledger_account = account()
    filter = ledger_account.filter
    assert isinstance(filter, RenyiFilter)
    once = filter.price([gaussian(40.0)], adjacency=ADD_REMOVE, budget=BUDGET, delta_share=None)[0]
    limits = [accounting.renyi_budget(BUDGET.epsilon, BUDGET.delta / 8, order) for order in filter.orders]
    expected = max(int(limit / cost * (1 + 1e-12)) for cost, limit in zip(once, limits, strict=True))
    assert expected > 20
    for _ in range(expected):
        ledger_account.charge(gaussian(40.0))
    with pytest.raises(BudgetExceeded, match="raise the noise"):
        ledger_account.charge(gaussian(40.0))


def test_the_filter_is_dearer_than_a_plan_and_not_absurdly() -> None:
    times = 100
    plan_noise = 40.8  # epsilon = 1 by PLD for 100 answers is at about 38
    assert accounting.epsilon([gaussian(plan_noise, times)], delta=1e-5, adjacency=ADD_REMOVE).epsilon <= 1
    with pytest.raises(BudgetExceeded):
        account().charge(gaussian(plan_noise, times))
    account().charge(gaussian(plan_noise * 1.15, times))


def test_unused_answers_go_back_to_the_renyi_filter_to_the_last_digit() -> None:
    ledger_account = account()
    whole = ledger_account.charge(gaussian(44.0, 90))
    with pytest.raises(BudgetExceeded):
        ledger_account.charge(gaussian(44.0, 90))
    for _ in range(10):
        whole.take("sum")
    whole.close()
    ledger_account.charge(gaussian(44.0, 80))
    with pytest.raises(BudgetExceeded):
        ledger_account.charge(gaussian(44.0, 20))


def test_giving_back_an_infinite_cost_restores_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no divergence exists at an order its cost is infinite; inf - inf would make that order useless or free.
    ledger_account = account(RenyiFilter(orders=(20.0, 40.0)))
    ledger_account.charge(gaussian(100.0)).take("sum")
    before = ledger_account._store.read(lambda tx: tx.totals(ledger_account._id))
    monkeypatch.setattr(accounting, "renyi", lambda *_: np.array([1e-3, math.inf]))
    ledger_account.charge(gaussian(5.0)).close()
    row = ledger_account._store.read(lambda tx: tx.account("d"))
    assert row is not None
    assert [row["total"]] == before


def test_sums_add_up_and_need_a_share_of_delta() -> None:
    ledger_account = account(SumFilter())
    with pytest.raises(InvalidArgument, match="delta_share"):
        ledger_account.charge(gaussian(20.0))
    with pytest.raises(InvalidArgument, match="delta_share"):
        ledger_account.charge(gaussian(20.0), delta_share=2e-5)
    cost = accounting.epsilon([gaussian(20.0)], delta=1e-6, adjacency=ADD_REMOVE).epsilon
    for _ in range(int(1 / cost)):
        ledger_account.charge(gaussian(20.0), delta_share=1e-6)
    with pytest.raises(BudgetExceeded, match="sums of epsilon"):
        ledger_account.charge(gaussian(20.0), delta_share=1e-6)
    assert ledger_account.epsilon_spent() == pytest.approx(int(1 / cost) * cost)


def test_sums_run_out_of_delta_too() -> None:
    ledger_account = account(SumFilter())
    ledger_account.charge(gaussian(200.0), delta_share=9e-6)
    with pytest.raises(BudgetExceeded):
        ledger_account.charge(gaussian(200.0), delta_share=2e-6)
    ledger_account.charge(gaussian(200.0), delta_share=1e-6)


def test_sums_give_nothing_back_once_an_answer_was_taken() -> None:
    ledger_account = account(SumFilter())
    plan = ledger_account.charge(gaussian(50.0, 50), delta_share=5e-6)
    plan.take("sum")
    before = ledger_account.left()
    plan.close()
    assert ledger_account.left() == before < 1


def test_renyi_filter_takes_no_delta_share() -> None:
    with pytest.raises(InvalidArgument, match="delta_share"):
        account().charge(gaussian(20.0), delta_share=1e-6)


# ------------------------------------------------------------------------------------------------ stated costs


def stated(epsilon: float, delta: float) -> Mechanism:
    noise = SealedGaussian(5.0, epsilon=epsilon, delta=delta, adjacency=ADD_REMOVE)
    return Mechanism(question="minimum", noise=noise, sampler=FullBatch(size=1000), replace_factor=0.0)


def test_the_renyi_filter_refuses_what_only_states_epsilon_and_delta() -> None:
    ledger_account = account()
    with pytest.raises(UnsupportedAccounting, match="declare it in the first plan of its account") as caught:
        ledger_account.charge(stated(0.1, 1e-6))
    assert str(caught.value).count(".") == 1, "one sentence"
    assert ledger_account.left() == BUDGET.epsilon


def test_as_a_first_plan_it_takes_the_whole_account_under_the_renyi_filter() -> None:
    ledger_account = account()
    plan = ledger_account.plan([stated(0.3, 1e-6)])
    assert ledger_account.epsilon_spent() <= 0.3
    plan.take("minimum")
    plan.close()
    with pytest.raises(BudgetExceeded, match="only as one composition"):
        ledger_account.charge(gaussian(1e4))
    with pytest.raises(BudgetExceeded):
        account().plan([stated(1.1, 1e-6)])
    with pytest.raises(BudgetExceeded):
        account().plan([stated(0.1, 2e-5)])


def test_sums_take_what_is_stated() -> None:
    ledger_account = account(SumFilter())
    for _ in range(3):
        ledger_account.charge(stated(0.3, 3e-6), delta_share=3e-6)
    assert ledger_account.epsilon_spent() == pytest.approx(0.9)
    with pytest.raises(BudgetExceeded, match="sums of epsilon"):
        ledger_account.charge(stated(0.05, 3e-6), delta_share=3e-6)
    with pytest.raises(BudgetExceeded, match="epsilon=inf"):
        ledger_account.charge(stated(0.05, 3e-6), delta_share=1e-6)
    ledger_account.charge(stated(0.05, 1e-6), delta_share=1e-6)
