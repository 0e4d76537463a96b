"""What only a server can do to a ledger: go away, come back, cut a commit off, know its users."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError
from sfumato.privacy import ledger_queue
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.ledger_postgres import READER, SPENDER, role_statements
from tests.faults.postgres import OWNER, Server, missing, throw_away
from tests.privacy.test_ledger import ADD_REMOVE, BUDGET, ask, counted, fork, open_account, wait

pytestmark = pytest.mark.postgres


@pytest.fixture
def schema(server: Server) -> Iterator[str]:
    with server.schema() as name:
        yield name


@pytest.fixture
def url(server: Server, schema: str) -> str:
    return server.url(schema=schema)


# --- a commit of which nobody knows if it was written -----------------------------------------------------------------


class Proxy:
    """Between the ledger and the server: cuts the connection at a change's commit, `before` or `after` it is done."""

    def __init__(self, server: Server) -> None:
        self._target = str(server.sockets / ".s.PGSQL.5432")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cut: str | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, schema: str) -> str:
        port = self._listener.getsockname()[1]
        options = quote(f"-csearch_path={schema}")
        plain = "sslmode=disable&gssencmode=disable"
        return f"postgresql+psycopg://{OWNER}@127.0.0.1:{port}/postgres?{plain}&options={options}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, contextlib.suppress(OSError):
            server.connect(self._target)
            silent = threading.Event()
            back = threading.Thread(target=self._answer, args=(server, client, silent), daemon=True)
            back.start()
            changes = False
            while data := client.recv(65536):
                changes |= b"set_config" in data  # reading transactions set nothing
                if b"COMMIT" in data and changes and self.cut is not None:
                    where, self.cut = self.cut, None
                    self.cuts += 1
                    silent.set()
                    if where == "after":
                        server.sendall(data)
                    break
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()  # until the server has done what it was told, and gone

    def _answer(self, server: socket.socket, client: socket.socket, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if not silent.is_set():
                    client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server)
    yield made
    made.close()


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_commit_that_was_cut_off_is_neither_lost_nor_counted_twice(
    proxy: Proxy, url: str, schema: str, where: str
) -> None:
    direct, account = open_account(url), open_account(proxy.url(schema))

    def cut_off(work: Callable[[], Any]) -> Any:
        before, proxy.cut = proxy.cuts, where
        result = work()
        assert proxy.cuts == before + 1, "nothing was cut"
        return result

    cut_off(lambda: account.charge(ask(200.0, 3))).take("sum")
    assert counted(direct) == [3]
    plan = cut_off(lambda: account.plan([ask(200.0, 10)], resume_key="run"))
    assert counted(direct) == [3, 0]
    cut_off(lambda: plan.take("sum"))
    assert (plan.taken, counted(direct)) == (1, [3, 1])
    cut_off(plan.settle)
    plan = cut_off(lambda: account.resume("run", seen=1))
    assert plan.taken == 1
    cut_off(lambda: plan.take("sum"))
    cut_off(plan.close)
    assert counted(direct) == [3, 2]
    cut_off(lambda: account.stamp("warning", "once"))
    assert len(direct.statement().stamps) == 1
    cut_off(lambda: Ledger(proxy.url(schema)).account("b", unit="user", adjacency=ADD_REMOVE, budget=BUDGET))
    assert Ledger(url).account_names() == ["b", "clinic"]

    def totals(tx: Any) -> tuple[list[float], list[list[float]]]:
        return json.loads(tx.account("clinic")["total"]), [json.loads(row) for row in tx.totals(direct._id)]

    total, parts = direct._store.read(totals)
    assert total == pytest.approx([sum(column) for column in zip(*parts, strict=True)])


def test_a_waiting_job_whose_commit_was_cut_off_waits_once(
    proxy: Proxy, url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_queue, "POLL_SECONDS", 0.05)
    direct, account = open_account(url), open_account(proxy.url(schema))
    first = direct.plan([ask(60.0, 100)])
    first.take("sum")
    proxy.cut = "after"
    seen: list[int] = []
    pause = ledger_queue.Turn.pause

    def look(turn: ledger_queue.Turn) -> None:
        seen.append(len(direct.view().waiting))
        if len(seen) == 3:
            first.close()
            proxy.cut = "after"  # the very commit that admits it
        pause(turn)

    monkeypatch.setattr(ledger_queue.Turn, "pause", look)
    account.plan([ask(60.0, 100)], wait=30).take("sum")
    assert set(seen) == {1}
    assert proxy.cuts == 2
    assert direct.view().waiting == ()
    assert counted(direct) == [1, 1]


def test_where_reconnecting_does_not_help_the_charge_counts(proxy: Proxy, url: str, schema: str) -> None:
    direct = open_account(url)
    account = Ledger(proxy.url(schema), timeout=0.3).account("clinic")
    proxy.cut = "after"
    proxy_url_is_gone = threading.Thread(target=lambda: (_until(lambda: proxy.cuts == 1), proxy.close()))
    proxy_url_is_gone.start()
    with contextlib.suppress(LedgerError):  # unless it was quicker than the closing
        account.charge(ask(200.0))
    proxy_url_is_gone.join()
    assert counted(direct) == [1]


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)


# --- a server that is away --------------------------------------------------------------------------------------------


def one_sentence(error: pytest.ExceptionInfo[LedgerError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith("no answer was given.")
    return text


def test_a_server_that_was_killed_is_met_again() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with throw_away() as server:
        account = open_account(server.url())
        hasty = Ledger(server.url(), timeout=0.3).account("clinic")
        plan = account.plan([ask(1000.0, 1000)], resume_key="run")
        plan.take("sum")
        server.kill()
        for work in (lambda: hasty.charge(ask(1000.0)), hasty.statement, lambda: hasty.resume("run")):
            with pytest.raises(LedgerError, match="cannot be reached") as error:
                work()
            one_sentence(error)
        with pytest.raises(LedgerError, match="cannot be reached") as error:
            Ledger(server.url())
        one_sentence(error)
        back = threading.Timer(0.5, server.start)
        back.start()
        for _ in range(40):
            plan.take("sum")  # waits until the server is back
        back.join()
        plan.close()
        assert counted(account) == [40 + 1]
        assert hasty.left() == pytest.approx(account.left())
        server.sql("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
        with pytest.raises(LedgerError, match="fsync=off"):
            _until(lambda: not Ledger(server.url()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"user": "nobody_of_that_name"}, "without this user or database"),
        ({"database": "no_such_database"}, "without this user or database"),
    ],
)
def test_a_wrong_user_or_database_is_said_at_once(server: Server, change: dict[str, str], words: str) -> None:
    with pytest.raises(LedgerError, match=words) as error:
        Ledger(server.url(**change))
    one_sentence(error)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql+psycopg://u:secret@127.0.0.1:1/db", "cannot be reached"),
        ("postgres://u:secret@127.0.0.1:1/db?connect_timeout=3", "cannot be reached"),
        ("postgresql://u@/db?password=secret&host=/nowhere", "cannot be reached"),
        ("postgresql+psycopg://u:secret@no-such-host.invalid/db", "host that cannot be found"),
        ("mysql://u:secret@127.0.0.1/db", "no ledger for mysql"),
    ],
)
def test_a_server_that_is_not_there_is_said_at_once_and_without_the_password(url: str, words: str) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with pytest.raises(LedgerError, match=words) as error:
        Ledger(url)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_another_programs_database_is_left_alone(server: Server, schema: str) -> None:
    with pytest.raises(LedgerError, match="another program"):
        Ledger(server.url(schema=schema), make=False)
    Ledger(server.url(schema=schema))
    Ledger(server.url(schema=schema), make=False)


def test_a_servers_defaults_do_not_weaken_the_ledger(server: Server, schema: str) -> None:
    options = f"-csearch_path={schema} -csynchronous_commit=off -cdefault_transaction_isolation=serializable"
    url = server.url(schema=schema).split("&options=")[0] + "&options=" + quote(options)
    store = open_account(url)._store

    def settings(tx: Any) -> list[str]:
        names = ("transaction_isolation", "synchronous_commit", "transaction_read_only")
        return [tx._connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]

    assert store.write(settings) == ["read committed", "on", "off"]
    assert store.read(settings)[0::2] == ["repeatable read", "on"]


def test_a_machine_that_dies_with_the_lock_loses_it(url: str) -> None:
    account = open_account(url)
    frozen = Ledger(url, timeout=0.5).account("clinic")

    def hang() -> None:
        def work(tx: Any) -> None:
            tx.lock_account(frozen._id, name=frozen.name, created=frozen._created)
            os.kill(os.getpid(), signal.SIGSTOP)

        frozen._store.write(work)

    pid = fork(hang)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    account.charge(ask(1000.0))
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    assert counted(account) == [1]


# --- who may spend, and who did ---------------------------------------------------------------------------------------


@pytest.fixture
def people(server: Server, schema: str, url: str) -> Iterator[dict[str, str]]:
    """URLs of a spender and a reader, with roles made by the statements that are documented."""
    open_account(url)
    names = {SPENDER: f"anna_{schema}", READER: f"bert_{schema}"}
    server.sql(*role_statements(schema).split("\n"))
    server.sql(role_statements(schema))  # once more changes nothing
    for role, name in names.items():
        server.sql(f"CREATE ROLE {name} LOGIN", f"GRANT {role} TO {name}")
    yield {role: server.url(user=name, schema=schema) for role, name in names.items()}
    server.sql(*(f"DROP ROLE {name}" for name in names.values()))
    server.sql(*(f"DROP OWNED BY {role}" for role in names), *(f"DROP ROLE {role}" for role in names))


def test_a_spender_spends_and_can_neither_change_a_budget_nor_forget(people: dict[str, str], schema: str) -> None:
    import sqlalchemy

    account = Ledger(people[SPENDER]).account("clinic")
    plan = account.plan([ask(60.0, 100)], resume_key="run")
    plan.take("sum")
    plan.pause()
    with pytest.raises(BudgetExceeded):
        account.plan([ask(60.0, 100)], wait=0.1)
    account.resume("run").close()
    account.charge(ask(1000.0))
    account.stamp("warning", "written by a spender")
    assert account.statement().stamps == (("warning", "written by a spender"),)
    with pytest.raises(LedgerError, match="only its owner makes accounts"):
        Ledger(people[SPENDER]).account("other", unit="user", adjacency=ADD_REMOVE, budget=BUDGET)
    engine = sqlalchemy.create_engine(people[SPENDER], poolclass=sqlalchemy.NullPool)
    for statement in (
        "UPDATE sfumato_accounts SET epsilon = 100",
        "UPDATE sfumato_plans SET mechanisms = '[]'",
        "DELETE FROM sfumato_plans",
        "DELETE FROM sfumato_accounts",
        "UPDATE sfumato_meta SET value = '1'",
    ):
        with pytest.raises(sqlalchemy.exc.ProgrammingError, match="permission denied"), engine.begin() as connection:
            connection.exec_driver_sql(statement)


def test_a_reader_reads_everything_and_spends_nothing(people: dict[str, str]) -> None:
    spent = Ledger(people[SPENDER]).account("clinic")
    spent.plan([ask(60.0, 100)], resume_key="run").take("sum")
    account = Ledger(people[READER]).account("clinic")
    assert counted(account) == [1]
    assert account.left() == pytest.approx(spent.left())
    assert account.view().plans == spent.view().plans
    assert account.quote([ask(1000.0)]).fits
    for work in (
        lambda: account.charge(ask(1000.0)),
        lambda: account.plan([ask(1000.0)], wait=5),
        lambda: account.resume("run"),
        lambda: account.stamp("warning", "x"),
    ):
        with pytest.raises(LedgerError, match="readers may not spend") as error:
            work()
        one_sentence(error)


def test_every_reservation_says_whose_it_is(people: dict[str, str], schema: str, url: str) -> None:
    anna = Ledger(people[SPENDER], user="Anna Schmidt").account("clinic")
    anna.plan([ask(1000.0, 10)], resume_key="run").pause()
    open_account(url).resume("run").close()
    anna.charge(ask(1000.0))
    first, second = Ledger(people[READER]).account("clinic").view().plans
    for plan in (first, second):
        assert plan.made_by is not None
        assert (plan.made_by.user, plan.made_by.process) == ("Anna Schmidt", os.getpid())
        assert plan.made_by.database_user == f"anna_{schema}"
        assert plan.made_by.host == socket.gethostname()
    assert first.held_by is not None
    assert first.held_by.database_user == OWNER
    assert "Anna" not in Ledger(url).account("clinic").statement().to_text(), "statements are made to be published"


def test_roles_are_for_plain_schemas() -> None:
    with pytest.raises(InvalidArgument, match="schema="):
        role_statements("public; DROP TABLE x")
