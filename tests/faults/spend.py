"""Many processes spend from one budget while the server is killed: `python -m tests.faults.spend --where postgres`.

Each process plans, takes, gives back, charges and waits at random, and journals every answer that left, in a file that
survives it. Plans are so large that only a few fit at once, so the limit is met all the time; in the end all charge
until nothing fits. A PostgreSQL server is killed like by a power cut and started again; with a file, processes are
killed instead. Then this must hold:

(a) the ledger counts every answer that left, in the plan that it belongs to, and not one fewer;
(b) whoever closed a plan finds exactly what it took: nothing was counted twice;
(c) no plan is in the ledger that nobody made: at most one for each process that was killed while it reserved;
(d) what left is within the budget, by the formula for Gaussian noise (order / 2 scale^2), not by the ledger's sums;
(e) at every moment that was looked at, the reservations together fit, and the total is their sum.

Mutants, which break one promise each, show that the harness can fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sfumato.data.samplers import FullBatch
from sfumato.errors import BudgetExceeded, LedgerError
from sfumato.privacy import accounting, ledger_account, ledger_queue, ledger_tables
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import RenyiFilter
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from tests.faults.postgres import Server, throw_away

BUDGET = Budget(epsilon=1.0, delta=1e-5)
ORDERS = RenyiFilter.around(BUDGET).orders
LIMITS = [accounting.renyi_budget(BUDGET.epsilon, BUDGET.delta / len(ORDERS), order) for order in ORDERS]
CAPACITY = 100_000  # answers that the budget holds
SCALE = math.sqrt(CAPACITY * min(a / 2 / limit for a, limit in zip(ORDERS, LIMITS, strict=True) if limit > 0))
LARGE = CAPACITY // 3  # answers of a plan: three at once
LAST = CAPACITY // 200  # answers of a charge at the end, until nothing fits
MUTANTS = {
    "unlocked": "the account's row is read without its lock",
    "generous": "the filter lets everything pass",
}


def used(divergences: Iterable[float]) -> float:
    """How much of the budget such Renyi divergences take, one for each order: the order with most left decides."""
    return min(spent / limit for spent, limit in zip(divergences, LIMITS, strict=True) if limit > 0)


def ask(times: int) -> Mechanism:
    return Mechanism(question="sum", noise=Gaussian(SCALE), sampler=FullBatch(size=1000), times=times)


# ---------------------------------------------------------------------------------------------- one process


class Worker:
    def __init__(self, where: str, journal: Path, until: float, seed: int) -> None:
        self._account = self._open(where)
        # The kernel keeps what was written when the process is killed, so no fsync is needed against kill -9.
        self._out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._until = until
        self._random = random.Random(seed)

    @staticmethod
    def _open(where: str) -> Account:
        while True:  # opening does not wait for a server
            with contextlib.suppress(LedgerError):
                return Ledger(where, timeout=120.0).account("clinic")
            time.sleep(0.2)

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._out, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    def run(self) -> None:
        # Few wait, since nobody passes them.
        jobs = (*[self._plan] * 4, *[self._charge] * 4, self._wait)
        while time.time() < self._until:
            with self._refusals():
                self._random.choice(jobs)()
        while True:
            try:
                self._spend(self._account.charge(ask(LAST)), LAST)
            except BudgetExceeded as refused:
                if "earlier reservation" not in str(refused):  # a dead job's place in the queue expires
                    return
                time.sleep(0.1)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except BudgetExceeded:
            self.write("refused")

    def _plan(self, wait: float = 0.0) -> None:
        plan = self._account.plan([ask(LARGE)], wait=wait)
        self._spend(plan, self._random.randrange(4))
        time.sleep(self._random.uniform(0.0, 0.02))
        plan.close()
        self.write("closed", plan=plan.id)

    def _charge(self) -> None:
        times = self._random.randrange(1, 4)
        self._spend(self._account.charge(ask(times)), times)

    def _wait(self) -> None:
        self._plan(wait=1.0)
        self.write("waited")

    def _spend(self, plan: Any, answers: int) -> None:
        self.write("made", plan=plan.id)
        for _ in range(answers):
            plan.take("sum")
        if answers:  # in one line: most of them at once, at the end
            self.write("left", plan=plan.id, answers=answers)


def sabotage(mutant: str | None) -> None:
    if mutant == "unlocked":

        def unlocked(tx: Any, account: int, **_: Any) -> Any:
            table = ledger_tables._accounts
            return tx._one(table.select().where(table.c.id == account))

        ledger_tables.Transaction.lock_account = unlocked  # type: ignore[method-assign]
    if mutant == "generous":

        class Generous:
            def __init__(self, inner: RenyiFilter) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def fits(self, total: Any, budget: Budget) -> bool:
                return True

        init = ledger_account.Account.__init__

        def generous(self: Account, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.filter = Generous(self.filter)  # type: ignore[assignment,arg-type]

        ledger_account.Account.__init__ = generous  # type: ignore[method-assign]


def born(number: int, where: str, folder: Path, until: float, mutant: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ledger_queue.POLL_SECONDS, ledger_queue.LEASE_SECONDS = 0.2, 5.0
        sabotage(mutant)
        Worker(where, folder / f"{os.getpid()}.journal", until, number).run()
        status = 0
    except BaseException:
        with open(folder / "errors", "a") as errors:
            errors.write(traceback.format_exc())
    finally:
        os._exit(status)


# ---------------------------------------------------------------------------------------------- what must hold


class Watch:
    """Looks at the ledger from outside, as it goes and at the end."""

    def __init__(self, account: Account, folder: Path) -> None:
        self.account, self.folder = account, folder
        self.violations: list[str] = []
        self.looks = 0
        self.most = 0.0

    def look(self) -> None:
        """(e), at one moment."""

        def work(tx: Any) -> tuple[list[float], list[list[float]]]:
            return json.loads(tx.account("clinic")["total"]), [json.loads(row) for row in tx.totals(self.account._id)]

        total, parts = self.account._store.read(work)
        summed = [math.fsum(column) for column in zip(*parts, strict=True)] if parts else [0.0] * len(ORDERS)
        share = used(summed)
        self.looks, self.most = self.looks + 1, max(self.most, share)
        if share > 1 + 1e-9:
            self._violated(f"(e) reservations take {share:.4f} of the budget")
        if any(not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(total, summed, strict=True)):
            self._violated("(e) the total is not the sum of what was reserved")

    def settle(self, deaths: int, made: set[int]) -> dict[str, Any]:
        """(a) to (d), when all is over; `deaths` is how many processes were killed, `made` the plans made before."""
        self.look()
        kinds: Counter[str] = Counter()
        left: dict[int, int] = defaultdict(int)
        closed = set()
        for path in self.folder.glob("*.journal"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                kinds[record["kind"]] += 1
                if record["kind"] == "left":
                    left[record["plan"]] += record["answers"]
                elif record["kind"] == "made":
                    if record["plan"] in made:
                        self._violated(f"(c) two processes made plan {record['plan']}")
                    made.add(record["plan"])
                elif record["kind"] == "closed":
                    closed.add(record["plan"])
        view = self.account.view()
        counted = {plan.plan: sum(count for count, _ in plan.questions.values()) for plan in view.plans}
        for plan in made:
            if counted.get(plan, 0) < left[plan]:
                self._violated(f"(a) {left[plan]} answers of plan {plan} left and {counted.get(plan)} are counted")
            if plan in closed and counted.get(plan, 0) != left[plan]:
                self._violated(f"(b) {left[plan]} answers of plan {plan} left and {counted.get(plan)} are counted")
        unknown = set(counted) - made
        if len(unknown) > deaths:
            self._violated(f"(c) {len(unknown)} plans that nobody made, and {deaths} processes were killed")
        answers = sum(left.values())
        share = used(answers * order / (2 * SCALE**2) for order in ORDERS)
        if share > 1 + 1e-9:
            self._violated(f"(d) the answers that left take {share:.4f} of the budget")
        return {
            "plans": len(made),
            "refused": kinds["refused"],
            "waited": kinds["waited"],
            "answers": answers,
            "counted": sum(counted.values()),
            "unknown plans": len(unknown),
            "looks": self.looks,
            "most reserved at once": self.most,
            "budget used": share,
        }

    def _violated(self, text: str) -> None:
        self.violations.append(text)


class Harness:
    def __init__(self, *, processes: int, seconds: float, kills: int, mutant: str | None, seed: int) -> None:
        self._processes, self._seconds, self._kills = processes, seconds, kills
        self._mutant, self._random = mutant, random.Random(seed)

    def run(self, server: Server | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            return self._run(server, str(folder / "ledger.db") if server is None else server.url(), folder)

    def _run(self, server: Server | None, where: str, folder: Path) -> dict[str, Any]:
        ledger = Ledger(where, timeout=120.0)
        account = ledger.account("clinic", unit="user", adjacency=Adjacency.ADD_REMOVE, budget=BUDGET)
        first = account.plan([ask(1)])  # accounting is imported before the forks
        first.close()
        watch = Watch(account, folder)
        start = time.time()
        until = start + self._seconds
        alive = [born(n, where, folder, until, self._mutant) for n in range(self._processes)]
        killer = threading.Thread(target=self._kill_server, args=(server, start), daemon=True)
        if server is not None:
            killer.start()
        moments = [start + self._seconds * (k + 1) / (self._kills + 1) for k in range(self._kills)]
        deaths = 0
        while alive:
            watch.look()
            if server is None and moments and time.time() > moments[0]:
                moments.pop(0)
                victim = self._random.choice(alive)
                os.kill(victim, signal.SIGKILL)
                deaths += 1
                alive.append(born(self._processes + deaths, where, folder, until, self._mutant))
            if watch.violations:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                    deaths += 1
            for pid in list(alive):
                if os.waitpid(pid, 0 if watch.violations else os.WNOHANG)[0] == pid:
                    alive.remove(pid)
            time.sleep(0.05)
        if server is not None:
            killer.join()
        errors = (folder / "errors").read_text() if (folder / "errors").exists() else ""
        if errors:
            watch.violations.append(f"a process failed: {errors.strip().splitlines()[-1]}")
        found = watch.settle(deaths, {first.id})
        return {
            "processes": self._processes,
            "seconds": round(time.time() - start, 1),
            "kills": deaths if server is None else self._kills,
            **found,
            "violations": watch.violations[:5],
        }

    def _kill_server(self, server: Server, start: float) -> None:
        for k in range(self._kills):
            time.sleep(max(0.0, start + self._seconds * (k + 1) / (self._kills + 1) - time.time()))
            server.kill()
            time.sleep(self._random.uniform(0.1, 0.5))
            server.start()


def main() -> int:
    parser = argparse.ArgumentParser(description="Spend from one budget with many processes, and check what is left.")
    parser.add_argument("--where", choices=("file", "postgres"), default="postgres")
    parser.add_argument("--processes", type=int, help="16 with a server, 4 with a file")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--kills", type=int, default=2, help="of the server, or with a file of processes")
    parser.add_argument("--mutant", choices=MUTANTS, help="run this broken variant; exit status 1 if it is caught")
    parser.add_argument("--seed", type=int, default=0, help="of what each process does; time itself does not repeat")
    options = parser.parse_args()
    processes = options.processes or (16 if options.where == "postgres" else 4)
    harness = Harness(
        processes=processes,
        seconds=options.seconds,
        kills=options.kills,
        mutant=options.mutant,
        seed=options.seed,
    )
    with contextlib.nullcontext() if options.where == "file" else throw_away() as server:
        report = harness.run(server)
    print(json.dumps({"where": options.where, "mutant": options.mutant, **report}, indent=2))
    return int(bool(report["violations"]))


if __name__ == "__main__":
    sys.exit(main())
