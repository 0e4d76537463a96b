"""Chooses the learning rates of table 7 (paper 000) on public users alone: a rehearsal in which they play all parts.

    python -m benchmarks.federated [--epsilon 0.5 2] [--rates 0.5 1 2 4] [--clips 0.5]

Of the public users three fifths lend their rows to as many made-up private users as there will be, each with rows drawn
at random; one fifth are the public users, and one fifth the test. No private row is read. Prints one JSON line for each
training: how many percent of the test rows are right.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sfumato.experiments.build import make_model
from sfumato.experiments.data import Rows, load_rows
from sfumato.experiments.federated import federate_rows
from sfumato.experiments.settings import Settings
from sfumato.experiments.spec import find_spec
from sfumato.objective import Objective, cross_entropy


def rehearsal(settings: Settings, rows: Rows, seed: int) -> tuple[Settings, Rows]:
    """Settings and rows of the same training, made of public rows."""
    draws = torch.Generator().manual_seed(seed)
    x, y = rows.public
    order = torch.randperm(len(y), generator=draws)
    fifth = len(y) // 5
    lent, public, test = order[: 3 * fifth], order[3 * fifth : 4 * fifth], order[4 * fifth :]
    drawn = lent[torch.randint(len(lent), (settings.data.private,), generator=draws)]
    parts = [(x[i], y[i]) for i in (drawn, public, test)]
    made = Rows(private=parts[0], public=parts[1], hold_out=None, test=parts[2])
    return replace(settings, data=replace(settings.data, public=len(public))), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--clips", type=float, nargs="+", default=[0.5])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: Rows | None = None
    for cell in find_spec("000-table7").cells:
        settings = cell.settings["paper"]
        if settings.training.epsilon not in options.epsilon:
            continue
        rows = load_rows(settings.data, torch.device("cpu")) if rows is None else rows
        for clip in options.clips:
            for rate in options.rates:
                training = replace(settings.training, learning_rate=rate, clip=clip, keep_last=1)
                tried, made = rehearsal(replace(settings, training=training), rows, options.seed)
                objective = Objective(make_model(settings.model, made.shape, options.seed), cross_entropy)
                start = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    run = federate_rows(objective, tried, made, seed=options.seed, folder=Path(folder))
                found = {
                    "row": cell.row,
                    "column": cell.column,
                    "clip": clip,
                    "learning_rate": rate,
                    "accuracy": round(100 * run.metrics["test_accuracy"], 2),
                    "seconds": round(time.perf_counter() - start, 1),
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
