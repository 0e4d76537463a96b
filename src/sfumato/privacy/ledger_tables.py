"""The ledger's tables, and the questions and changes of one transaction. Nothing here knows what privacy is."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from sfumato.errors import LedgerError
from sfumato.privacy.spender import Spender

SCHEMA_VERSION = "3"
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
# Whoever made a plan and whoever holds it now; new in version 2, so that older ledgers know neither.
_WHO = ("made_by", "held_by")
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
    *(sa.Column(name, sa.Text, nullable=False, server_default="") for name in _WHO),
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
# What happened to an account, each line hashed with the one before; new in version 3. Copies of one ledger that were
# both used have different lines, since each line has a random word in it, and a checkpoint knows the last one it saw.
_heads = sa.Table(
    "sfumato_heads",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("account_id", sa.Integer, sa.ForeignKey(_accounts.c.id), nullable=False, index=True),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("head", sa.String(64), nullable=False, index=True),
)
_queue = sa.Table(
    "sfumato_queue",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),  # the order of arrival: it is given under the account's lock
    sa.Column("account_id", sa.Integer, sa.ForeignKey(_accounts.c.id), nullable=False, index=True),
    sa.Column("token", sa.String(40), nullable=False, unique=True),
    sa.Column("mechanisms", sa.Text, nullable=False),
    sa.Column("asks", sa.Double),  # epsilon, by the filter
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("made_by", sa.Text, nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("seen", sa.Double, nullable=False),  # when it last gave a sign of life, by the database's clock
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Transaction:
    """The questions and changes of one transaction.

    `again` says that an earlier attempt was cut off, and may or may not have been written. `clock` is the time, in
    seconds, by a clock that all who use the ledger share.
    """

    def __init__(self, connection: sa.Connection, who: Spender, *, clock: float, again: bool) -> None:
        self._connection = connection
        self.who, self.clock, self.again = who, clock, again

    def _one(self, query: sa.Select[Any]) -> Row | None:
        row = self._connection.execute(query).mappings().first()
        return None if row is None else dict(row)

    def _all(self, query: sa.Select[Any]) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query).mappings()]

    # ------------------------------------------------------------------------------------------ accounts

    def account_names(self) -> list[str]:
        return list(self._connection.execute(sa.select(_accounts.c.name).order_by(_accounts.c.name)).scalars())

    def account(self, name: str) -> Row | None:
        return self._one(sa.select(_accounts).where(_accounts.c.name == name))

    def lock_account(self, account: int, *, name: str, created: str) -> Row:
        """The account's row; until the transaction ends, nobody else can lock it."""
        row = self._one(sa.select(_accounts).where(_accounts.c.id == account).with_for_update())
        if row is None or (row["name"], row["created"]) != (name, created):  # ids of another ledger are the same
            raise LedgerError("The account is gone: the ledger was replaced while it was open; open it again.")
        return row

    def lock_accounts(self) -> None:
        """Until the transaction ends, nobody else can make an account."""
        self._connection.execute(sa.select(_meta).where(_meta.c.name == "version").with_for_update())

    def add_account(self, **values: Any) -> None:
        self._connection.execute(sa.insert(_accounts).values(created=now(), updated=now(), **values))

    def change_account(self, account: int, **values: Any) -> None:
        self._connection.execute(sa.update(_accounts).where(_accounts.c.id == account).values(updated=now(), **values))

    # ------------------------------------------------------------------------------------------ plans

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

    def plan_of(self, account: int, owner: str) -> Row | None:
        return self._one(sa.select(_plans).where(_plans.c.account_id == account, _plans.c.owner == owner))

    def add_plan(self, **values: Any) -> int:
        who = self.who.to_json()
        row = {"created": now(), "updated": now(), "made_by": who, "held_by": who, **values}
        result = self._connection.execute(sa.insert(_plans).values(row))
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

    # ------------------------------------------------------------------------------------------ stamps

    def stamps(self, account: int) -> list[Row]:
        return self._all(sa.select(_stamps).where(_stamps.c.account_id == account).order_by(_stamps.c.id))

    def add_stamp(self, account: int, kind: str, text: str) -> None:
        same = (_stamps.c.account_id == account) & (_stamps.c.kind == kind) & (_stamps.c.text == text)
        if self._one(sa.select(_stamps).where(same)) is None:
            values = {"account_id": account, "kind": kind, "text": text, "created": now()}
            self._connection.execute(sa.insert(_stamps).values(values))

    # ------------------------------------------------------------------------------------------ the chain

    def link(self, account: int, event: str) -> None:
        """Adds a line to the account's chain; its lock must be held."""
        event = f"{event} {secrets.token_hex(16)}"
        head = chained(self.head(account), event)
        self._connection.execute(sa.insert(_heads).values(account_id=account, event=event, head=head))

    def head(self, account: int) -> str:
        """The hash of the chain's last line, or nothing where there is none yet."""
        last = sa.select(_heads.c.head).where(_heads.c.account_id == account).order_by(_heads.c.id.desc()).limit(1)
        return self._connection.execute(last).scalar() or ""

    def has_head(self, account: int, head: str) -> bool:
        found = sa.select(_heads.c.id).where(_heads.c.account_id == account, _heads.c.head == head)
        return self._connection.execute(found).first() is not None

    def chain(self, account: int) -> list[Row]:
        return self._all(sa.select(_heads).where(_heads.c.account_id == account).order_by(_heads.c.id))

    # ------------------------------------------------------------------------------------------ the queue

    def waiting(self, account: int) -> list[Row]:
        """Whoever waits for this account's budget, first come first."""
        return self._all(sa.select(_queue).where(_queue.c.account_id == account).order_by(_queue.c.id))

    def wait(self, **values: Any) -> None:
        row = {"created": now(), "made_by": self.who.to_json(), "seen": self.clock, **values}
        self._connection.execute(sa.insert(_queue).values(row))

    def still_waits(self, token: str) -> None:
        self._connection.execute(sa.update(_queue).where(_queue.c.token == token).values(seen=self.clock))

    def leave(self, token: str) -> None:
        self._connection.execute(sa.delete(_queue).where(_queue.c.token == token))


def chained(before: str, event: str) -> str:
    return hashlib.sha256(f"{before}\n{event}".encode()).hexdigest()


def make_tables(connection: sa.Connection) -> None:
    _tables.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(_meta).values(name="version", value=SCHEMA_VERSION))


def has_tables(connection: sa.Connection) -> bool:
    return sa.inspect(connection).has_table(_meta.name)


def stored_version(connection: sa.Connection) -> str | None:
    return connection.execute(sa.select(_meta.c.value).where(_meta.c.name == "version")).scalar()


def upgrade(connection: sa.Connection) -> None:
    """From version 1 or 2 to 3, in a transaction that nobody else can write beside."""
    known = {column["name"] for column in sa.inspect(connection).get_columns(_plans.name)}
    for name in _WHO:
        if name not in known:
            connection.exec_driver_sql(f"ALTER TABLE {_plans.name} ADD COLUMN {name} TEXT NOT NULL DEFAULT ''")
    _queue.create(connection, checkfirst=True)
    _heads.create(connection, checkfirst=True)
    connection.execute(sa.update(_meta).where(_meta.c.name == "version").values(value=SCHEMA_VERSION))


META, ACCOUNTS, PLANS, STAMPS, QUEUE, HEADS = (t.name for t in (_meta, _accounts, _plans, _stamps, _queue, _heads))
