"""Waiting for budget: first come first served, nobody overspends, starves, or is held up by the dead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy import ledger_queue
from sfumato.privacy.filters import SumFilter
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.ledger_plan import Plan
from tests.privacy.test_ledger import ADD_REMOVE, BUDGET, ask, counted, fork, open_account, wait

HALF = ask(60.0, 100)  # more than half of what the filter holds
SMALL = ask(1000.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_queue, "POLL_SECONDS", 0.05)


@pytest.fixture
def account(where: Path | str) -> Account:
    return open_account(where)


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Plan]]]:
    """Runs a reservation in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def until_waiting(account: Account, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(account.view().waiting) != number:
        assert time.monotonic() < deadline, account.view().waiting
        time.sleep(0.02)


def test_a_plan_waits_for_what_another_gives_back(account: Account, beside: Callable[..., Future[Plan]]) -> None:
    first = account.plan([HALF])
    first.take("sum")
    second = beside(account.plan, [HALF], wait=30, note="night run")
    until_waiting(account, 1)
    (waits,) = account.view().waiting
    assert (waits.place, waits.note, waits.questions) == (1, "night run", {"sum": 100})
    price = account.filter.price([HALF], adjacency=ADD_REMOVE, budget=BUDGET, delta_share=None)
    assert waits.asks == account.filter.spent(price[0], BUDGET) > BUDGET.epsilon / 2
    assert waits.made_by is not None
    assert waits.made_by.process == os.getpid()
    assert not second.done()
    first.close()
    assert second.result(20).remaining() == 100
    assert account.view().waiting == ()
    with pytest.raises(BudgetExceeded):
        account.plan([HALF])


def test_nobody_passes_whoever_came_first(account: Account, beside: Callable[..., Future[Plan]]) -> None:
    first = account.plan([HALF])
    first.take("sum")
    second = beside(account.plan, [HALF], wait=30)
    until_waiting(account, 1)
    for reserve in (lambda: account.charge(SMALL), lambda: account.plan([SMALL])):  # there would be room for it
        with pytest.raises(BudgetExceeded, match="1 earlier reservation waits"):
            reserve()
    third = beside(account.charge, SMALL, wait=30)
    until_waiting(account, 2)
    first.take("sum")  # what is reserved can be used, of course
    first.close()
    assert second.result(20).id < third.result(20).id
    account.charge(SMALL)


def test_what_cannot_be_given_back_is_not_waited_for(account: Account) -> None:
    plan = account.plan([HALF])
    while plan.taken < 90:
        plan.take("sum")
    start = time.monotonic()
    with pytest.raises(BudgetExceeded, match="left at"):
        account.plan([HALF], wait=1000)
    assert time.monotonic() - start < 100
    assert account.view().waiting == ()


def test_a_sealed_account_is_waited_for_only_while_nothing_was_asked(where: Path | str) -> None:
    account = open_account(where)
    whole = account.plan([ask(38.5, 100)])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(open_account(where).plan, [ask(38.5, 100)], wait=30)
        until_waiting(account, 1)
        whole.close()
        plan = other.result(20)
    assert account.statement().composition.startswith("planned")  # it became the first
    plan.take("sum")
    with pytest.raises(BudgetExceeded, match="is spent"):
        account.plan([SMALL], wait=1000)


def test_waiting_ends_when_hope_ends(account: Account, beside: Callable[..., Future[Plan]]) -> None:
    plan = account.plan([HALF])
    plan.take("sum")
    other = beside(account.plan, [HALF], wait=1000)
    until_waiting(account, 1)
    while plan.taken < 90:
        plan.take("sum")
    with pytest.raises(BudgetExceeded, match=r"After 1000 s of waiting"):
        other.result(20)
    assert account.view().waiting == ()


def test_waiting_ends_at_its_time_and_leaves_the_queue(account: Account) -> None:
    account.plan([HALF]).take("sum")
    before = counted(account)
    with pytest.raises(BudgetExceeded, match=r"After 0.2 s of waiting: This asks"):
        account.plan([HALF], wait=0.2)
    assert account.view().waiting == ()
    assert counted(account) == before


def test_an_interrupted_job_leaves_the_queue(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.plan([HALF]).take("sum")

    def interrupt(turn: ledger_queue.Turn) -> None:
        assert len(account.view().waiting) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger_queue.Turn, "pause", interrupt)
    with pytest.raises(KeyboardInterrupt):
        account.plan([HALF], wait=30)
    assert account.view().waiting == ()


def test_a_job_that_died_while_waiting_holds_nobody_up(where: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = open_account(where)
    account.plan([HALF]).take("sum")
    pid = fork(lambda: open_account(where).plan([HALF], wait=1000) and None)
    until_waiting(account, 1)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    with pytest.raises(BudgetExceeded, match="1 earlier reservation waits"):
        account.charge(SMALL)
    monkeypatch.setattr(ledger_queue, "LEASE_SECONDS", 0.3)
    time.sleep(0.4)
    assert account.view().waiting == ()
    account.charge(SMALL)
    assert account._store.read(lambda tx: tx.waiting(account._id)) == []


def test_one_who_lost_its_place_takes_another(account: Account, beside: Callable[..., Future[Plan]]) -> None:
    first = account.plan([HALF])
    first.take("sum")
    second = beside(account.plan, [HALF], wait=30)
    until_waiting(account, 1)
    account._store.write(lambda tx: tx.leave(tx.waiting(account._id)[0]["token"]))  # as if it had slept for too long
    until_waiting(account, 1)
    first.close()
    second.result(20)


def test_the_ledger_may_be_opened_patiently(where: Path | str, beside: Callable[..., Future[Plan]]) -> None:
    account = open_account(where)
    patient = Ledger(where, wait=30).account("clinic")
    first = account.plan([HALF])
    first.take("sum")
    second = beside(patient.plan, [HALF])
    until_waiting(account, 1)
    third = beside(patient.charge, SMALL)
    until_waiting(account, 2)
    with pytest.raises(BudgetExceeded, match="2 earlier reservations wait"):
        patient.charge(SMALL, wait=0)
    first.close()
    assert second.result(20).id < third.result(20).id


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_wait_must_be_a_time(account: Account, seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="wait="):
        account.plan([SMALL], wait=seconds)


def test_many_wait_and_each_gets_its_turn(where: Path | str) -> None:
    account = open_account(where)
    held = account.plan([HALF])
    held.take("sum")
    order: list[int] = []
    lock = threading.Lock()

    def job(number: int) -> None:
        with open_account(where).plan([HALF], wait=60) as plan, lock:
            order.append(number)
            assert plan.taken == 0

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=job, args=(number,)))
        threads[-1].start()
        until_waiting(account, number + 1)
    held.close()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_a_sum_filter_can_be_waited_for_too(where: Path | str, beside: Callable[..., Future[Plan]]) -> None:
    account = Ledger(where).account("sums", unit="user", adjacency=ADD_REMOVE, budget=BUDGET, filter=SumFilter())
    first = account.plan([ask(7.0)], delta_share=5e-6)
    second = beside(account.plan, [ask(5.0)], delta_share=5e-6, wait=30)
    until_waiting(account, 1)
    first.close()
    second.result(20).take("sum")
    with pytest.raises(BudgetExceeded, match="left at"):  # begun, it counts in full
        account.plan([ask(7.0)], delta_share=5e-6, wait=30)
