"""A ledger in a SQLite file, or in memory.

Durability. A commit must survive a killed process and a power cut, or an answer could leave that no ledger remembers.
SQLite keeps a rollback journal with synchronous=EXTRA: with FULL alone the removal of the journal is not yet on the
disk when COMMIT returns, and a power cut would undo the commit. A write-ahead log would be four times faster; but it
needs memory shared by all processes, which the network disks of clusters lack, and a copy of the file alone would know
less than was answered. Connections live for one transaction, so that a fork inherits none.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import NullPool, Pool, StaticPool

from sfumato.errors import LedgerError
from sfumato.privacy import ledger_tables as tables
from sfumato.privacy.ledger_store import Backend
from sfumato.privacy.spender import Spender


class _SQLite(Backend):
    _timeout = 0.0

    def begin(self, connection: sa.Connection, who: Spender, *, write: bool, again: bool) -> tables.Transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        return tables.Transaction(connection, who, clock=time.time(), again=again)

    def reason(self, error: Exception) -> str:
        text = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        for sign, reason in (
            ("locked", f"was locked by another process for more than {self._timeout:g} s: end it, or raise timeout"),
            ("readonly", "is read-only: make the file and its folder writable"),
            ("malformed", "is corrupt: put back the newest backup that holds every answer given, or ask nothing more"),
            ("not a database", "is not a ledger: name another file"),
            ("is full", "cannot be written because the disk is full: free some space"),
            ("disk I/O", "cannot be written (disk error, or no space): check the disk"),
            ("unable to open", "cannot be opened: it was removed, or this user has no right to it"),
        ):
            if sign in text:
                return reason
        return f"failed ({text}): repair the database, then try again"


class Memory(_SQLite):
    name, durable = "in memory", False

    def __init__(self) -> None:
        kept = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        kept.executescript(_tables())
        self.engine = _engine(lambda: kept, StaticPool)


class File(_SQLite):
    def __init__(self, where: str, *, timeout: float, make: bool) -> None:
        named, self._timeout = file_of(where), timeout
        self.name = repr(str(named))
        if not named.parent.is_dir():
            raise LedgerError(
                f"Ledger {self.name} needs the folder {str(named.parent)!r}, which is missing: make it first."
            )
        path = named.absolute()  # now: a program that changes its folder later still means this file
        if path.is_dir():
            raise LedgerError(f"Ledger {self.name} is a folder: name a file in it.")
        try:
            if not path.exists():
                if not make:
                    raise LedgerError(f"Ledger {self.name} does not exist: check its name.")
                _make(path)
            with open(path, "rb") as file:
                start = file.read(16)
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise LedgerError(f"Ledger {self.name} {self.reason(error)}; no answer was given.") from error
        if not start:  # never taken for a new ledger: it may be what is left of an old one
            raise LedgerError(f"Ledger {self.name} is an empty file: remove it to begin a new ledger, or name another.")
        if start != b"SQLite format 3\x00":
            raise LedgerError(f"Ledger {self.name} is not a database, and was left as it is: name another file.")

        def connect() -> sqlite3.Connection:
            # mode=rw: a ledger that was removed while in use must never come back empty.
            uri = f"file:{quote(str(path))}?mode=rw"
            connection = sqlite3.connect(uri, uri=True, timeout=self._timeout, isolation_level=None)
            connection.execute("PRAGMA synchronous=EXTRA")
            connection.execute("PRAGMA fullfsync=ON")
            return connection

        self.engine = _engine(connect, NullPool)

    def check(self, connection: sa.Connection) -> None:
        if connection.exec_driver_sql("PRAGMA quick_check").scalar() != "ok":
            raise LedgerError(
                f"Ledger {self.name} is corrupt: put back the newest backup that holds every answer given, "
                "or ask nothing more; no answer was given."
            )


def _engine(connect: Callable[[], Any], pool: type[Pool]) -> sa.Engine:
    """One way to speak to all ledgers: each statement is compiled once per process, not once per ledger."""
    like, compiled = _dialect()
    made = pool(connect, dialect=like.dialect)
    return sa.Engine(made, like.dialect, like.url, execution_options={"compiled_cache": compiled})


@lru_cache(maxsize=1)
def _dialect() -> tuple[sa.Engine, dict[Any, Any]]:
    engine = sa.create_engine("sqlite://", poolclass=NullPool)
    with engine.connect():  # the first connection tells the dialect what this SQLite can do
        return engine, {}


@lru_cache(maxsize=1)
def _tables() -> str:
    """SQL that makes a ledger without accounts."""
    with closing(sqlite3.connect(":memory:")) as connection:
        with _engine(lambda: connection, StaticPool).begin() as begun:
            tables.make_tables(begun)
        return "\n".join(connection.iterdump())


def _make(path: Path) -> None:
    """A complete ledger appears under its name at once: nobody can see, or be left with, half of one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with closing(sqlite3.connect(draft)) as connection:
            connection.executescript(_tables())
        _flush(draft)
        with suppress(FileExistsError):  # another process was first: its file is the ledger
            os.link(draft, path)
        _flush(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def file_of(where: str) -> Path:
    """The file that a path or a URL of SQLite names."""
    if not where.startswith("sqlite://"):
        return Path(where).expanduser()
    database = sa.make_url(where).database
    if not database or database == ":memory:":
        raise LedgerError(f"Ledger {where!r} names no file: use Ledger.in_memory() for a ledger that may be lost.")
    return Path(database)


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and has no need to
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
