"""A ledger in a PostgreSQL database, by its URL: several machines, several jobs, one budget for a dataset.

Durability. synchronous_commit is switched on for every change, whatever the server's default, and a server that runs
with fsync=off is refused: after a power cut it would forget what was answered. Connections live for one transaction, so
that a fork inherits none and a restarted server is met anew each time.

Exclusion. Changes run at READ COMMITTED, where a statement that waited for a lock sees what the former holder wrote;
the account's row is locked first. Reads run at REPEATABLE READ, so that a statement adds up. A machine that dies while
it holds a lock loses it after `timeout` seconds, since the server ends sessions that idle in a transaction.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from sfumato.errors import InvalidArgument, LedgerError
from sfumato.privacy import ledger_tables as tables
from sfumato.privacy.ledger_store import Backend
from sfumato.privacy.spender import Spender

READER, SPENDER = "sfumato_reader", "sfumato_spender"
_DRIVER = "postgresql+psycopg"
_TABLES_LOCK = 0x5F0A70  # an advisory lock's number: whoever makes the tables holds it

_BEGIN = sa.text(
    "SELECT session_user, extract(epoch FROM clock_timestamp())::float8, set_config('synchronous_commit', 'on', true), "
    "set_config('lock_timeout', :wait, true), set_config('idle_in_transaction_session_timeout', :wait, true)"
)
_LOOK = sa.text("SELECT session_user, extract(epoch FROM clock_timestamp())::float8")

# By SQLSTATE. Class 08 is a broken connection, 57P0x a server that stops or starts, 25P03 a session that idled too
# long, 40 a transaction that lost against another one, 53300 and 53400 a server with too many connections.
_PASSING = ("08", "57P0", "25P03", "40", "53300", "53400")


class Postgres(Backend):
    makes_tables = True

    def __init__(self, url: str, *, timeout: float) -> None:
        self._timeout = timeout
        try:
            parsed = sa.make_url(url)
            if parsed.drivername in ("postgres", "postgresql"):
                parsed = parsed.set(drivername=_DRIVER)
            if parsed.drivername != _DRIVER:
                raise sa.exc.ArgumentError(f"there is no ledger for {parsed.drivername}")
            self.name = _shown(parsed)
            # A server that silently went away is noticed within `timeout`, also in the middle of an answer.
            seconds = max(2, round(timeout))
            patience = {
                "connect_timeout": seconds,
                "tcp_user_timeout": 1000 * seconds,
                "keepalives_idle": seconds,
                "application_name": "sfumato",
            }
            self.engine = sa.create_engine(
                parsed,
                poolclass=NullPool,
                isolation_level="READ COMMITTED",
                connect_args={key: value for key, value in patience.items() if key not in parsed.query},
            )
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
            raise LedgerError(
                f"The ledger's URL cannot be used ({error}): install its driver (pip install 'sfumato[postgres]') "
                "and write it as postgresql+psycopg://user@host/database."
            ) from error

    def begin(self, connection: sa.Connection, who: Spender, *, write: bool, again: bool) -> tables.Transaction:
        if write:
            begin = connection.execute(_BEGIN, {"wait": str(max(1, round(1000 * self._timeout)))})
        else:
            connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            begin = connection.execute(_LOOK)
        user, clock = begin.one()[:2]
        return tables.Transaction(connection, who.known_as(user), clock=clock, again=again)

    def lock_tables(self, connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:number)"), {"number": _TABLES_LOCK})

    def check(self, connection: sa.Connection) -> None:
        if connection.exec_driver_sql("SHOW fsync").scalar() != "on":
            raise LedgerError(
                f"Ledger {self.name} is on a server with fsync=off, which forgets answers after a power cut: set "
                "fsync=on in its postgresql.conf."
            )

    def passing(self, error: Exception) -> bool:
        state, text = _facts(error)
        if state is not None:
            return state.startswith(_PASSING)
        lost = isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or bool(
            getattr(error, "connection_invalidated", False)
        )
        return lost and not any(sign in text for sign, _ in _REFUSED)

    def reason(self, error: Exception) -> str:
        state, text = _facts(error)
        if state == "42501":
            return (
                f"does not allow this to its database user ({text}): readers may not spend, and only its owner makes "
                f"accounts; ask the owner for the role {SPENDER}"
            )
        for sign, reason in (
            ("25006", "is read-only, as a standby server or a read-only session is: use the primary server"),
            ("55P03", f"was locked by another process for more than {self._timeout:g} s: end it, or raise timeout"),
            ("53100", "cannot be written because the server's disk is full: free some space"),
            ("42P01", "has lost its tables: put back the newest backup that holds every answer given"),
        ):
            if state == sign:
                return reason
        for sign, reason in _REFUSED:
            if state is None and sign in text:
                return f"{reason} ({text})"
        if self.passing(error):
            return f"cannot be reached ({text}): start the server, or check the URL's host and port"
        return f"failed ({text}): repair the database, then try again"


# A connection that is refused for good carries no SQLSTATE, only words.
_REFUSED = (
    ("authentication failed", "refuses this user: check user and password, or ~/.pgpass"),
    ("no password supplied", "asks for a password: put it into ~/.pgpass or PGPASSWORD"),
    ("pg_hba.conf", "refuses this user or machine: its pg_hba.conf must let them in"),
    ("does not exist", "is on a server without this user or database: make it, or check the URL"),
    ("not permitted to log in", "refuses this user: name a role that may log in"),
    ("resolve host", "names a host that cannot be found: check the URL"),
    ("translate host name", "names a host that cannot be found: check the URL"),
)


def _facts(error: Exception) -> tuple[str | None, str]:
    """The SQLSTATE, where the server gave one, and what it said."""
    origin = getattr(error, "orig", None) or error
    lines = [line.strip() for line in str(origin).splitlines() if line.strip()] or [type(origin).__name__]
    return getattr(origin, "sqlstate", None), lines[0].removesuffix(".")


def _shown(url: sa.URL) -> str:
    hidden = {key: "***" for key in url.query if "password" in key}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def role_statements(schema: str = "public") -> str:
    """SQL that makes the roles of a team's ledger; its owner runs it, in the ledger's database, once or again.

    A reader sees everything. A spender reserves, takes and gives back; it can change no budget and delete no plan. Only
    the owner of the tables makes accounts, and with them budgets.

    >>> print(role_statements().splitlines()[-1])
    -- GRANT sfumato_reader TO auditor;
    """
    if not schema.replace("_", "").isalnum():
        raise InvalidArgument(f"schema={schema!r} must be a plain name of letters, digits and underscores.")
    every = ", ".join(
        f"{schema}.{t}" for t in (tables.META, tables.ACCOUNTS, tables.PLANS, tables.STAMPS, tables.QUEUE, tables.HEADS)
    )
    rows = {
        tables.ACCOUNTS: "UPDATE (total, sealed_by, updated)",
        tables.PLANS: "INSERT, UPDATE (owner, held_by, open, marks, counted, updated)",
        tables.STAMPS: "INSERT",
        tables.HEADS: "INSERT",
        tables.QUEUE: "INSERT, DELETE, UPDATE (seen)",
    }
    made = [
        f"DO $$ BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;"
        for role in (READER, SPENDER)
    ]
    both = f"{READER}, {SPENDER}"
    return "\n".join(
        [
            *made,
            f"GRANT USAGE ON SCHEMA {schema} TO {both};",
            f"GRANT SELECT ON {every} TO {both};",
            *(f"GRANT {rights} ON {schema}.{table} TO {SPENDER};" for table, rights in rows.items()),
            *(
                f"GRANT USAGE ON SEQUENCE {schema}.{table}_id_seq TO {SPENDER};"
                for table in (tables.PLANS, tables.STAMPS, tables.QUEUE, tables.HEADS)
            ),
            "-- Then, for each person or job that logs in:",
            f"-- GRANT {SPENDER} TO anna;",
            f"-- GRANT {READER} TO auditor;",
        ]
    )
