"""Kill -9 at random moments of real trainings, and look at what is left: `python -m tests.faults.kill`.

Each life of a training is a forked process that calls `sfumato.train` with a checkpoint and a ledger file. It journals,
in a file that survives it, every answer that left the door, every checkpoint, and the state that it found after a
resume. The private rows are zero and so are their gradients: an answer is its noise, and its own fingerprint. After
every death this must hold:

(a) the ledger counts at least the answers that left, and states at least their epsilon;
(b) no noise was ever used twice: no three neighbouring values occur in two answers, in this life or an earlier one;
(c) the checkpoint can be read, is one that was written, and the next life starts from exactly that state;
(d) steps taken + lost <= steps + reserve, short = steps - taken, and a finished training says so for ever.

Mutants, which break one promise each, show that the harness can fail.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import mmap
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sfumato.training
from sfumato import Budget, Clip, GradientMean, Ledger, Objective, Private, Public, cross_entropy, train
from sfumato.checkpoint import load_checkpoint, save_checkpoint
from sfumato.errors import SfumatoError
from sfumato.privacy import accounting
from sfumato.privacy.ledger import Account
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

STEPS, RESERVE, SIZE, BATCH, NOISE = 160, 60, 200, 20, 4.0
BUDGET = Budget(epsilon=8.0, delta=1e-4)
CHECKPOINT_EVERY = 0.03  # seconds
PHASES = ("start", "plan", "resume", "step", "ledger", "checkpoint", "close", "end")
# Too short to be hit often by chance; of a plan or a resume, whichever this life begins with.
AIMED = ("begin", "ledger", "ledger", "ledger", "checkpoint", "checkpoint", "close", "end")
MUTANTS = {
    "late-mark": "the ledger is written just after an answer has left, not before",
    "replay": "the noise generator is restored from the checkpoint",
    "forget": "the optimiser's momentum is not restored",
    "in-place": "the checkpoint is overwritten in place",
}
MUTANT_KILLS = 72  # within which each must be caught


# ---------------------------------------------------------------------------------------------- one life, in a child


@dataclass(frozen=True)
class Place:
    """The files of one training; several trainings may share a ledger."""

    folder: Path
    ledger: Path
    name: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.name}.journal"

    @property
    def noise_state(self) -> Path:
        return self.folder / f"{self.name}.noise"  # written by the mutant "replay" only


class Life:
    """What the child writes while it lives: where it is, in shared memory, and what happened, in the journal."""

    def __init__(self, place: Place, mutant: str | None, where: mmap.mmap) -> None:
        self.place, self.mutant, self.where = place, mutant, where
        # The kernel keeps what was written when the process is killed, so no fsync is needed against kill -9.
        self._out = os.open(place.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.resumed: Callable[[Any], None] | None = None
        self.late: list[Callable[[], None]] = []

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._out, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.where[0] = self.where[0], PHASES.index(name)
        yield
        self.where[0] = before

    def within(self, owner: Any, method: str, name: str) -> None:
        """Show `name` as the phase while owner.method runs."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def shown(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, shown)

    def run(self) -> None:
        """One call of `train`, from the start or from where the last life died."""
        self.within(Account, "plan", "plan")
        self.within(Account, "resume", "resume")
        self.within(Plan, "_raise_mark", "ledger")
        self.within(Plan, "close", "close")
        torch.manual_seed(time.monotonic_ns())  # a life that restored nothing would start elsewhere
        module = torch.nn.Linear(12, 3, dtype=torch.float64)
        objective = Objective(module, cross_entropy)
        zeros = (torch.zeros(SIZE, 12, dtype=torch.float64), torch.arange(SIZE) % 3)
        # The bias would have a gradient even so.
        module.bias.requires_grad_(False)
        private = Private(
            zeros,
            name=self.place.name,
            size=SIZE,
            objective=objective,
            ledger=self.place.ledger,
            budget=BUDGET,
        )
        public = Public((torch.randn(32, 12, dtype=torch.float64), torch.arange(32) % 3), objective=objective)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        self._journal_checkpoints(private)
        self._journal_answers(private)
        self._break(private)

        def found(state: Any) -> None:
            live = digest(module.state_dict(), optimizer.state_dict(), state, public.random_state, state["step"])
            self.write("found", step=state["step"], digest=live)

        self.resumed = found
        self.where[0] = PHASES.index("step")
        run = train(
            module,
            private=private,
            public=public,
            method=Averaging(self),
            steps=STEPS,
            reserve=RESERVE,
            batch_size=BATCH,
            noise=NOISE,
            optimizer=lambda _: optimizer,
            checkpoint=self.place.checkpoint,
            checkpoint_every=CHECKPOINT_EVERY,
            name=self.place.name,
            progress=False,
        )
        self.where[0] = PHASES.index("end")
        kept = {"taken": run.steps_taken, "lost": run.steps_lost, "short": run.steps_short}
        self.write("finished", **kept, weights=digest(run.weights))
        time.sleep(0.002)  # so that the end, too, can be hit

    def _journal_answers(self, private: Private) -> None:
        ask = private.ask

        def journaled(question: Any, **kwargs: Any) -> Any:
            answer = ask(question, **kwargs)
            values = answer["weight"].flatten()[:8]
            self.write("answer", noise=[float(v).hex() for v in values])
            while self.late:
                self.late.pop()()
            return answer

        private.ask = journaled  # type: ignore[method-assign]

    def _journal_checkpoints(self, private: Private) -> None:
        def journaled(path: Path, state: dict[str, Any]) -> None:
            # Before it is written: whatever is found on the disk later must be in the journal.
            self.write("checkpoint", step=state["step"], digest=digest_of(state))
            with self.phase("checkpoint"):
                if self.mutant == "in-place":
                    torch.save(state, path)
                else:
                    save_checkpoint(path, state)
                if self.mutant == "replay":
                    kept = private._noise._normals._rng.bit_generator.state
                    draft = self.place.noise_state.with_suffix(".draft")
                    draft.write_bytes(pickle.dumps(kept))
                    draft.replace(self.place.noise_state)

        sfumato.training.save_checkpoint = journaled

    def _break(self, private: Private) -> None:
        if self.mutant == "replay" and self.place.noise_state.exists():
            kept = pickle.loads(self.place.noise_state.read_bytes())
            private._noise._normals._rng.bit_generator.state = kept
        if self.mutant == "forget":
            torch.optim.SGD.load_state_dict = lambda self, state: None  # type: ignore[method-assign,assignment]
        if self.mutant == "late-mark":
            raise_mark = Plan._raise_mark

            def later(plan: Plan, question: str, slab: Any) -> None:
                slab.mark = slab.taken + 1
                self.late.append(lambda: raise_mark(plan, question, slab))

            Plan._raise_mark = later  # type: ignore[method-assign]


class Averaging:
    """A method with a state that depends on every answer, and that draws public batches."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def init(self, params: Any) -> Any:
        return {"step": 0, "mean": {n: torch.zeros_like(p) for n, p in params.items()}}

    def step(self, state: Any, params: Any, public: Public, ask: Any) -> tuple[Any, Any]:
        if self._life.resumed is not None:
            self._life.resumed(state)
            self._life.resumed = None
        public.batch(4)
        gradient = ask(GradientMean(params, Clip(1.0)))
        mean = {n: 0.9 * m + 0.1 * gradient[n] for n, m in state["mean"].items()}
        return gradient, {"step": state["step"] + 1, "mean": mean}


def digest(*parts: Any) -> str:
    """Of nested dicts, lists and tensors, bit by bit."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in part:
                hashed.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        elif isinstance(part, torch.Tensor | np.ndarray):
            hashed.update(np.asarray(part).tobytes())
        else:
            hashed.update(repr(part).encode())

    add(parts)
    return hashed.hexdigest()[:32]


def digest_of(saved: dict[str, Any]) -> str:
    return digest(saved["model"], saved["optimizer"], saved["state"], saved["public"], saved["step"])


def born(place: Place, mutant: str | None, *, elsewhere: bool = False) -> tuple[int, mmap.mmap]:
    """Fork a life; it exits with 0 when its training is finished, 3 when it was refused with a sentence, else 1.

    Lives that are `elsewhere` do not see each other's lock on the checkpoint, as on two machines.
    """
    where = mmap.mmap(-1, mmap.PAGESIZE)
    pid = os.fork()
    if pid:
        return pid, where
    status = 1
    try:
        if elsewhere:
            sfumato.training.held_checkpoint = contextlib.nullcontext
        Life(place, mutant, where).run()
        status = 0
    except BaseException as error:
        status = 3 if isinstance(error, SfumatoError) else 1
        place.folder.joinpath("errors").open("a").write(traceback.format_exc())
    finally:
        os._exit(status)


# ---------------------------------------------------------------------------------------------- what must hold


@dataclass
class Watch:
    """One training over all its lives, as seen from outside."""

    place: Place
    violations: list[str] = field(default_factory=list)
    windows: set[tuple[str, ...]] = field(default_factory=set)
    answers: int = 0
    counted: int = 0
    written: set[tuple[int, str]] = field(default_factory=set)
    on_disk: tuple[int, str] | None = None  # the checkpoint that the next life will find
    finished: dict[str, Any] | None = None
    shared: bool = False  # two machines ran this training at once, so a checkpoint may have changed under their feet
    _read: int = 0

    def look(self) -> int:
        """After a death: read on, check everything, and say how many counted answers no checkpoint knows."""
        for record in self._records():
            getattr(self, f"_{record.pop('kind')}")(**record)
        account = self._account()
        line = account.statement().asked[0] if account is not None and account.statement().asked else None
        self.counted = 0 if line is None else line.answers
        if self.counted < self.answers:
            self._violated(f"(a) {self.answers} answers left the door and the ledger counts {self.counted}")
        if self.counted > STEPS + RESERVE:
            self._violated(f"(d) the ledger counts {self.counted} answers of {STEPS + RESERVE}")
        if account is not None and self.answers:
            real, stated = cost(self.answers), account.statement().epsilon
            if stated < real:
                self._violated(f"(a) the ledger states epsilon={stated}, and epsilon={real} has left")
        try:
            saved = load_checkpoint(self.place.checkpoint)
        except Exception as error:
            self._violated(f"(c) the checkpoint cannot be read: {error}")
            return 0
        self.on_disk = None if saved is None else (saved["step"], digest_of(saved))
        if self.on_disk is not None and self.on_disk not in self.written:
            self._violated(f"(c) the checkpoint of step {self.on_disk[0]} is not one that was written")
        if self.finished is not None and saved is not None:
            run = self.finished
            if run["weights"] != digest(saved["model"]) and not self.shared:
                self._violated("(c) the weights of the Run are not those of the last checkpoint")
            if run["taken"] + run["lost"] != self.counted:
                self._violated(f"(d) the Run says {run} and the ledger counts {self.counted}")
        return self.counted - (0 if saved is None else saved["answers"])

    def _answer(self, noise: list[str]) -> None:
        self.answers += 1
        for window in zip(noise, noise[1:], noise[2:], strict=False):
            if window in self.windows:
                self._violated(f"(b) noise was used again in answer {self.answers}: {window}")
            self.windows.add(window)

    def _checkpoint(self, step: int, digest: str) -> None:
        self.written.add((step, digest))

    def _found(self, step: int, digest: str) -> None:
        allowed = self.written if self.shared else {self.on_disk}
        if step and (step, digest) not in allowed:
            self._violated(f"(c) a life resumed at step {step} with another state than the checkpoint's")
        if not step and self.on_disk is not None and not self.shared:
            self._violated("(c) a life began afresh although there was a checkpoint")

    def _finished(self, **run: Any) -> None:
        if self.finished is not None and run != self.finished and not self.shared:
            self._violated(f"(d) a finished training said {self.finished} and then {run}")
        self.finished = run
        if run["taken"] + run["lost"] > STEPS + RESERVE or run["short"] != STEPS - run["taken"] or run["lost"] < 0:
            self._violated(f"(d) taken, lost and short do not add up: {run} of {STEPS} + {RESERVE}")

    def _account(self) -> Account | None:
        if not self.place.ledger.exists():
            return None
        ledger = Ledger(self.place.ledger)
        return ledger.account(self.place.name) if self.place.name in ledger.account_names() else None

    def _records(self) -> list[dict[str, Any]]:
        if not self.place.journal.exists():
            return []
        with self.place.journal.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        return [json.loads(line) for line in text.splitlines()]

    def _violated(self, what: str) -> None:
        self.violations.append(f"{self.place.name}: {what}")


@functools.cache
def cost(answers: int) -> float:
    """What so many answers cost, by the accountant itself."""
    sampler = Private(torch.zeros(1, 1), name="cost", size=SIZE, budget=BUDGET).poisson(BATCH)
    one = Mechanism(question="GradientMean", noise=Gaussian(NOISE), sampler=sampler, times=answers)
    # The plan's own cost is exact to 3e-4; a coarse one could lie above it.
    return accounting.epsilon([one], delta=BUDGET.delta, adjacency=Adjacency.ADD_REMOVE).epsilon


# ---------------------------------------------------------------------------------------------- injecting


@dataclass
class Tally:
    """What was injected and what it did."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (company, phase)
    lost: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    trainings: int = 0
    finished: int = 0
    answers: int = 0
    counted: int = 0
    taken: int = 0
    short: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"company": company, "phase": phase, "kills": n, "lost": self.lost[company, phase]}
            for (company, phase), n in sorted(
                self.kills.items(), key=lambda item: (item[0][0], PHASES.index(item[0][1]))
            )
        ]
        plain = {k: v for k, v in vars(self).items() if k not in ("kills", "lost")}
        return {"kills": self.total, "rows": rows, **plain}


class Harness:
    """Trainings, one after the other, each killed until it is finished or spent."""

    def __init__(self, kills: int, *, mutant: str | None = None, seed: int | None = None) -> None:
        self.kills, self.mutant = kills, mutant
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.life = 0.6  # seconds that a whole training takes, kept up to date

    def run(self) -> Tally:
        begun = time.monotonic()
        for company in itertools.cycle(("alone", "alone", "another on its ledger", "another on its plan")):
            if self.tally.total >= self.kills or (self.mutant and self.tally.violations):
                break
            folder = Path(tempfile.mkdtemp(prefix="sfumato-faults-"))
            try:
                self._training(folder, company)
            finally:
                shutil.rmtree(folder)
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    def _training(self, folder: Path, company: str) -> None:
        names = ("first", "second") if company == "another on its ledger" else ("first",)
        watches = [Watch(Place(folder, folder / "ledger.db", name)) for name in names]
        self.tally.trainings += len(watches)
        lives = 0
        while any(w.finished is None for w in watches) and not any(w.violations for w in watches) and lives < 40:
            lives += 1
            if company == "another on its plan" and lives > 1:
                self._takeover(watches[0])
            else:
                self._together([w for w in watches if w.finished is None], company)
            if self.tally.total >= self.kills:
                break
        for watch in watches:
            if watch.finished is not None and not watch.violations:  # once more: nothing is asked, the same is said
                answers = watch.answers
                self._reap(watch, born(watch.place, self.mutant)[0], company, None)
                if watch.answers != answers:
                    watch._violated("(d) a finished training asked again")
                self.tally.finished += 1
                self.tally.taken += watch.finished["taken"]
                self.tally.short += watch.finished["short"]
            self.tally.answers += watch.answers
            self.tally.counted += watch.counted
            self.tally.violations += watch.violations

    def _together(self, watches: list[Watch], company: str) -> None:
        """One life of each, at the same time, each with its own moment of death."""
        lives = [(watch, *born(watch.place, self.mutant)) for watch in watches]
        moments = [self._moment(watch, where) for watch, _, where in lives]
        begun = time.monotonic()
        waiting = dict(zip((pid for _, pid, _ in lives), moments, strict=True))
        dead: set[int] = set()
        while waiting:
            for pid, due in list(waiting.items()):
                if gone(pid):
                    del waiting[pid]
                elif due():
                    os.kill(pid, signal.SIGKILL)
                    del waiting[pid]
                    dead.add(pid)
            time.sleep(0.0002)
        for watch, pid, where in lives:
            alone = watch.on_disk is None and pid not in dead and len(lives) == 1
            self._reap(watch, pid, company, where)
            if alone:
                self.life = 0.7 * self.life + 0.3 * (time.monotonic() - begun)

    def _takeover(self, watch: Watch) -> None:
        """The first life is stopped, as a machine that hangs; a second takes its plan; the first wakes up. Both die."""
        watch.shared = True
        first, first_where = born(watch.place, self.mutant, elsewhere=True)
        time.sleep(self.rng.uniform(0.02, 0.3))
        os.kill(first, signal.SIGSTOP)
        second, second_where = born(watch.place, self.mutant, elsewhere=True)
        time.sleep(self.rng.uniform(0.02, 0.2))
        os.kill(first, signal.SIGCONT)
        time.sleep(self.rng.uniform(0.0, 0.3))
        for pid in self.rng.sample([first, second], 2):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
            time.sleep(self.rng.uniform(0.0, 0.02))
        for pid, where in ((first, first_where), (second, second_where)):
            self._reap(watch, pid, "another on its plan", where)

    def _moment(self, watch: Watch, where: mmap.mmap) -> Callable[[], bool]:
        """When to kill: at a moment of the expected life, all alike; or just after it has entered a given phase."""
        left = 1.0 - (watch.on_disk[0] if watch.on_disk else 0) / STEPS
        end = time.monotonic() + self.rng.uniform(0.0, 1.2 * self.life * left + 0.03)
        if self.rng.random() < 0.5:
            return lambda: time.monotonic() >= end
        aim = self.rng.choice(AIMED)
        if aim == "begin":
            aim = "resume" if watch.counted else "plan"
        # A ledger is written a few times in a life, a checkpoint often; the others happen once.
        turns = self.rng.choice({"ledger": (1, 1, 2, 3), "checkpoint": (1, 2, 4, 8)}.get(aim, (1,)))
        delay = self.rng.uniform(0.0, 0.0015)
        inside = False

        def due() -> bool:
            nonlocal inside, turns
            entered, inside = not inside and where[0] == PHASES.index(aim), where[0] == PHASES.index(aim)
            turns -= entered
            if turns > 0:
                return False
            time.sleep(delay)
            return True

        return due

    def _reap(self, watch: Watch, pid: int, company: str, where: mmap.mmap | None) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 1 or (status == 3 and where is not None and not watch.shared):
            errors = watch.place.folder / "errors"
            text = errors.read_text().strip().splitlines()[-1] if errors.exists() else "no reason given"
            watch._violated(f"(c) a life ended by itself: {text}")
        before = watch.counted - watch.answers
        watch.look()
        if status == -signal.SIGKILL and where is not None:
            kind = (company, PHASES[where[0]])
            self.tally.kills[kind] += 1
            self.tally.lost[kind].append(max(0, watch.counted - watch.answers - before))


def gone(pid: int) -> bool:
    """Whether it has ended; it stays there to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ---------------------------------------------------------------------------------------------- the program


def warm_up() -> None:
    """Whatever is slow and the same for all is done once, before the first fork: imports, and the plan's accounting."""
    torch.set_num_threads(1)
    module = torch.nn.Linear(12, 3, dtype=torch.float64)
    data = (torch.zeros(SIZE, 12, dtype=torch.float64), torch.arange(SIZE) % 3)
    with tempfile.TemporaryDirectory() as folder:
        private = Private(
            data,
            name="warm",
            size=SIZE,
            objective=Objective(module, cross_entropy),
            budget=BUDGET,
            ledger=f"{folder}/ledger.db",
        )
        train(module, private=private, steps=2, batch_size=BATCH, noise=NOISE, progress=False)
    whole = Mechanism(
        question="GradientMean", noise=Gaussian(NOISE), sampler=private.poisson(BATCH), times=STEPS + RESERVE
    )
    account = Ledger(None).account("warm", unit="example", adjacency=Adjacency.ADD_REMOVE, budget=BUDGET)
    plan = account.plan([whole])
    for answers in range(STEPS + RESERVE + 1):
        plan.epsilon_after(answers)


def show(console: Console, tally: Tally) -> None:
    table = Table(title=f"{tally.total} kills of {tally.trainings} trainings in {tally.seconds:.0f} s")
    for heading in ("in company of", "killed during"):
        table.add_column(heading)
    for heading in ("kills", "answers lost, mean", "most"):
        table.add_column(heading, justify="right")
    for row in tally.to_json()["rows"]:
        lost = row["lost"]
        table.add_row(row["company"], row["phase"], str(row["kills"]), f"{sum(lost) / len(lost):.1f}", str(max(lost)))
    console.print(table)
    console.print(
        f"{tally.answers} answers left the door and the ledgers count {tally.counted}: {tally.counted - tally.answers} "
        f"were paid for and never given. {tally.finished} trainings finished, in all {tally.taken} steps, "
        f"{tally.short} short."
    )
    for violation in tally.violations:
        console.print(f"[bold red]VIOLATION[/] {violation}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill trainings at random moments and check what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mutant", choices=MUTANTS, help="run this broken variant only; exit status 1 if it is caught")
    parser.add_argument(
        "--mutants", nargs="*", choices=MUTANTS, default=list(MUTANTS), help="which broken variants to catch afterwards"
    )
    parser.add_argument("--seed", type=int, help="of the moments; time itself does not repeat")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm_up()
    tally = Harness(options.kills, mutant=options.mutant, seed=options.seed).run()
    report: dict[str, Any] = {"mutant": options.mutant, **tally.to_json(), "mutants": {}}
    console = Console()
    if not options.json:
        show(console, tally)
    failed = bool(tally.violations)
    if options.mutant is None:
        for mutant in options.mutants:
            broken = Harness(MUTANT_KILLS, mutant=mutant, seed=options.seed).run()
            caught = bool(broken.violations)
            failed |= not caught
            report["mutants"][mutant] = {"caught": caught, "kills": broken.total, "violations": broken.violations[:1]}
            if not options.json:
                verdict = f"caught after {broken.total} kills" if caught else "[bold red]NOT CAUGHT[/]"
                console.print(f"Mutant {mutant} ({MUTANTS[mutant]}): {verdict}. {(broken.violations or [''])[0]}")
    if options.json:
        print(json.dumps(report, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
