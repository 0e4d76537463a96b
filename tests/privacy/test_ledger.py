"""The ledger never under-counts: not under crashes, not with several processes, not on a broken disk."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import statistics
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from sfumato.data.samplers import FullBatch, Poisson
from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError
from sfumato.privacy import accounting, ledger_plan
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import RenyiFilter, SumFilter
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.ledger_store import Transaction
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

ADD_REMOVE = Adjacency.ADD_REMOVE
BUDGET = Budget(epsilon=1.0, delta=1e-5)


def ask(scale: float = 100.0, times: int = 1, question: str = "sum") -> Mechanism:
    return Mechanism(question=question, noise=Gaussian(scale), sampler=FullBatch(size=1000), times=times)


def open_account(where: Path | str | None) -> Account:
    return Ledger(where).account("clinic", unit="user", adjacency=ADD_REMOVE, budget=BUDGET)


@pytest.fixture
def account(where: Path | str) -> Account:
    return open_account(where)


def contents(where: Path | str) -> object:
    """Everything that is stored."""
    if isinstance(where, Path):
        return where.read_bytes()
    with sqlalchemy.create_engine(where, poolclass=sqlalchemy.NullPool).connect() as connection:
        tables = sqlalchemy.MetaData()
        tables.reflect(connection)
        return [(t.name, sorted(map(repr, connection.execute(t.select())))) for t in tables.sorted_tables]


def sql(where: Path | str, *statements: str) -> None:
    """Behind the ledger's back."""
    url = where if isinstance(where, str) else f"sqlite:///{where}"
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def counted(account: Account) -> list[int]:
    return [line.answers for line in account.statement().asked]


def fork(work: Callable[[], None]) -> int:
    """Runs `work` in a child process, which exits with 0 if it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # newer Pythons warn of threads, of which the child has none
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_an_account_is_known_by_its_declared_name(where: Path | str) -> None:
    open_account(where)
    again = Ledger(where).account("clinic")
    assert (again.unit, again.adjacency, again.budget) == ("user", ADD_REMOVE, BUDGET)
    assert again.filter == RenyiFilter.around(BUDGET)
    assert Ledger(where).account_names() == ["clinic"]


@pytest.mark.parametrize(
    "other",
    [
        {"unit": "example"},
        {"adjacency": Adjacency.REPLACE_ONE},
        {"budget": Budget(2.0, 1e-5)},
        {"budget": Budget(1.0, 1e-6)},
        {"filter": SumFilter()},
    ],
)
def test_what_was_fixed_cannot_be_changed(where: Path | str, other: dict[str, object]) -> None:
    open_account(where)
    with pytest.raises(LedgerError, match=r"was made with .* not .* leave .* out"):
        Ledger(where).account("clinic", **other)  # type: ignore[arg-type]


def test_a_new_account_needs_everything_and_a_wrong_name_makes_none(where: Path | str) -> None:
    with pytest.raises(InvalidArgument, match="new to this ledger: give unit and adjacency and budget, or"):
        Ledger(where).account("clinic")
    with pytest.raises(InvalidArgument, match="new to this ledger: give budget, or"):
        Ledger(where).account("clinic", unit="user", adjacency=ADD_REMOVE)
    with pytest.raises(InvalidArgument, match="unit"):
        Ledger(where).account("clinic", unit="row", adjacency=ADD_REMOVE, budget=BUDGET)
    with pytest.raises(InvalidArgument, match="name"):
        Ledger(where).account("")
    assert Ledger(where).account_names() == []


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_first_plan_is_composed_as_a_whole(account: Account) -> None:
    whole = ask(38.5, 100)
    cost = accounting.epsilon([whole], delta=1e-5, adjacency=ADD_REMOVE).epsilon
    assert 0.9 < cost <= 1
    account.plan([whole])
    assert account.epsilon_spent() == cost


def test_a_plan_that_does_not_fit_leaves_no_trace(account: Account, where: Path | str) -> None:
    before = contents(where)
    with pytest.raises(BudgetExceeded, match=r"costs epsilon=.* budget .* is epsilon=1 .*raise the noise"):
        account.plan([ask(30.0, 100)])
    assert contents(where) == before
    account.plan([ask(38.5, 100)])


def test_when_the_first_plan_takes_more_than_the_filter_holds_nothing_else_is_admitted(account: Account) -> None:
    plan = account.plan([ask(38.5, 100)])
    plan.take("sum")
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match="is spent: its first plan"):
            account.charge(ask(1e4))
        assert account.left() == 0
        plan.close()  # ending early changes nothing: which bound holds must not depend on answers


def test_a_plan_that_was_never_asked_gives_everything_back(account: Account) -> None:
    account.plan([ask(38.5, 100)]).close()
    account.plan([ask(38.5, 100)]).take("sum")
    with pytest.raises(BudgetExceeded):
        account.plan([ask(1e4)])


def test_a_second_plan_is_counted_by_the_filter_with_the_first(account: Account) -> None:
    first = account.plan([ask(60.0, 100)])
    with pytest.raises(BudgetExceeded, match="left at"):
        account.plan([ask(60.0, 100)])
    for _ in range(10):
        first.take("sum")
    first.close()
    account.plan([ask(60.0, 100)])
    assert account.statement().epsilon == BUDGET.epsilon
    assert "Renyi" in account.statement().composition


def test_an_open_plan_counts_in_full_while_others_come_and_go(account: Account) -> None:
    account.plan([ask(60.0, 100)])
    account.charge(ask(1000.0, 10)).close()  # the total is added up afresh
    with pytest.raises(BudgetExceeded):
        account.plan([ask(60.0, 100)])


def test_two_small_plans_do_not_each_get_the_whole_budget(account: Account) -> None:
    account.charge(ask(12.0, 4)).take("sum")
    with pytest.raises(BudgetExceeded):  # alone it would fit by PLD
        account.plan([ask(38.5, 100)])


def test_answers_are_handed_out_in_declared_order_and_no_more(account: Account) -> None:
    plan = account.plan([ask(100.0, 2), ask(200.0, 1, "other"), ask(300.0, 2)])
    assert [plan.take("sum").noise.scale for _ in range(4)] == [100, 100, 300, 300]
    with pytest.raises(BudgetExceeded, match="no answer to 'sum' left out of 4"):
        plan.take("sum")
    with pytest.raises(InvalidArgument, match="'gram' is not in plan"):
        plan.take("gram")
    assert (plan.taken, plan.remaining("sum"), plan.remaining("other"), plan.remaining()) == (4, 0, 1, 1)
    plan.close()
    assert counted(account) == [2, 0, 2]
    with pytest.raises(LedgerError, match="closed"):
        plan.take("other")


def test_an_answer_is_on_the_disk_before_take_returns(account: Account, where: Path | str) -> None:
    plan = account.plan([ask(1000.0, 3000)])
    for n in range(1, 3001):
        plan.take("sum")
        if n in (1, 2, 3, 9, 10, 77, 1000, 3000):
            assert counted(Ledger(where).account("clinic"))[0] >= n
    plan.close()
    assert counted(account) == [3000]


def test_the_count_is_exact_after_close_and_after_pause(account: Account) -> None:
    plan = account.plan([ask(1000.0, 1000)], resume_key="run")
    for _ in range(100):
        plan.take("sum")
    assert counted(account)[0] > 100, "written ahead"
    plan.pause()
    assert counted(account) == [100]
    with pytest.raises(LedgerError, match="closed here"):
        plan.take("sum")
    plan = account.resume("run", seen=100)
    assert (plan.taken, plan.lost, plan.remaining()) == (100, 0, 900)
    plan.take("sum")
    plan.close()
    plan.close()
    assert counted(account) == [101]
    with pytest.raises(LedgerError, match="is closed"):
        account.resume("run")


def test_with_closes_after_success_and_pauses_after_an_error(account: Account) -> None:
    plan = account.plan([ask(1000.0, 10)], resume_key="run")
    plan.take("sum")
    with pytest.raises(KeyError), plan:
        raise KeyError("the user's")
    with account.resume("run") as plan:
        assert plan.taken == 1
        plan.take("sum")
    with pytest.raises(LedgerError):
        account.resume("run")


def test_a_charge_is_paid_at_once_and_taken_without_the_disk(account: Account, where: Path | str) -> None:
    slab = account.charge(ask(200.0, 50))
    assert counted(account) == [50]
    before = contents(where)
    for _ in range(50):
        slab.take("sum")
    with pytest.raises(BudgetExceeded):
        slab.take("sum")
    slab.close()
    assert contents(where) == before
    with pytest.raises(LedgerError, match="is closed"):
        account.resume(slab.id)


# --- resume and fencing -----------------------------------------------------------------------------------------------


def test_resume_counts_the_whole_slab_and_fences_the_former_owner(account: Account, where: Path | str) -> None:
    old = account.plan([ask(1000.0, 10_000)], resume_key="run")
    while old._slabs["sum"].mark - old.taken < 20:
        old.take("sum")
    mark, seen = old._slabs["sum"].mark, old.taken
    new = Ledger(where).account("clinic").resume("run", seen={"sum": seen})
    assert (new.taken, new.lost) == (mark, mark - seen)
    for _ in range(mark - seen):  # what the former owner has reserved it may hand out: it is counted
        old.take("sum")
    with pytest.raises(LedgerError, match="taken over"):
        old.take("sum")
    with pytest.raises(LedgerError, match="taken over"):
        old.close()
    new.take("sum")
    new.close()
    assert counted(account) == [mark + 1]


def test_a_ledger_that_knows_less_than_the_checkpoint_is_refused(account: Account, where: Path | str) -> None:
    plan = account.plan([ask(1000.0, 100)], resume_key="run")
    for _ in range(30):
        plan.take("sum")
    plan.pause()
    sql(where, """UPDATE sfumato_plans SET marks = '{"sum": 0}'""")  # an old backup
    with pytest.raises(LedgerError, match="old backup"):
        account.resume("run", seen=30)
    with pytest.raises(LedgerError, match="old backup"):
        account.resume("run", seen={"other": 1})


def test_resume_finds_by_id_or_key_and_keys_are_not_reused(account: Account) -> None:
    plan = account.plan([ask(1000.0, 10)], resume_key="run")
    assert account.resume(plan.id).lost is None
    with pytest.raises(LedgerError, match="has no plan 'other'"):
        account.resume("other")
    with pytest.raises(LedgerError, match="belongs to plan"):
        account.plan([ask(1000.0, 10)], resume_key="run")


def test_plans_cannot_be_copied_or_carried_into_a_fork(account: Account) -> None:
    plan = account.plan([ask(1000.0, 10)])
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(plan)

    def take() -> None:
        with pytest.raises(LedgerError, match="after a fork"):
            plan.take("sum")
        with pytest.raises(LedgerError, match="after a fork"):
            plan.close()

    assert wait(fork(take)) == 0


def test_an_in_memory_ledger_cannot_follow_a_fork() -> None:
    account = open_account(None)

    def charge() -> None:
        with pytest.raises(LedgerError, match="cannot follow a fork"):
            account.charge(ask())

    assert wait(fork(charge)) == 0


def test_threads_share_a_plan_without_sharing_an_answer(account: Account) -> None:
    plan = account.plan([ask(1000.0, 2000)])
    got: list[int] = []

    def work() -> None:
        try:
            while True:
                plan.take("sum")
                got.append(1)
        except BudgetExceeded:
            return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2000


def test_killed_at_random_moments_the_ledger_never_counts_too_little(where: Path | str, tmp_path: Path) -> None:
    planned, kills = 1_000_000, 50
    account = open_account(where)
    account.plan([ask(50_000.0, planned)], resume_key="run")
    journal = tmp_path / "journal"
    journal.touch()

    def spend() -> None:
        plan = open_account(where).resume("run")
        out = os.open(journal, os.O_WRONLY | os.O_APPEND)
        try:
            while True:
                plan.take("sum")
                os.write(out, struct.pack("q", plan.taken))  # the answer has left
        except BudgetExceeded:
            return

    rng = random.Random(1)
    killed = 0
    for attempt in range(kills):
        size, deadline = journal.stat().st_size, time.monotonic() + 10
        pid = fork(spend)
        # Half of them wherever they are (opening, resuming, in the first write), half once answers flow.
        while attempt % 2 and journal.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        killed += wait(pid) == -signal.SIGKILL
        numbers = [n for (n,) in struct.iter_unpack("q", journal.read_bytes())]
        assert len(numbers) == len(set(numbers)), "one answer left the door twice"
        mark = counted(account)[0]
        assert len(numbers) <= mark <= planned
        assert not numbers or max(numbers) <= mark
    assert killed > kills // 2
    assert len(numbers) > 200, "the test must have taken something"
    assert mark < planned, "the test must not have run dry"
    last = account.resume("run", seen=len(numbers))
    assert last.remaining() == planned - mark
    assert last.lost == mark - len(numbers)
    print(f"\n{killed} kills, {len(numbers)} answers left, {mark} counted of {planned}")


def test_four_processes_cannot_overspend_together(where: Path | str, tmp_path: Path) -> None:
    alone = open_account(None)
    fits = 0
    with contextlib.suppress(BudgetExceeded):
        while True:
            alone.charge(ask(50.0))
            fits += 1
    account = open_account(where)
    tally = tmp_path / "tally"
    tally.touch()
    go = tmp_path / "go"

    def spend() -> None:
        mine = open_account(where)
        out = os.open(tally, os.O_WRONLY | os.O_APPEND)
        while not go.exists():
            time.sleep(0.001)
        try:
            while True:
                mine.charge(ask(50.0)).take("sum")
                os.write(out, b"x")
        except BudgetExceeded:
            return

    children = [fork(spend) for _ in range(4)]
    go.touch()
    assert [wait(pid) for pid in children] == [0] * 4
    assert len(tally.read_bytes()) == fits == sum(counted(account)) > 100


def test_of_four_processes_one_gets_the_whole_budget(where: Path | str, tmp_path: Path) -> None:
    # All four also race to make the file and the account.
    go, won = tmp_path / "go", tmp_path / "won"
    won.touch()

    def spend() -> None:
        while not go.exists():
            time.sleep(0.001)
        try:
            open_account(where).plan([ask(38.5, 100)])
        except BudgetExceeded:
            return
        with open(won, "ab") as file:
            file.write(b"x")

    accounting.epsilon([ask(38.5, 100)], delta=1e-5, adjacency=ADD_REMOVE)  # so that the children race at the database
    children = [fork(spend) for _ in range(4)]
    time.sleep(0.2)
    go.touch()
    assert [wait(pid) for pid in children] == [0] * 4
    assert won.read_bytes() == b"x"
    if isinstance(where, Path):
        assert sorted(p.name for p in tmp_path.iterdir()) == ["go", "ledger.db", "won"]


# --- a broken world ---------------------------------------------------------------------------------------------------


def test_files_that_are_no_ledger_are_refused_and_left_alone(tmp_path: Path) -> None:
    text, empty, other, folder = (tmp_path / name for name in ("text", "empty", "other", "folder"))
    text.write_text("my thesis, by me")
    empty.touch()
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    folder.mkdir()
    for path, words in (
        (text, "is not a database"),
        (empty, "is an empty file"),
        (other, "another program"),
        (folder, "is a folder"),
        (tmp_path / "missing" / "ledger.db", "folder .* is missing"),
    ):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(LedgerError, match=words):
            Ledger(path)
        assert (path.read_bytes() if path.is_file() else None) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "folder", "other", "text"]


def test_bad_urls_are_refused(tmp_path: Path) -> None:
    for url, words in (
        ("nosuch://here", "URL cannot be used"),
        ("sqlite://", "in_memory"),
        ("sqlite:///" + str(tmp_path / "missing" / "l.db"), "is missing"),
    ):
        with pytest.raises(LedgerError, match=words):
            Ledger(url)
    Ledger(f"sqlite:///{tmp_path}/ledger.db")
    assert (tmp_path / "ledger.db").exists()


def test_another_schema_version_is_refused(where: Path | str) -> None:
    Ledger(where)
    sql(where, "UPDATE sfumato_meta SET value = '99'")
    with pytest.raises(LedgerError, match="schema version 99"):
        Ledger(where)
    sql(where, "DELETE FROM sfumato_meta")
    with pytest.raises(LedgerError, match="schema version 0"):
        Ledger(where)


def test_a_ledger_of_version_1_is_brought_up_to_date_and_forgets_nothing(where: Path | str) -> None:
    plan = open_account(where).plan([ask(100.0, 10)], resume_key="run")
    plan.take("sum")
    sql(
        where,
        "ALTER TABLE sfumato_plans DROP COLUMN made_by",
        "ALTER TABLE sfumato_plans DROP COLUMN held_by",
        "DROP TABLE sfumato_queue",
        "UPDATE sfumato_meta SET value = '1'",
    )
    account = open_account(where)
    assert counted(account) == [1]
    assert account.view().plans[0].made_by is None
    plan.take("sum")  # also of a process that opened it before
    again = Ledger(where, user="anna").account("clinic").resume("run")
    assert again.taken >= 2
    held = account.view().plans[0].held_by
    assert held is not None
    assert (held.user, held.process) == ("anna", os.getpid())
    with pytest.raises(BudgetExceeded):
        account.plan([ask(38.0, 100)])


def test_a_corrupt_file_is_refused(path: Path) -> None:
    account = open_account(path)
    for _ in range(40):
        account.charge(ask(1000.0))
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 7] = random.Random(0).randbytes(4096 * 4)
    path.write_bytes(bytes(data))
    with pytest.raises(LedgerError, match="corrupt"):
        Ledger(path)
    assert path.read_bytes() == bytes(data)
    path.write_bytes(b"SQLite format 3\x00" + bytes(data[16:5000]))
    with pytest.raises(LedgerError):
        Ledger(path)


def test_a_locked_ledger_gives_no_answer(where: Path | str) -> None:
    open_account(where)
    account = Ledger(where, timeout=0.1).account("clinic")
    plan = account.plan([ask(1000.0, 100)])
    plan.take("sum")
    work: list[Callable[[], object]] = [lambda: account.charge(ask()), lambda: plan.take("sum")]
    if isinstance(where, Path):
        other = sqlite3.connect(where, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        work.append(account.statement)  # a server lets readers in
    else:
        other = sqlalchemy.create_engine(where, poolclass=sqlalchemy.NullPool).raw_connection()
        other.cursor().execute("LOCK TABLE sfumato_accounts, sfumato_plans")
    for try_it in work:
        with pytest.raises(LedgerError, match=r"was locked by another process for more than 0.1 s"):
            try_it()
    other.rollback()
    other.close()
    assert plan.taken == 1
    plan.take("sum")
    assert plan.taken == 2


def test_an_interrupted_read_locks_nobody_out(where: Path | str) -> None:
    """Nor the program itself, which writes how many answers a plan took while it still handles the interruption."""
    open_account(where)
    account = Ledger(where, timeout=0.1).account("clinic")
    plan = account.plan([ask(1000.0, 100)])
    plan.take("sum")

    def interrupted(tx: Transaction) -> None:
        twice = "SELECT name FROM sfumato_accounts UNION ALL SELECT name FROM sfumato_accounts"
        rows = tx._connection.exec_driver_sql(twice)
        rows.fetchone()
        raise KeyboardInterrupt  # with a row left

    try:
        account._store.read(interrupted)
    except KeyboardInterrupt:
        plan.pause()
    assert counted(account) == [1]


def test_a_ledger_that_was_removed_or_replaced_gives_no_answer(account: Account, where: Path | str) -> None:
    plan = account.plan([ask(1000.0, 100)])
    plan.take("sum")
    if isinstance(where, Path):
        where.unlink()
    else:
        sql(
            where,
            "DROP TABLE sfumato_meta, sfumato_stamps, sfumato_queue, sfumato_heads, sfumato_plans, sfumato_accounts",
        )
    with pytest.raises(LedgerError, match=r"was removed|has lost its tables"):
        plan.take("sum")
    assert not (isinstance(where, Path) and where.exists())
    other = open_account(where)
    other.plan([ask(1000.0, 100)])  # the same id
    with pytest.raises(LedgerError, match="replaced"):
        plan.take("sum")


def test_a_ledger_stays_the_same_file_wherever_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    accounts = []
    for folder in folders:
        folder.mkdir()
        monkeypatch.chdir(folder)
        accounts.append(open_account("ledger.db"))
    copied = [pickle.loads(pickle.dumps(Ledger(name))) for name in ("ledger.db", "sqlite:///ledger.db")]
    accounts[0].charge(ask()).take("sum")
    monkeypatch.chdir(tmp_path)
    accounts[0].charge(ask()).take("sum")
    for ledger in copied:
        assert ledger.account_names() == ["clinic"]
    counted = [open_account(folder / "ledger.db").statement().asked for folder in folders]
    assert [len(lines) for lines in counted] == [2, 0]


def test_an_account_is_not_charged_under_the_number_of_another(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    account = open_account(path)
    path.unlink()
    other = Ledger(path).account("another", unit="user", adjacency=ADD_REMOVE, budget=BUDGET)
    for spend in (lambda: account.charge(ask()), lambda: account.plan([ask()]), lambda: account.stamp("note", "x")):
        with pytest.raises(LedgerError, match="replaced while it was open"):
            spend()
    assert not other.statement().asked


def test_a_full_disk_gives_no_answer_and_charges_nothing(path: Path) -> None:
    account = open_account(path)
    account.charge(ask(1000.0))

    def charge() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size))
        with pytest.raises(LedgerError, match="disk"):
            account.charge(ask(1000.0))

    before = counted(account)
    assert wait(fork(charge)) == 0
    assert counted(Ledger(path).account("clinic")) == before


@pytest.fixture
def public_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_ledger_can_be_read_and_not_spent(public_folder: Path) -> None:
    path = public_folder / "ledger.db"
    open_account(path).plan([ask(1000.0, 100)], resume_key="run")
    path.chmod(0o444)

    def look() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        account = Ledger(path).account("clinic")
        assert account.statement().epsilon > 0
        for work in (lambda: account.charge(ask(1000.0)), lambda: account.resume("run")):
            with pytest.raises(LedgerError, match="is read-only"):
                work()
        with pytest.raises(LedgerError):
            Ledger(public_folder / "new.db")

    before = path.read_bytes()
    assert wait(fork(look)) == 0
    assert path.read_bytes() == before


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_taking_answers_costs_little(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = 10_000
    plan = account.plan([ask(5000.0, answers)])
    writes, costs = [], []
    raise_mark = plan._raise_mark

    def counted(*args: object) -> None:
        writes.append(args)
        raise_mark(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "_raise_mark", counted)
    for _ in range(answers):
        time.sleep(0.0002)
        start = time.perf_counter()
        plan.take("sum")
        costs.append(time.perf_counter() - start)
    usual = statistics.median(costs)
    print(f"\ntake: {1e6 * usual:.1f} us as a rule, {len(writes)} writes")
    assert len(writes) <= 100  # 8 on an idle machine
    assert usual < 200e-6  # 8 us on an idle machine; a write takes 4,000


def test_slow_steps_lose_one_answer_in_a_crash(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(ledger_plan.time, "monotonic", lambda: next(clock) / 2)  # every look at it is a second later
    plan = account.plan([ask(1000.0, 100)])
    for n in range(1, 20):
        plan.take("sum")
        monkeypatch.setattr(plan, "_slab_seconds", ledger_plan.SLAB_SECONDS[0])
        assert plan._slabs["sum"].mark == n


def test_progress_is_cheap_monotone_and_ends_at_the_plan(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Mechanism(question="g", noise=Gaussian(3.0), sampler=Poisson(size=50_000, batch_size=500), times=1000)
    plan = account.plan([train, ask(100.0, 2)])
    calls = []
    real = accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *a, **k: calls.append(1) or real(*a, **k))
    curve = [plan.epsilon_after(k) for k in range(1003)]
    assert len(calls) <= 11
    assert curve[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(curve))
    assert curve[-1] == account.epsilon_spent() == plan.epsilon_after(10**9)
    middle = real(
        [Mechanism(question="g", noise=train.noise, sampler=train.sampler, times=700)], delta=1e-5, adjacency=ADD_REMOVE
    )
    assert curve[700] == pytest.approx(middle.epsilon, rel=0.05)


def test_the_balance_is_read_at_most_once_a_second(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.charge(ask(200.0))
    spent = account.epsilon_spent()
    assert 0 < spent < 1
    assert account.left() == pytest.approx(1 - spent)
    monkeypatch.delattr(account, "_store")
    assert account.epsilon_spent() == spent
