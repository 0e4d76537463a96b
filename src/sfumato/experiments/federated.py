"""Table 7 of paper 000: rows are divided evenly among users, some users are public, and the others train privately.

The three columns by settings: method dp-sgd with `everyone` behind the door; dp-sgd, setting cold-extended, with public
users beside it; and dope-sgd.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sfumato.errors import InvalidArgument
from sfumato.experiments.data import Rows, joined
from sfumato.experiments.settings import Federated, Settings
from sfumato.federated import (
    LocalClients,
    LocalWork,
    PublicUsers,
    dope_sgd,
    dp_sgd,
    dp_sgd_beside_public,
    federate,
    private_users,
)
from sfumato.federated.methods import Method
from sfumato.objective import Batch, Objective
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.public import Public
from sfumato.run import Run


def federate_rows(objective: Objective, settings: Settings, rows: Rows, *, seed: int, folder: Path) -> Run:
    """One training with a ledger of its own in the folder; it resumes there."""
    federated, training = settings.federated, settings.training
    assert federated is not None
    if training.epsilon is None:
        raise InvalidArgument("noise is given, and federated experiments take epsilon: give that.")
    public = _clients(objective, rows.public, federated)
    private = _clients(objective, joined(rows.private, rows.public) if federated.everyone else rows.private, federated)
    data = settings.data
    declared = (data.private + (data.public if federated.everyone else 0)) // federated.rows_per_user
    folder.mkdir(parents=True, exist_ok=True)
    budget = Budget(training.epsilon, training.delta)
    with Ledger(folder / "ledger.db") as ledger:
        users = private_users(
            private, name=f"{data.name}, users, seed {seed}", size=declared, ledger=ledger, budget=budget
        )
        return federate(
            objective,
            private=users,
            public=None if federated.everyone else PublicUsers(public, seed=seed),
            test=Public(rows.test),
            method=_method(settings, federated, share=data.public / (data.public + data.private)),
            rounds=training.steps,
            users_per_round=training.batch_size,
            budget=budget,
            optimizer=partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum),
            evaluate_every=training.evaluate_every,
            ema=True,
            keep_last=training.keep_last,
            checkpoint=folder / "checkpoint.pt",
            name=f"{training.setting} {' + '.join(training.method)}",
        )


def _clients(objective: Objective, rows: Batch, federated: Federated) -> LocalClients:
    """Consecutive rows are one user's: the rows were drawn at random, so that is an even division at random."""
    owners = torch.arange(len(rows[1])) // federated.rows_per_user
    return LocalClients(objective, rows, owners.numpy(), records_per_user=federated.rows_per_user)


def _method(settings: Settings, federated: Federated, *, share: float) -> Method:
    training = settings.training
    work = LocalWork(
        epochs=federated.epochs, batch_size=federated.local_batch, learning_rate=federated.local_learning_rate
    )
    if training.method == ("dope-sgd",):
        assert training.dope is not None
        return partial(dope_sgd, work=work, clip=training.clip, origin_clip=training.dope.origin_clip)
    if training.method != ("dp-sgd",):
        raise InvalidArgument(f"method={list(training.method)} is not there for users: give dp-sgd or dope-sgd.")
    if training.setting == "cold-extended":
        return partial(dp_sgd_beside_public, work=work, clip=training.clip, share=share)
    return partial(dp_sgd, work=work, clip=training.clip)
