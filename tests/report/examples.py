"""Real runs of every kind, small: trainings of the library and of the command line, a synthesis and a selection."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from sfumato import Budget, Objective, Private, Public, cross_entropy, train
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli.main import main
from sfumato.privacy.ledger import Ledger

PRIVATE, PUBLIC, TEST = 1000, 200, 400

TRAIN = """
[data]
private = "digits.npz"
public = "digits.npz"
test = "digits.npz"
name = "digits, by the command line"
size = 1000
range = [0, 16]

[model]
kind = "{kind}"
outputs = 10
shape = [1, 8, 8]

[privacy]
epsilon = 3.0
delta = 1e-4
ledger = "ledger-of-train.db"

[training]
method = "dope-sgd"
steps = {steps}
batch_size = 300
learning_rate = 1.0
ema = true
keep_last = {keep}
out = "runs/averaged"
"""

SYNTHESIZE = """
[data]
public = "digits.npz"
range = [0, 16]
held_out = 0.25

[generator]
channels = {channels}
multipliers = [1]
blocks = 1
attention = []
images = {images}
batch_size = 40

[sample]
n = 60
steps = {sampling}

[measure]
memorised = true

[output]
folder = "runs/synthetic"
"""

SELECT = """
[model]
weights = "runs/averaged"

[pool]
images = "digits.npz"
classes = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

[select]
strategy = "diverse-public"
n = 24
out = "runs/to_label"
"""


def make_examples(folder: Path, *, good: bool = False) -> Path:
    """The folder of the runs; `good` takes a minute, for pictures, and otherwise seconds."""
    digits = load_digits()
    parts = np.split(np.arange(len(digits.target)), np.cumsum([PRIVATE, PUBLIC, TEST]))
    names = ("train", "public", "test", "pool")
    images = {f"x_{name}": digits.images[rows][:, None] for name, rows in zip(names, parts, strict=True)}
    labels = {f"y_{name}": digits.target[rows] for name, rows in zip(names[:3], parts, strict=False)}
    np.savez(folder / "digits.npz", **images, **labels)
    flat = [(torch.tensor(digits.data[rows] / 16, dtype=torch.float32), digits.target[rows]) for rows in parts]
    _from_the_library(folder, [(x, torch.tensor(y)) for x, y in flat], steps=60 if good else 6)
    _command(folder, "train", TRAIN.format(kind="linear", steps=60 if good else 8, keep=20 if good else 4))
    filled = {"channels": 16, "images": 6_000, "sampling": 12} if good else {"channels": 8, "images": 80, "sampling": 2}
    _command(folder, "synthesize", SYNTHESIZE.format(**filled))
    _command(folder, "select", SELECT)
    return folder / "runs"


def _from_the_library(folder: Path, rows: list[tuple[torch.Tensor, torch.Tensor]], *, steps: int) -> None:
    """Two trainings of one ledger, which measure how well private and public gradients agree."""
    with Ledger(folder / "ledger.db") as ledger:
        for name, method in (("dp-sgd", partial(dp_sgd, clip=0.5)), ("dope-sgd", partial(dope_sgd, clip=0.5))):
            torch.manual_seed(0)
            objective = Objective(torch.nn.Linear(64, 10), cross_entropy)
            run = train(
                objective.module,
                private=Private(
                    rows[0],
                    name="digits",
                    size=PRIVATE,
                    objective=objective,
                    ledger=ledger,
                    budget=Budget(5.0, 1e-5),
                ),
                public=Public(rows[1], objective=objective, seed=0),
                test=Public(rows[2]),
                method=method,
                noise=4.0,
                steps=steps,
                batch_size=300,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
                ema=True,
                alignment=True,
                name=name,
                progress=False,
            )
            run.save(folder / "runs" / name)


def _command(folder: Path, command: str, config: str) -> None:
    path = folder / f"{command}.toml"
    path.write_text(config)
    status = main([command, str(path), "--json"])
    assert status == 0, command
