"""The engine: S = sum_i c_i * s * (mean_k g_ik - p), with c_i = min(1, C / |s * (mean_k g_ik - p)|).

One unit i (an example, or a user with several records) has K views; p is the clip's origin, s its scale, C its norm;
with offsets, view k is evaluated at w + v_k. One forward and one backward pass over each micro-batch collect what every
parameter's uses contribute; then come the norms over all parameters, the factors c_i, and the weighted sums.

The engine knows nothing of noise, ledgers or papers. `reference.py` is its slow, obvious twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.gradients.clip import Clip
from sfumato.gradients.contributions import SMALL
from sfumato.gradients.gradient import Gradient
from sfumato.gradients.graphs import state_of
from sfumato.gradients.memory import STEP, Gauge, first_micro_batch, unit_bytes
from sfumato.gradients.modes import Trace
from sfumato.gradients.passes import Augment, Performance, exact_products, per_unit, rows_of
from sfumato.gradients.probe import Probe
from sfumato.objective import Batch, Objective

# Parameters, rows, weights of rows, which units are no padding, offsets, origin, scale: what a micro-batch depends on.
_Named = dict[str, Tensor]
_Inputs = tuple[_Named, Any, Tensor | None, Tensor, list[_Named] | None, _Named | None, _Named | None]


_AT_ONCE_ON_GPU = 512  # units whose products of 16-bit factors are added up in float32
_FILLED = 0.75  # of a micro-batch that is padded on a GPU, at least


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
    largest: int | None = None,
    performance: Performance | None = None,
    probe: Probe | None = None,
) -> dict[str, Tensor]:
    """The sum over the batch's units of their clipped gradients; in float64 if it takes more than one micro-batch.

    `largest`: what such a batch rarely has more units than, by declared numbers; micro-batches are cut by it.

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
    if found.alone:
        performance = replace(performance, micro_batch=1)
    device = next(iter(params.values())).device
    on_gpu = performance.kernels and kernels.usable(*params.values())
    at_once = _most_at_once(found, params, clip, in_float64=on_gpu)
    kind = (views, units.records, units.weights is None, offsets is None, clip.norm, clip.stability)
    shifted = (clip.origin is None, clip.scale is None)
    key = (*kind, *shifted, performance, id(augment), id(found), at_once if on_gpu else None)
    bare = replace(clip, origin=None, scale=None)  # a recording is given its own of these
    all_weights = None if units.weights is None else units.weights.to(device)

    def compute(inputs: _Inputs) -> dict[str, Tensor]:
        lent, rows, weights, present, moves, origin, scale = inputs
        addends = per_unit(
            objective,
            lent,
            rows,
            found,
            count=len(present),
            present=present,
            views=views,
            augment=augment,
            offsets=moves,
            weights=weights,
            clip=bare,
            origin=origin,
            scale=scale,
            performance=performance,
        )
        return dict(addends.sums(at_once))

    recorded = on_gpu and device.type == "cuda" and performance.cuda_graph is not False
    state = state_of(objective.module, objective.loss, augment) if recorded else None
    fixed = (
        None if offsets is None else [{name: v[name] for name in params} for v in offsets],
        _like(clip.origin, params),
        _like(clip.scale, params),
    )

    def one_part(start: int, stop: int, padded: int) -> dict[str, Tensor]:
        rows, padding = slice(start * units.records, stop * units.records), (padded - stop + start) * units.records
        part = tree_map(partial(_rows, rows, padding), batch)
        weights = None if all_weights is None else _rows(rows, padding, all_weights)
        present = torch.arange(padded, device=device) < stop - start
        inputs: _Inputs = (dict(params), part, weights, present, *fixed)
        if not recorded:
            return compute(inputs)
        always = performance.cuda_graph is True
        return probe.graphs.run((key, padded, state), compute, inputs, always=always, keep=(augment, objective.loss))

    fold, width = units.records * views, 2 if objective.autocast else max(p.element_size() for p in params.values())
    bytes_each = unit_bytes(found, params, clip, performance, fold, width)
    largest = largest or count
    size = performance.micro_batch or probe.sizes.get(key)
    size = size or first_micro_batch(bytes_each, params, performance, largest)
    if not on_gpu:
        size = min(size, largest if largest < STEP else -(-largest // STEP) * STEP)
        size = min(size, at_once if at_once < STEP else at_once // STEP * STEP)
    start = 0
    while start < count:
        stop, padded = _next_part(start, count, size, on_gpu=on_gpu)
        unknown = device.type == "cuda" and performance.micro_batch is None and key not in probe.sizes
        gauge = Gauge(device) if unknown else None
        try:
            with exact_products(performance, recurring=padded == size and not unknown):
                sums = one_part(start, stop, padded)
        except torch.OutOfMemoryError:
            if size == 1 or performance.micro_batch is not None:
                raise
            size = probe.sizes[key] = size // 2
            continue
        for name, value in sums.items():
            # One micro-batch is one sum; several are added up in float64.
            total[name] = total[name].double().add_(value) if name in total else value
        start = stop
        if gauge is not None:
            size = probe.sizes[key] = gauge.micro_batch(padded, largest)  # the first size was a guess
    return {name: total[name] for name in params}


def _like(gradient: Gradient | None, params: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    return None if gradient is None else {name: gradient[name].to(p) for name, p in params.items()}


def _next_part(start: int, count: int, size: int, *, on_gpu: bool) -> tuple[int, int]:
    """Where the micro-batch that begins at `start` ends, and to how many units it is padded.

    There are few sizes only: on a GPU the whole one, a half, a quarter and an eighth, on a CPU multiples of 32. The
    rest of a sample is padded to one that it nearly fills, or cut. Libraries choose how to compute, and so to round, by
    the shape: one unit more should change few of the shapes that others are computed in. And memory is used again.
    """
    left = count - start
    if not on_gpu:
        return min(start + size, count), min(size, -(-left // STEP) * STEP)
    sizes = [max(1, size >> i) for i in range(4)]
    if left < size:
        for part in sizes:
            if part * _FILLED <= left < part:
                return count, part
    for part in sizes:
        if part <= left:
            return start + part, part
    return count, sizes[-1]


def _rows(rows: slice, padding: int, value: Any) -> Any:
    """Some rows, the last of them repeated `padding` times; on a CPU at the beginning of a piece of memory.

    How a kernel rounds may depend on where in it a tensor begins.
    """
    if not isinstance(value, Tensor):
        return value
    part = value[rows]
    if padding:
        return torch.cat([part, part[-1:].expand(padding, *part.shape[1:])])
    return part.clone() if rows.start and not part.is_cuda else part


def _most_at_once(found: Trace, params: Mapping[str, Tensor], clip: Clip, *, in_float64: bool) -> int:
    """`_most_in_one_sum`; where kernels add instantiated gradients up in float64, it only concerns what stays factors.

    Then it is a power of two, so that recordings are not made for every origin, and the origin is not looked at, which
    would make the GPU wait, unless there is something large that stays factors.
    """
    if not in_float64:
        return _most_in_one_sum(params, clip)
    factored = any(params[name].numel() > SMALL for name in found.positions if params[name].ndim == 2)
    if clip.origin is None or not factored:
        return _AT_ONCE_ON_GPU
    return min(_AT_ONCE_ON_GPU, 1 << _most_in_one_sum(params, clip).bit_length() - 1)


def _most_in_one_sum(params: Mapping[str, Tensor], clip: Clip) -> int:
    """How many units may be summed in working precision before float64 takes over.

    A sum's rounding depends on all its units, so it must stay far below C: under 1e-3 C for sums of n (C + c |p|) with
    the largest factor c.
    """
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    longest = 1.0
    if clip.origin is not None:
        shifted = clip.origin if clip.scale is None else clip.scale * clip.origin
        longest += clip.largest_factor * float(shifted.norm()) / clip.norm
    return max(1, int(1e-3 / (2 * eps * longest)))
