"""A row among spoiled ones: the same rows, with NaN for whatever is a number in all others.

Ordinary rows hide much of what they do to each other: a largest logit that is taken off everybody's cancels until it
is infinite, a term of weight 1e-4 is lost in rounding, a threshold lies above all of them. NaN passes through all of
that, so a row whose loss and gradient stay what they were was not looked at.

Integers have no NaN. Where a number is made of integers alone (a table look-up, a cast, a mask), the result is spoiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sfumato.gradients.flow import Flow
from sfumato.objective import Batch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Others:
    """All rows but `keep`, out of `rows`; `minor` says which vary fastest where rows are merged with something else."""

    rows: int
    keep: int
    value: float = float("nan")
    minor: bool = False

    def spoil_batch(self, batch: Batch) -> Batch:
        """With the integers as they are."""
        return tree_map(
            lambda t: self._spoil(t, 0) if isinstance(t, Tensor) and t.is_floating_point() else t,
            batch,
        )

    def spoil(self, x: Tensor, other: Shape) -> Tensor:
        """`x` where it holds other rows, as its shape for another number of rows tells.

        What has the same shape for any number of rows is of all of them; what grows in no simple way is left.
        """
        shape = tuple(x.shape)
        if shape == other:
            return torch.full_like(x, self.value)
        moving = [d for d, (m, n) in enumerate(zip(shape, other, strict=False)) if m != n]
        if len(shape) != len(other) or len(moving) != 1 or shape[moving[0]] % self.rows:
            return x
        return self._spoil(x, moving[0])

    def _spoil(self, x: Tensor, dim: int) -> Tensor:
        place = torch.arange(x.shape[dim], device=x.device)
        row = place % self.rows if self.minor else place // (x.shape[dim] // self.rows)
        return x.masked_fill((row != self.keep).view(-1, *[1] * (x.ndim - dim - 1)), self.value)


class Entrances(TorchFunctionMode):
    """Sees where numbers are made of the batch's integers: notes their shapes, or spoils them.

    `before` saw the same for another number of rows.
    """

    def __init__(self, batch: Batch, others: Others | None = None, before: Entrances | None = None) -> None:
        super().__init__()
        self.shapes: list[Shape] = []
        self.calls = 0
        self._flow = Flow(batch)
        self._others, self._known = others, () if before is None else before.shapes
        # A loop until something converges never ends for NaN.
        self._most = math.inf if before is None else 4 * before.calls + 1000

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        if self.calls > self._most:
            raise RecursionError
        out = func(*args, **kwargs)
        read = self._flow.read(func, args, kwargs)
        made = isinstance(out, Tensor) and out.is_floating_point() and not any(out is t for t in args[:1])
        if made and read and not any(t.is_floating_point() for t in read):
            out = self._entered(out)
        self._flow.note(func, args, kwargs, out)
        return out

    def _entered(self, out: Tensor) -> Tensor:
        place = len(self.shapes)
        self.shapes.append(tuple(out.shape))
        if self._others is None or place >= len(self._known):
            return out
        return self._others.spoil(out, self._known[place])
