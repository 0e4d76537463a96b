"""The engine: S = sum_i c_i * s * (mean_k g_ik - p), with c_i = min(1, C / |s * (mean_k g_ik - p)|).

One unit i (an example, or a user with several records) has K views; p is the clip's origin, s its scale, C its norm;
with offsets, view k is evaluated at w + v_k. One forward and one backward pass over each micro-batch collect what every
parameter's uses contribute; then come the norms over all parameters, the factors c_i, and the weighted sums.

The engine knows nothing of noise, ledgers or papers. `reference.py` is its slow, obvious twin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.gradients.clip import Clip
from sfumato.gradients.contributions import outer_ghost_pays
from sfumato.gradients.modes import Trace
from sfumato.gradients.passes import Augment, Performance, exact_products, per_unit, rows_of
from sfumato.gradients.probe import Probe
from sfumato.gradients.rules import convolution
from sfumato.objective import Batch, Objective


@dataclass(frozen=True, eq=False)
class Units:
    """How rows make up units: `records` rows each (padded), with a weight per row (0 for padding).

    With the reduction "mean" a user's weights are 1 / number of records, with "sum" they are 1.
    """

    records: int = 1
    weights: Tensor | None = None


def clipped_sum(
    objective: Objective,
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    clip: Clip,
    views: int = 1,
    augment: Augment | None = None,
    offsets: Sequence[Mapping[str, Tensor]] | None = None,
    units: Units | None = None,
    performance: Performance | None = None,
    probe: Probe | None = None,
) -> dict[str, Tensor]:
    """The sum over the batch's units of their clipped gradients; in float64 if it takes more than one micro-batch.

    *Formal guarantee.* Every unit's addend has L2 norm <= clip.norm (1 + 1e-6), whatever its rows hold; a unit with a
    non-finite gradient adds exactly zero; no unit's addend depends on another unit's rows (`probe.py` tests that of
    the user's own model).
    """
    performance, units = performance or Performance(), units or Units()
    clip.check(params)
    if views < 1:
        raise InvalidArgument(f"views={views} must be at least 1.")
    if offsets is not None and len(offsets) != views:
        raise InvalidArgument(f"offsets has {len(offsets)} entries but views={views}: give one offset per view.")
    present = rows_of(batch)
    if present == 0:
        return {name: torch.zeros_like(p) for name, p in params.items()}
    total: dict[str, Tensor] = {}
    count, rest = divmod(present, units.records)
    assert rest == 0, "units are padded to equal numbers of records"
    probe = probe or Probe.of(objective)
    found = probe.trace(params, batch)
    size = performance.micro_batch or _micro_batch(found, params, clip, performance, units.records * views, count)
    size = min(size, _most_in_one_sum(params, clip))
    for start in range(0, count, size):
        stop = min(start + size, count)
        rows = slice(start * units.records, stop * units.records)
        part = tree_map(partial(_slice, rows), batch)
        weights = None if units.weights is None else units.weights[rows]
        with exact_products():
            addends = per_unit(
                objective,
                params,
                part,
                found,
                count=stop - start,
                views=views,
                augment=augment,
                offsets=offsets,
                weights=weights,
                clip=clip,
                performance=performance,
            )
            for name, value in addends.sums():
                # One micro-batch is one sum in working precision; several are added up in float64.
                total[name] = total[name].double().add_(value) if name in total else value
    return {name: total[name] for name in params}


def _slice(rows: slice, value: Any) -> Any:
    return value[rows] if isinstance(value, Tensor) else value


def _most_in_one_sum(params: Mapping[str, Tensor], clip: Clip) -> int:
    """How many units may be summed in working precision before float64 takes over.

    A sum's rounding depends on all its units, so it must stay far below C: under 1e-3 C for sums of length n (C + |p|).
    """
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    longest = 1.0
    if clip.origin is not None:
        shifted = clip.origin if clip.scale is None else clip.scale * clip.origin
        longest += float(shifted.norm()) / clip.norm
    return max(1, int(1e-3 / (2 * eps * longest)))


def _micro_batch(
    found: Trace, params: Mapping[str, Tensor], clip: Clip, performance: Performance, fold: int, count: int
) -> int:
    """As many units as fit with their instantiated gradients and activations into what is set aside for each."""

    def instantiated(name: str, p: Tensor) -> bool:
        positions = found.positions.get(name)
        if performance.ghost is not None or positions is None or (clip.scale is not None and positions * fold > 1):
            return performance.ghost is not True or positions is None
        pays = outer_ghost_pays if p.ndim == 2 else convolution.ghost_pays
        return not pays(positions * fold, p.shape[0], p[0].numel())

    size = sum(p.numel() * p.element_size() for name, p in params.items() if instantiated(name, p))
    width = max(p.element_size() for p in params.values())
    activations = 2 * found.outputs * fold * width  # inputs and gradients of every use
    # A part costs some passes over the parameters, whatever its size: models with many get larger parts.
    room = performance.activation_bytes + 25 * sum(p.numel() * p.element_size() for p in params.values())
    most = min(performance.instantiated_bytes // max(1, size), room // max(1, activations))
    parts = math.ceil(count / max(1, most))
    return math.ceil(count / parts)
