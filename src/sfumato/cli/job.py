"""A checked config, made into the things that a training needs; first all that can be had without private values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli.account import make_sampler
from sfumato.cli.config import Config
from sfumato.cli.model import make_objective, row_shape
from sfumato.cli.pretrain import pretrain
from sfumato.data.tables import Layout, Role, Scaling, Table, class_labels, layout, match, read_table
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.objective import Objective
from sfumato.privacy import accounting, calibration
from sfumato.privacy.accounting import Cost
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Private
from sfumato.public import Public
from sfumato.training import train

if TYPE_CHECKING:
    from sfumato.data.samplers import Sampler
    from sfumato.run import Run

_METHODS: dict[str, Callable[..., Any]] = {"dp-sgd": dp_sgd}
_ROLES: tuple[Role, ...] = ("private", "public", "test")


@dataclass(frozen=True)
class Job:
    """Everything that is known before a private value is read."""

    config: Config
    layouts: Mapping[Role, Layout]
    objective: Objective
    sampler: Sampler
    noise: float
    cost: Cost

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.objective.parameters().values())

    @property
    def checkpoint(self) -> Path:
        return self.config.out / "checkpoint.pt"


def prepare(config: Config) -> Job:
    """Check files' headers, the model and the sampler; no private value, no ledger, nothing written."""
    data = config.data
    layouts: dict[Role, Layout] = {}
    for role in _ROLES:
        name = getattr(data, role)
        if name is not None:
            layouts[role] = layout(config.file(name), role, label=data.label, users=data.users)
            match(layouts[role], layouts["private"])
    objective = make_objective(config, row_shape(config.model, layouts["private"].shape))
    sampler = make_sampler(config.training.sampling, data.size, config.training.batch_size)
    noise, cost = _calibrated(config, sampler)
    return Job(config, layouts, objective, sampler, noise, cost)


def _calibrated(config: Config, sampler: Sampler) -> tuple[float, Cost]:
    """The noise that the training will use, and what it will cost; refuses what no accountant can do."""
    privacy, adjacency = config.privacy, Adjacency(config.privacy.adjacency)
    times = config.training.steps + config.training.reserve
    noise = calibration.noise_multiplier(
        epsilon=privacy.epsilon, delta=privacy.delta, sampler=sampler, steps=times, adjacency=adjacency
    )
    planned = Mechanism(question="GradientMean", noise=Gaussian(noise), sampler=sampler, times=times)
    return noise, accounting.epsilon([planned], delta=privacy.delta, adjacency=adjacency)


def execute(job: Job, *, resume: bool, progress: bool) -> Run:
    """Train and save. Whatever is wrong with the input is found before the ledger is charged."""
    config, objective = job.config, job.objective
    data, training, privacy = config.data, config.training, config.privacy
    continues = job.checkpoint.exists()
    if continues and not resume:
        raise InvalidArgument(f"out={str(config.out)!r} holds a training already: choose another out, or use --resume.")
    if continues:
        _check_same(config)
    tables = {role: _rows(job, role) for role in job.layouts}
    scale = _scaling(job, tables)
    batches = {role: _batch(job, table, role, scale) for role, table in tables.items()}
    free = {
        role: Public(batches[role], objective=objective, seed=training.seed) if role in batches else None
        for role in _ROLES[1:]
    }
    private = Private(
        batches["private"],
        name=data.name,
        size=data.size,
        objective=objective,
        ledger=config.ledger,
        budget=Budget(privacy.budget or privacy.epsilon, privacy.delta),
        unit="example" if data.users is None else "user",
        users=tables["private"].users,
        records_per_user=data.records_per_user,
        adjacency=privacy.adjacency,
    )
    if free["public"] is not None and not continues:
        pretrain(
            objective,
            free["public"],
            steps=training.pretrain_steps,
            learning_rate=training.pretrain_learning_rate,
        )
    with _recorded(job):
        run = train(
            objective.module,
            private=private,
            public=free["public"],
            test=free["test"],
            method=partial(_METHODS[training.method], clip=training.clip),
            budget=Budget(privacy.epsilon, privacy.delta),
            steps=training.steps,
            sampler=job.sampler,
            reserve=training.reserve,
            optimizer=_optimizer(config),
            evaluate_every=training.evaluate_every,
            checkpoint=job.checkpoint,
            checkpoint_every=training.checkpoint_every,
            progress=progress,
        )
    run.save(config.out)
    return run


# ------------------------------------------------------------------------------------------------ the pieces


def _optimizer(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    training = config.training
    if training.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=training.learning_rate)
    return partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum)


def _rows(job: Job, role: Role) -> Table:
    data = job.config.data
    users = data.users if role == "private" else None
    return read_table(job.layouts[role], label=data.label, users=users, columns=job.layouts["private"].columns)


def _scaling(job: Job, tables: Mapping[Role, Table]) -> Scaling | None:
    data, shape = job.config.data, job.layouts["private"].shape
    if data.range == "public":
        return Scaling.of_public(tables["public"].features)
    if isinstance(data.range, list):
        return Scaling.declared(data.range[0], data.range[1], shape)
    if data.lower is not None and data.upper is not None:
        return Scaling.declared(data.lower, data.upper, shape)
    return None


def _batch(job: Job, table: Table, role: Role, scale: Scaling | None) -> tuple[torch.Tensor, torch.Tensor]:
    model, features = job.config.model, table.features
    if scale is not None:
        features = scale(features)
    shape = row_shape(model, features.shape[1:])
    rows = torch.from_numpy(np.ascontiguousarray(features)).reshape(len(features), *shape)
    if job.config.training.loss == "squared-error":
        return rows, torch.from_numpy(table.labels.astype(np.float32))
    return rows, torch.from_numpy(class_labels(table.labels, model.outputs, role))


# ------------------------------------------------------------------------------------------------ resuming

_MAY_CHANGE = {"data.private", "data.public", "data.test", "training.evaluate_every", "training.checkpoint_every"}


def _check_same(config: Config) -> None:
    """An interrupted training goes on with the config it began with."""
    record = config.out / "config.json"
    before = json.loads(record.read_text()) if record.exists() else {}
    for section, values in config.to_json().items():
        for key, value in values.items():
            old = before.get(section, {}).get(key, value)
            if old != value and f"{section}.{key}" not in _MAY_CHANGE:
                raise InvalidArgument(
                    f"[{section}] {key}={value!r} was {old!r} when the training in out={str(config.out)!r} began: put "
                    "it back to continue, or choose another out."
                )


@contextmanager
def _recorded(job: Job) -> Iterator[None]:
    """Write down the config that a training began with; take it back if it could not begin."""
    out, record = job.config.out, job.config.out / "config.json"
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(job.config.to_json(), indent=2) + "\n")
    try:
        yield
    except SfumatoError:
        if new and not job.checkpoint.exists():
            for path in (record, job.checkpoint.with_name(f".{job.checkpoint.name}.lock")):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()
        raise
