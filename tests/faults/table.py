"""Everything that may happen to a training and its ledger, injected for real: `python -m tests.faults.table`.

Each life of a training is a forked process that tells, through a pipe, of every answer that left the door. After each
fault: the ledger counts at least the answers that left (what it lacks is "uncounted", and must be nothing); whoever met
the fault was told so in one sentence; and the training then went on to its end, where it may. A mutant
shows that the table can fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sfumato import Budget, Ledger, Objective, Private, cross_entropy, train
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.gradients import Performance
from sfumato.privacy.ledger import Account

STEPS, RESERVE, SIZE, BATCH, NOISE = 30, 40, 200, 20, 4.0
BUDGET = Budget(epsilon=12.0, delta=1e-4)
MUTANTS = {"blind": "the head of a ledger is not compared with the checkpoint's"}
REPOSITORY = Path(__file__).parent.parent.parent


class Model(torch.nn.Module):
    """A small model whose checkpoint is larger than a ledger, and that can run out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("ballast", torch.zeros(100_000))
        self.fails = 0  # forward passes with private rows that run out of memory from now on

    def forward(self, rows: torch.Tensor) -> Any:
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("made up")
        return self.linear(rows)


@dataclass
class Told:
    """What one life left behind."""

    answers: int
    error: str = ""
    kind: str = ""
    taken: int = 0
    lost: int = 0
    short: int = 0
    finished: bool = False


Event = Callable[[Model], None]


def live(
    folder: Path,
    *,
    at: int | None = None,
    event: Event | None = None,
    micro_batch: int | None = None,
    checkpoint_every: float = 0.0,
) -> Told:
    """One life of the training in `folder`; `event` happens before its answer number `at`."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        try:
            told = _train(folder, write, at, event, micro_batch, checkpoint_every)
            os.write(write, b"\n" + json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        dots, _, rest = pipe.read().partition(b"\n")
    os.waitpid(pid, 0)
    return Told(answers=dots.count(b"."), **(json.loads(rest) if rest else {"error": "died", "kind": "died"}))


def _train(
    folder: Path,
    pipe: int,
    at: int | None,
    event: Event | None,
    micro_batch: int | None = None,
    checkpoint_every: float = 0.0,
) -> dict[str, Any]:
    model, answers = Model(), 0

    def method(params: Any, public: Any, ask: Any) -> Any:
        def told(question: Any) -> Any:
            nonlocal answers
            if event is not None and answers == at:
                event(model)
            answers += 1
            answer = ask(question)
            os.write(pipe, b".")
            return answer

        return dp_sgd(params, public, told)

    try:
        private = Private(
            (torch.zeros(SIZE, 4), torch.arange(SIZE) % 2),
            name="people",
            size=SIZE,
            objective=Objective(model, cross_entropy),
            ledger=folder / "ledger.db",
            budget=BUDGET,
            performance=Performance(micro_batch=micro_batch),
        )
        run = train(
            model,
            private=private,
            method=method,
            steps=STEPS,
            reserve=RESERVE,
            batch_size=BATCH,
            noise=NOISE,
            checkpoint=folder / "run.pt",
            checkpoint_every=checkpoint_every,
            progress=False,
        )
    except BaseException as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {"taken": run.steps_taken, "lost": run.steps_lost, "short": run.steps_short, "finished": True}


def warm_up() -> None:
    """What the progress of every life would account for anew, each time; forked lives inherit it."""
    with tempfile.TemporaryDirectory() as folder:
        read, write = os.pipe()
        _train(Path(folder), write, None, None)
        os.close(read)
        os.close(write)


def counted(folder: Path) -> int:
    with Ledger(folder / "ledger.db", make=False) as ledger:
        return sum(line.answers for line in ledger.account("people").statement().asked)


def interrupt(model: Model) -> None:
    raise KeyboardInterrupt


def limit_files(size: int) -> Event:
    """From now on no file of this process may grow beyond `size`, as on a disk without room."""
    return lambda model: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def beside_a_check(at: int) -> int:
    """The model is looked at again at the 4th, 16th, 64th, ... question: where that lacks memory, it says nothing."""
    return at + 2 if at in (3, 4, 15, 16, 63, 64) else at


def run_out(times: int) -> Event:
    def event(model: Model) -> None:
        model.fails = times

    return event


# ------------------------------------------------------------------------------------------------ the faults


@dataclass
class Fault:
    """A row of the table."""

    name: str
    injected: int = 0
    answers: int = 0  # that left the door
    counted: int = 0  # by the ledger
    unpaid: int = 0  # left and not counted: must be nothing
    refused: int = 0  # times that somebody was told, in one sentence
    finished: int = 0  # trainings that went on to their end
    message: str = ""
    violations: list[str] = field(default_factory=list)

    def check(self, right: bool, said: str) -> None:
        if not right:
            self.violations.append(f"{self.name}: {said}")

    def told(self, told: Told, *words: str) -> None:
        self.injected += 1
        self.refused += bool(told.error)
        self.message = told.error or self.message
        fits = all(word in told.error for word in words)
        one = told.error.count("\n") == 0 and told.kind not in ("", "died")
        self.check(fits and one, f"said {told.kind}: {told.error!r}, not {words}")

    def settle(self, answers: int, count: int, last: Told) -> None:
        self.answers += answers
        self.counted += count
        self.unpaid += max(0, answers - count)
        self.check(answers <= count, f"{answers} answers left and {count} are counted")
        self.finished += last.finished
        self.check(last.finished, f"the training did not go on: {last.error}")
        self.check(last.taken + last.short == STEPS, f"{last.taken} steps taken and {last.short} short")


def disk_full_ledger(row: Fault, folder: Path, at: int) -> None:
    first = live(folder, at=at, event=limit_files(4096), checkpoint_every=1e9)
    row.told(first, "Ledger", "disk")
    last = live(folder)
    row.settle(first.answers + last.answers, counted(folder), last)


def disk_full_checkpoint(row: Fault, folder: Path, at: int) -> None:
    first = live(folder, at=at, event=limit_files(300_000))
    row.told(first, "checkpoint", "cannot be written", "free some space")
    last = live(folder)
    row.settle(first.answers + last.answers, counted(folder), last)


def out_of_memory(row: Fault, folder: Path, at: int) -> None:
    first = live(folder, at=beside_a_check(at), event=run_out(1), micro_batch=7)
    row.told(first, "ran out of memory", "stays charged", "micro_batch")
    last = live(folder, micro_batch=3)
    row.settle(first.answers + last.answers, counted(folder), last)


def out_of_memory_once(row: Fault, folder: Path, at: int) -> None:
    """Where the library chose the size of the micro-batches itself, it halves it and goes on."""
    last = live(folder, at=beside_a_check(at), event=run_out(1))
    row.injected += 1
    row.check(last.lost == 0, f"{last.lost} steps lost")
    row.settle(last.answers, counted(folder), last)


def old_checkpoint(row: Fault, folder: Path, at: int) -> None:
    first = live(folder, at=at, event=interrupt)
    shutil.copy(folder / "run.pt", folder / "old.pt")
    second = live(folder, at=5, event=interrupt)
    shutil.copy(folder / "old.pt", folder / "run.pt")
    row.injected += 1
    last = live(folder)
    row.check(last.lost == second.answers, f"{last.lost} steps lost where {second.answers} answers were forgotten")
    row.settle(first.answers + second.answers + last.answers, counted(folder), last)


def ledger_from_backup(row: Fault, folder: Path, at: int) -> None:
    first = live(folder, at=at, event=interrupt)
    shutil.copy(folder / "ledger.db", folder / "backup.db")
    second = live(folder, at=5, event=interrupt)
    shutil.move(folder / "ledger.db", folder / "newest.db")
    shutil.copy(folder / "backup.db", folder / "ledger.db")
    third = live(folder)
    row.told(third, "ledger", "backup")
    row.check(third.answers == 0, f"{third.answers} answers left beside a ledger from a backup")
    shutil.move(folder / "newest.db", folder / "ledger.db")
    last = live(folder)
    row.settle(first.answers + second.answers + last.answers, counted(folder), last)


def ledger_used_twice(row: Fault, folder: Path, at: int) -> None:
    """Two copies go their own ways, which neither can know; found out where one's checkpoint meets the other."""
    first = live(folder, at=at, event=interrupt)
    for name in ("ledger.db", "run.pt"):
        shutil.copy(folder / name, folder / f"copy of {name}")
    second = live(folder, at=5, event=interrupt)
    for name in ("ledger.db", "run.pt"):
        shutil.move(folder / name, folder / f"first {name}")
        shutil.move(folder / f"copy of {name}", folder / name)
    live(folder, at=9, event=interrupt)  # the copy: it counts its own answers, more of them than the first one
    shutil.move(folder / "run.pt", folder / "second run.pt")
    shutil.copy(folder / "first run.pt", folder / "run.pt")
    third = live(folder)
    row.told(third, "lacks what the ledger of this checkpoint knew")
    row.check(third.answers == 0, f"{third.answers} answers left beside a copy")
    shutil.move(folder / "first ledger.db", folder / "ledger.db")
    last = live(folder)
    row.settle(first.answers + second.answers + last.answers, counted(folder), last)


def two_processes(row: Fault, folder: Path, at: int) -> None:
    """A second process is started on the same checkpoint while the first one trains."""
    gate, go = os.pipe()

    def wait(model: Model) -> None:
        os.read(gate, 1)

    found: list[Told] = []
    first = threading.Thread(target=lambda: found.append(live(folder, at=at, event=wait)))
    first.start()
    while not (folder / "run.pt").exists():
        time.sleep(0.01)
    second = live(folder)
    os.write(go, b"x")
    first.join()
    os.close(gate)
    os.close(go)
    row.told(second, "in use by another process")
    row.settle(second.answers + found[0].answers, counted(folder), found[0])


_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static int calls = 0;
static long jump(void) { return ((++calls / 3) % 2) ? 315360000L : -315360000L; } /* ten years on, ten years back */
int clock_gettime(clockid_t id, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *) = 0;
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int r = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += jump();
  return r;
}
time_t time(time_t *t) { struct timespec s; clock_gettime(CLOCK_REALTIME, &s); if (t) *t = s.tv_sec; return s.tv_sec; }
int gettimeofday(struct timeval *v, void *z) {
  struct timespec s; clock_gettime(CLOCK_REALTIME, &s); v->tv_sec = s.tv_sec; v->tv_usec = s.tv_nsec / 1000; return 0;
}
"""


def clock_jumps(row: Fault, folder: Path, at: int) -> None:
    """The system's clock jumps by twenty years, on and back, at every third look: before, during and after a resume."""
    library = folder / "clock.so"
    (folder / "clock.c").write_text(_CLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    lives = []
    for stop in (at, None):
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.table", "--live", str(folder), *([] if stop is None else [str(stop)])],
            env={**os.environ, "LD_PRELOAD": str(library)},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=900,  # a busy machine is slow; a training that hangs is found all the same
            check=False,
        )
        row.check(done.returncode == 0, f"died: {done.stderr[-300:]}")
        years = json.loads(done.stdout)
        row.check(len(set(years.pop("years"))) > 1, "the clock did not jump: the test proves nothing")
        lives.append(Told(**years))
        row.injected += 1
    row.settle(sum(told.answers for told in lives), counted(folder), lives[-1])


FAULTS: dict[str, Callable[[Fault, Path, int], None]] = {
    "disk full, for the ledger": disk_full_ledger,
    "disk full, for the checkpoint": disk_full_checkpoint,
    "out of memory, fixed micro-batch": out_of_memory,
    "out of memory, once": out_of_memory_once,
    "a checkpoint older than the ledger": old_checkpoint,
    "a ledger put back from a backup": ledger_from_backup,
    "a ledger copied and used twice": ledger_used_twice,
    "two processes on one checkpoint": two_processes,
    "clock jumps by twenty years": clock_jumps,
}


def power_cut(kills: int, seed: int) -> Fault:
    """kill -9 at random moments, by the harness that is made for it."""
    report = _harness("kill", "--kills", str(kills), "--seed", str(seed), "--json", "--mutants")
    row = Fault("power cut (kill -9)", injected=report["kills"], answers=report["answers"], counted=report["counted"])
    row.finished, row.violations = report["finished"], report["violations"]
    row.unpaid = max(0, row.answers - row.counted)
    return row


def many_spenders(seconds: float, seed: int) -> Fault:
    """Four processes spend one budget, and two of them are killed, by the harness that is made for it."""
    report = _harness("spend", "--where", "file", "--seconds", str(seconds), "--seed", str(seed))
    row = Fault("four processes, one budget, kills", injected=report["kills"], violations=report["violations"])
    row.answers, row.counted = report["answers"], report["counted"]
    row.unpaid = max(0, row.answers - row.counted)
    return row


def _harness(name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.faults.{name}", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def inject(names: list[str], times: int, seed: int) -> list[Fault]:
    """Every named fault, `times` times, each at a random step."""
    moments = random.Random(seed)
    rows = []
    for name in names:
        row = Fault(name)
        if name == "clock jumps by twenty years" and shutil.which("cc") is None:
            row.message = "not run: there is no C compiler"
            rows.append(row)
            continue
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                FAULTS[name](row, Path(folder), moments.randint(2, STEPS - 12))
        rows.append(row)
    return rows


def blind(seed: int) -> list[str]:
    """What the table says of a library that does not look at heads."""
    honest, Account.check_head = Account.check_head, lambda self, head: None  # type: ignore[method-assign]
    try:
        return inject(["a ledger copied and used twice"], 1, seed)[0].violations
    finally:
        Account.check_head = honest  # type: ignore[method-assign]


def show(rows: list[Fault]) -> None:
    table = Table(title="What was injected, and what was lost")
    table.add_column("fault")
    for heading in ("injected", "answers left", "counted", "uncounted", "told", "went on"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = (row.injected, row.answers, row.counted, row.unpaid, row.refused, row.finished)
        table.add_row(row.name, *map(str, numbers))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in rows:
        if row.message:
            console.print(f"{row.name}: {row.message}", highlight=False)
        for violation in row.violations:
            console.print(f"[bold red]VIOLATION[/] {violation}")


def _live_here(folder: Path, at: int | None) -> None:
    """One life in this very process, whose clock the caller has seen to."""
    read, write = os.pipe()
    years = [time.localtime(time.time()).tm_year for _ in range(8)]
    told = _train(folder, write, at, None if at is None else interrupt)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answers = pipe.read().count(b".")
    print(json.dumps({"answers": answers, "years": years, **told}))


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject every fault, and print what was lost.")
    parser.add_argument("--times", type=int, default=10, help="each fault, at a random step")
    parser.add_argument("--kills", type=int, default=50, help="of trainings; 0 leaves out the two other harnesses")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--live", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.live:
        _live_here(Path(options.live[0]), int(options.live[1]) if len(options.live) > 1 else None)
        return 0
    warm_up()
    rows = inject(options.only, options.times, options.seed)
    if options.kills:
        rows += [power_cut(options.kills, options.seed), many_spenders(max(3.0, options.kills / 5), options.seed)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    caught = blind(options.seed)
    report = {"faults": [vars(row) for row in rows], "mutants": {"blind": {"caught": bool(caught)}}}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    show(rows)
    verdict = f"caught: {caught[0]}" if caught else "NOT CAUGHT"
    Console().print(f"Mutant blind ({MUTANTS['blind']}): {verdict}", highlight=False)
    return int(any(row.violations or row.unpaid for row in rows) or not caught)


if __name__ == "__main__":
    sys.exit(main())
