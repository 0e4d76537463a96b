"""A released classifier as selection sees it: what it makes of rows, one by one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.gradients.row_by_row import RowByRow, passes, safe_size
from sfumato.objective import Batch
from sfumato.public import Public

_PROBES = 16  # public rows; a place that rounds otherwise shows with nearly every one of them


class Views(NamedTuple):
    """What a classifier makes of rows: its last embedding and its logits, one row each."""

    embeddings: Tensor
    logits: Tensor


class Released:
    """A classifier whose weights are public: released by differentially private training, or trained on public data.

    It is copied as it is now, and used in eval mode: dropout is off, and batch norm, which would mix rows, uses its
    running statistics. Training the original further does not change it.

    Args:
        module: gives logits (rows, classes) for a batch of inputs.
        embedding: the name of the layer whose *input* is the embedding; by default the last `nn.Linear`.
        batch_size: rows per pass.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> views = Released(model).views(torch.rand(5, 4))
    >>> views.embeddings.shape, views.logits.shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    """

    def __init__(self, module: nn.Module, *, embedding: str | None = None, batch_size: int = 512) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgument(f"batch_size={batch_size} must be a whole number of at least 1.")
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        self._layer = _layer(self._module, embedding)
        self._batch_size = batch_size
        self._pools: weakref.WeakKeyDictionary[Public, Views] = weakref.WeakKeyDictionary()
        self._probes: Tensor | None = None

    @torch.no_grad()
    def views(self, rows: Batch) -> Views:
        """Embeddings and logits of a tensor of public inputs, or of the first tensor of a batch (inputs, ...)."""
        count, parts = len(_inputs(rows)), list(self._passes(rows, self._batch_size))
        return Views(*(torch.cat(values)[:count] for values in zip(*parts, strict=True)))

    @torch.no_grad()
    def per_row(self, rows: Batch, value: Callable[[Views], Tensor]) -> Tensor:
        """A function of the views of public rows: it sees as many rows at a time as the model does."""
        return torch.cat([value(views) for views in self._passes(rows, self._batch_size)])[: len(_inputs(rows))]

    def row_map(self, value: Callable[[Views], Tensor]) -> RowByRow:
        """A function of the views as a map of private rows; `of` has to have seen a public pool before."""
        if self._probes is None:
            raise InvalidArgument("row_map needs public rows to try places with: call of(pool) first.")
        device = self._probes.device

        @torch.no_grad()
        def one_pass(rows: Batch) -> Tensor:
            return value(self._pass(_inputs(rows).to(device)))

        return RowByRow(one_pass, safe_size(one_pass, self._probes, self._batch_size))

    def of(self, pool: Public) -> Views:
        """The views of a public pool, computed once. Not finite ones are an error: the model has diverged."""
        if self._probes is None:
            device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
            self._probes = _inputs(next(pool.batches(_PROBES))).to(device)
        if pool not in self._pools:
            parts = [self.views(batch) for batch in pool.batches(16 * self._batch_size)]
            views = Views(*(torch.cat(values) for values in zip(*parts, strict=True)))
            if not all(bool(torch.isfinite(values).all()) for values in views):
                raise InvalidArgument("module gives values that are not finite for public rows: it has diverged.")
            self._pools[pool] = views
        return self._pools[pool]

    def _passes(self, rows: Batch, size: int) -> Iterator[Views]:
        inputs = _inputs(rows).to(next((p.device for p in self._module.parameters()), torch.device("cpu")))
        yield from map(self._pass, passes(inputs, size))

    def _pass(self, inputs: Tensor) -> Views:
        seen: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.append(arguments[0])

        hook = self._layer.register_forward_pre_hook(keep)  # of our own copy, for one pass
        try:
            logits = self._module(inputs)
        finally:
            hook.remove()
        if len(seen) != 1 or len(seen[0]) != len(inputs):
            raise InvalidArgument("embedding must name a layer that is run once per pass, with one input per row.")
        if logits.ndim != 2 or len(logits) != len(inputs):
            raise InvalidArgument(f"module must give logits (rows, classes), not a tensor of {logits.ndim} dimensions.")
        return Views(seen[0].flatten(1), logits)


def _layer(module: nn.Module, name: str | None) -> nn.Module:
    layers: dict[str, nn.Module] = dict(module.named_modules())
    if name is not None:
        if name not in layers:
            raise InvalidArgument(f"embedding={name!r} is not a layer of the module: see module.named_modules().")
        return layers[name]
    linear = [layer for layer in layers.values() if isinstance(layer, nn.Linear)]
    if not linear:
        raise InvalidArgument("module has no nn.Linear: give embedding=, the layer whose input is the embedding.")
    return linear[-1]


def _inputs(rows: Batch) -> Tensor:
    first = rows[0] if isinstance(rows, tuple | list) else rows
    if not isinstance(first, Tensor):
        raise InvalidArgument("rows must be a tensor of inputs, or a tuple (inputs, ...), for a classifier to see.")
    return first
