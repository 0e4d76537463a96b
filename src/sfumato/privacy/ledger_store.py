"""Transactions of the ledger's database; `ledger` never sees SQL, and nothing here knows what privacy is.

Exclusion. Every change happens under a lock that is taken before the first read: BEGIN IMMEDIATE on SQLite, and
SELECT ... FOR UPDATE on the account's row on PostgreSQL. So "does it fit?" and "write it down" are one step for all.

A connection that is lost. When a server is killed while it commits, nobody here can know if the commit was written. So
`write` asks again, for `timeout` seconds, and runs `work` once more. This counts nothing twice and loses nothing,
because every `work` of the ledger (1) takes the account's lock first, which the earlier attempt holds until it is
decided, and (2) finds what it wrote by a token that no other process has, or writes the same values again. Where that
does not help either, the caller gets an error and no answer: what was written counts.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import sqlalchemy as sa

from sfumato.errors import LedgerError
from sfumato.privacy import ledger_tables as tables
from sfumato.privacy.ledger_tables import Row, Transaction
from sfumato.privacy.spender import Spender

__all__ = ["Row", "Store", "Transaction"]

T = TypeVar("T")
_FAILURES = (sa.exc.SQLAlchemyError, sqlite3.Error, OSError)
_RETRY_SECONDS = (0.05, 1.0)


class Backend(ABC):
    """What SQLite and PostgreSQL do differently."""

    name: str
    engine: sa.Engine
    durable = True
    makes_tables = False
    """Whether an empty database may become a ledger; a file never is empty."""

    @abstractmethod
    def begin(self, connection: sa.Connection, who: Spender, *, write: bool, again: bool) -> Transaction:
        """Starts the transaction; with `write` it sees all that was committed before it got its locks."""

    @abstractmethod
    def reason(self, error: Exception) -> str:
        """What is wrong and what to do, to follow the ledger's name in a sentence."""

    def passing(self, error: Exception) -> bool:
        """Whether the same may succeed in a moment."""
        return False

    def lock_tables(self, connection: sa.Connection) -> None:
        """Until the transaction ends, nobody else can make or change the tables."""
        return None

    def check(self, connection: sa.Connection) -> None:
        """Raises LedgerError where the database cannot be trusted."""
        return None


class Store:
    """A database of accounts: a file, a URL, or (None) memory."""

    def __init__(
        self, where: str | os.PathLike[str] | None, *, timeout: float, user: str | None = None, make: bool = True
    ) -> None:
        self._timeout, self._user, self._pid = timeout, user, os.getpid()
        self._turn: AbstractContextManager[object] = nullcontext()
        if where is not None and "://" in str(where) and not str(where).startswith("sqlite://"):
            from sfumato.privacy.ledger_postgres import Postgres

            self._backend: Backend = Postgres(str(where), timeout=timeout)
        else:
            from sfumato.privacy.ledger_file import File, Memory

            self._backend = Memory() if where is None else File(str(where), timeout=timeout, make=make)
        self.name, self.durable = self._backend.name, self._backend.durable
        if not self.durable:
            self._turn = threading.RLock()  # memory is a single connection, which threads share
        self._met = False  # a server that was never met is not waited for: its URL may be wrong
        self._open(make)

    def close(self) -> None:
        self._backend.engine.dispose()

    def read(self, work: Callable[[Transaction], T]) -> T:
        """What `work` sees is the ledger at one moment."""
        return self._run(work, write=False)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """All or nothing. `work` runs again where it may not have been written: see the top of this file."""
        return self._run(work, write=True)

    def _run(self, work: Callable[[Transaction], T], *, write: bool) -> T:
        if not self.durable and os.getpid() != self._pid:
            raise LedgerError("An in-memory ledger cannot follow a fork: give the ledger a file, or do not fork.")
        who = Spender.here(self._user)
        deadline, pause, again = time.monotonic() + self._timeout, _RETRY_SECONDS[0], False
        while True:
            try:
                return self._attempt(work, who, write=write, again=again)
            except _FAILURES as error:
                late = time.monotonic() + pause > deadline
                if not self._met or late or not self._backend.passing(error):
                    raise LedgerError(
                        f"Ledger {self.name} {self._backend.reason(error)}; no answer was given."
                    ) from error
            again = True
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all at once, when the server is back
            pause = min(2 * pause, _RETRY_SECONDS[1])

    def _attempt(self, work: Callable[[Transaction], T], who: Spender, *, write: bool, again: bool) -> T:
        try:
            with self._turn, self._backend.engine.connect() as connection:
                result = work(self._backend.begin(connection, who, write=write, again=again))
                connection.commit()
                self._met = True
                return result
        except BaseException as error:
            # Ctrl-C in the middle of a read leaves a cursor among the variables of a frame. As long as the error is
            # handled it would hold the lock of SQLite's file, and what is written meanwhile, as a plan's exact count,
            # would wait for it in vain.
            traceback.clear_frames(error.__traceback__)
            raise

    def _open(self, make: bool) -> None:
        def version(tx: Transaction) -> str | None:
            return tables.stored_version(tx._connection) or "0" if tables.has_tables(tx._connection) else None

        def complete(tx: Transaction) -> None:
            self._backend.lock_tables(tx._connection)
            match version(tx):  # another process may have been first
                case None:
                    tables.make_tables(tx._connection)
                case "1" | "2":
                    tables.upgrade(tx._connection)

        found = self.read(version)
        if found is None and not (make and self._backend.makes_tables):
            raise LedgerError(f"Ledger {self.name} is a database of another program: name another one.")
        if found in (None, "1", "2"):
            self.write(complete)
            found = self.read(version)
        if found != tables.SCHEMA_VERSION:
            raise LedgerError(
                f"Ledger {self.name} has schema version {found} and this Sfumato reads version "
                f"{tables.SCHEMA_VERSION}: use the Sfumato that wrote it."
            )
        self.read(lambda tx: self._backend.check(tx._connection))
