"""Rows that are nobody's, made of what is public of a row: its types and its shape.

What a model does with them may decide whether it is refused, since it would for any data of this kind.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.objective import Batch, Objective

# Which integers a row may hold nobody says: first as many as there are probed rows, then such as two classes, lengths
# of at least one or a mask that leaves something have, and nothing but zeros at last.
_RANGES = ((0, 5), (0, 2), (1, 3), (1, 2), (0, 1))


def made_up_rows(like: Batch, count: int) -> Iterator[Batch]:
    """Batches of rows of these types and shapes, each for a model that has an error for those before it."""
    leaves = [t for t in tree_flatten(like)[0] if isinstance(t, Tensor)]
    whole = any(not t.is_floating_point() and not t.is_complex() for t in leaves)
    for low, high in _RANGES if whole else _RANGES[:1]:
        yield tree_map(_Maker(count, low, high), like)


class _Maker:
    """Makes one tensor after another."""

    def __init__(self, count: int, low: int, high: int) -> None:
        self._count, self._low, self._high = count, low, high
        self._generator = torch.Generator().manual_seed(0)
        self._rising = False

    def __call__(self, like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape = self._count, *like.shape[1:]
        if like.is_floating_point() or like.is_complex():
            # From 1/4 to 3/4, where roots and logarithms are, and far enough from a kink at 0.
            return (0.25 + 0.5 * torch.rand(shape, generator=self._generator)).to(like)
        if math.prod(shape[1:]) == 1:
            return self._labels().view(shape).to(like)
        return self._words(math.prod(shape[1:])).view(shape).to(like)

    def _words(self, length: int) -> Tensor:
        """Many integers per row, such as tokens or a mask: one row is full, others end in zeros, as if padded.

        Zeros between others would be cut off by a model that cuts its rows to the longest.
        """
        least, above = max(self._low, 1), max(self._high, 2)
        words = torch.randint(least, above, (self._count, length), generator=self._generator)
        padding = (1 + torch.arange(self._count) * (length // 2) // self._count).clamp_max(length - 1)
        padding[1] = 0
        if self._low == 0:
            words[torch.arange(length) >= length - padding[:, None]] = 0
        return words if self._high > 1 else torch.zeros_like(words)

    def _labels(self) -> Tensor:
        """One integer per row, the small ones in the first half, or of every second tensor in the other one.

        So a class that is in one half is not in the other, and a row is the longest among the first, not among all.
        """
        self._rising = not self._rising
        place = torch.arange(self._count)
        place[1:3] = place[1:3].flip(0)
        if not self._rising:
            place = self._count - 1 - place
        return self._low + place * (self._high - self._low) // self._count


class TriedOnCpu:
    """Which made-up rows a model on a GPU may be given: an index out of range, elsewhere an error, ends its use there.

    Integers other than zero, which is in every range, are tried on a copy of the model on the CPU first.
    """

    def __init__(self, objective: Objective, params: Mapping[str, Tensor]) -> None:
        self._objective, self._params = objective, params
        self._moved: Objective | None = None

    def fails(self, rows: Batch) -> bool:
        whole = [t for t in tree_flatten(rows)[0] if isinstance(t, Tensor) and not t.is_floating_point()]
        if all(p.is_cpu for p in self._params.values()) or not any(bool(t.any()) for t in whole):
            return False
        try:
            self.moved().losses({name: p.cpu() for name, p in self._params.items()}, tree_map(_on_cpu, rows))
        except Exception:
            return True
        return False

    def moved(self) -> Objective:
        """Its tensors are copied one by one, so that a GPU holds none of them twice."""
        if self._moved is None:
            module = self._objective.module
            moved: dict[int, Any] = {id(b): b.detach().cpu() for b in module.buffers()}
            moved |= {id(p): nn.Parameter(p.detach().cpu(), p.requires_grad) for p in module.parameters()}
            self._moved = Objective(copy.deepcopy(module, moved), self._objective.loss)
        return self._moved


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
