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
and adjacency), samplers with their declared sizes, planned and counted answers, what they cost, note, resume key, and
who made and holds it; the same of a reservation that waits; stamps; ids and times. No row, no answer and no sampled
number: no private facts, unless a caller notes them down.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sfumato.errors import InvalidArgument, LedgerError, SfumatoError
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter, RenyiFilter
from sfumato.privacy.ledger_account import Account as Account
from sfumato.privacy.mechanisms import Adjacency as Adjacency
from sfumato.privacy.mechanisms import Mechanism as Mechanism

if TYPE_CHECKING:
    from sfumato.privacy.ledger_store import Row, Transaction

UNITS = ("example", "user")


class Ledger:
    """A database of accounts: a SQLite file, a PostgreSQL database by its URL, or None for a throw-away one.

    Args:
        where: a file, on a disk with working locks, or a URL like postgresql+psycopg://user@host/database.
        timeout: how long to wait, in seconds, for another process, or for a server that restarts.
        wait: how long a reservation that does not fit may wait, in seconds, for what other jobs may give back.
        user: who spends, for the records; by default the user that the operating system knows.
        make: whether a ledger that does not exist is made.

    >>> from sfumato.privacy.mechanisms import FullBatch, Gaussian
    >>> mean = Mechanism(question="mean", noise=Gaussian(5.0), sampler=FullBatch(size=900), times=3)
    >>> ledger = Ledger.in_memory()
    >>> account = ledger.account("clinic", unit="user", adjacency=Adjacency.ADD_REMOVE, budget=Budget(2.0, 1e-5))
    >>> with account.plan([mean]) as plan:
    ...     plan.take("mean").noise
    Gaussian(scale=5.0)
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None,
        *,
        timeout: float = 30.0,
        wait: float = 0.0,
        user: str | None = None,
        make: bool = True,
    ) -> None:
        from sfumato.privacy.ledger_store import Store  # imports SQLAlchemy, which takes a third of a second

        if user is not None and not 1 <= len(user) <= 200:
            raise InvalidArgument(f"user={user!r} must have 1 to 200 characters: say who spends, or leave it out.")
        self._store = Store(where, timeout=timeout, user=user, make=make)
        self._where, self._wait = None if where is None else _lasting(os.fspath(where)), wait
        self._options: dict[str, Any] = {"timeout": timeout, "wait": wait, "user": user, "make": make}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy opens the same file or database; what is in memory alone cannot be copied, or spent twice."""
        if self._where is None:
            raise SfumatoError("A ledger in memory cannot be copied or pickled: give Ledger a path.")
        return partial(Ledger, **self._options), (self._where,)

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
        row = self._store.read(lambda tx: tx.account(name))
        if row is None:
            if unit is None or adjacency is None or budget is None:
                terms = {"unit": unit, "adjacency": adjacency, "budget": budget}
                missing = " and ".join(what for what, given in terms.items() if given is None)
                raise InvalidArgument(f"name={name!r} is new to this ledger: give {missing}, or check the name.")
            made = filter or RenyiFilter.around(budget)
            values = {
                "name": name,
                "unit": unit,
                "adjacency": str(adjacency),
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "filter": json.dumps(made.to_json()),
                "total": json.dumps(made.zero()),
            }

            def make(tx: Transaction) -> Row | None:
                tx.lock_accounts()
                if tx.account(name) is None:
                    tx.add_account(**values)
                return tx.account(name)

            row = self._store.write(make)
            assert row is not None
        account = Account(self._store, row, wait=self._wait)
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
        return self._store.read(lambda tx: tx.account_names())

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lasting(where: str) -> str:
    """What names the same ledger from every folder."""
    from sfumato.privacy.ledger_file import file_of

    on_server = "://" in where and not where.startswith("sqlite://")
    return where if on_server else str(file_of(where).absolute())


def _show(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)
