"""The ledger's tables and transactions. Nothing here knows what privacy is; `ledger` never sees SQL.

Durability. A commit must survive a killed process and a power cut, or an answer could leave that no ledger remembers.
SQLite keeps a rollback journal with synchronous=EXTRA: with FULL alone the removal of the journal is not yet on the
disk when COMMIT returns, and a power cut would undo the commit. A write-ahead log would be four times faster; but it
needs memory shared by all processes, which the network disks of clusters lack, and a copy of the file alone would know
less than was answered. Connections live for one transaction, so that a fork inherits none.

Exclusion. Every change happens under a lock that is taken before the first read: BEGIN IMMEDIATE on SQLite, and
SELECT ... FOR UPDATE on the account's row elsewhere. So "does it fit?" and "write it down" are one step for all.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import NullPool, StaticPool

from sfumato.errors import LedgerError

SCHEMA_VERSION = "1"
Row = dict[str, Any]

_tables = sa.MetaData()
_meta = sa.Table(
    "sfumato_meta",
    _tables,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_accounts = sa.Table(
    "sfumato_accounts",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("unit", sa.String(20), nullable=False),
    sa.Column("adjacency", sa.String(20), nullable=False),
    sa.Column("epsilon", sa.Double, nullable=False),
    sa.Column("delta", sa.Double, nullable=False),
    sa.Column("filter", sa.Text, nullable=False),
    sa.Column("total", sa.Text, nullable=False),  # the filter's running total over all plans
    sa.Column("sealed_by", sa.Integer),  # the first plan, where the filter cannot hold it
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("updated", sa.String(40), nullable=False),
)
_plans = sa.Table(
    "sfumato_plans",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.Integer, sa.ForeignKey(_accounts.c.id), nullable=False, index=True),
    sa.Column("resume_key", sa.String(200)),
    sa.Column("owner", sa.String(40), nullable=False),  # whoever knows it may spend the plan
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("composition", sa.String(20), nullable=False),  # planned | filter
    sa.Column("mechanisms", sa.Text, nullable=False),
    sa.Column("marks", sa.Text, nullable=False),  # question -> answers that may have left the door
    sa.Column("price", sa.Text),
    sa.Column("counted", sa.Text, nullable=False),
    sa.Column("epsilon", sa.Double),
    sa.Column("accountant", sa.String(100)),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("updated", sa.String(40), nullable=False),
    sa.UniqueConstraint("account_id", "resume_key"),
)
_stamps = sa.Table(
    "sfumato_stamps",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.Integer, sa.ForeignKey(_accounts.c.id), nullable=False, index=True),
    sa.Column("kind", sa.String(40), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Transaction:
    """The questions and changes of one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def _one(self, query: sa.Select[Any]) -> Row | None:
        row = self._connection.execute(query).mappings().first()
        return None if row is None else dict(row)

    def _all(self, query: sa.Select[Any]) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query).mappings()]

    def account_names(self) -> list[str]:
        return list(self._connection.execute(sa.select(_accounts.c.name).order_by(_accounts.c.name)).scalars())

    def account(self, name: str) -> Row | None:
        return self._one(sa.select(_accounts).where(_accounts.c.name == name))

    def lock_account(self, account: int) -> Row:
        """The account's row; until the transaction ends, nobody else can lock it."""
        row = self._one(sa.select(_accounts).where(_accounts.c.id == account).with_for_update())
        if row is None:
            raise LedgerError("The account is gone: the ledger was replaced while it was open; open it again.")
        return row

    def lock_accounts(self) -> None:
        """Until the transaction ends, nobody else can make an account."""
        self._connection.execute(sa.select(_meta).where(_meta.c.name == "version").with_for_update())

    def add_account(self, **values: Any) -> None:
        self._connection.execute(sa.insert(_accounts).values(created=now(), updated=now(), **values))

    def change_account(self, account: int, **values: Any) -> None:
        self._connection.execute(sa.update(_accounts).where(_accounts.c.id == account).values(updated=now(), **values))

    def plans(self, account: int) -> list[Row]:
        return self._all(sa.select(_plans).where(_plans.c.account_id == account).order_by(_plans.c.id))

    def totals(self, account: int) -> list[str]:
        """What every plan of the account counts for."""
        return list(
            self._connection.execute(sa.select(_plans.c.counted).where(_plans.c.account_id == account)).scalars()
        )

    def lock_plan(self, account: int, plan: int | str) -> Row | None:
        """The plan of this id or resume key; until the transaction ends, nobody else can raise its marks."""
        column = _plans.c.id if isinstance(plan, int) else _plans.c.resume_key
        return self._one(sa.select(_plans).where(_plans.c.account_id == account, column == plan).with_for_update())

    def add_plan(self, **values: Any) -> int:
        result = self._connection.execute(sa.insert(_plans).values(created=now(), updated=now(), **values))
        key = result.inserted_primary_key
        assert key is not None
        return int(key[0])

    def change_plan(self, plan: int, holder: str, **values: Any) -> None:
        """Changes the plan if `holder` still owns it."""
        mine = (_plans.c.id == plan) & (_plans.c.owner == holder)
        result = self._connection.execute(sa.update(_plans).where(mine).values(updated=now(), **values))
        if result.rowcount != 1:
            raise LedgerError(
                f"Plan {plan} was taken over by another process, or its ledger was replaced: "
                "stop this process, or resume the plan here."
            )

    def stamps(self, account: int) -> list[Row]:
        return self._all(sa.select(_stamps).where(_stamps.c.account_id == account).order_by(_stamps.c.id))

    def add_stamp(self, account: int, kind: str, text: str) -> None:
        same = (_stamps.c.account_id == account) & (_stamps.c.kind == kind) & (_stamps.c.text == text)
        if self._one(sa.select(_stamps).where(same)) is None:
            values = {"account_id": account, "kind": kind, "text": text, "created": now()}
            self._connection.execute(sa.insert(_stamps).values(values))


class Store:
    """A database of accounts: a file, a URL, or (None) memory."""

    def __init__(self, where: str | os.PathLike[str] | None, *, timeout: float) -> None:
        self._timeout = timeout
        self._turn: AbstractContextManager[Any] = nullcontext()
        self._pid = os.getpid()
        self.durable = where is not None
        if where is None:
            self.name = "in memory"
            self._turn = threading.RLock()  # memory is a single connection, which threads share
            self._engine = sa.create_engine(
                "sqlite://",
                poolclass=StaticPool,
                connect_args={"check_same_thread": False, "isolation_level": None},
            )
            with self.transaction() as tx:
                _make_tables(tx._connection)
        elif "://" in str(where) and not str(where).startswith("sqlite://"):
            self._open_url(str(where))
        else:
            self._open_file(_sqlite_path(str(where)))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[Transaction]:
        """All or nothing; every failure of the database is a LedgerError."""
        if not self.durable and os.getpid() != self._pid:
            raise LedgerError("An in-memory ledger cannot follow a fork: give the ledger a file, or do not fork.")
        with self._turn, self._translated(), self._engine.connect() as connection:
            dialect = connection.dialect.name
            if dialect == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
            elif dialect == "postgresql" and write:
                connection.exec_driver_sql("SET LOCAL synchronous_commit TO on")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout TO {int(self._timeout * 1000)}")
            yield Transaction(connection)
            connection.commit()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise LedgerError(f"Ledger {self.name} {self._reason(error)}; no answer was given.") from error

    def _reason(self, error: Exception) -> str:
        text = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        for sign, reason in (
            ("locked", f"was locked by another process for more than {self._timeout:g} s: end it, or raise timeout"),
            (
                "lock timeout",
                f"was locked by another process for more than {self._timeout:g} s: end it, or raise timeout",
            ),
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

    def _open_url(self, url: str) -> None:
        try:
            parsed = sa.make_url(url)
            self.name = parsed.render_as_string(hide_password=True)
            self._engine = sa.create_engine(parsed, poolclass=NullPool)
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            raise LedgerError(
                f"The ledger's URL cannot be used ({error}): install its driver (pip install 'sfumato[postgres]') "
                "and write it as postgresql+psycopg://user@host/database."
            ) from error
        with self._translated():
            if not sa.inspect(self._engine).has_table(_meta.name):
                # Two processes may race here: the loser's CREATE TABLE fails, and the version check below decides.
                with suppress(sa.exc.DBAPIError), self._engine.begin() as connection:
                    _make_tables(connection)
        self._check_version()

    def _open_file(self, path: Path) -> None:
        self.name = repr(str(path))
        if not path.parent.is_dir():
            raise LedgerError(
                f"Ledger {self.name} needs the folder {str(path.parent)!r}, which is missing: make it first."
            )
        if path.is_dir():
            raise LedgerError(f"Ledger {self.name} is a folder: name a file in it.")
        if not path.exists():
            self._make_file(path)
        with self._translated(), open(path, "rb") as file:
            start = file.read(16)
        if not start:  # never taken for a new ledger: it may be what is left of an old one
            raise LedgerError(f"Ledger {self.name} is an empty file: remove it to begin a new ledger, or name another.")
        if start != b"SQLite format 3\x00":
            raise LedgerError(f"Ledger {self.name} is not a database, and was left as it is: name another file.")

        def connect() -> sqlite3.Connection:
            # mode=rw: a ledger that was removed while in use must never come back empty.
            uri = f"file:{quote(str(path.absolute()))}?mode=rw"
            connection = sqlite3.connect(uri, uri=True, timeout=self._timeout, isolation_level=None)
            connection.execute("PRAGMA synchronous=EXTRA")
            connection.execute("PRAGMA fullfsync=ON")
            return connection

        self._engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
        self._check_version()
        with self.transaction(write=False) as tx:
            damage = tx._connection.exec_driver_sql("PRAGMA quick_check").scalar()
        if damage != "ok":
            raise LedgerError(
                f"Ledger {self.name} is corrupt: put back the newest backup that holds every answer given, "
                "or ask nothing more; no answer was given."
            )

    def _make_file(self, path: Path) -> None:
        """A complete ledger appears under its name at once: nobody can see, or be left with, half of one."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with self._translated():
                engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(draft), poolclass=NullPool)
                with engine.begin() as connection:
                    _make_tables(connection)
                _flush(draft)
                with suppress(FileExistsError):  # another process was first: its file is the ledger
                    os.link(draft, path)
                _flush(path.parent)
        finally:
            draft.unlink(missing_ok=True)

    def _check_version(self) -> None:
        with self._translated(), self._engine.connect() as connection:
            if not sa.inspect(connection).has_table(_meta.name):
                raise LedgerError(f"Ledger {self.name} is a database of another program: name another file.")
            version = connection.execute(sa.select(_meta.c.value).where(_meta.c.name == "version")).scalar()
        if version != SCHEMA_VERSION:
            raise LedgerError(
                f"Ledger {self.name} has schema version {version} and this Sfumato reads version {SCHEMA_VERSION}: "
                "use the Sfumato that wrote it."
            )


def _make_tables(connection: sa.Connection) -> None:
    _tables.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(_meta).values(name="version", value=SCHEMA_VERSION))


def _sqlite_path(where: str) -> Path:
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
