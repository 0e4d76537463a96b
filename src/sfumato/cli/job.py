"""A checked config, made into the things that a training needs; first all that can be had without private values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sfumato.algorithms.dp_sgd import as_clip
from sfumato.algorithms.extended import shares
from sfumato.algorithms.method import algorithm
from sfumato.card import card
from sfumato.cli.account import make_sampler
from sfumato.cli.augmentation import augmentation, check_augmentation
from sfumato.cli.config import Config
from sfumato.cli.interruption import RESUMABLE, interruptible
from sfumato.cli.method import AUTO, Layer, layers, stacked
from sfumato.cli.model import make_objective, row_shape
from sfumato.cli.record import check_unchanged, read_record, recorded
from sfumato.cli.synthesize_job import Job as Making
from sfumato.cli.train_public import judges, public_rows, trained_on
from sfumato.cli.train_synthesis import make, prepare_synthesis
from sfumato.data import cells, class_folders
from sfumato.data.encoding import Encoding
from sfumato.data.preprocessing import PREPROCESSING, Preprocessing
from sfumato.data.tables import Layout, Role, Scaling, Table, class_labels, layout, match, read_table
from sfumato.ensembles import Iterates, best_on_public, majority_vote, mean_logits
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.gradients import Clip
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import accounting, calibration
from sfumato.privacy.accounting import Cost
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.training import train
from sfumato.warmup import Sam, warm_up

if TYPE_CHECKING:
    from sfumato.data.samplers import Sampler
    from sfumato.run import Run

Batch = tuple[torch.Tensor, torch.Tensor]
_ROLES: tuple[Role, ...] = ("private", "public", "test")


@dataclass(frozen=True)
class Job:
    """Everything that is known before a private value is read."""

    config: Config
    layouts: Mapping[Role, Layout]
    objective: Objective
    sampler: Sampler
    joining: int  # public rows in a step's batch
    answers: int  # that the steps take: some may ask nothing
    noise: float
    cost: Cost
    making: Making | None = None  # of more public rows, before anything else
    later: tuple[Mechanism, ...] = ()  # what is reserved for after the training, in one plan with it

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.objective.parameters().values())

    def planned(self) -> list[Mechanism]:
        """All that the ledger is asked for."""
        times = self.answers + self.config.training.reserve
        steps = Mechanism(question="GradientMean", noise=Gaussian(self.noise), sampler=self.sampler, times=times)
        return [steps, *self.later]

    def would_write(self) -> list[Path]:
        names = ["run.json", "weights.safetensors", "statement.txt", "checkpoint.pt", "config.json"]
        names += ["README.md", PREPROCESSING]
        names += ["ema.safetensors"] if self.config.training.ema else []
        names += [self.config.iterates.name] if self.config.training.keep_last else []
        made = [] if self.making is None else self.making.would_write()
        return [*made, *(self.config.out / name for name in names)]

    def layers(self, clip: float | Clip) -> list[Layer]:
        return layers(self.config, clip, (self.sampler.expected, self.joining))


def prepare(config: Config) -> Job:
    """Check files' headers, the model and the sampler; no private value, no ledger, nothing written."""
    data = config.data
    if config.out.is_file():
        raise InvalidArgument(f"[training] out={str(config.out)!r} is a file: name a folder.")
    _check_classes(config)
    layouts: dict[Role, Layout] = {}
    for role in _ROLES:
        name = getattr(data, role)
        if name is not None:
            layouts[role] = layout_of(config, role, name)
            match(layouts[role], layouts["private"])
    shape = row_shape(config.model, layouts["private"].shape)
    check_augmentation("training", config.training, shape)
    if config.warmup is not None:
        check_augmentation("warmup", config.warmup, shape)
    objective = make_objective(config, shape)
    making = None if config.making is None else prepare_synthesis(config, config.making, layouts)
    sampler, joining = _sampling(config, layouts)
    method = stacked(layers(config, AUTO, (sampler.expected, joining)))  # how it clips is all the same here
    answers = algorithm(method).answers(config.training.steps)
    later = _later(config)
    noise, cost = _calibrated(config, sampler, answers + config.training.reserve, later)
    return Job(config, layouts, objective, sampler, joining, answers, noise, cost, making, later)


def layout_of(config: Config, role: Role, name: str) -> Layout:
    """The layout of a file that the config names, its columns encoded as the config declares."""
    data = config.data
    code = Encoding(columns=data.columns or (), categories=data.categories, ignore=data.ignore, missing=data.missing)
    image = _image_shape(config)
    found = layout(config.file(name), role, label=data.label, users=data.users, encoding=code, image=image)
    for column in data.ranges:
        if column not in found.columns:
            where = f"[data.ranges] names {column!r}, and {role}={str(found.path)!r} has no"
            if not found.columns:
                raise InvalidArgument(f"{where} columns with names: give range = [lowest, highest] instead.")
            # Which it has instead is not said, since the file may be private.
            raise InvalidArgument(f"{where} such column in its header: check both.")
    for column in found.columns if data.ranges else ():
        if column not in data.ranges and column not in data.categories:
            raise InvalidArgument(
                f"[data.ranges] lacks {column}: give [lowest, highest] of every column of numbers, declare its "
                "categories, or list it in ignore."
            )
    return found


def _image_shape(config: Config) -> class_folders.Shape | None:
    """Of images in folders: as declared, or that of the public or test ones; never of a private one."""
    declared, data = config.model.shape, config.data
    if declared is not None and len(declared) == 3 and declared[0] in (1, 3):
        return declared[0], declared[1], declared[2]
    for role, name in (("public", data.public), ("test", data.test)):
        if name is not None and config.file(name).is_dir() and not cells.is_dataset(config.file(name)):
            return class_folders.shape(config.file(name), role)
    return None


def _check_classes(config: Config) -> None:
    classes, outputs = config.data.classes, config.model.outputs
    if classes is not None and (len(set(classes)) != len(classes) or len(classes) != outputs):
        raise InvalidArgument(f"[data] classes={classes} must be {outputs} different labels, since outputs={outputs}.")


def _sampling(config: Config, layouts: Mapping[Role, Layout]) -> tuple[Sampler, int]:
    """The private sampler, whose rate is every private unit's own, and how many public rows join each batch."""
    training, size = config.training, config.data.size
    wanted = training.batch_size
    if not training.extended:
        return make_sampler(training.sampling, size, wanted), 0
    rows = trained_on(config, layouts)
    if training.sampling == "full":
        if wanted not in (None, size + rows):
            raise InvalidArgument(
                f"[training] batch_size={wanted} contradicts full sampling of size={size} private and {rows} public "
                "rows: leave it out."
            )
        return make_sampler("full", size, None), rows
    private, joining = (None, 0) if wanted is None else shares(wanted, size, rows)
    if private is not None and not (1 <= private <= size and joining >= 1):
        raise InvalidArgument(
            f"[training] batch_size={wanted} would hold {private} of size={size} private and {joining} of {rows} "
            "public rows: choose one that has some of both, and no more than there are."
        )
    return make_sampler(training.sampling, size, private), joining


def _calibrated(config: Config, sampler: Sampler, times: int, later: Sequence[Mechanism]) -> tuple[float, Cost]:
    """The noise that the training will use, and what it will cost; refuses what no accountant can do."""
    privacy, adjacency = config.privacy, Adjacency(config.privacy.adjacency)
    noise = calibration.noise_multiplier(
        epsilon=privacy.epsilon, delta=privacy.delta, sampler=sampler, steps=times, adjacency=adjacency, extra=later
    )
    planned = Mechanism(question="GradientMean", noise=Gaussian(noise), sampler=sampler, times=times)
    return noise, accounting.epsilon([planned, *later], delta=privacy.delta, adjacency=adjacency)


def execute(job: Job, *, resume: bool, progress: bool) -> Run:
    """Train and save. Whatever is wrong with the input is found before the ledger is charged."""
    config, objective = job.config, job.objective
    data, training, privacy = config.data, config.training, config.privacy
    continues = config.checkpoint.exists()
    if continues and not resume:
        raise InvalidArgument(f"out={str(config.out)!r} holds a training already: choose another out, or use --resume.")
    if continues:
        check_unchanged(config)
    if job.making is not None:  # before a private value is read
        make(job.making, progress=progress)
    tables: dict[Role, Table] = {}
    own = 0
    if data.public is not None:
        tables["public"], own = public_rows(config, job.layouts)
    tables |= {role: _rows(job, role) for role in job.layouts if role != "public"}
    scale = _scaling(job, tables)
    batches = {role: _batch(job, table, role, scale) for role, table in tables.items()}
    chosen_on: Batch | None = None
    if training.choose:
        batches["public"], chosen_on = _held_back(config, batches["public"], own)
    views = augmentation(training)
    public = Public(batches["public"], objective=objective, seed=training.seed, augment=views) if data.public else None
    test = Public(batches["test"], objective=objective) if data.test else None
    if public is not None and not continues:
        _warm_up(config, objective, public, progress)
    clip = _clip(job, public, continues)
    private = Private(
        batches["private"],
        name=data.name,
        size=data.size,
        objective=objective,
        ledger=config.ledger,
        budget=_budget(config),
        unit="example" if data.users is None else "user",
        users=tables["private"].users,
        records_per_user=data.records_per_user,
        adjacency=privacy.adjacency,
    )
    with recorded(config, as_clip(clip).norm), interruptible(RESUMABLE):
        run = train(
            objective.module,
            private=private,
            public=public,
            test=test,
            method=stacked(job.layers(clip)),
            budget=Budget(privacy.epsilon, privacy.delta),
            steps=training.steps,
            sampler=job.sampler,
            reserve=training.reserve,
            afterwards=_lines(config, private),
            optimizer=_optimizer(config),
            evaluate_every=training.evaluate_every,
            ema=training.ema,
            keep_last=training.keep_last,
            alignment=training.alignment,
            checkpoint=config.checkpoint,
            checkpoint_every=training.checkpoint_every,
            progress=progress,
        )
    if test is not None and run.iterates is not None and len(run.iterates):
        last = {**run.metrics, **_ensembles(objective, run.iterates, test)}
        run = replace(run, history=[*run.history[:-1], last])
    run = replace(run, config={**run.config, "clip": as_clip(clip).norm})
    if chosen_on is not None:
        run = _chosen(objective, run, Public(chosen_on), test)
    run.save(config.out)
    keep_preprocessing(config, scale)
    (config.out / "README.md").write_text(card(run, data=_about_data(config), model=config.model.kind))
    return run


# ------------------------------------------------------------------------------------------------ the pieces


def _warm_up(config: Config, objective: Objective, public: Public, progress: bool) -> None:
    options = config.warmup
    if options is None:
        return
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "adamw":
        optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=rate, weight_decay=decay)
    else:
        momentum = 0.9 if options.momentum is None else options.momentum
        optimizer = partial(torch.optim.SGD, lr=rate, momentum=momentum, weight_decay=decay)
    with own_generators(config.training.seed):  # views are drawn by torch's own
        losses = warm_up(
            objective,
            public,
            steps=options.steps,
            batch_size=options.batch_size,
            optimizer=optimizer,
            augment=augmentation(options),
            sharpness=Sam(radius=options.sam_radius, adaptive=options.adaptive) if options.sam_radius else None,
            progress=progress,
        )
    if not (math.isfinite(losses[-1]) and all(bool(p.isfinite().all()) for p in objective.parameters().values())):
        raise InvalidArgument(f"[warmup] learning_rate={rate} makes the warm-up diverge: lower it.")


def _clip(job: Job, public: Public | None, continues: bool) -> float | Clip:
    wanted = job.config.training.clip
    if wanted == "auto":
        return AUTO
    if public is None or not isinstance(wanted, str):
        return float(wanted)
    if continues:  # it was measured at weights that are gone
        record = read_record(job.config)
        if "clip" not in record:
            raise InvalidArgument(
                f"[training] clip='public' was measured when the training in out={str(job.config.out)!r} began, and "
                "its config.json is gone: choose another out."
            )
        return float(record["clip"])
    median = float(public.gradient_norms(job.objective.parameters()).median())
    if not 0 < median < math.inf:
        raise InvalidArgument(
            f"[training] clip='public' finds a median gradient of length {median:g} on the public rows: give a number."
        )
    return median


def _ensembles(objective: Objective, iterates: Iterates, test: Public) -> dict[str, float]:
    """How good the mean of the kept weights is on the test rows, and for classifiers their vote and mean output."""
    module, mean = objective.module, iterates.mean()
    if objective.loss is not cross_entropy:
        return {"test_mean_loss": float(test.losses(mean).mean())}
    inputs, labels = test.batch()
    guesses = {
        "mean": mean_logits(module, [mean], inputs).argmax(1),
        "vote": majority_vote(module, iterates, inputs),
        "logits": mean_logits(module, iterates, inputs).argmax(1),
    }
    return {f"test_{name}_accuracy": float((found == labels).double().mean()) for name, found in guesses.items()}


def _budget(config: Config) -> Budget | None:
    """Of all that is ever asked of the dataset; None opens an account that is there as it is."""
    privacy, place = config.privacy, str(config.ledger)
    if privacy.budget is None and ("://" in place or Path(place).exists()):
        with Ledger(place, make=False) as ledger:
            if config.data.name in ledger.account_names():
                return None
    return Budget(privacy.budget or privacy.epsilon, privacy.delta)


def _later(config: Config) -> tuple[Mechanism, ...]:
    if config.afterwards is None:
        return ()
    from sfumato.cli.near_private import reserved_mechanisms

    return tuple(reserved_mechanisms(config))


def _lines(config: Config, private: Private) -> tuple[Planned, ...]:
    if config.afterwards is None:
        return ()
    from sfumato.cli.near_private import reserved_by

    found = reserved_by(config)
    return () if found is None else found[0].lines(private, pca=found[1].pca, support=found[1].support)


def _optimizer(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    training = config.training
    if training.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=training.learning_rate)
    return partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum)


def _rows(job: Job, role: Role) -> Table:
    data = job.config.data
    if role == "public":
        return public_rows(job.config, job.layouts)[0]
    users = data.users if role == "private" else None
    columns = job.layouts["private"].columns
    return read_table(job.layouts[role], label=data.label, users=users, columns=columns, classes=data.classes)


def _scaling(job: Job, tables: Mapping[Role, Table]) -> Preprocessing:
    data, private = job.config.data, job.layouts["private"]
    scale: Scaling | None = None
    if data.range == "public":
        scale = Scaling.of_public(tables["public"].features)
    elif isinstance(data.range, list):
        scale = Scaling.declared(data.range[0], data.range[1], private.shape)
    elif data.lower is not None and data.upper is not None:
        scale = Scaling.declared(data.lower, data.upper, private.shape)
    elif data.ranges:
        # Each column has its slots, of which those of a category are 0 and 1 already.
        pairs = [data.ranges.get(name, [0.0, 1.0]) for name in private.columns]
        widths = [private.encoding.width(name) for name in private.columns]
        lower, upper = (np.repeat([pair[k] for pair in pairs], widths).tolist() for k in (0, 1))
        scale = Scaling.declared(lower, upper, private.shape)
    if scale is not None and private.columns:
        scale = scale.only(private.encoding.is_number(private.columns))
    return Preprocessing(
        shape=row_shape(job.config.model, private.shape),
        columns=private.columns,
        encoding=private.encoding,
        scaling=scale,
        label=data.label,
        classes=data.classes,
    )


def _batch(job: Job, table: Table, role: Role, prepared: Preprocessing) -> Batch:
    rows = torch.from_numpy(prepared(table.features))
    if job.config.training.loss == "squared-error":
        with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a private label
            return rows, torch.from_numpy(table.labels.astype(np.float32))
    return rows, torch.from_numpy(class_labels(table.labels, job.config.model.outputs, role))


def keep_preprocessing(config: Config, prepared: Preprocessing) -> None:
    """Beside the weights: what `sfumato.load` needs to make rows of files again."""
    folder = os.path.relpath(config.path.parent, config.out)  # where a model of one's own is found
    facts = {**prepared.to_json(), "config_folder": folder}
    (config.out / PREPROCESSING).write_text(json.dumps(facts, indent=2) + "\n")


def _about_data(config: Config) -> dict[str, str]:
    """What a model card may say: names of files, never of what is in the private one."""
    data = config.data
    made = data.synthetic if config.making is None else "made of the public rows"
    named = {"public rows": data.public, "synthetic rows": made, "test rows": data.test}
    return {name: Path(value).name for name, value in named.items() if value is not None}


# ------------------------------------------------------------------------------------------------ after


def _held_back(config: Config, rows: Batch, own: int) -> tuple[Batch, Batch]:
    """The rows to train on, and those to choose on, which are among the first, the `own` of the public file."""
    held, others = judges(config, own)
    others = torch.cat([others, torch.arange(own, len(rows[1]))])
    return (rows[0][others], rows[1][others]), (rows[0][held], rows[1][held])


def _chosen(objective: Objective, run: Run, judges: Public, test: Public | None) -> Run:
    """The weights that are best on public rows nothing was trained on: the last ones, their average, or the mean."""
    candidates: dict[str, Mapping[str, torch.Tensor]] = {"last": objective.parameters()}
    if run.ema is not None:
        candidates["ema"] = run.ema
    if run.iterates is not None and len(run.iterates):
        candidates["mean"] = run.iterates.mean()
    name, scores = best_on_public(objective.module, candidates, judges)
    last = dict(run.metrics)
    if test is not None:  # once, for the one that is handed on
        last["test_chosen_accuracy"] = best_on_public(objective.module, {name: candidates[name]}, test)[1][name]
    config = {**run.config, "chosen": name, "chosen_on_public": scores}
    weights = {**run.weights, **candidates[name]}
    return replace(run, weights=weights, config=config, history=[*run.history[:-1], last])
