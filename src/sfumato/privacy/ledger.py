"""The ledger: what was asked of each private dataset, what it may still cost, and a refusal when that is too much.

A ledger holds *accounts*, one per declared dataset name, each with one unit, one adjacency, one budget and one filter,
all fixed before the first answer. An account grants *plans*: durable reservations, made before any answer, of a number
of answers of each kind. Whoever holds a plan takes its answers one by one; the ledger is written ahead, in slabs.

*Formal guarantee.* Everything that is asked of an account, together, is (epsilon, delta)-DP with its budget's numbers,
provided every answer is taken here before its noise is drawn. The first plan of an account is chosen before any
answer, so its cost as one composition (by PLD, say) is a proof for it alone. Before any answer it is also settled
whether the account's filter has room for the whole of it:
(a) it has: then everything that is ever admitted, first plan included, is within the filter, whose theorem covers it;
(b) it has not: then the account is *sealed*, nothing else is ever admitted, and the first plan's own bound covers it.
Which of the two holds does not depend on answers. That is why a sealed account stays sealed when its plan ends early:
if the rest were given back, an answer could decide which bound applies, and the two deltas would add up.

What is written down was declared or follows from what was: of an account its name, unit, adjacency, budget, filter and
running total; of a plan its questions' names with their noise (its scale, and where a proof states them epsilon, delta
and adjacency), samplers with their declared sizes, planned and counted answers, what they cost, note and resume key;
stamps; ids and times. No row, no answer and no sampled number: no private facts, unless a caller notes them down.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError, SfumatoError, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, RenyiFilter, SumFilter, Vector
from sfumato.privacy.ledger_plan import Plan, planned_answers
from sfumato.privacy.mechanisms import Adjacency, Mechanism
from sfumato.privacy.statement import Asked, Statement

if TYPE_CHECKING:
    from sfumato.privacy.ledger_store import Row, Store

UNITS = ("example", "user")


class Ledger:
    """A database of accounts: a file (SQLite), any SQLAlchemy URL (PostgreSQL, say), or None for a throw-away one.

    The file must lie on a disk with working locks. `timeout` is how long to wait, in seconds, for another process.

    >>> from sfumato.privacy.mechanisms import FullBatch, Gaussian
    >>> mean = Mechanism(question="mean", noise=Gaussian(5.0), sampler=FullBatch(size=900), times=3)
    >>> ledger = Ledger.in_memory()
    >>> account = ledger.account("clinic", unit="user", adjacency=Adjacency.ADD_REMOVE, budget=Budget(2.0, 1e-5))
    >>> with account.plan([mean]) as plan:
    ...     plan.take("mean").noise
    Gaussian(scale=5.0)
    """

    def __init__(self, where: str | os.PathLike[str] | None, *, timeout: float = 30.0) -> None:
        from sfumato.privacy.ledger_store import Store  # imports SQLAlchemy, which takes a third of a second

        self._store, self._where, self._timeout = Store(where, timeout=timeout), where, timeout

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy opens the same file or database; what is in memory alone cannot be copied, or spent twice."""
        if self._where is None:
            raise SfumatoError("A ledger in memory cannot be copied or pickled: give Ledger a path.")
        where = os.fspath(self._where)
        absolute = where if "://" in where else os.path.abspath(where)
        return partial(Ledger, timeout=self._timeout), (absolute,)

    @classmethod
    def in_memory(cls) -> Self:
        """A ledger that is forgotten when the process ends; its statements say so."""
        return cls(None)

    def account(
        self,
        name: str,
        *,
        unit: str | None = None,
        adjacency: Adjacency | None = None,
        budget: Budget | None = None,
        filter: Filter | None = None,
    ) -> Account:
        """Opens the account of a dataset, by its declared name, or makes it; None means "as it is stored".

        A new account needs unit, adjacency and budget; its filter is `RenyiFilter.around(budget)` unless given.
        """
        if not name or len(name) > 200:
            raise InvalidArgument(f"name={name!r} must have 1 to 200 characters: declare a name for the dataset.")
        if unit is not None and unit not in UNITS:
            raise InvalidArgument(f"unit={unit!r} must be one of {', '.join(UNITS)}.")
        with self._store.transaction(write=False) as tx:
            row = tx.account(name)
        if row is None:
            if unit is None or adjacency is None or budget is None:
                raise InvalidArgument(
                    f"name={name!r} is new to this ledger: give unit, adjacency and budget, or check it."
                )
            made = filter or RenyiFilter.around(budget)
            with self._store.transaction() as tx:
                tx.lock_accounts()
                if tx.account(name) is None:
                    tx.add_account(
                        name=name,
                        unit=unit,
                        adjacency=str(adjacency),
                        epsilon=budget.epsilon,
                        delta=budget.delta,
                        filter=json.dumps(made.to_json()),
                        total=json.dumps(made.zero()),
                    )
                row = tx.account(name)
            assert row is not None
        account = Account(self._store, row)
        for what, asked, stored in (
            ("unit", unit, account.unit),
            ("adjacency", adjacency, account.adjacency),
            ("budget", budget, account.budget),
            ("filter", filter, account.filter),
        ):
            if asked is not None and asked != stored:
                raise LedgerError(
                    f"Account {name!r} was made with {what}={_show(stored)}, not {_show(asked)}: "
                    f"these are fixed before the first answer; leave {what} out to open the account as it is."
                )
        return account

    def account_names(self) -> list[str]:
        with self._store.transaction(write=False) as tx:
            return tx.account_names()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Account:
    """One private dataset, by its declared name. Made by `Ledger.account`."""

    def __init__(self, store: Store, row: Row) -> None:
        self._store = store
        self._id: int = row["id"]
        self.name: str = row["name"]
        self.unit: str = row["unit"]
        self.adjacency = Adjacency(row["adjacency"])
        self.budget = Budget(row["epsilon"], row["delta"])
        self.filter = Filter.from_json(json.loads(row["filter"]))
        self._known: tuple[float, tuple[float, float]] | None = None  # when, and the balance then

    def plan(
        self,
        mechanisms: Sequence[Mechanism],
        *,
        resume_key: str | None = None,
        note: str = "",
        delta_share: float | None = None,
    ) -> Plan:
        """One durable reservation of everything in `mechanisms`; or BudgetExceeded, and nothing is written.

        The first plan of an account is composed as a whole (by PLD where there is one); a plan made when something
        was already asked is composed with it by the filter. `delta_share` is SumFilter's; the first plan may leave it
        out and then takes all of delta. With a `resume_key` the plan is found again after a crash.
        """
        if not mechanisms:
            raise InvalidArgument("mechanisms=[] asks nothing: name at least one mechanism.")
        with self._store.transaction(write=False) as tx:
            first = not any(_was_asked(row) for row in tx.plans(self._id))
        if first and isinstance(self.filter, SumFilter) and delta_share is None:
            delta_share = self.budget.delta
        # All that is slow is computed before the lock is taken.
        cost = accounting.epsilon(mechanisms, delta=self.budget.delta, adjacency=self.adjacency) if first else None
        if cost is not None and cost.epsilon > self.budget.epsilon:
            raise BudgetExceeded(
                f"The plan costs epsilon={cost.epsilon:.4g} and the budget of account {self.name!r} is "
                f"epsilon={self.budget.epsilon:g} at delta={self.budget.delta:g}: raise the noise or lower times."
            )
        try:
            price = self.filter.price(mechanisms, adjacency=self.adjacency, budget=self.budget, delta_share=delta_share)
        except UnsupportedAccounting:
            if cost is None:
                raise
            price = None  # the filter cannot hold it: case (b) above
        return self._reserve(mechanisms, price=price, cost=cost, resume_key=resume_key, note=note, prepaid=False)

    def charge(self, mechanism: Mechanism, *, note: str = "", delta_share: float | None = None) -> Plan:
        """Reserves `mechanism.times` answers whose noise was chosen from earlier answers; composed by the filter.

        All of them are counted as used at once, so that taking them writes nothing; `close` gives back the rest.
        """
        price = self.filter.price([mechanism], adjacency=self.adjacency, budget=self.budget, delta_share=delta_share)
        return self._reserve([mechanism], price=price, cost=None, resume_key=None, note=note, prepaid=True)

    def _reserve(
        self,
        mechanisms: Sequence[Mechanism],
        *,
        price: list[Vector] | None,
        cost: accounting.Cost | None,
        resume_key: str | None,
        note: str,
        prepaid: bool,
    ) -> Plan:
        planned = [m.times for m in mechanisms]
        counted = self.filter.zero() if price is None else self.filter.counted(price, planned, planned)
        marks = planned_answers(mechanisms) if prepaid else dict.fromkeys(planned_answers(mechanisms), 0)
        owner = secrets.token_hex(16)
        self._known = None
        with self._store.transaction() as tx:  # check and write are one step: two processes cannot both fit
            account = tx.lock_account(self._id)
            if resume_key is not None and (old := tx.lock_plan(self._id, resume_key)) is not None:
                raise LedgerError(
                    f"resume_key={resume_key!r} belongs to plan {old['id']} of account {self.name!r}: "
                    "resume that plan, or choose another key."
                )
            # Where another plan came between, this one is no longer the first. (Where the last one went, it is
            # counted by the filter all the same, which is only careful.)
            if cost is not None and any(_was_asked(row) for row in tx.plans(self._id)):
                cost = None
            total = [a + b for a, b in zip(json.loads(account["total"]), counted, strict=True)]
            fits = price is not None and account["sealed_by"] is None and self.filter.fits(total, self.budget)
            if not fits and cost is None:
                self._refuse(account, counted if price is not None else None)
            plan = tx.add_plan(
                account_id=self._id,
                resume_key=resume_key,
                owner=owner,
                open=not prepaid,
                composition="filter" if cost is None else "planned",
                mechanisms=json.dumps([m.to_json() for m in mechanisms]),
                marks=json.dumps(marks),
                price=json.dumps(price) if fits else None,
                counted=json.dumps(counted if fits else self.filter.zero()),
                epsilon=None if cost is None else cost.epsilon,
                accountant=None if cost is None else cost.accountant,
                note=note,
            )
            if fits:
                tx.change_account(self._id, total=json.dumps(total))
            else:
                tx.change_account(self._id, sealed_by=plan)
        return Plan(
            self,
            plan,
            owner,
            mechanisms,
            taken=dict.fromkeys(marks, 0),
            marks=marks,
            epsilon=None if cost is None else cost.epsilon,
            prepaid=prepaid,
        )

    def _refuse(self, account: Row, counted: Vector | None) -> NoReturn:
        if counted is None:
            raise LedgerError(
                f"Another plan of account {self.name!r} came first, and its filter has no accountant for this one: "
                "declare both in one plan."
            )
        if account["sealed_by"] is not None:
            raise BudgetExceeded(
                f"Account {self.name!r} is spent: its first plan ({account['sealed_by']}) fits the budget only as "
                "one composition, so nothing can be added to it; next time declare everything in one plan, or less."
            )
        total = json.loads(account["total"])
        spent, alone = (self.filter.spent(t, self.budget) for t in (total, counted))
        raise BudgetExceeded(
            f"This asks for epsilon={alone:.4g} and account {self.name!r} has "
            f"epsilon={max(0.0, self.budget.epsilon - spent):.4g} of {self.budget.epsilon:g} left at "
            f"delta={self.budget.delta:g} ({self.filter.describe()}): raise the noise or ask less often."
        )

    def resume(self, plan: int | str, *, seen: int | Mapping[str, int] | None = None) -> Plan:
        """Takes over an open plan, by id or resume key; its former owner can reserve nothing more.

        `seen` is how many answers (per question, or of all) the checkpoint knows; the others that were counted are
        lost: they may have left the door, so they are never handed out again.
        """
        owner = secrets.token_hex(16)
        with self._store.transaction() as tx:
            tx.lock_account(self._id)
            row = tx.lock_plan(self._id, plan)
            if row is None:
                raise LedgerError(
                    f"Account {self.name!r} has no plan {plan!r}: look its id or resume_key up in the statement."
                )
            if not row["open"]:
                raise LedgerError(
                    f"Plan {plan!r} of account {self.name!r} is closed: make a new plan for what is left."
                )
            marks: dict[str, int] = json.loads(row["marks"])
            lost = _lost(marks, seen)
            tx.change_plan(row["id"], row["owner"], owner=owner)
        # Why two owners cannot spend one answer twice. An owner hands out answer n of a question only if n is at most
        # the mark it has itself committed (Plan._raise_mark). That commit and the one above exclude each other: either
        # it came first, and `marks`, read in the same transaction, contains it; or it comes later, finds another
        # owner and fails. So whatever the former owner still hands out, now or in an hour, is within `marks`; and
        # here the first answer handed out is number marks + 1.
        mechanisms = [Mechanism.from_json(m) for m in json.loads(row["mechanisms"])]
        return Plan(self, row["id"], owner, mechanisms, taken=marks, marks=marks, epsilon=row["epsilon"], lost=lost)

    def _count(self, plan: Plan, taken: Mapping[str, int], *, close: bool) -> None:
        """Writes the exact count of a plan that hands out no more answers, and gives back the rest if it ends."""
        self._known = None
        with self._store.transaction() as tx:
            account = tx.lock_account(self._id)
            if not close:
                tx.change_plan(plan.id, plan.owner, marks=json.dumps(taken))
                return
            row = tx.lock_plan(self._id, plan.id)
            counted = self.filter.zero()
            if row is not None and row["price"] is not None:
                planned = [m.times for m in plan.mechanisms]
                counted = self.filter.counted(json.loads(row["price"]), planned, _split(plan.mechanisms, taken))
            tx.change_plan(plan.id, plan.owner, marks=json.dumps(taken), counted=json.dumps(counted), open=False)
            # Added up afresh: subtracting from the total would lose small costs next to large ones, and under-count.
            total = [math.fsum(column) for column in zip(*map(json.loads, tx.totals(self._id)), strict=True)]
            # A plan of which no answer was taken was never asked: only then is the account as it was before.
            still = account["sealed_by"] != plan.id or any(taken.values())
            tx.change_account(self._id, total=json.dumps(total), sealed_by=account["sealed_by"] if still else None)

    def stamp(self, kind: str, text: str) -> None:
        """Writes a durable warning into every later statement; kind "not-private" makes it say NOT PRIVATE."""
        with self._store.transaction() as tx:
            tx.lock_account(self._id)
            tx.add_stamp(self._id, kind, text)

    def epsilon_spent(self) -> float:
        """A guide to what was reserved so far; read from the ledger at most once a second. The statement has the proof.

        For a single plan its epsilon; under a filter the used share of the budget, as so much of the budget's epsilon.
        """
        return self._balance()[0]

    def left(self) -> float:
        """How much epsilon a further question may use; 0 when the first plan took everything."""
        return self._balance()[1]

    def _balance(self) -> tuple[float, float]:
        now = time.monotonic()
        if self._known is None or now - self._known[0] > 1.0:
            account, plans, _ = self._read()
            self._known = (now, self._weigh(account, [row for row in plans if _was_asked(row)]))
        return self._known[1]

    def _read(self) -> tuple[Row, list[Row], list[Row]]:
        with self._store.transaction(write=False) as tx:
            account, plans, stamps = tx.account(self.name), tx.plans(self._id), tx.stamps(self._id)
        if account is None:
            raise LedgerError(
                f"Account {self.name!r} is gone: the ledger was replaced while it was open; open it again."
            )
        return account, plans, stamps

    def _weigh(self, account: Row, asked: Sequence[Row]) -> tuple[float, float]:
        by_filter = min(self.filter.spent(json.loads(account["total"]), self.budget), self.budget.epsilon)
        left = 0.0 if account["sealed_by"] is not None else self.budget.epsilon - by_filter
        if len(asked) == 1 and asked[0]["composition"] == "planned":
            return asked[0]["epsilon"], left
        return by_filter, left

    def statement(self) -> Statement:
        """The privacy statement of everything asked so far."""
        account, plans, stamps = self._read()
        asked = [row for row in plans if _was_asked(row)]
        planned = len(asked) == 1 and asked[0]["composition"] == "planned"
        if not asked:
            epsilon, accountant, composition = 0.0, "none", "nothing was asked"
        elif planned:
            epsilon, accountant = asked[0]["epsilon"], asked[0]["accountant"]
            composition = f"planned, {accountant}"
        else:  # a filter proves the budget, not what was used of it
            epsilon, accountant, composition = self.budget.epsilon, "dp-accounting", self.filter.describe()
        lines = []
        for row in plans:
            mechanisms = [Mechanism.from_json(m) for m in json.loads(row["mechanisms"])]
            used = _split(mechanisms, json.loads(row["marks"]))
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
            dataset=self.name,
            unit=self.unit,
            adjacency=self.adjacency,
            budget=self.budget,
            epsilon=epsilon,
            left=self._weigh(account, asked)[1],
            accountant=accountant,
            composition=composition,
            asked=tuple(lines),
            stamps=tuple((s["kind"], s["text"]) for s in stamps),
            durable=self._store.durable,
            created=account["created"],
            updated=max([account["updated"], *(row["updated"] for row in plans)]),
        )


def _was_asked(plan: Row) -> bool:
    """Whether answers of the plan may have left the door, or still can."""
    return bool(plan["open"]) or any(json.loads(plan["marks"]).values())


def _split(mechanisms: Sequence[Mechanism], taken: Mapping[str, int]) -> list[int]:
    """Answers per mechanism: those of one question are used in declared order."""
    rest, used = dict(taken), []
    for mechanism in mechanisms:
        used.append(min(rest[mechanism.question], mechanism.times))
        rest[mechanism.question] -= used[-1]
    return used


def _lost(marks: Mapping[str, int], seen: int | Mapping[str, int] | None) -> int | None:
    """Answers that were counted and that the resumed process does not know."""
    if seen is None:
        return None
    known = dict(seen) if isinstance(seen, Mapping) else {"": seen}
    counted = dict(marks) if isinstance(seen, Mapping) else {"": sum(marks.values())}
    for question, answers in known.items():
        if answers < 0 or answers > counted.get(question, 0):
            raise LedgerError(
                f"seen={seen} does not match the {counted.get(question, 0)} answers that the ledger counted: the "
                "checkpoint is of another plan, or the ledger was put back from an old backup and cannot be trusted."
            )
    return sum(counted.values()) - sum(known.values())


def _show(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)
