"""`sfumato demo`: what public data is worth, in half a minute and without a download.

Scikit-learn's 1,797 handwritten digits are split into private, public and test rows. Learning rate, clip norms and how
fast mirror descent decays were chosen on public rows alone: again and again 20 of them were the public ones, 1,250
noisy copies of 60 stood in for the private ones, and the other 20 judged. Steps were chosen so, too; batch and momentum
are usual values. All are the same for every private training, but for DOPE-SGD's clip norm. The size of the split and
of the network were chosen to make a good demonstration, and the default seed is a typical one: of six, its figures are
nearest to the mean.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.interruption import CHARGED, interruptible
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.objective import Objective
    from sfumato.privacy.ledger import Ledger
    from sfumato.public import Public
    from sfumato.run import Run

PRIVATE, PUBLIC, TEST = 1250, 100, 447
EPSILON, DELTA = 2.0, 1e-5
BUDGET = 5.2  # of the four trainings together: what the ledger's filter needs to admit the last one as well
STEPS, BATCH, CLIP, LEARNING_RATE, MOMENTUM = 40, 600, 1.0, 0.5, 0.9
MIRROR_DECAY = 1.5  # in trainings: the private gradient's weight ends at 1/2
DOPE_CLIP = 0.7  # what a gradient has left around the public one is shorter
PUBLIC_STEPS, PLAIN_STEPS = 40, 150


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the ledger and the runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of public randomness only: the split and the first weights.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    steps: Annotated[int, typer.Option(min=1, hidden=True)] = STEPS,
) -> None:
    """Train on handwritten digits without privacy and, in four ways, with it: what public rows are worth."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(
            f"--out={str(out)!r} is not an empty folder: an earlier demo's ledger remembers what was spent, so choose "
            "another folder, or delete this one."
        )
    from sfumato.report import report

    start = time.perf_counter()
    rows = compare(out, seed=seed, steps=steps, progress=not as_json and sys.stdout.isatty())
    page = str(report([out]).write(out / "report.html"))
    seconds = time.perf_counter() - start
    if as_json:
        facts = {"rows": [vars(row) for row in rows], "together": _together(), "report": page, "seconds": seconds}
        typer.echo(json.dumps(facts))
    else:
        _show(rows, out, page, seconds)


@dataclass(frozen=True)
class Way:
    """A private training: the name of its folder, its line in the table, and where it starts."""

    name: str
    title: str
    warm: bool = True


WAYS = (
    Way("cold", "DP-SGD, cold start", warm=False),
    Way("warm", "DP-SGD, warm start"),
    Way("mirror", "mirror descent, warm start"),
    Way("dope", "DOPE-SGD, warm start"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    accuracy: float
    epsilon: float | None  # None: private rows were used without protection
    run: str | None = None


def compare(out: Path, *, seed: int, steps: int, progress: bool) -> list[Row]:
    """Every way of training on the same rows; the ledger and the private runs go to `out`."""
    from sfumato.objective import Objective, cross_entropy
    from sfumato.privacy.ledger import Ledger
    from sfumato.public import Public

    private, public, test = split(seed)
    test_rows = Public(test)

    def fresh() -> Objective:
        return Objective(_model(seed), cross_entropy)

    def plain(data: Any, plain_steps: int) -> Objective:
        objective = fresh()
        _plain_training(objective, Public(data, seed=seed), plain_steps)
        return objective

    def start(way: Way) -> Objective:
        objective = fresh()
        if way.warm:
            objective.module.load_state_dict(warm.module.state_dict())
        return objective

    warm = plain(public, PUBLIC_STEPS)
    rows = [Row("public rows only", _accuracy(warm, test_rows), 0.0)]
    # The digits are public in truth. On data that is not, this line is what Sfumato exists to avoid.
    unprotected = Row("no privacy, for comparison", _accuracy(plain(private, PLAIN_STEPS), test_rows), None)

    out.mkdir(parents=True, exist_ok=True)
    with interruptible(CHARGED), Ledger(out / "ledger.db") as ledger:
        runs = {
            way: _private_training(way, start(way), private, public, test_rows, ledger, seed, steps, progress)
            for way in WAYS
        }
        statement = ledger.account("digits").statement()
    for way, run in runs.items():
        # All models leave, so each comes with the promise that covers all.
        replace(run, statement=statement.to_json(), statement_text=statement.to_text()).save(out / way.name)
        rows.append(Row(way.title, run.metrics["test_accuracy"], EPSILON, str(out / way.name)))
    return [*rows, unprotected]


def split(seed: int) -> tuple[Any, Any, Any]:
    """Private, public and test rows: (pixels in [0, 1], digit), each with the same share of every digit."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(x / 16, y, test_size=TEST, stratify=y, random_state=seed)
    x, public_x, y, public_y = train_test_split(x, y, test_size=PUBLIC, stratify=y, random_state=seed)
    parts = ((x, y), (public_x, public_y), (test_x, test_y))
    private, public, test = ((torch.tensor(a, dtype=torch.float32), torch.tensor(b)) for a, b in parts)
    return private, public, test


def _model(seed: int) -> Any:
    from sfumato.generators import own_generators
    from sfumato.models.basic import mlp

    with own_generators(seed):
        return mlp(64, 10)


def _plain_training(objective: Objective, rows: Public, steps: int) -> None:
    from functools import partial

    import torch

    from sfumato.warmup import warm_up

    warm_up(objective, rows, steps=steps, batch_size=len(rows), optimizer=partial(torch.optim.AdamW, lr=0.01))


def _private_training(
    way: Way,
    objective: Objective,
    data: Any,
    public: Any,
    test: Public,
    ledger: Ledger,
    seed: int,
    steps: int,
    progress: bool,
) -> Run:
    import torch

    from sfumato.privacy.budget import Budget
    from sfumato.private import Private
    from sfumato.public import Public
    from sfumato.training import train

    # The same rows under the same name: the ledger adds the trainings up.
    private = Private(
        data, name="digits", size=PRIVATE, objective=objective, ledger=ledger, budget=Budget(BUDGET, DELTA)
    )
    return train(
        objective.module,
        private=private,
        public=Public(public, objective=objective, seed=seed),
        test=test,
        method=_method(way, steps),
        budget=Budget(EPSILON, DELTA),
        steps=steps,
        batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM),
        name=way.name,
        progress=progress,
    )


def _method(way: Way, steps: int) -> Any:
    """The public batch is all public rows."""
    from functools import partial

    from sfumato.algorithms.dope_sgd import dope_sgd
    from sfumato.algorithms.dp_sgd import dp_sgd
    from sfumato.algorithms.mirror_descent import MirrorDescent

    if way.name == "dope":
        return partial(dope_sgd, clip=DOPE_CLIP, public_batch=None)
    below = partial(dp_sgd, clip=CLIP)
    if way.name == "mirror":
        return MirrorDescent(decay_steps=MIRROR_DECAY * steps, public_batch=None, method=below)
    return below


def _accuracy(objective: Objective, test: Public) -> float:
    from sfumato.objective import Objective
    from sfumato.training import accuracy

    return float(test.losses(objective.parameters(), objective=Objective(objective.module, accuracy)).mean())


def _together() -> dict[str, float]:
    return {"epsilon": BUDGET, "delta": DELTA}


def _show(rows: list[Row], out: Path, page: str, seconds: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Handwritten digits: {PRIVATE} private, {PUBLIC} public, {TEST} test rows",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("trained on")
    table.add_column("test accuracy", justify="right")
    table.add_column("epsilon", justify="right")
    table.add_column("saved in")
    for row in rows:
        spent = "not private" if row.epsilon is None else f"{row.epsilon:g}"
        table.add_row(row.name, f"{100 * row.accuracy:.1f} %", spent, row.run or "", end_section=row is rows[-1])
    table.add_row("all four together", "", f"{BUDGET:g}", str(out / "ledger.db"))
    console = Console(markup=False)
    console.print(table)
    console.print(
        f"Each private training alone costs epsilon {EPSILON:g} at delta {DELTA:g}. All four used the same people's "
        f"rows, and all results are shown here: together they cost epsilon {BUDGET:g}, as {out / 'ledger.db'} says. To "
        f"train just one of them would cost {EPSILON:g}. The line without privacy protects nobody.",
        highlight=False,
    )
    console.print(
        "Hyper-parameters were chosen on public rows alone and are the same for all, but for DOPE-SGD's clip norm. The "
        "noise is fresh every time and moves private accuracies by about a point, so one run is no ranking.",
        highlight=False,
    )
    console.print(
        f"{seconds:.0f} seconds. The promise in plain words: {out / 'dope' / 'statement.txt'}. All of it on one page, "
        f"to open in a browser: {page}",
        highlight=False,
    )
