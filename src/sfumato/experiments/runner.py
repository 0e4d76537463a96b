"""Runs one cell for one seed: warm start, private training, scores, record.

What it leaves in the output folder: the record where `records` says; `warm-ups/`, shared by all cells; and
`work/<settings>-seed<k>/` with the training's ledger, its checkpoint while it lasts, and its weights. A training that
was interrupted goes on from there.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import sfumato
from sfumato.algorithms.method import algorithm
from sfumato.data.samplers import Poisson
from sfumato.errors import InvalidArgument
from sfumato.experiments.build import make_augment, make_method, make_model, private_batch
from sfumato.experiments.data import Rows, load_rows
from sfumato.experiments.federated import federate_rows
from sfumato.experiments.labelling import before_labels, curve, questions, split
from sfumato.experiments.records import Record, all_records, has_settings, read_record, record_path, write_record
from sfumato.experiments.scores import all_scores, choice
from sfumato.experiments.settings import Data, Settings, Text
from sfumato.experiments.spec import Cell, Scale, Spec
from sfumato.experiments.synthetic import with_synthetic
from sfumato.experiments.texts import load_text
from sfumato.experiments.warm import warm_start
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Private
from sfumato.public import Public
from sfumato.questions import GradientMean
from sfumato.run import Run
from sfumato.selection import Ask
from sfumato.text import next_word, stamp
from sfumato.training import train
from sfumato.warmup import warm_up

NOTE = (
    "The rows are of a benchmark that everybody has. To reproduce a table they count as private anew in every "
    "training, so each has a ledger of its own; for rows that are private in truth, all trainings share one."
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One cell with one seed."""

    spec: Spec
    cell: Cell
    seed: int
    scale: Scale
    out: Path

    @property
    def settings(self) -> Settings:
        return self.cell.settings[self.scale]

    @property
    def path(self) -> Path:
        """Of the record."""
        return record_path(self.out, self.spec, self.cell, self.scale, self.seed)

    @property
    def work(self) -> Path:
        return self.out / "work" / f"{self.settings.key()}-seed{self.seed}"

    def finished(self) -> Path | None:
        """Where the record of this training is, which may have been made for another cell with the same settings."""
        own = {self.path: read_record(self.path)} if self.path.exists() else {}
        found = {**own, **all_records(self.out, self.scale)}
        return next((p for p, r in found.items() if r["seed"] == self.seed and has_settings(r, self.settings)), None)


def jobs(spec: Spec, cells: Sequence[Cell], scale: Scale, seeds: Sequence[int], out: Path, *, again: bool) -> list[Job]:
    """What is to be run, checked before anything is: no record of other settings is overwritten."""
    found = [Job(spec=spec, cell=cell, seed=seed, scale=scale, out=out) for seed in seeds for cell in cells]
    for job in found:
        if not again and job.path.exists() and not has_settings(read_record(job.path), job.settings):
            raise InvalidArgument(
                f"{str(job.path)!r} was made with other settings than {spec.name} has now: give --again to replace it, "
                "or another --out."
            )
    return found


def run_job(job: Job, *, device: torch.device, again: bool = False, progress: bool = False) -> Record:
    """Train, measure, and write the record; or give back the one that is there already."""
    done = job.finished()
    if done is not None and not again:
        _tidy(job.work)
        return read_record(done)
    if again and job.work.exists():
        shutil.rmtree(job.work)
    if (job.work / "run").exists():
        raise InvalidArgument(
            f"{str(job.work)!r} holds a finished training whose record is gone: give --again to train anew."
        )
    settings, seed = job.settings, job.seed
    if settings.selection is not None:
        return _label(job, done or job.path, device=device, progress=progress)
    rows, synthetic = with_synthetic(
        _rows(settings.data, device, settings.text), settings, folder=job.out / "synthetic", progress=progress
    )
    module = make_model(settings.model, rows.shape, seed, rows.classes).to(device)
    low = settings.training.bfloat16_on_gpu and device.type == "cuda"
    loss = cross_entropy if settings.text is None else next_word
    objective = Objective(module, loss, autocast=torch.bfloat16 if low else None)
    warm = warm_start(objective, settings, rows, seed=seed, folder=job.out / "warm-ups", progress=progress)
    if settings.training.setting == "warm-only":
        run = _as_it_is(objective, rows)
    elif settings.training.setting == "not-private":
        run = _train_openly(job, objective, rows, progress)
    elif settings.federated is not None:
        run = federate_rows(objective, settings, rows, seed=seed, folder=job.work)
    else:
        run = _train(job, objective, rows, progress)
    scores = all_scores(objective, run, rows, mirrors=settings.training.augment.flip)
    record = {
        "spec": job.spec.name,
        "cell": {"row": job.cell.row, "column": job.cell.column},
        "seed": seed,
        "scale": job.scale,
        "chosen": choice(scores, lowest=settings.text is not None),
        "metrics": scores,
        "synthetic": synthetic or None,
        **({} if rows.text is None else {"text": dict(rows.text)}),
        "warm_up": warm,
        "seconds": round(run.seconds, 1),
        "steps_taken": run.steps_taken,
        "steps_lost": run.steps_lost,
        "steps_short": run.steps_short,
        "machine": machine(device),
        "note": NOTE,
        "config": settings.to_json(),
        "run": dict(run.config),
        "history": run.history,
        "statement": dict(run.statement),
    }
    run.save(job.work / "run")
    path = done or job.path
    write_record(path, record)
    _tidy(job.work)
    return read_record(path)


def _label(job: Job, path: Path, *, device: torch.device, progress: bool) -> Record:
    """Train as the strategy needs it, once for all that need the same, and then choose, label and train on labels."""
    settings, seed = job.settings, job.seed
    basis = before_labels(settings)
    cell = Cell(row=f"before labels {basis.key()}", column="private training", settings={job.scale: basis})
    start = replace(job, cell=cell)
    begun = run_job(start, device=device, progress=progress)
    rows, data = _rows(settings.data, device), settings.data
    objective = Objective(make_model(settings.model, rows.shape, seed).to(device), cross_entropy)
    trained = Run.load(start.work / "run")
    objective.module.load_state_dict(trained.weights if trained.ema is None else trained.ema)
    advice = split(settings)
    doors: list[Private] = []

    def ask() -> Ask | None:
        if advice is None or settings.training.epsilon is None:
            return None
        budget = Budget(settings.training.epsilon, settings.training.delta)
        doors.append(Private(rows.private, name=data.name, size=data.private, objective=objective, budget=budget))
        return questions(doors[-1], settings, advice)

    since = time.perf_counter()
    scores, polluted = curve(objective, settings, rows, seed=seed, ask=ask)
    record = {
        "spec": job.spec.name,
        "cell": {"row": job.cell.row, "column": "labels"},
        "seed": seed,
        "scale": job.scale,
        "chosen": None,
        "metrics": scores,
        "polluted": polluted if settings.data.pollution else None,
        "before": begun["metrics"]["ema"],
        "seconds": round(time.perf_counter() - since, 1),
        "machine": machine(device),
        "note": NOTE,
        "config": settings.to_json(),
        "statement": doors[-1].statement().to_json() if doors else begun["statement"],
    }
    write_record(path, record)
    return read_record(path)


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "sfumato": sfumato.__version__,
    }


@lru_cache(maxsize=1)
def _rows(data: Data, device: torch.device, text: Text | None = None) -> Rows:
    return load_rows(data, device) if text is None else load_text(data, text, device)


def _train(job: Job, objective: Objective, rows: Rows, progress: bool) -> Run:
    settings = job.settings
    training, data = settings.training, settings.data
    method = make_method(settings)
    sampler = Poisson(size=data.private, batch_size=private_batch(settings))
    if training.epsilon is not None:
        budget = Budget(training.epsilon, training.delta)
    else:
        planned = Mechanism(
            question=GradientMean.kind(),
            noise=Gaussian(training.noise or 0.0),
            sampler=sampler,
            times=algorithm(method).answers(training.steps),
        )
        cost = accounting.epsilon([planned], delta=training.delta, adjacency=Adjacency.ADD_REMOVE)
        budget = Budget(cost.epsilon, training.delta)
    job.work.mkdir(parents=True, exist_ok=True)
    # Named by its settings, not by its cell: an interrupted training goes on from any cell that has them.
    name = f"{training.setting} {' + '.join(training.method)}, seed {job.seed}"
    with Ledger(job.work / "ledger.db") as ledger:
        private = Private(
            rows.private,
            name=f"{data.name}, {settings.key()}, seed {job.seed}",
            size=data.private,
            objective=objective,
            ledger=ledger,  # of this training alone: see NOTE
            budget=budget,
            device_noise=next(objective.module.parameters()).is_cuda,  # many trainings may share one host
        )
        if rows.words is not None:
            stamp(private, rows.words)
        return train(
            objective.module,
            private=private,
            public=Public(
                rows.public, objective=objective, seed=job.seed, augment=make_augment(training.public_augment)
            ),
            test=Public(rows.test),
            method=method,
            budget=None if training.epsilon is None else budget,
            noise=training.noise,
            steps=training.steps,
            sampler=sampler,
            optimizer=partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum),
            evaluate_every=training.evaluate_every,
            ema=True,
            keep_last=training.keep_last,
            checkpoint=job.work / "checkpoint.pt",
            name=name,
            progress=progress,
        )


def _train_openly(job: Job, objective: Objective, rows: Rows, progress: bool) -> Run:
    """For comparison: plain training on the rows that count as private. Nobody is protected."""
    training, start = job.settings.training, time.perf_counter()
    warm_up(
        objective,
        Public(rows.private, seed=job.seed),  # public in truth, see NOTE
        steps=training.steps,
        batch_size=training.batch_size,
        optimizer=partial(torch.optim.SGD, lr=training.learning_rate, momentum=training.momentum),
        augment=make_augment(training.augment),
        progress=progress,
    )
    return Run(
        weights={n: t.detach().clone() for n, t in objective.module.state_dict().items()},
        config={"name": "not private", "steps": training.steps},
        statement={"private": False, "text": "NOT PRIVATE: plain training, for comparison."},
        steps_taken=training.steps,
        seconds=time.perf_counter() - start,
    )


def _as_it_is(objective: Objective, rows: Rows) -> Run:
    """The warm start alone."""
    return Run(
        weights={n: t.detach().clone() for n, t in objective.module.state_dict().items()},
        config={"name": "warm start", "steps": 0},
        statement={"private": False, "text": "NOT PRIVATE: the vocabulary was counted in private text."}
        if rows.words is not None and rows.words.counted_in_private_text
        else {"private": True, "epsilon": 0.0, "text": "No private row was asked for anything."},
        steps_taken=0,
        seconds=0.0,
    )


def _tidy(work: Path) -> None:
    """A finished training needs no checkpoint, and a hundred iterates are large; the ledger and the weights stay."""
    (work / "checkpoint.pt").unlink(missing_ok=True)
    shutil.rmtree(work / "checkpoint.pt.iterates", ignore_errors=True)
