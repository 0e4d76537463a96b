"""What rows hold, followed through a model: which tensors depend on it, and where it decides what lies where.

A use of a parameter is attributed to rows by place. So nothing that a parameter is given may have been put in its place
by contents: not `h[mask]`, which is rows x length only while all rows are full, nor rows that were sorted by length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Tensors in arguments, however nested; cheap for the usual flat case."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _named(*names: str) -> frozenset[Any]:
    """Functions of torch and methods of its tensors, in place or not, by name."""
    spelled = [s for name in names for s in (name, f"{name}_")]
    found = (getattr(place, name, None) for place, name in itertools.product((torch, Tensor), spelled))
    return frozenset(function for function in found if function is not None)


# Of these arguments only the shapes, types and devices reach the result.
_SHAPE_OF = frozenset(
    getattr(place, name)
    for place, name in (
        *itertools.product((torch,), ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")),
        (torch, "randint_like"),
        *itertools.product((Tensor,), ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")),
    )
)
_FIRST_OF = frozenset({Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as})

# Functions whose contents decide places, with the position of their `dim` and what it is without one.
_ORDERS: Mapping[Any, tuple[int, int]] = {
    **dict.fromkeys(_named("sort", "argsort"), (1, -1)),
    **dict.fromkeys(_named("topk"), (2, -1)),
    **dict.fromkeys(_named("msort"), (1, 0)),
}
_BY_INDEX = _named("index_select", "gather")
_INTO_INDEX = _named("index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
_ANYWHERE = _named("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "masked_scatter", "take")
_ALONG = _named("take_along_dim", "repeat_interleave")


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # inside a vmap of the model's own
        return id(tensor)


def _sources(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Arguments whose numbers can reach the result."""
    if func in _SHAPE_OF:
        return iter(())
    return tensors_in(args[:1] if func in _FIRST_OF else (args, kwargs))


class Flow:
    """Follows what the rows of a batch hold. `earlier` is the same for another number of rows.

    By storage: views of a tensor, and what is written into them, count with it.
    """

    def __init__(self, batch: Any, earlier: Flow | None = None) -> None:
        self._alive = list(tensors_in((batch,)))  # storages stay unique while tensors live
        self._contents = {_storage(t) for t in self._alive}
        self._moved: set[int] = set()
        self._earlier = earlier
        self._choices: list[list[int]] = []

    def moved(self, values: Any) -> bool:
        """Whether what is in `values` lies where it does because of what rows hold."""
        return any(_storage(t) in self._moved for t in tensors_in(values))

    def read(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The arguments whose contents reach the result."""
        return [t for t in _sources(func, args, kwargs) if self._holds(t)]

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A function was called."""
        read = self.read(func, args, kwargs)
        decided = func is torch.randperm or read
        put = args[::2] if func is Tensor.__setitem__ else _sources(func, args, kwargs)  # `_places` judges the index
        moved = self.moved(put) or self._moves(self._places(func, args, kwargs))
        if not decided and not moved:
            return
        for tensor in tensors_in((out, args[:1] if func is Tensor.__setitem__ else ())):
            self._alive.append(tensor)
            self._contents.add(_storage(tensor))
            if moved:
                self._moved.add(_storage(tensor))

    def _holds(self, value: Any) -> bool:
        """Whether a value depends on rows. A list of numbers may have been a tensor once, be it 0, 1, 2, ..."""
        if isinstance(value, Tensor):
            return _storage(value) in self._contents
        return isinstance(value, (list, np.ndarray))

    def _moves(self, sizes: list[int] | None) -> bool:
        """Whether places are chosen along a dimension that counts rows: one whose size is another than before."""
        if sizes is None:
            return False
        place = len(self._choices)
        self._choices.append(sizes)
        if self._earlier is None:
            return False
        before = self._earlier._choices
        return place >= len(before) or before[place] != sizes

    def _places(self, func: Any, args: Any, kwargs: Any) -> list[int] | None:
        """Sizes of the dimensions along which contents choose places; None if they choose none."""
        first, rest = args[0] if args else kwargs.get("input"), [*args[1:], *kwargs.values()]
        if not isinstance(first, Tensor):
            return None
        shape = list(first.shape)
        if func is Tensor.__getitem__ or (func is Tensor.__setitem__ and self._any_holds([args[2]])):
            return self._indexed(shape, args[1])
        if func in _BY_INDEX or func in _INTO_INDEX:
            index = args[2] if len(args) > 2 else kwargs.get("index")
            put = func in _BY_INDEX or self._any_holds([v for v in rest if v is not index])
            return _along(shape, args, kwargs, 1, None) if put and self._holds(index) else None
        if func in _ORDERS:
            return _along(shape, args, kwargs, *_ORDERS[func]) if self._holds(first) else None
        if func in _ALONG:
            return _along(shape, args, kwargs, 2, None) if self._any_holds(rest) else None
        if func in _ANYWHERE or (func is torch.where and len(args) == 1 and not kwargs):
            return shape if self._any_holds([first, *rest]) else None
        return None

    def _any_holds(self, values: Any) -> bool:
        return any(self._holds(t) for t in tensors_in(values))

    def _indexed(self, shape: Sequence[int], index: Any) -> list[int] | None:
        parts = list(index) if isinstance(index, tuple) else [index]
        widths = [_width(part) for part in parts]
        chosen: list[int] = []
        dim = 0
        for part, width in zip(parts, widths, strict=True):
            if part is Ellipsis:
                dim += len(shape) - sum(widths)
            elif self._holds(part):
                chosen += shape[dim : dim + width]
            dim += width
        return chosen or None


def _along(shape: list[int], args: Any, kwargs: Any, position: int, usual: int | None) -> list[int]:
    """The size of the dimension that is named at a position; of all of them if none is."""
    dim = args[position] if len(args) > position else kwargs.get("dim", usual)
    return [shape[dim]] if isinstance(dim, int) and shape else shape


def _width(part: Any) -> int:
    """How many dimensions an index is for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    masks = isinstance(part, (Tensor, np.ndarray)) and part.dtype in (torch.bool, torch.uint8, np.bool_)
    return part.ndim if masks else 1
