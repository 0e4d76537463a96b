"""What an account's rows say: the balance, the statement, who spent what, and what a plan would cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sfumato.errors import LedgerError, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, SumFilter, Vector
from sfumato.privacy.ledger_plan import planned_answers
from sfumato.privacy.ledger_queue import is_alive
from sfumato.privacy.mechanisms import Mechanism
from sfumato.privacy.spender import Spender
from sfumato.privacy.statement import Asked, Statement

if TYPE_CHECKING:
    from sfumato.privacy.ledger_account import Account
    from sfumato.privacy.ledger_store import Row, Store, Transaction


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """One reservation. `epsilon` is its share of the budget, for people: the promise is that of the statement."""

    plan: int
    made_by: Spender | None
    held_by: Spender | None
    open: bool
    epsilon: float
    questions: dict[str, tuple[int, int]]
    """Question -> answers counted, answers planned."""
    note: str
    resume_key: str | None
    created: str
    updated: str


@dataclass(frozen=True, kw_only=True)
class WaitView:
    """One reservation that waits; `asks` is epsilon by the filter, None where it has no accountant."""

    place: int
    made_by: Spender | None
    asks: float | None
    questions: dict[str, int]
    note: str
    created: str


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one person reserved, by the names in the records; `epsilon` is about their share of the budget."""

    user: str
    database_user: str | None
    plans: int
    answers: int
    epsilon: float
    last: str


@dataclass(frozen=True, kw_only=True)
class AccountView:
    """An account at one moment."""

    dataset: str
    unit: str
    adjacency: str
    budget: Budget
    spent: float
    left: float
    sealed: bool
    plans: tuple[PlanView, ...]
    waiting: tuple[WaitView, ...]
    warnings: tuple[str, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """Who reserved how much, most first; a plan is its maker's, whoever holds it now."""
        mine: dict[tuple[str, str | None], list[PlanView]] = {}
        for plan in self.plans:
            by = plan.made_by
            mine.setdefault(("unknown", None) if by is None else (by.user, by.database_user), []).append(plan)
        found = [
            Share(
                user=user,
                database_user=database_user,
                plans=len(plans),
                answers=sum(counted for plan in plans for counted, _ in plan.questions.values()),
                epsilon=sum(plan.epsilon for plan in plans),
                last=max(plan.updated for plan in plans),
            )
            for (user, database_user), plans in mine.items()
        ]
        return tuple(sorted(found, key=lambda share: -share.epsilon))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for machines."""
        return {**asdict(self), "shares": [asdict(share) for share in self.shares]}


@dataclass(frozen=True, kw_only=True)
class Quote:
    """What a plan would cost: as one composition by itself, and as its share of the account's budget now."""

    alone: float
    accountant: str
    share: float | None
    first: bool
    """Whether nothing was asked so far, so that `alone` is what it costs here."""
    fits: bool
    left: float
    """Of the budget, after it; None of it is reserved."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The rows of one account at one moment."""

    account: Row
    plans: list[Row]
    stamps: list[Row]
    waiting: list[Row]

    def _asked(self) -> list[Row]:
        return [row for row in self.plans if was_asked(row)]

    def balance(self, filter: Filter, budget: Budget) -> tuple[float, float]:
        """Spent and left, as so much of the budget's epsilon."""
        asked = self._asked()
        by_filter = min(filter.spent(json.loads(self.account["total"]), budget), budget.epsilon)
        left = 0.0 if self.account["sealed_by"] is not None else budget.epsilon - by_filter
        if len(asked) == 1 and asked[0]["composition"] == "planned":
            return asked[0]["epsilon"], left
        return by_filter, left

    def statement(self, account: Account, *, durable: bool) -> Statement:
        asked = self._asked()
        planned = len(asked) == 1 and asked[0]["composition"] == "planned"
        if not asked:
            epsilon, accountant, composition = 0.0, "none", "nothing was asked"
        elif planned:
            epsilon, accountant = asked[0]["epsilon"], asked[0]["accountant"]
            composition = f"planned, {accountant}"
        else:  # a filter proves the budget, not what was used of it
            epsilon, accountant, composition = account.budget.epsilon, "dp-accounting", account.filter.describe()
        lines = []
        for row in self.plans:
            mechanisms = mechanisms_of(row)
            used = split(mechanisms, json.loads(row["marks"]))
            lines += [
                Asked(
                    plan=row["id"],
                    resume_key=row["resume_key"],
                    open=row["open"],
                    mechanism=mechanism,
                    answers=answers,
                    note=row["note"],
                    created=row["created"],
                )
                for mechanism, answers in zip(mechanisms, used, strict=True)
            ]
        return Statement(
            dataset=account.name,
            unit=account.unit,
            adjacency=account.adjacency,
            budget=account.budget,
            epsilon=epsilon,
            left=self.balance(account.filter, account.budget)[1],
            accountant=accountant,
            composition=composition,
            asked=tuple(lines),
            stamps=tuple((s["kind"], s["text"]) for s in self.stamps),
            durable=durable,
            created=self.account["created"],
            updated=max([self.account["updated"], *(row["updated"] for row in self.plans)]),
        )

    def view(self, account: Account) -> AccountView:
        spent, left = self.balance(account.filter, account.budget)
        alone = len(self._asked()) == 1
        plans = []
        for row in self.plans:
            marks, planned = json.loads(row["marks"]), planned_answers(mechanisms_of(row))
            counted = account.filter.spent(json.loads(row["counted"]), account.budget)
            # As one composition, where that is its price: it sealed the account, or nothing else was asked.
            whole = row["epsilon"] if was_asked(row) and (alone or row["price"] is None) else None
            plans.append(
                PlanView(
                    plan=row["id"],
                    made_by=Spender.from_json(row["made_by"]),
                    held_by=Spender.from_json(row["held_by"]),
                    open=bool(row["open"]),
                    epsilon=counted if whole is None else whole,
                    questions={question: (marks[question], times) for question, times in planned.items()},
                    note=row["note"],
                    resume_key=row["resume_key"],
                    created=row["created"],
                    updated=row["updated"],
                )
            )
        waiting = [
            WaitView(
                place=place,
                made_by=Spender.from_json(row["made_by"]),
                asks=row["asks"],
                questions=planned_answers(mechanisms_of(row)),
                note=row["note"],
                created=row["created"],
            )
            for place, row in enumerate(self.waiting, start=1)
        ]
        return AccountView(
            dataset=account.name,
            unit=account.unit,
            adjacency=str(account.adjacency),
            budget=account.budget,
            spent=spent,
            left=left,
            sealed=self.account["sealed_by"] is not None,
            plans=tuple(plans),
            waiting=tuple(waiting),
            warnings=self.statement(account, durable=True).warnings,
        )

    def quote(self, account: Account, mechanisms: Sequence[Mechanism], *, delta_share: float | None) -> Quote:
        budget, filter = account.budget, account.filter
        alone = accounting.epsilon(mechanisms, delta=budget.delta, adjacency=account.adjacency)
        first = not self._asked()
        _, left = self.balance(filter, budget)
        if first and isinstance(filter, SumFilter) and delta_share is None:
            delta_share = budget.delta
        share, fits = None, False
        try:
            price = filter.price(mechanisms, adjacency=account.adjacency, budget=budget, delta_share=delta_share)
        except UnsupportedAccounting:
            pass
        else:
            planned = [m.times for m in mechanisms]
            counted = filter.counted(price, planned, planned)
            share = filter.spent(counted, budget)
            total = [a + b for a, b in zip(json.loads(self.account["total"]), counted, strict=True)]
            fits = self.account["sealed_by"] is None and filter.fits(total, budget)
            after = max(0.0, budget.epsilon - filter.spent(total, budget)) if fits else left
        if not fits:
            fits = first and alone.epsilon <= budget.epsilon
            after = 0.0 if fits else left  # it would seal the account
        return Quote(
            alone=alone.epsilon,
            accountant=alone.accountant,
            share=share,
            first=first,
            fits=fits and not self.waiting,
            left=after,
        )


def read(store: Store, account: int, name: str) -> Facts:
    def work(tx: Transaction) -> Facts | None:
        row = tx.account(name)
        alive = [waiting for waiting in tx.waiting(account) if is_alive(waiting, tx.clock)]
        found = tx.plans(account), tx.stamps(account)
        return None if row is None else Facts(account=row, plans=found[0], stamps=found[1], waiting=alive)

    facts = store.read(work)
    if facts is None:
        raise LedgerError(f"Account {name!r} is gone: the ledger was replaced while it was open; open it again.")
    return facts


def mechanisms_of(row: Row) -> list[Mechanism]:
    return [Mechanism.from_json(m) for m in json.loads(row["mechanisms"])]


def was_asked(plan: Row) -> bool:
    """Whether answers of the plan may have left the door, or still can."""
    return bool(plan["open"]) or any(json.loads(plan["marks"]).values())


def split(mechanisms: Sequence[Mechanism], taken: Mapping[str, int]) -> list[int]:
    """Answers per mechanism: those of one question are used in declared order."""
    rest, used = dict(taken), []
    for mechanism in mechanisms:
        used.append(min(rest[mechanism.question], mechanism.times))
        rest[mechanism.question] -= used[-1]
    return used


def least(plan: Row, filter: Filter) -> Vector:
    """What the plan would count for if it ended now."""
    if not plan["open"] or plan["price"] is None:
        counted: Vector = json.loads(plan["counted"])
        return counted
    mechanisms = mechanisms_of(plan)
    used = split(mechanisms, json.loads(plan["marks"]))
    return filter.counted(json.loads(plan["price"]), [m.times for m in mechanisms], used)
