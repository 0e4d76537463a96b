"""A checked config, made into the things that a training needs; first all that can be had without private values."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli.account import make_sampler
from sfumato.cli.config import Config, ModelSection
from sfumato.cli.pretrain import pretrain
from sfumato.data.tables import Layout, Role, Scaling, Table, class_labels, layout, match, read_table
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.gradients.probe import Probe
from sfumato.models import basic
from sfumato.objective import Loss, Objective, cross_entropy, squared_error
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.training import train

if TYPE_CHECKING:
    from sfumato.data.samplers import Sampler
    from sfumato.run import Run

_LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}
_METHODS: dict[str, Callable[..., Any]] = {"dp-sgd": dp_sgd}
_ROLES: tuple[Role, ...] = ("private", "public", "test")


@dataclass(frozen=True)
class Job:
    """Everything that is known before a private value is read."""

    config: Config
    layouts: Mapping[Role, Layout]
    objective: Objective
    sampler: Sampler

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.objective.parameters().values())

    @property
    def checkpoint(self) -> Any:
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
    shape = _shape(config.model, layouts["private"].shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        with _importable(config):
            module = _module(config.model, shape)
    objective = Objective(module, _LOSSES[config.training.loss])
    _check_model(config, objective, shape)
    sampler = make_sampler(config.training.sampling, data.size, config.training.batch_size)
    return Job(config, layouts, objective, sampler)


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


# ------------------------------------------------------------------------------------------------ the model


def _shape(model: ModelSection, found: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one row as the model sees it."""
    if model.shape is None:
        if model.kind == "cnn":
            raise InvalidArgument("[model] shape is missing: the cnn needs [channels, height, width].")
        return found
    if math.prod(model.shape) != math.prod(found):
        raise InvalidArgument(f"[model] shape={model.shape} does not hold the {math.prod(found)} features of a row.")
    return tuple(model.shape)


def _module(model: ModelSection, shape: tuple[int, ...]) -> nn.Module:
    inputs = math.prod(shape)
    if model.kind == "linear":
        return basic.linear(inputs, model.outputs)
    if model.kind == "mlp":
        return basic.mlp(inputs, model.outputs, model.hidden)
    if model.kind == "cnn":
        if len(shape) != 3:
            raise InvalidArgument(f"[model] shape={list(shape)} must be [channels, height, width] for the cnn.")
        module = basic.cnn(shape[0], model.outputs)
        _try(model.kind, lambda: module(torch.zeros(1, *shape)))  # its lazy layer learns its size here
        return module
    if ":" not in model.kind:
        raise InvalidArgument(f"[model] kind={model.kind!r} must be 'linear', 'mlp', 'cnn' or 'module:function'.")
    return _own_module(model, inputs)


def _own_module(model: ModelSection, inputs: int) -> nn.Module:
    module_name, _, function_name = model.kind.partition(":")
    function = _try(model.kind, lambda: getattr(importlib.import_module(module_name), function_name))
    made = _try(model.kind, lambda: function(inputs, model.outputs, **model.options))
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"[model] kind={model.kind!r} returned {type(made).__name__}: return a torch module.")
    return made


def _try(kind: str, call: Callable[[], Any]) -> Any:
    """A user's own code, or a shape that does not work: no private value is near, so the message may be shown."""
    try:
        return call()
    except SfumatoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise InvalidArgument(f"[model] kind={kind!r} cannot be made ({type(error).__name__}: {said}).") from error


@contextmanager
def _importable(config: Config) -> Iterator[None]:
    """Modules beside the config file can be named in it."""
    folder = str(config.path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _check_model(config: Config, objective: Objective, shape: tuple[int, ...]) -> None:
    """What the door would refuse after the plan is made is refused here, on made-up rows, before anything is."""
    rows = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    outputs, kind = config.model.outputs, config.model.kind
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        answer = _try(kind, lambda: objective.module.eval()(rows))
    objective.module.train()
    if tuple(answer.shape) != (4, outputs):
        raise InvalidArgument(
            f"[model] kind={kind!r} gives {tuple(answer.shape)[1:]} values per row instead of outputs={outputs}."
        )
    classes = torch.arange(4) % outputs
    targets = classes if config.training.loss == "cross-entropy" else torch.rand(4)
    if targets.is_floating_point() and outputs != 1:
        raise InvalidArgument(f"[model] outputs={outputs} must be 1 for loss='squared-error'.")
    Probe.of(objective).trace(objective.parameters(), (rows, targets))


def _optimizer(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    training = config.training
    if training.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=training.learning_rate)
    return partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum)


# ------------------------------------------------------------------------------------------------ the data


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
    shape = _shape(model, features.shape[1:])
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
                    f"[{section}] {key}={value!r} was {old!r} when the training in out={str(config.out)!r} began: put it "
                    "back to continue, or choose another out."
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
            record.unlink()
            out.rmdir()
        raise
