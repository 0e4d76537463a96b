"""A map of private rows, one by one to the last bit: else one row more would change how others' rows are rounded.

Kernels may round a row by where it lies and by how many there are: an array's last few numbers are computed by other
instructions than the rest, a matrix product takes rows in blocks. A threshold makes a whole vote of the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sfumato.objective import Batch

OnePass = Callable[[Batch], Tensor]


class RowByRow:
    """What `one_pass` makes of rows, in passes of one shape, each in memory of its own.

    *Formal guarantee.* What it makes of a row depends on that row alone, if `one_pass` makes the same of it in every
    place of a pass of `size` rows: that is for who gives the size to find out, without a look at private rows.
    """

    def __init__(self, one_pass: OnePass, size: int) -> None:
        self._one_pass, self._size = one_pass, size

    def __call__(self, rows: Batch) -> Tensor:
        found = torch.cat([self._one_pass(part).detach() for part in passes(rows, self._size)])
        return found[: _count(rows)]

    def then(self, exactly: Callable[[Tensor, Batch], Tensor]) -> RowByRow:
        """Followed by something that rounds nothing, such as a comparison: it is given the result, and the rows."""
        return RowByRow(lambda rows: exactly(self._one_pass(rows), rows), self._size)

    def alone(self) -> RowByRow:
        """The same with every row in a pass of its own."""
        return RowByRow(self._one_pass, 1)


def passes(rows: Batch, size: int) -> Iterator[Batch]:
    """Rows in parts of `size`, the last one filled up with its last row, or with zeros where there is none."""
    values, form = tree_flatten(rows)
    for start in range(0, max(_count(rows), 1), size):
        parts = [_part(value, start, size) for value in values]
        yield parts[0] if type(rows) is Tensor else tuple(parts) if _is_flat(rows) else tree_unflatten(parts, form)


def _is_flat(rows: Batch) -> bool:
    """(X, y), without the price of a tree."""
    return type(rows) is tuple and all(type(value) is Tensor for value in rows)


def _part(value: Any, start: int, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = value[start : start + size]
    if missing := size - len(part):
        filling = part[-1:] if len(part) else part.new_zeros(1, *part.shape[1:])
        return torch.cat([part, filling.expand(missing, *part.shape[1:])]).contiguous()
    # A copy: kernels may also go by where in memory a row begins, which a slice leaves to chance.
    return part.clone(memory_format=torch.contiguous_format)


def _count(rows: Batch) -> int:
    return next(len(t) for t in tree_flatten(rows)[0] if isinstance(t, Tensor))


@torch.no_grad()
def safe_size(one_pass: Callable[[Tensor], Tensor], probes: Tensor, size: int) -> int:
    """`size` if each of some public rows comes out of all places of a pass alike, else 1.

    It looks at what comes out, and so wants a pass that gives numbers: in a label, most differences would be lost.
    """
    for row in probes:
        everywhere = one_pass(row.expand(size, *row.shape).clone())
        if not torch.equal(everywhere, everywhere[:1].expand_as(everywhere)):
            return 1
    return size
