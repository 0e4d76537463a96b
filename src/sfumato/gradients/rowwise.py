"""Checks that a user's function treats rows one by one, made on a few jittered rows before anything is charged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.errors import InvalidArgument
from sfumato.gradients.passes import Augment
from sfumato.gradients.probe import mixed, probe_rows
from sfumato.objective import Batch

_ROWS = 8


def check_row_map(row_map: Callable[[Batch], Tensor], rows: Batch) -> None:
    """Raise if the map mixes rows, as centring by their mean would: other rows must not change a row's value."""
    first, second = probe_rows(rows, _ROWS, 0), probe_rows(rows, _ROWS, 1)
    values = row_map(tree_map(_copy, first))
    for keep in (0, 3, _ROWS - 1):
        # The others exchanged, then all equal to one of them (a mean moves furthest then), then none.
        same_others = [_picked(first, [(keep + shift) % _ROWS] * _ROWS) for shift in (1, 4)]
        changed = [row_map(mixed(first, others, keep))[keep] for others in (second, *same_others)]
        if not all(_same(values[keep], v) for v in (*changed, row_map(_picked(first, [keep]))[0])):
            raise InvalidArgument(
                "row_map gives a row another value when other rows change (centring, normalising or batch norm over "
                "the rows?): make it a function of each row alone."
            )


def check_augment(augment: Augment, rows: Batch) -> None:
    """Raise if it mixes rows, as MixUp and CutMix do: a person would enter other people's gradients.

    With the same random numbers a row must come out the same, whatever the other rows hold. A map whose randomness
    torch's seed does not fix cannot be tested this way and is taken at its word.
    """
    first, second = probe_rows(rows, _ROWS, 0), probe_rows(rows, _ROWS, 1)

    def seeded(batch: Batch, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        out = [v for v in tree_flatten(augment(tree_map(_copy, batch)))[0] if isinstance(v, Tensor)]
        if not out or any(v.ndim == 0 or len(v) != _ROWS for v in out):
            raise InvalidArgument("augment must map row to row: it returned another number of rows than it was given.")
        return out

    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            before = seeded(first, seed)
            if not all(map(_same, before, seeded(first, seed))):
                return
            for keep in (0, _ROWS - 1):
                after = seeded(mixed(first, second, keep), seed)
                if not all(_same(a[keep], b[keep]) for a, b in zip(before, after, strict=True)):
                    raise InvalidArgument(
                        "augment gives a row another value when other rows change (MixUp or CutMix between private "
                        "rows?): mix with public rows only."
                    )


def _picked(batch: Batch, rows: list[int]) -> Batch:
    return tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, batch)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
