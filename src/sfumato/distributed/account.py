"""The ledger as several processes see it: the first one keeps it, the others hear what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar, cast

from sfumato.privacy.ledger import Account
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.ledger_view import AccountView, Quote
from sfumato.privacy.mechanisms import Mechanism
from sfumato.privacy.statement import Statement

T = TypeVar("T")


class Agreement(Protocol):
    """What is needed of the processes."""

    def first(self, compute: Callable[[], T]) -> T:
        """What the first process computes, for all; its error is raised by all."""

    def only_first(self, compute: Callable[[], T]) -> T | None:
        """What the first process computes, for itself alone; its error is raised by all."""

    def number(self, compute: Callable[[], int]) -> int:
        """The first process's whole number (not negative), for all; its error is raised by all."""


class SharedAccount:
    """An `Account` of all processes; `kept` is the real one, in the first process."""

    def __init__(self, processes: Agreement, kept: Account | None) -> None:
        self._processes, self._kept = processes, kept
        self.name, self.unit, self.adjacency, self.budget, self.filter = processes.first(
            lambda: (self._own.name, self._own.unit, self._own.adjacency, self._own.budget, self._own.filter)
        )

    @property
    def _own(self) -> Account:
        assert self._kept is not None, "only the first process keeps the account"
        return self._kept

    def plan(self, mechanisms: Sequence[Mechanism], **options: Any) -> SharedPlan:
        return self._shared(lambda: self._own.plan(mechanisms, **options))

    def charge(self, mechanism: Mechanism, **options: Any) -> SharedPlan:
        return self._shared(lambda: self._own.charge(mechanism, **options))

    def resume(self, plan: int | str, **options: Any) -> SharedPlan:
        return self._shared(lambda: self._own.resume(plan, **options))

    def _shared(self, made: Callable[[], Plan]) -> SharedPlan:
        return SharedPlan(self._processes, self._processes.only_first(made))

    def stamp(self, kind: str, text: str) -> None:
        self._processes.only_first(lambda: self._own.stamp(kind, text))

    def statement(self) -> Statement:
        return self._processes.first(lambda: self._own.statement())

    def head(self) -> str:
        """Known to the first process only, which writes the checkpoint."""
        return "" if self._kept is None else self._kept.head()

    def check_head(self, head: str) -> None:
        self._processes.only_first(lambda: self._own.check_head(head))

    def epsilon_spent(self) -> float:
        return self._processes.first(lambda: self._own.epsilon_spent())

    def left(self) -> float:
        return self._processes.first(lambda: self._own.left())

    def view(self) -> AccountView:
        return self._processes.first(lambda: self._own.view())

    def quote(self, mechanisms: Sequence[Mechanism], **options: Any) -> Quote:
        return self._processes.first(lambda: self._own.quote(mechanisms, **options))


class SharedPlan:
    """A `Plan` of all processes: all take an answer together.

    To pause or close it the first process needs no other, which may have died.
    """

    def __init__(self, processes: Agreement, kept: Plan | None) -> None:
        self._processes, self._kept = processes, kept
        self.id, self.lost, self.mechanisms, self._taken, self._planned = processes.first(self._facts)

    def _facts(self) -> tuple[int, int | None, tuple[Mechanism, ...], dict[str, int], dict[str, int]]:
        plan = self._kept
        assert plan is not None, "only the first process holds the plan"
        taken = {m.question: plan.taken_of(m.question) for m in plan.mechanisms}
        return plan.id, plan.lost, plan.mechanisms, taken, {q: n + plan.remaining(q) for q, n in taken.items()}

    @property
    def taken(self) -> int:
        return sum(self._taken.values())

    def taken_of(self, question: str) -> int:
        return self._taken[question]

    def remaining(self, question: str | None = None) -> int:
        return sum(self._planned[q] - self._taken[q] for q in (self._taken if question is None else [question]))

    def take(self, question: str) -> Mechanism:
        taken = self._processes.number(lambda: self.mechanisms.index(cast(Plan, self._kept).take(question)))
        self._taken[question] += 1
        return self.mechanisms[taken]

    def epsilon_after(self, answers: int) -> float:
        """Known to the first process only: it is for progress bars."""
        return math.nan if self._kept is None else self._kept.epsilon_after(answers)

    def settle(self) -> None:
        if self._kept is not None:
            self._kept.settle()

    def pause(self) -> None:
        if self._kept is not None:
            self._kept.pause()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    @contextmanager
    def kept_open(self) -> Iterator[Self]:
        if self._kept is None:
            yield self
        else:
            with self._kept.kept_open():
                yield self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._kept is not None:
            self._kept.__exit__(*error)
