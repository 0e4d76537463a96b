"""A search as its file says: candidates, race and trials, made of the parts of `sfumato train`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.algorithms.dp_sgd import as_clip
from sfumato.algorithms.method import algorithm
from sfumato.cli import job as training_job
from sfumato.cli.augmentation import augmentation
from sfumato.cli.interruption import interruptible
from sfumato.cli.job import Job, prepare
from sfumato.cli.method import stacked
from sfumato.cli.model import row_shape
from sfumato.cli.tune_config import TuneFile
from sfumato.data.preprocessing import Preprocessing
from sfumato.data.samplers import FullBatch
from sfumato.data.tables import Role
from sfumato.ensembles import evaluating
from sfumato.errors import InvalidArgument
from sfumato.gradients.row_by_row import RowByRow, safe_size
from sfumato.objective import Objective
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.privacy.repetitions import Repetitions
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean, NoisyMean
from sfumato.run import Run
from sfumato.training import train
from sfumato.tuning import Candidate, SearchCost, Trial, Tuned, race, rehearse, rehearsed, search_cost, tune

Batch = tuple[Tensor, Tensor]
_AT_ONCE, _PROBES = 512, 16  # rows per pass, and rows that every place of a pass is tried with
CHARGED = "Interrupted; the whole search stays charged, and nothing of it is kept."


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """Everything that is known before a private value is read."""

    file: TuneFile
    jobs: Sequence[Job]
    candidates: Sequence[Candidate]
    repetitions: Repetitions
    cost: SearchCost

    def job_of(self, options: Mapping[str, Any]) -> Job:
        return next(job for job, one in zip(self.jobs, self.candidates, strict=True) if one.options == options)


def prepare_search(file: TuneFile, say: Callable[[str], None] = lambda _: None) -> SearchJob:
    """Check every candidate as `sfumato train` would; no private value, no ledger, nothing written.

    `say` is told what is being computed, since noise is calibrated for every candidate.
    """
    jobs: list[Job] = []
    candidates: list[Candidate] = []
    privacy = file.config.privacy
    for k, (point, config) in enumerate(zip(file.points, file.configs, strict=True), start=1):
        say(f"Noise of candidate {k} of {len(file.points)}")
        jobs.append(prepare(config))
        candidates.append(Candidate(options=point, asks=_asks(file, jobs[-1])))
    say("Cost of the whole search")
    law = Repetitions(mean=file.tune.mean, shape=file.shape)
    cost = search_cost(candidates, law, delta=privacy.delta, adjacency=Adjacency(privacy.adjacency))
    return SearchJob(file=file, jobs=jobs, candidates=candidates, repetitions=law, cost=cost)


def _asks(file: TuneFile, job: Job) -> tuple[Mechanism, ...]:
    """The training's steps with noise calibrated to one trial's epsilon, and the score's answer within it."""
    privacy = job.config.privacy
    terms: dict[str, Any] = {"delta": privacy.delta, "adjacency": Adjacency(privacy.adjacency)}
    score: list[Mechanism] = []
    if file.tune.score == "private":
        everyone = FullBatch(size=job.config.data.size)
        share = file.tune.score_share * privacy.epsilon
        scale = calibration.trial_noise_multiplier(epsilon=share, sampler=everyone, steps=1, **terms)
        score = [Mechanism(question=NoisyMean.kind(), noise=Gaussian(scale), sampler=everyone)]
    noise = calibration.trial_noise_multiplier(
        epsilon=privacy.epsilon, sampler=job.sampler, steps=job.answers, extra=score, **terms
    )
    steps = Mechanism(question=GradientMean.kind(), noise=Gaussian(noise), sampler=job.sampler, times=job.answers)
    return (steps, *score)


def execute_search(search: SearchJob) -> Tuned[Run] | None:
    """Race on public rows, charge, search and save. What is wrong with the input is found before the ledger is."""
    config, cost = search.file.config, search.cost
    data, privacy = config.data, config.privacy
    if (config.out / "run.json").exists():
        raise InvalidArgument(f"out={str(config.out)!r} holds a finished run already: choose another out.")
    if privacy.budget is None:
        raise InvalidArgument(
            f"[privacy] budget is missing: epsilon={privacy.epsilon:g} is that of one trial, and this search costs "
            f"{cost.epsilon:.4g}: give a budget of at least that."
        )
    if privacy.budget < cost.epsilon:
        raise InvalidArgument(
            f"[privacy] budget={privacy.budget:g} is less than the epsilon={cost.epsilon:.4g} that this search costs: "
            "raise it, or lower epsilon or [tune] mean."
        )
    tables = {role: training_job._rows(search.jobs[0], role) for role in search.jobs[0].layouts}
    scale = training_job._scaling(search.jobs[0], tables)
    batches: dict[Role, Batch] = {
        role: training_job._batch(search.jobs[0], table, role, scale) for role, table in tables.items()
    }
    left = _race(search, batches) if search.file.tune.keep else search.candidates
    private = Private(
        batches["private"],
        name=data.name,
        size=data.size,
        ledger=config.ledger,
        budget=Budget(privacy.budget, privacy.delta),
        unit="example" if data.users is None else "user",
        users=tables["private"].users,
        records_per_user=data.records_per_user,
        adjacency=privacy.adjacency,
    )
    config.out.mkdir(parents=True, exist_ok=True)

    def trial(options: Mapping[str, Any], lent: Private) -> Trial[Run]:
        job = search.job_of(options)
        asks = next(candidate.asks for candidate in left if candidate.options == options)
        return _trial(job, asks, lent, batches.get("public"), batches.get("test"))

    with interruptible(CHARGED):
        found = tune(
            left,
            private=private,
            trial=trial,
            repetitions=search.repetitions,
            objective=lambda options: _fresh(search.job_of(options)),
            note=f"sfumato tune {search.file.path.name}",
        )
    if found is not None:
        _save(search, found, scale)
    return found


def _fresh(job: Job) -> Objective:
    return Objective(copy.deepcopy(job.objective.module), job.objective.loss, job.objective.autocast)


def _trial(
    job: Job, asks: Sequence[Mechanism], private: Private, public_rows: Batch | None, test_rows: Batch | None
) -> Trial[Run]:
    """One training, silent and without a file, and its score."""
    objective, config = private.objective, job.config
    assert objective is not None
    training, (steps, *score) = config.training, asks
    job = replace(job, objective=objective, sampler=steps.sampler)
    views = augmentation(training)
    public = None
    if public_rows is not None:
        public = Public(public_rows, objective=objective, seed=training.seed, augment=views)
        training_job._warm_up(config, objective, public, progress=False)
    clip = training_job._clip(job, public, continues=False)
    run = train(
        objective.module,
        private=private,
        public=public,
        test=None if test_rows is None else Public(test_rows, objective=objective),
        method=stacked(job.layers(clip)),
        steps=training.steps,
        sampler=steps.sampler,
        noise=steps.noise.scale,
        afterwards=[Planned(NoisyMean, line.noise.scale, private.everyone(), 1) for line in score],
        optimizer=training_job._optimizer(config),
        evaluate_every=training.steps,
        ema=training.ema,
        progress=False,
    )
    run = replace(run, config={**run.config, "clip": as_clip(clip).norm})
    if not score:
        return Trial(score=run.metrics.get("test_accuracy", -run.metrics["test_loss"]), outcome=run)
    probes = _probes(job) if public_rows is None else public_rows[0][:_PROBES]
    with evaluating(objective.module):
        right = hits(objective.module, probes)
        return Trial(score=float(private.ask(NoisyMean(right, bound=1.0))), outcome=run)


def hits(module: nn.Module, probes: Tensor) -> RowByRow:
    """1 for every private row whose label is found, else 0: by that row alone, whatever others are in the batch."""
    device = next(module.parameters()).device

    @torch.no_grad()
    def of_inputs(inputs: Tensor) -> Tensor:
        found: Tensor = module(inputs.to(device))
        return found

    logits = RowByRow(lambda batch: of_inputs(batch[0]), safe_size(of_inputs, probes, _AT_ONCE))
    return logits.then(lambda found, batch: (found.argmax(1) == batch[1].to(device)).double()[:, None])


def _probes(job: Job) -> Tensor:
    """Made-up rows, scaled as all are, where there are no public ones."""
    shape = row_shape(job.config.model, job.layouts["private"].shape)
    return torch.rand(_PROBES, *shape, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------ the race


def _race(search: SearchJob, batches: Mapping[Role, Batch]) -> list[Candidate]:
    """Every candidate trains on one half of the public rows, as if they were private, and is judged on the other."""
    inputs, labels = batches["public"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(search.file.tune.seed))
    half = len(labels) // 2
    if half < 2:
        raise InvalidArgument(f"[tune] keep={search.file.tune.keep} needs at least 4 public rows for a race.")
    stage, judges = ((inputs[part], labels[part]) for part in (order[:half], order[half:]))

    def score(candidate: Candidate, effort: float) -> float:
        job = search.job_of(candidate.options)
        steps = max(1, round(job.config.training.steps * effort))
        shorter = replace(job, config=replace(job.config, training=replace(job.config.training, steps=steps)))
        answers = algorithm(stacked(shorter.layers(1.0))).answers(steps)
        once = replace(candidate, asks=(replace(candidate.asks[0], times=max(1, answers)),))
        stand_in = rehearsed(once, half)
        found = rehearse(
            stand_in,
            rows=stage,
            size=half,
            trial=lambda options, lent: _trial(shorter, stand_in.asks, lent, stage, judges),
            objective=_fresh(job),
        )
        return found.score

    keep = search.file.tune.keep
    assert keep is not None
    return race(search.candidates, score, keep=keep)


# ------------------------------------------------------------------------------------------------ what is left


def _save(search: SearchJob, found: Tuned[Run], prepared: Preprocessing) -> None:
    config = search.job_of(found.options).config
    found.outcome.save(config.out)
    record = {**config.to_json(), "clip": found.outcome.config["clip"]}
    (config.out / "config.json").write_text(json.dumps(record, indent=2) + "\n")
    training_job.keep_preprocessing(config, prepared)
    facts = {"options": dict(found.options), "score": found.score, "cost": vars(found.cost)}
    (config.out / "tune.json").write_text(json.dumps(facts, indent=2) + "\n")
