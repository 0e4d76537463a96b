"""Which rows a model is probed with: jittered, far apart, and cut short."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.objective import Batch

_LOOKED_AT = 1024  # rows among which probed rows are chosen
_ENTRIES = 1 << 18  # among which the commonest is looked for
_EXTREMES = 6
LARGEST = 1e4  # of a number in a probed row


def probe_rows(batch: Batch, count: int, seed: int) -> Batch:
    """`count` finite rows that differ from each other: rows of the batch, in turn, jittered where they are numbers.

    Numbers are cut to a usual size: a row that overflows in the model must not decide whether the model is accepted.
    """
    return jittered(rows_to_probe(batch, count, seed), seed)


def rows_to_probe(batch: Batch, count: int, start: int = 0) -> Batch:
    """Rows of the batch, in turn, as they are."""
    order = spread_over(batch)
    return taken(batch, order[(torch.arange(count) + start) % len(order)])


def taken(batch: Batch, rows: Tensor) -> Batch:
    return tree_map(lambda t: t[rows.to(t.device)] if isinstance(t, Tensor) else t, batch)


def jittered(batch: Batch, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def jitter(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        rows = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0).clamp(-LARGEST, LARGEST)
        by = torch.rand(rows.shape, generator=generator).to(rows) * 2 - 1
        return rows + 0.05 * (1 + rows.abs()) * by

    return tree_map(jitter, batch)


def integers_of(batch: Batch) -> list[Tensor]:
    """Labels, tokens, lengths, masks: what cannot be jittered, each (rows, entries), of some rows."""
    tensors = [t for t in tree_flatten(batch)[0] if isinstance(t, Tensor) and not t.is_floating_point()]
    return [t[:_LOOKED_AT].reshape(len(t[:_LOOKED_AT]), -1).long().cpu() for t in tensors if not t.is_complex()]


def alike_in(batch: Batch) -> frozenset[int]:
    """Which of the batch's integers are the same in all rows."""
    return frozenset(i for i, t in enumerate(integers_of(batch)) if bool((t == t[:1]).all()))


def _commonest(integers: Tensor) -> Tensor:
    return integers.flatten()[:_ENTRIES].long().mode().values


def extremes_of(batch: Batch) -> Tensor:
    """Some rows whose integers are far apart: the shortest and the longest, if the commonest number is padding."""
    integers = integers_of(batch)
    measures = [*((t == _commonest(t)).sum(1) for t in integers), *(t.sum(1) for t in integers)]
    chosen = [int(place) for measure in measures for place in (measure.argmax(), measure.argmin())]
    return torch.tensor(list(dict.fromkeys(chosen))[:_EXTREMES], dtype=torch.long)


def cut_short(rows: Batch, batch: Batch, length: int) -> Batch:
    """Rows whose integers end after a few, the rest being what is commonest in the batch."""

    def cut(value: Any, like: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.ndim < 2:
            return value
        flat = value.reshape(len(value), -1).clone()
        flat[:, length:] = _commonest(like).to(value)
        return flat.reshape(value.shape)

    return tree_map(cut, rows, batch)


def spread_over(batch: Batch) -> Tensor:
    """Row numbers, from all over the batch, those first whose integers (labels, tokens) differ.

    Integers cannot be jittered, and rows that are equal would hide that they are mixed.
    """
    integers = integers_of(batch)
    count = next(len(t[:_LOOKED_AT]) for t in tree_flatten(batch)[0] if isinstance(t, Tensor))
    # Steps of about 0.618 of the whole, the golden section: any few of them are spread out.
    step = next(s for s in range(int(0.618 * count), count + 2) if math.gcd(s, count) == 1)
    everything = torch.arange(count) * step % count
    if not integers or not count:
        return everything
    _, kind = torch.unique(torch.cat(integers, 1)[everything], dim=0, return_inverse=True)
    places = torch.arange(count)
    first = torch.full((int(kind.max()) + 1,), count).scatter_reduce(0, kind, places, "amin").sort().values
    later = torch.ones(count, dtype=torch.bool)
    later[first] = False
    return torch.cat([everything[first], everything[later]])


def mixed(first: Batch, second: Batch, keep: int) -> Batch:
    """`second` with row `keep` taken from `first`."""

    def mix(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        b = b.clone()
        b[keep] = a[keep]
        return b

    return tree_map(mix, first, second)


def joined(first: Batch, second: Batch) -> Batch:
    return tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, first, second)
