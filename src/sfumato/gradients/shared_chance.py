"""Chance that rows share: one coin for a whole pass, a mask over weights, an order of the rows.

Which rows pass together depends on who else is there, so one row more would give others another coin. It is found by
how many random numbers are drawn: for every row twice, twice as many, or else some of them are not a row's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sfumato.generators import own_generators
from sfumato.gradients.passes import rows_of
from sfumato.gradients.probed_rows import taken
from sfumato.objective import Batch

_ORDERS = ("randperm", "multinomial")  # of which each number depends on the others


def shares_chance(compute: Callable[[Batch], Any], rows: Batch) -> bool:
    """Whether `compute` draws anything for several rows at once. Draws that the rows' contents call for are theirs."""
    twice = taken(rows, torch.arange(2 * rows_of(rows)) % rows_of(rows))
    (few, few_moved), (many, many_moved) = (_drawn(compute, batch) for batch in (rows, twice))
    outside = any(a is not None and a == b for a, b in zip(few_moved, many_moved, strict=True))
    return few.ordered or many.ordered or many.numbers != 2 * few.numbers or outside


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the random numbers that torch draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.ordered = 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            count = next((t.numel() for t in tree_flatten(out)[0] if isinstance(t, Tensor)), 0)
            self.numbers += count
            self.ordered |= count > 1 and func.__name__.split(".")[0] in _ORDERS
        return out


def _drawn(compute: Callable[[Batch], Any], rows: Batch) -> tuple[Draws, tuple[Any, Any]]:
    """What torch draws; and where numpy's and Python's generators stand afterwards, if they moved."""
    with own_generators(0), torch.enable_grad(), Draws() as draws:
        before = _stand()
        compute(rows)
        after = _stand()
    numpy_moved, python_moved = (b if a != b else None for a, b in zip(before, after, strict=True))
    return draws, (numpy_moved, python_moved)


def _stand() -> tuple[Any, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return (kind, np.asarray(keys).tobytes(), *rest), random.getstate()
