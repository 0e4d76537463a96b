"""Whether a row map that nobody knows gives a row the same bits in every place of a pass: tried with made-up rows.

A map may end in a label, which hides how its score was rounded. So all that it computes on the way is watched, and what
cannot be watched, such as numbers that it takes out of torch, is not trusted. Private rows are not looked at: whether
rows pass together must not depend on them, since it changes how all of them are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.gradients.probed_rows import taken
from sfumato.gradients.row_by_row import OnePass, RowByRow
from sfumato.objective import Batch

AT_ONCE = 448  # rows of a pass: whole vectors of numbers, and hardly ever a layer's width
_ROWS, _FEWEST, _MOST = 1024, 4, 64  # rows that are tried, and how often at least and at most they change places
_WIDE, _NARROW = 250, 2  # made-up integers are below: they may be levels of grey, or numbers of classes
_ODD = 0x1E3779B97F4A7C15
_WAYS_OUT = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.tolist, Tensor.data_ptr)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apart(owner: Any, one_pass: OnePass, rows: Batch, size: int) -> Tensor:
    """What `one_pass` makes of rows, `size` at a time if they come out alike in all places of such a pass, else alone.

    `owner` is whose pass it is, always the same: it keeps what was found, for it may ask again and again.
    """
    if size > 1:
        tried, kind = vars(owner).setdefault("_tried", {}), _kind(rows, size)
        if kind not in tried:
            tried[kind] = comes_out_alike(one_pass, rows, size)
        size = size if tried[kind] else 1
    return RowByRow(one_pass, size)(rows)


def _kind(rows: Batch, size: int) -> tuple[Any, ...]:
    """What kernels are chosen by."""
    kinds = tuple((t.dtype, t.shape[1:], t.device) for t in _tensors(rows))
    return kinds, size, torch.get_num_threads()


def comes_out_alike(one_pass: OnePass, schema: Batch, size: int) -> bool:
    """Whether made-up rows, in types and shapes like those of `schema`, come out of all places of a pass alike."""
    on_cpu = all(t.is_cpu for t in tree_flatten(schema)[0] if isinstance(t, Tensor))
    # On a GPU a number that is too large for a table would end the process's use of it.
    for below in (_WIDE, _NARROW) if on_cpu else (_NARROW,):
        try:
            return _in_all_places(one_pass, schema, size, below)
        except Exception:  # whatever is wrong with made-up rows: perhaps their numbers are too large
            continue
    return False


def _in_all_places(one_pass: OnePass, schema: Batch, size: int, below: int) -> bool:
    for round_ in range(min(_MOST, max(_FEWEST, _ROWS // size))):
        # Odd, so that a row's place changes by its last binary digits, too; and all over the pass, in turn.
        shift = (1 + 2 * int(0.309 * round_ * size)) % size
        rows = _made_up(schema, size, below, round_)
        first, second = _Watch(rows, size), _Watch(moved := _rolled(rows, shift, size), size)
        if not (first.sees(one_pass, rows) and second.sees(one_pass, moved) and first.same(second, shift)):
            return False
    return True


def _made_up(schema: Batch, size: int, below: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def made_up(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape = (size, *like.shape[1:])
        if not (like.is_floating_point() or like.is_complex()):
            most = 2 if like.dtype == torch.bool else min(below, 120) if like.dtype == torch.int8 else below
            return torch.randint(most, shape, generator=generator).to(like.device, like.dtype)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        if (
            not like.is_cpu
        ):  # a map may take them for numbers of classes, and there a negative one is worse than an error
            return uniform.to(like.device, like.dtype)
        every_second = (torch.arange(size) % 2).bool().reshape(-1, *(1 for _ in shape[1:]))
        return torch.where(every_second, 6 * uniform - 3, uniform).to(like.device, like.dtype)

    return tree_map(made_up, schema)


def _rolled(rows: Batch, shift: int, size: int) -> Batch:
    return taken(rows, (torch.arange(size) - shift) % size)


class _Calls(TorchFunctionMode):
    """Notices tensors that are handed to something else than torch, which might even write to them."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch, self.leaving = watch, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.leaving |= func in _WAYS_OUT
        if func is not F.one_hot or (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 1:
            return func(*args, **kwargs)
        with self._watch.only_checked():
            return func(*args, **kwargs)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the bits, row by row, of every result that is made of the batch, as a number for each row."""

    def __init__(self, batch: Batch, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size, self._trusted, self._only_checked = size, True, False
        self._results: list[list[Tensor]] = []  # for each the ways to read it row by row
        self._of_rows = {_memory(t) for t in _tensors(batch)}
        self._constant: set[StorageWeakRef] = set()
        self._from_outside: set[StorageWeakRef] = set()
        self._alive: list[Tensor] = []

    def sees(self, one_pass: OnePass, batch: Batch) -> bool:
        """Run a pass. Whether what comes out was made of rows in ways that can be seen."""
        with (calls := _Calls(self)), self:
            out = one_pass(batch)
        return self._trusted and not calls.leaving and _memory(out) in self._of_rows

    @contextmanager
    def only_checked(self) -> Iterator[None]:
        """While numbers are only taken out to be refused if they are out of range."""
        self._only_checked = True
        try:
            yield
        finally:
            self._only_checked = False

    def same(self, other: _Watch, shift: int) -> bool:
        """Whether the other pass gave every row the same, `shift` places further on."""
        if len(self._results) != len(other._results) or not other._from_outside <= self._from_outside:
            return False  # what was there before is a constant; else it may have been made of rows out of sight
        pairs = zip(self._results, other._results, strict=True)
        return all(
            any(torch.equal(a, b if b.ndim == 0 else b.roll(-shift, 0)) for a, b in zip(mine, others, strict=True))
            for mine, others in pairs
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [(t, _memory(t)) for t in _tensors((args, kwargs))]
        of_rows = any(memory in self._of_rows for _, memory in given)
        for t, memory in given:
            if memory not in self._of_rows and memory not in self._constant and self._size in t.shape:
                self._from_outside.add(memory)
                self._alive.append(t)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._trusted = False  # rows of one pass may share what is drawn
        if of_rows and func._schema.is_mutable and not _tensors(out):
            self._trusted = False  # it does not hand over what it wrote
        if of_rows and _looks_at_contents(func, args) and not self._only_checked:
            self._trusted = False
        for t in _tensors(out):
            memory = _memory(t)
            if of_rows:
                self._of_rows.add(memory)
                self._note(t, func)
            elif memory not in self._from_outside:
                self._constant.add(memory)  # made here, of nothing else than constants
        return out

    def _note(self, result: Tensor, func: Any) -> None:
        nothing = func.is_view or any(word in func.name() for word in ("empty", "set_", "resize_"))
        if nothing or not result.numel():  # what only finds memory, or shows it once more
            return
        ways = [_bits(each) for each in by_row(result, self._size)]
        if result.ndim == 0:
            ways = [_bits(result.reshape(1, 1))[0]]
        if ways:
            self._results.append(ways)
        elif result.is_floating_point() or result.is_complex():
            self._trusted = False  # some rows only, say: whose they are and where they lie is up to other rows


def _looks_at_contents(func: Any, args: Any) -> bool:
    """Whether contents decide a number, on which a branch may hang, or a shape, as those of a mask do.

    So all rows of a pass might be computed otherwise for a row unlike any that is tried.
    """
    if torch.Tag.data_dependent_output in func.tags:
        return True
    masks = any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:]))
    return torch.Tag.dynamic_output_shape in func.tags and (masks or func is not torch.ops.aten.index.Tensor)


def by_row(t: Tensor, rows: int) -> Iterator[Tensor]:
    """(rows, ...), in every way in which it may be meant: rows before or behind what they are merged with."""
    for dim, size in enumerate(t.shape):
        if size and size % rows == 0:
            rest = (*t.shape[:dim], *t.shape[dim + 1 :])
            merged = t.movedim(dim, 0)
            yield merged.reshape(rows, -1, *rest)
            if size > rows:
                yield merged.reshape(size // rows, rows, -1, *rest).transpose(0, 1)


def _bits(rows: Tensor) -> Tensor:
    """One number for each row that differs where a bit does."""
    real = torch.view_as_real(rows) if rows.is_complex() else rows
    flat = real.detach().reshape(len(real), -1).contiguous()
    bits = flat.view(_INTEGERS[flat.element_size()]).long()
    return (bits * ((2 * torch.arange(bits.shape[1], device=bits.device) + 1) * _ODD)).sum(1)


def _memory(t: Tensor) -> StorageWeakRef:
    """Which memory it is: told apart from any other as long as this lives, and not kept from being freed."""
    return StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
