"""How long a training will take, how much memory, and whether its noise drowns everything; no row of anyone is read.

Time and memory come from a few steps on made-up rows, the rest from public quantities.
"""

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


def noise_over_signal(*, noise: float, batch: float, answers: int, parameters: int, size: int) -> float:
    """How many times as long as the longest signal the noise of a whole training is, where rows can feel it.

    In units of the clip norm: the mean gradient of a step is at most 1 long, so all steps together say at most
    `answers`, and only if every row always pulls one way. The noise of a step has the deviation noise / batch in every
    parameter; over all steps that grows by the square root of their number. It is felt where it lies along the
    gradient of some row, and those of `size` rows span no more than `size` dimensions: what lies across them changes,
    to first order, no row's loss, however many parameters there are. Momentum, decay and averages weigh the steps
    unequally, which by Cauchy and Schwarz makes the ratio larger and never smaller.

    >>> noise_over_signal(noise=2.0, batch=100, answers=100, parameters=10_000, size=2500)
    0.1
    """
    return noise / batch * math.sqrt(min(parameters, size) / answers) if answers else 0.0


def ratio_of(job: Job) -> float:
    """The same of a training that is not yet begun."""
    return noise_over_signal(
        noise=job.noise,
        batch=job.sampler.expected,
        answers=job.answers,
        parameters=job.parameters,
        size=job.config.data.size,
    )


def warning(job: Job) -> str | None:
    """From 1 on: real rows pull in many ways, so that at 1 accuracy is near chance, and a good one needs about 0.1."""
    ratio, size = ratio_of(job), job.config.data.size
    if ratio < 1:
        return None
    return (
        f"[privacy] epsilon={job.config.privacy.epsilon:g} with size={size} leaves next to nothing to learn: over all "
        f"{job.answers} steps the noise is {ratio:.2g} times as long as the gradients of all rows would be if every "
        f"one pulled the same way, so take more epsilon, more rows, a larger batch_size or a model of fewer than "
        f"{min(job.parameters, size)} parameters, or leave it to public rows and [warmup]."
    )


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
