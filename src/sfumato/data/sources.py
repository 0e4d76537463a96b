"""Where rows come from: in-memory tensors and arrays (the fast path), or any map-style dataset."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import Dataset, default_collate

from sfumato.data.samplers import Indices
from sfumato.errors import InvalidArgument
from sfumato.objective import Batch
from sfumato.traces import LOADER

_MOST_WORK = 100_000  # of a search for a common element: a fraction of a second


class Source(ABC):
    """Rows by number. `len` is the number of rows, which may be private."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Indices, *, lend: bool = False) -> Batch:
        """The rows of these numbers as one batch: a copy, or with `lend` perhaps the data itself, not to be changed."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """About how much memory one row takes."""

    @property
    def form(self) -> str | None:
        """Types and shapes of a row, where they are known without a look at one."""
        return None

    def shares_rows(self, other: Source) -> bool:
        """Whether some rows are in both, in the same memory; no value is read, and a copy is not known as one."""
        return self is other


class TensorSource(Source):
    """A tensor or array, or a tuple, list or dict of them, with one row per example."""

    def __init__(self, data: Any) -> None:
        self._data = tree_map(lambda v: v if isinstance(v, Tensor) else _shared(v), data)
        lengths = {len(t) if t.ndim else None for t in tree_flatten(self._data)[0]}
        if len(lengths) != 1 or None in lengths:
            raise InvalidArgument(
                "data has arrays with different numbers of rows: every array needs one row per example, in the same "
                "order."
            )
        self._length = int(lengths.pop() or 0)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: Indices, *, lend: bool = False) -> Batch:
        if lend and _consecutive(indices):
            rows = partial(_slice, start=int(indices[0]), stop=int(indices[-1]) + 1)
        else:
            rows = partial(_selected, index=torch.from_numpy(np.ascontiguousarray(indices)))
        data = self._data
        if type(data) is tuple and all(type(t) is Tensor for t in data):  # (X, y), without the price of a tree
            return tuple(map(rows, data))
        return rows(data) if type(data) is Tensor else tree_map(rows, data)

    @property
    def row_bytes(self) -> int:
        return sum(t[:1].nbytes for t in tree_flatten(self._data)[0])

    @property
    def form(self) -> str:
        return form_of_rows(self._data)

    def shares_rows(self, other: Source) -> bool:
        if not isinstance(other, TensorSource):
            return False
        own, others = ([_Address(t) for t in tree_flatten(source._data)[0]] for source in (self, other))
        return any(share_memory(np.asarray(a), np.asarray(b)) for a, b in product(own, others))

    def made_up(self, rows: int) -> Batch:
        """Rows of the same types and shapes that hold nothing but zeros."""
        return tree_map(lambda t: torch.zeros(rows, *t.shape[1:], dtype=t.dtype, device=t.device), self._data)


def form_of_rows(batch: Batch) -> str:
    """Types and shapes, without the number of rows.

    >>> form_of_rows({"x": torch.zeros(5, 3), "y": torch.zeros(5, dtype=torch.int64)})
    "{'x': float32 (3,), 'y': int64 ()}"
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape[1:])}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {form_of_rows(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return f"({', '.join(map(form_of_rows, batch))})"
    return type(batch).__name__


def share_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether an element is in both. Every second row and the rows between them are apart, and known to be.

    >>> x = np.zeros((10, 3))
    >>> share_memory(x, x[:2]), share_memory(x[::2], x[1::2])
    (True, False)
    """
    try:
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


class _Address:
    """A tensor's place as numpy takes it, also on a GPU, whose memory cannot be read from here and is not."""

    def __init__(self, t: Tensor) -> None:
        size = t.element_size()
        self.__array_interface__ = {
            "data": (t.data_ptr(), True),
            "shape": tuple(t.shape),
            "strides": tuple(n * size for n in t.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _shared(array: Any) -> Tensor:
    """A tensor over the same memory, which nothing here writes to: it may be a file that is mapped for reading."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(np.asarray(array))


def _consecutive(indices: Indices) -> bool:
    return len(indices) > 0 and bool(indices[-1] - indices[0] == len(indices) - 1 and (np.diff(indices) == 1).all())


def _slice(t: Tensor, *, start: int, stop: int) -> Tensor:
    # Of a table that lies in memory column by column, sums over columns would be rounded by a row's place.
    return t[start:stop].contiguous()


def _selected(t: Tensor, *, index: Tensor) -> Tensor:
    # A GPU is not waited for: the driver has read what is copied to it before the call returns.
    return t.index_select(0, index if t.is_cpu else index.to(t.device, non_blocking=True))


class DatasetSource(Source):
    """Any dataset with `len` and `[i]`; rows are collated as torch's own loader does, which finds one type for all.

    So their fields have to be of one type each: a single whole number among fractions would round all others anew.
    """

    def __init__(self, dataset: Dataset[Any] | Sequence[Any]) -> None:
        self._dataset = dataset
        self._kind: Any = None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def gather(self, indices: Indices, *, lend: bool = False) -> Batch:
        rows = [self._dataset[int(i)] for i in indices]
        if self._kind is None and len(self):
            self._kind = _kind_of(self._dataset[0])
        if any(_kind_of(row) != self._kind for row in rows):
            raise InvalidArgument(
                "data has rows of unlike types: give every row the same fields, each a tensor or number of one type, "
                "such as float(value)."
            )
        return default_collate(rows)

    @property
    def row_bytes(self) -> int:
        if not len(self):
            return 0
        return sum(t.nbytes for t in tree_flatten(self.gather(np.zeros(1, np.int64)))[0] if isinstance(t, Tensor))

    def shares_rows(self, other: Source) -> bool:
        return isinstance(other, DatasetSource) and other._dataset is self._dataset


_NUMBERS = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float64)}


def _kind_of(row: Any) -> Any:
    """The fields of a row and their types, as a batch would have them."""
    leaves, form = tree_flatten(row)
    return form, [_type_of(leaf) for leaf in leaves]


def _type_of(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype
    if isinstance(value, np.generic):
        return value.dtype
    return _NUMBERS.get(type(value), type(value))


def as_source(data: Any) -> Source:
    """Choose the form of the data by what it is."""
    if isinstance(data, Source):
        return data
    leaves = tree_flatten(data)[0]
    if leaves and all(isinstance(v, Tensor | np.ndarray) for v in leaves):
        return TensorSource(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data)
    raise InvalidArgument(
        f"data={type(data).__name__} is not understood: give tensors or arrays (alone, or in a tuple, list or dict), "
        "or a dataset with len() and [i]."
    )


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, each loaded in a thread while the one before it is computed with."""
    iterator = iter(batches)
    with ThreadPoolExecutor(1, thread_name_prefix=LOADER) as pool:
        future = pool.submit(next, iterator, None)
        while (batch := future.result()) is not None:
            future = pool.submit(next, iterator, None)
            yield batch
