"""`sfumato demo`: what public data is worth, in a minute and without a download.

Scikit-learn's 1,797 handwritten digits are split into private, public and test rows. Steps and learning rate were
chosen on public rows alone, of which noisy copies stood in for the private ones; batch, clip and momentum are usual
values. They are the same for the cold and the warm start. The size of the split and of the network were chosen to make
a good demonstration, and the default seed is a typical one: of six, its figures are nearest to the mean.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.objective import Objective
    from sfumato.public import Public
    from sfumato.run import Run

PRIVATE, PUBLIC, TEST = 1250, 100, 447
EPSILON, DELTA = 2.0, 1e-5
BUDGET = 3.6  # of both trainings together: what the ledger's filter needs to admit the second one as well
STEPS, BATCH, CLIP, LEARNING_RATE, MOMENTUM = 40, 600, 1.0, 0.5, 0.9
PUBLIC_STEPS, PLAIN_STEPS = 40, 150


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the ledger and the two runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of public randomness only: the split and the first weights.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    steps: Annotated[int, typer.Option(min=1, hidden=True)] = STEPS,
) -> None:
    """Train on handwritten digits with and without privacy, from a cold and from a warm start."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(
            f"--out={str(out)!r} is not an empty folder: an earlier demo's ledger remembers what was spent, so choose "
            "another folder, or delete this one."
        )
    start = time.perf_counter()
    rows = compare(out, seed=seed, steps=steps, progress=not as_json and sys.stdout.isatty())
    seconds = time.perf_counter() - start
    if as_json:
        typer.echo(json.dumps({"rows": [vars(row) for row in rows], "together": _together(), "seconds": seconds}))
    else:
        _show(rows, out, seconds)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    accuracy: float
    epsilon: float | None  # None: private rows were used without protection
    run: str | None = None


def compare(out: Path, *, seed: int, steps: int, progress: bool) -> list[Row]:
    """Public only, cold, warm and (for comparison) without privacy; the ledger and both private runs go to `out`."""
    from sfumato.cli.pretrain import pretrain
    from sfumato.objective import Objective, cross_entropy
    from sfumato.privacy.ledger import Ledger
    from sfumato.public import Public

    private, public, test = split(seed)
    test_rows = Public(test)

    def fresh() -> Objective:
        return Objective(_model(seed), cross_entropy)

    def plain(data: Any, plain_steps: int) -> Objective:
        objective = fresh()
        pretrain(objective, Public(data, objective=objective), steps=plain_steps)
        return objective

    warm, cold = plain(public, PUBLIC_STEPS), fresh()
    public_only = _accuracy(warm, test_rows)
    # The digits are public in truth. On data that is not, this line is what Sfumato exists to avoid.
    unprotected = _accuracy(plain(private, PLAIN_STEPS), test_rows)

    out.mkdir(parents=True, exist_ok=True)
    with Ledger(out / "ledger.db") as ledger:
        runs = {
            name: _private_training(name, objective, private, test_rows, ledger, steps, progress)
            for name, objective in (("cold", cold), ("warm", warm))
        }
        statement = ledger.account("digits").statement()
    for name, run in runs.items():
        # Both models leave, so both come with the promise that covers both.
        replace(run, statement=statement.to_json(), statement_text=statement.to_text()).save(out / name)
    return [
        Row("public rows only", public_only, 0.0),
        Row("DP-SGD, cold start", runs["cold"].metrics["test_accuracy"], EPSILON, str(out / "cold")),
        Row("DP-SGD, warm start", runs["warm"].metrics["test_accuracy"], EPSILON, str(out / "warm")),
        Row("no privacy, for comparison", unprotected, None),
    ]


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
    import torch

    from sfumato.models.basic import mlp

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(64, 10)


def _private_training(
    name: str, objective: Objective, data: Any, test: Public, ledger: Any, steps: int, progress: bool
) -> Run:
    from functools import partial

    import torch

    from sfumato.algorithms.dp_sgd import dp_sgd
    from sfumato.privacy.budget import Budget
    from sfumato.private import Private
    from sfumato.training import train

    # The same rows under the same name: the ledger adds the two trainings up.
    private = Private(
        data, name="digits", size=PRIVATE, objective=objective, ledger=ledger, budget=Budget(BUDGET, DELTA)
    )
    return train(
        objective.module,
        private=private,
        test=test,
        method=partial(dp_sgd, clip=CLIP),
        budget=Budget(EPSILON, DELTA),
        steps=steps,
        batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM),
        name=name,
        progress=progress,
    )


def _accuracy(objective: Objective, test: Public) -> float:
    from sfumato.objective import Objective
    from sfumato.training import accuracy

    return float(test.losses(objective.parameters(), objective=Objective(objective.module, accuracy)).mean())


def _together() -> dict[str, float]:
    return {"epsilon": BUDGET, "delta": DELTA}


def _show(rows: list[Row], out: Path, seconds: float) -> None:
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
        table.add_row(row.name, f"{100 * row.accuracy:.1f} %", spent, row.run or "")
    console = Console()
    console.print(table)
    console.print(
        f"Each private training alone costs epsilon {EPSILON:g} at delta {DELTA:g}. Both used the same people's rows, "
        f"and both results are shown here: together they cost epsilon {BUDGET:g}, as {out / 'ledger.db'} says. To "
        f"train just one of them would cost {EPSILON:g}. The last line protects nobody. The noise is fresh every time, "
        "which moves private accuracies by a point or two.",
        highlight=False,
    )
    console.print(
        f"{seconds:.0f} seconds. The promise in plain words: {out / 'warm' / 'statement.txt'}", highlight=False
    )
