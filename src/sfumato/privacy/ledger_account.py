"""An account: reserves, resumes, gives back and states. `ledger` says what this proves."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError, UnsupportedAccounting
from sfumato.privacy import accounting, ledger_view
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, SumFilter, Vector
from sfumato.privacy.ledger_plan import Plan, planned_answers
from sfumato.privacy.ledger_queue import Turn
from sfumato.privacy.ledger_view import AccountView, Quote, split, was_asked
from sfumato.privacy.mechanisms import Adjacency, Mechanism
from sfumato.privacy.statement import Statement

if TYPE_CHECKING:
    from sfumato.privacy.ledger_store import Row, Store, Transaction


@dataclass(frozen=True, kw_only=True)
class _Asking:
    """What a reservation asks for. All that is slow to compute is computed before a lock is taken."""

    mechanisms: Sequence[Mechanism]
    price: list[Vector] | None
    """By the filter; None where it has no accountant."""
    counted: Vector
    cost: accounting.Cost | None
    """As one composition, if nothing was asked before."""
    marks: dict[str, int]
    resume_key: str | None
    note: str
    prepaid: bool


class Account:
    """One private dataset, by its declared name. Made by `Ledger.account`."""

    def __init__(self, store: Store, row: Row, *, wait: float) -> None:
        self._store, self._wait = store, wait
        self._id: int = row["id"]
        self.name: str = row["name"]
        self._created: str = row["created"]
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
        wait: float | None = None,
    ) -> Plan:
        """One durable reservation of everything in `mechanisms`; or BudgetExceeded, and nothing is written.

        The first plan of an account is composed as a whole (by PLD where there is one); a plan made when something
        was already asked is composed with it by the filter. `delta_share` is SumFilter's; the first plan may leave it
        out and then takes all of delta. With a `resume_key` the plan is found again after a crash. `wait` is how many
        seconds it may wait for its turn and for what others give back (None: what the ledger was opened with).
        """
        if not mechanisms:
            raise InvalidArgument("mechanisms=[] asks nothing: name at least one mechanism.")
        if resume_key is not None and not 1 <= len(resume_key) <= 200:
            raise InvalidArgument(f"resume_key={resume_key!r} must have 1 to 200 characters: shorten it.")
        price: list[Vector] | None = None
        priced = False
        cost: accounting.Cost | None = None
        with Turn(self._store, self._id, self._wait if wait is None else wait) as turn:
            while True:
                first = self._store.read(lambda tx: not any(was_asked(row) for row in tx.plans(self._id)))
                if first and isinstance(self.filter, SumFilter) and delta_share is None:
                    delta_share = self.budget.delta
                if first and cost is None:
                    cost = self._whole(mechanisms)
                if not priced:
                    price, priced = self._price(mechanisms, delta_share, needed=cost is None), True
                asking = self._asking(
                    mechanisms, price=price, cost=cost, resume_key=resume_key, note=note, prepaid=False
                )
                if (plan := self._reserve(asking, turn)) is not None:
                    return plan
                turn.pause()

    def charge(
        self, mechanism: Mechanism, *, note: str = "", delta_share: float | None = None, wait: float | None = None
    ) -> Plan:
        """Reserves `mechanism.times` answers whose noise was chosen from earlier answers; composed by the filter.

        All of them are counted as used at once, so that taking them writes nothing; `close` gives back the rest.
        """
        price = self._price([mechanism], delta_share, needed=True)
        asking = self._asking([mechanism], price=price, cost=None, resume_key=None, note=note, prepaid=True)
        with Turn(self._store, self._id, self._wait if wait is None else wait) as turn:
            while (plan := self._reserve(asking, turn)) is None:
                turn.pause()
            return plan

    def _whole(self, mechanisms: Sequence[Mechanism]) -> accounting.Cost:
        cost = accounting.epsilon(mechanisms, delta=self.budget.delta, adjacency=self.adjacency)
        if not cost.epsilon <= self.budget.epsilon:
            raise BudgetExceeded(
                f"The plan costs epsilon={cost.epsilon:.4g} and the budget of account {self.name!r} is "
                f"epsilon={self.budget.epsilon:g} at delta={self.budget.delta:g}: raise the noise or lower times."
            )
        return cost

    def _price(
        self, mechanisms: Sequence[Mechanism], delta_share: float | None, *, needed: bool
    ) -> list[Vector] | None:
        try:
            return self.filter.price(mechanisms, adjacency=self.adjacency, budget=self.budget, delta_share=delta_share)
        except UnsupportedAccounting:
            if needed:
                raise
            return None  # the filter cannot hold it: case (b) of the proof

    def _asking(
        self,
        mechanisms: Sequence[Mechanism],
        *,
        price: list[Vector] | None,
        cost: accounting.Cost | None,
        resume_key: str | None,
        note: str,
        prepaid: bool,
    ) -> _Asking:
        planned = [m.times for m in mechanisms]
        return _Asking(
            mechanisms=mechanisms,
            price=price,
            counted=self.filter.zero() if price is None else self.filter.counted(price, planned, planned),
            cost=cost,
            marks=planned_answers(mechanisms) if prepaid else dict.fromkeys(planned_answers(mechanisms), 0),
            resume_key=resume_key,
            note=note,
            prepaid=prepaid,
        )

    def _reserve(self, asking: _Asking, turn: Turn) -> Plan | None:
        """None: not yet, and it waits in the queue."""
        owner = secrets.token_hex(16)
        self._known = None

        def work(tx: Transaction) -> Row | None:  # check and write are one step: two processes cannot both fit
            account = tx.lock_account(self._id, name=self.name, created=self._created)
            if tx.again and (mine := tx.plan_of(self._id, owner)) is not None:
                return mine  # the attempt that was cut off had been written
            return self._admit(tx, account, owner, asking, turn)

        row = self._store.write(work)
        if row is None:
            return None
        return Plan(
            self,
            row["id"],
            owner,
            asking.mechanisms,
            taken=dict.fromkeys(asking.marks, 0),
            marks=asking.marks,
            epsilon=row["epsilon"],
            prepaid=asking.prepaid,
        )

    def _admit(self, tx: Transaction, account: Row, owner: str, asking: _Asking, turn: Turn) -> Row | None:
        if asking.resume_key is not None and (old := tx.lock_plan(self._id, asking.resume_key)) is not None:
            raise LedgerError(
                f"resume_key={asking.resume_key!r} belongs to plan {old['id']} of account {self.name!r}: "
                "resume that plan, or choose another key."
            )
        # Where another plan came between, this one is no longer the first. (Where the last one went, it is
        # counted by the filter all the same, which is only careful.)
        cost = asking.cost
        if cost is not None and any(was_asked(row) for row in tx.plans(self._id)):
            cost = None
        total = [a + b for a, b in zip(json.loads(account["total"]), asking.counted, strict=True)]
        fits = asking.price is not None and account["sealed_by"] is None and self.filter.fits(total, self.budget)
        ahead = turn.ahead(tx)
        if ahead or not (fits or cost is not None):
            if not turn.may_wait or not (fits or cost is not None or self._may_fit(tx, asking)):
                self._refuse(account, asking, ahead, turn)
            mechanisms = json.dumps([m.to_json() for m in asking.mechanisms])
            asks = None if asking.price is None else self.filter.spent(asking.counted, self.budget)
            turn.join(tx, mechanisms=mechanisms, asks=asks, note=asking.note)
            return None
        epsilon = None if cost is None else cost.epsilon
        plan = tx.add_plan(
            account_id=self._id,
            resume_key=asking.resume_key,
            owner=owner,
            open=not asking.prepaid,
            composition="filter" if cost is None else "planned",
            mechanisms=json.dumps([m.to_json() for m in asking.mechanisms]),
            marks=json.dumps(asking.marks),
            price=json.dumps(asking.price) if fits else None,
            counted=json.dumps(asking.counted if fits else self.filter.zero()),
            epsilon=epsilon,
            accountant=None if cost is None else cost.accountant,
            note=asking.note,
        )
        if fits:
            tx.change_account(self._id, total=json.dumps(total))
        else:
            tx.change_account(self._id, sealed_by=plan)
        tx.link(self._id, f"plan {plan} made")
        turn.leave(tx)
        return {"id": plan, "epsilon": epsilon}

    def _may_fit(self, tx: Transaction, asking: _Asking) -> bool:
        """Whether there would be room if every open plan ended now: nothing more can be hoped for."""
        plans = tx.plans(self._id)
        if not any(any(json.loads(row["marks"]).values()) for row in plans):
            return True  # nothing has left yet, so that this one may still become the first
        if asking.price is None or any(row["price"] is None and was_asked(row) for row in plans):
            return False  # sealed for good
        least = [ledger_view.least(row, self.filter) for row in plans]
        total = [math.fsum(column) for column in zip(asking.counted, *least, strict=True)]
        return self.filter.fits(total, self.budget)

    def _refuse(self, account: Row, asking: _Asking, ahead: int, turn: Turn) -> NoReturn:
        waited = f"After {turn.wait:g} s of waiting: " if turn.queued else ""
        if asking.price is None:
            raise LedgerError(
                f"{waited}Another plan of account {self.name!r} came first, and its filter has no accountant for this "
                "one: declare both in one plan."
            )
        if account["sealed_by"] is not None:
            raise BudgetExceeded(
                f"{waited}Account {self.name!r} is spent: its first plan ({account['sealed_by']}) fits its "
                f"epsilon={self.budget.epsilon:g} only as one composition, so nothing can be added to it: take an "
                "interrupted training up again from its checkpoint; next time give each a share, "
                "train(..., budget=Budget(...)), or declare everything in one plan."
            )
        total = json.loads(account["total"])
        spent, alone = (self.filter.spent(t, self.budget) for t in (total, asking.counted))
        left = max(0.0, self.budget.epsilon - spent)
        if ahead:
            raise BudgetExceeded(
                f"{waited}This asks for epsilon={alone:.4g} of account {self.name!r}, for which {ahead} earlier "
                f"reservation{'s wait' if ahead > 1 else ' waits'}: give wait=seconds to queue behind, or try later."
            )
        raise BudgetExceeded(
            f"{waited}This asks for epsilon={alone:.4g} and account {self.name!r} has "
            f"epsilon={left:.4g} of {self.budget.epsilon:g} left at "
            f"delta={self.budget.delta:g} ({self.filter.describe()}): raise the noise or ask less often."
        )

    def resume(self, plan: int | str, *, seen: int | Mapping[str, int] | None = None) -> Plan:
        """Takes over an open plan, by id or resume key; its former owner can reserve nothing more.

        `seen` is how many answers (per question, or of all) the checkpoint knows; the others that were counted are
        lost: they may have left the door, so they are never handed out again.
        """
        owner = secrets.token_hex(16)

        def work(tx: Transaction) -> tuple[Row, dict[str, int], int | None]:
            tx.lock_account(self._id, name=self.name, created=self._created)
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
            tx.change_plan(row["id"], row["owner"], owner=owner, held_by=tx.who.to_json())
            tx.link(self._id, f"plan {row['id']} resumed")
            return row, marks, lost

        row, marks, lost = self._store.write(work)
        # Why two owners cannot spend one answer twice. An owner hands out answer n of a question only if n is at most
        # the mark it has itself committed (Plan._raise_mark). That commit and the one above exclude each other: either
        # it came first, and `marks`, read in the same transaction, contains it; or it comes later, finds another
        # owner and fails. So whatever the former owner still hands out, now or in an hour, is within `marks`; and
        # here the first answer handed out is number marks + 1.
        mechanisms = [Mechanism.from_json(m) for m in json.loads(row["mechanisms"])]
        return Plan(self, row["id"], owner, mechanisms, taken=marks, marks=marks, epsilon=row["epsilon"], lost=lost)

    def _mark(self, plan: Plan, marks: Mapping[str, int]) -> None:
        """Writes down, before they are handed out, how far a plan's answers may go."""
        self._store.write(lambda tx: tx.change_plan(plan.id, plan.owner, marks=json.dumps(marks)))

    def _count(self, plan: Plan, taken: Mapping[str, int], *, close: bool) -> None:
        """Writes the exact count of a plan that hands out no more answers, and gives back the rest if it ends."""
        self._known = None

        def work(tx: Transaction) -> None:
            account = tx.lock_account(self._id, name=self.name, created=self._created)
            if not close:
                tx.change_plan(plan.id, plan.owner, marks=json.dumps(taken))
                return
            row = tx.lock_plan(self._id, plan.id)
            counted = self.filter.zero()
            if row is not None and row["price"] is not None:
                planned = [m.times for m in plan.mechanisms]
                counted = self.filter.counted(json.loads(row["price"]), planned, split(plan.mechanisms, taken))
            tx.change_plan(plan.id, plan.owner, marks=json.dumps(taken), counted=json.dumps(counted), open=False)
            # Added up afresh: subtracting from the total would lose small costs next to large ones, and under-count.
            total = [math.fsum(column) for column in zip(*map(json.loads, tx.totals(self._id)), strict=True)]
            # A plan of which no answer was taken was never asked: only then is the account as it was before.
            still = account["sealed_by"] != plan.id or any(taken.values())
            tx.change_account(self._id, total=json.dumps(total), sealed_by=account["sealed_by"] if still else None)
            tx.link(self._id, f"plan {plan.id} closed")

        self._store.write(work)

    def stamp(self, kind: str, text: str) -> None:
        """Writes a durable warning into every later statement; kind "not-private" makes it say NOT PRIVATE."""

        def work(tx: Transaction) -> None:
            tx.lock_account(self._id, name=self.name, created=self._created)
            tx.add_stamp(self._id, kind, text)

        self._store.write(work)

    def head(self) -> str:
        """A hash of all that happened to the account, to be kept beside a checkpoint: `check_head` knows it again."""
        return self._store.read(lambda tx: tx.head(self._id))

    def check_head(self, head: str) -> None:
        """Raises LedgerError where this ledger lacks what a ledger with that head knew: it is a copy or a backup."""
        if head and not self._store.read(lambda tx: tx.has_head(self._id, head)):
            raise LedgerError(
                f"Account {self.name!r} lacks what the ledger of this checkpoint knew: the ledger was put back from a "
                "backup, or is a copy that went its own way, and counts too little; go on with the one that was in use."
            )

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
            facts = ledger_view.read(self._store, self._id, self.name)
            self._known = (now, facts.balance(self.filter, self.budget))
        return self._known[1]

    def statement(self) -> Statement:
        """The privacy statement of everything asked so far."""
        facts = ledger_view.read(self._store, self._id, self.name)
        return facts.statement(self, durable=self._store.durable)

    def view(self) -> AccountView:
        """Who reserved what and when, what is left, and who waits."""
        return ledger_view.read(self._store, self._id, self.name).view(self)

    def quote(self, mechanisms: Sequence[Mechanism], *, delta_share: float | None = None) -> Quote:
        """What a plan of these would cost now, and whether there is room for it; nothing is reserved."""
        facts = ledger_view.read(self._store, self._id, self.name)
        return facts.quote(self, mechanisms, delta_share=delta_share)


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
