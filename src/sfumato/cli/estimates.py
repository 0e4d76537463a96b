"""How long a training will take and how much memory, from a few steps on made-up rows; no row of anyone is read."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch

from sfumato.algorithms.method import algorithm
from sfumato.cli.job import Batch, Job
from sfumato.cli.method import AUTO, Layer, stacked
from sfumato.cli.model import row_shape
from sfumato.gradients.memory import first_micro_batch, unit_bytes
from sfumato.gradients.passes import Performance
from sfumato.gradients.probe import Probe
from sfumato.objective import Objective
from sfumato.privacy.budget import Budget
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean

_UNITS = 128  # at most so many made-up units in a step; the rest is extrapolated
_PUBLIC = 640
_TIMES = 3  # of which the first looks at the model, too


def estimates(job: Job) -> dict[str, Any]:
    """Seconds of one step and of all, and megabytes; of this machine as busy as it is now."""
    parts = job.layers(AUTO)
    views = int(parts[-1].given["views"])
    expected = max(1, math.ceil(job.sampler.expected))
    many = min(expected, max(2, _UNITS // views))
    few = max(1, many // 4)
    seconds = _step_seconds(job, parts, many)
    if many < expected:  # only the private part of a step grows with the batch
        alone = [parts[-1]]
        slope = (_step_seconds(job, alone, many) - _step_seconds(job, alone, few)) / (many - few)
        seconds += max(0.0, slope) * (expected - many)
    steps = job.config.training.steps
    return {
        "seconds_per_step": _rounded(seconds),
        "seconds_estimate": _rounded(seconds * steps),
        "memory_mb_estimate": math.ceil(_bytes(job, views, expected) / 2**20),
    }


def made_up(job: Job, count: int) -> Batch:
    """Rows of the right shape that nobody has."""
    shape = row_shape(job.config.model, job.layouts["private"].shape)
    draws = torch.Generator().manual_seed(0)
    rows = torch.rand(count, *shape, generator=draws)
    if job.config.training.loss == "squared-error":
        return rows, torch.rand(count, generator=draws)
    return rows, torch.arange(count) % job.config.model.outputs


def _step_seconds(job: Job, parts: list[Layer], units: int) -> float:
    """The fastest of a few steps, whole but for the optimiser's."""
    known = job.objective
    objective = Objective(copy.deepcopy(known.module), known.loss, known.autocast)
    private = Private(made_up(job, units), name="made-up", size=units, objective=objective, budget=Budget(1.0, 1e-6))
    public = Public(made_up(job, _PUBLIC), objective=objective, seed=0)
    private.plan(Planned(GradientMean, 100.0, private.everyone(), _TIMES))
    way = algorithm(stacked(parts))
    state = way.init(objective.parameters())
    taken = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        _, state = way.step(state, objective.parameters(), public, private.ask)
        taken.append(time.perf_counter() - start)
    private.close()
    return min(taken)


def _bytes(job: Job, views: int, expected: int) -> float:
    """Rows as float32 and once more while they are read; weights with gradients, averages and moments; one pass."""
    rows = 2 * 4 * job.config.data.size * math.prod(job.layouts["private"].shape)
    weights = 4 * job.parameters * (8 if job.config.training.optimizer == "adamw" else 6)
    params, how = job.objective.parameters(), Performance()
    trace = Probe.of(job.objective).trace(params, made_up(job, 4))
    unit = unit_bytes(trace, params, AUTO, how, views, 4)
    return float(rows + weights + sum(unit) * first_micro_batch(unit, params, how, expected))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")
