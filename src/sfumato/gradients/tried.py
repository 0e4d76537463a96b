"""The engine on a few rows, beside plain autograd, and beside itself where all rows but one are spoiled (`spoiled.py`).

Used by `probe.py`; what is raised names a module, and no number of any row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.errors import UnsupportedModel
from sfumato.generators import seed_torch
from sfumato.gradients.clip import Clip
from sfumato.gradients.compared import Named, Row, distance_of, gap_of, same_of, tolerance_of
from sfumato.gradients.flow import Flow
from sfumato.gradients.modes import FEW, Trace, TraceMode, module_of, trace
from sfumato.gradients.passes import Addends, Performance, per_unit
from sfumato.gradients.probed_rows import LARGEST, jittered, mixed, rows_to_probe, taken
from sfumato.gradients.rules.call import Key
from sfumato.gradients.spoiled import Entrances, Others
from sfumato.objective import Batch, Objective

ROWS = 3
HALF_TOLERANCE = 0.25  # between two computations in bfloat16, whose rounding can flip a ReLU
Run = tuple[Tensor, Addends]  # losses, and what the engine makes of them


def trace_of(objective: Objective, params: Mapping[str, Tensor], batch: Batch, *, minor: bool) -> Trace:
    originals = dict(objective.module.named_parameters())
    given = rows_to_probe(batch, FEW)

    def run(rows: int, uses: frozenset[Key], earlier: Flow | None) -> TraceMode:
        seed_torch(0)
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        # More of the same rows: what all of them hold, such as the longest one's length, stays what it was.
        lent = jittered(taken(given, torch.arange(rows) % FEW), 0)
        mode = TraceMode(leaves, originals, lent, uses, earlier)
        with torch.enable_grad(), mode:
            objective.losses(leaves, lent)
        return mode

    return trace(run, minor=minor)


def agreeing_trace(
    objective: Objective, params: Mapping[str, Tensor], batch: Batch, rows: Batch, gradients: Mapping[int, Named]
) -> tuple[Trace, Run, tuple[float, str]]:
    """The trace with which the engine is closest to autograd, what it gives, how far that is, and where most."""
    for minor in (False, True):
        found = trace_of(objective, params, batch, minor=minor)
        run = by_engine(objective, params, rows, found)
        distance = distance_of_engine(objective, params, run[1], gradients)
        if distance[0] <= tolerance_of(params) or not found.merged:
            break
    return found, run, distance


def by_engine(
    objective: Objective,
    params: Mapping[str, Tensor],
    rows: Batch,
    found: Trace,
    watched: Callable[[Batch], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Run:
    """What the engine makes of rows; `watched` is around the loss while it is computed."""
    losses: list[Tensor] = []

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        with watched(batch):
            losses.append(objective.loss(module, batch))
        return losses[-1]

    seed_torch(0)
    noted = Objective(objective.module, loss, objective.autocast)
    unclipped = Clip(float("inf"))
    addends = per_unit(noted, params, rows, found, count=ROWS, clip=unclipped, performance=Performance())
    return losses[-1].detach(), addends


def _of_row(addends: Addends, row: int) -> dict[str, Tensor]:
    """The gradient of one row."""
    pick = torch.zeros_like(addends.factors)
    pick[row] = 1
    return {name: c.weighted_sum(pick, ROWS) for name, c in addends.contributions.items()}


def distance_of_engine(
    objective: Objective, params: Mapping[str, Tensor], addends: Addends, gradients: Mapping[int, Named]
) -> tuple[float, str]:
    """How far the engine's gradients and norms are from autograd's; a norm that is too small counts like a gradient."""
    worst: tuple[float, str] = (0.0, "")
    for i, gradient in gradients.items():
        worst = max(worst, distance_of(_of_row(addends, i), gradient))
        size = sum(float(t.double().square().sum()) for t in gradient.values()) ** 0.5
        if float(addends.norms[i]) < size * (1 - (1e-3 if objective.autocast is None else HALF_TOLERANCE)):
            worst = max(worst, (1.0, worst[1] or next(iter(params))))
    return worst


def refuse_distant(distance: float, worst: str, tolerance: float) -> None:
    if distance > tolerance:
        raise UnsupportedModel(
            f"The per-example gradient of {worst!r} does not agree with autograd: "
            f"module {module_of(worst)!r} uses its parameters in a way that is not seen (compiled, checkpointed or "
            "random code); replace it or freeze it."
        )


def where_spoiled(
    objective: Objective,
    params: Mapping[str, Tensor],
    rows: Batch,
    more: Batch,
    before: tuple[Trace, Run],
    keeps: tuple[int, ...],
) -> str | None:
    """Where a row's loss or gradient changes when all other rows are spoiled (`spoiled.py`); None if it does not.

    By the engine: autograd adds gradients of a shared weight up over rows, and zero times NaN is NaN.
    """
    entrances = Entrances(more)
    seed_torch(0)
    with torch.enable_grad(), entrances:  # a model may take gradients itself
        objective.losses(params, more)
    tolerance = same_of(params)
    found, (losses, addends) = before

    def run(others: Others) -> Run:
        watched = partial(Entrances, others=others, before=entrances)
        return by_engine(objective, params, others.spoil_batch(rows), found, watched)

    def change(own: Row, keep: int, value: float) -> tuple[float, str] | None:
        """None if the model raises an error, as it may for NaN. Rows may be major or minor where they are merged."""
        smallest = None
        for minor in (False, True):
            with contextlib.suppress(Exception):
                spoiled = run(Others(ROWS, keep, value, minor))
                gap = gap_of(own, (spoiled[0][keep], _of_row(spoiled[1], keep)))
                smallest = gap if smallest is None else min(smallest, gap)
                if gap[0] <= tolerance:
                    break
        return smallest

    for keep in keeps:
        own = losses[keep], _of_row(addends, keep)
        # A model that has an error for NaN is shown large numbers; if it has one for these too, nothing can be said.
        gap = change(own, keep, math.nan) or change(own, keep, LARGEST)
        if gap is not None and not gap[0] <= tolerance:
            return gap[1]
    return None


def where_others_matter(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, others: Batch, found: Trace
) -> str | None:
    """Where one of the rows is worth something else beside others, which are not finite, than beside its like."""
    alike = jittered(rows_to_probe(rows, ROWS), 0)
    beside = mixed(alike, jittered(rows_to_probe(others, ROWS), 0), 0)
    with contextlib.suppress(Exception):  # as a model may raise for what is not finite
        pair = [by_engine(objective, params, batch, found) for batch in (alike, beside)]
        gap = gap_of(*((losses[0], _of_row(addends, 0)) for losses, addends in pair))
        if not gap[0] <= tolerance_of(params):
            return gap[1]
    return None
