"""Public data: may be used freely, for free.

The taint rule: only public data and already released answers may flow into a `Public`. A tensor computed from private
rows (a mean, a vocabulary, a filtered copy) is not public, however small it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.data.sources import as_source
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.gradients.graphs import Graphs, state_of
from sfumato.gradients.reference import per_example_gradients
from sfumato.objective import Batch, Objective


class Public:
    """A dataset that may be looked at: batches, gradients, losses.

    `augment`: a random map of batches that gradients are taken through, so that few rows go further; losses are not.

    >>> import torch
    >>> from sfumato import Objective, Public, cross_entropy
    >>> objective = Objective(torch.nn.Linear(3, 2), cross_entropy)
    >>> public = Public((torch.rand(8, 3), torch.tensor([0, 1] * 4)), objective=objective, seed=0)
    >>> sorted(public.gradient(objective.parameters(), batch_size=4))
    ['bias', 'weight']
    """

    def __init__(
        self,
        data: Any,
        *,
        objective: Objective | None = None,
        seed: int | None = None,
        augment: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._source = as_source(data)
        self.objective = objective
        self.augment = augment
        self._rng = np.random.default_rng(seed)
        self._graphs = Graphs()
        if not len(self._source):
            raise InvalidArgument("public data has no rows: leave it out instead.")
        _check_finite(data)

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, batch_size: int | None = None) -> Batch:
        """All rows, or a random batch without replacement."""
        if batch_size is None or batch_size >= len(self):
            return self._source.gather(np.arange(len(self)))
        if batch_size < 1:
            raise InvalidArgument(f"batch_size={batch_size} must be at least 1.")
        return self._source.gather(np.sort(self._rng.choice(len(self), batch_size, replace=False)))

    def batches(self, batch_size: int, *, shuffle: bool = False) -> Iterator[Batch]:
        """One pass over the rows."""
        if batch_size < 1:
            raise InvalidArgument(f"batch_size={batch_size} must be at least 1.")
        order = self._rng.permutation(len(self)) if shuffle else np.arange(len(self))
        for start in range(0, len(self), batch_size):
            yield self._source.gather(order[start : start + batch_size])

    def gradient(self, params: Mapping[str, Tensor], batch_size: int | None = None) -> Gradient:
        """The mean gradient over all rows, or over a random batch."""
        objective = self._need_objective()
        batch = self._drawn(params, batch_size)
        compute, inputs = partial(_mean_gradient, objective), (dict(params), batch)
        leaves = tree_flatten(inputs)[0]
        if not all(isinstance(t, Tensor) and t.is_cuda for t in leaves):
            return Gradient(compute(inputs))
        # One batch after the other of the same shape: replayed, where Python would hold the GPU up.
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in leaves)
        key = (shapes, tuple(params), state_of(objective.module, objective.loss))
        return Gradient(self._graphs.run(key, compute, inputs, always=False, keep=objective))

    def gradient_norms(self, params: Mapping[str, Tensor], batch_size: int = 256) -> Tensor:
        """How long the gradients of single rows are, for a random batch of them: what a clip norm can be chosen by.

        >>> objective = Objective(torch.nn.Linear(3, 2), lambda module, rows: module(rows).sum(1))
        >>> norms = Public(torch.rand(8, 3), objective=objective).gradient_norms(objective.parameters())
        >>> clip = float(norms.median())
        """
        objective = self._need_objective()
        batch = self._drawn(params, batch_size)
        squares = [
            sum(g.double().flatten(1).square().sum(1) for g in per_example_gradients(objective, params, part).values())
            for part in _in_parts(batch, _AT_ONCE)
        ]
        return torch.cat([torch.as_tensor(s) for s in squares]).sqrt()

    @torch.no_grad()
    def losses(
        self, params: Mapping[str, Tensor], *, objective: Objective | None = None, batch_size: int = 1024
    ) -> Tensor:
        """The loss of every row, under this or another objective (a metric with one value per row, say)."""
        objective = objective or self._need_objective()
        device = next(iter(params.values())).device
        return torch.cat([objective.losses(params, _to(batch, device)) for batch in self.batches(batch_size)])

    @property
    def random_state(self) -> Any:
        """The state of the generator of public batches; checkpoints keep it."""
        return self._rng.bit_generator.state

    @random_state.setter
    def random_state(self, state: Any) -> None:
        self._rng.bit_generator.state = state

    def _drawn(self, params: Mapping[str, Tensor], batch_size: int | None) -> Batch:
        batch = _to(self.batch(batch_size), next(iter(params.values())).device)
        return batch if self.augment is None else self.augment(batch)

    def _need_objective(self) -> Objective:
        if self.objective is None:
            raise InvalidArgument("objective is missing: give Public(..., objective=Objective(module, loss)).")
        return self.objective


def _mean_gradient(objective: Objective, inputs: tuple[dict[str, Tensor], Batch]) -> dict[str, Tensor]:
    params, batch = inputs
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        loss = objective.losses(leaves, batch).mean()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


_AT_ONCE = 16  # rows whose gradients are written out


def _in_parts(batch: Batch, rows: int) -> Iterator[Batch]:
    for start in range(0, len(tree_flatten(batch)[0][0]), rows):
        yield tree_map(lambda t, start=start: t[start : start + rows], batch)


def _to(batch: Batch, device: torch.device) -> Batch:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)


def _check_finite(data: Any) -> None:
    for position, value in enumerate(tree_flatten(data)[0]):
        if isinstance(value, Tensor | np.ndarray):
            tensor = torch.as_tensor(value)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise InvalidArgument(
                    f"public data has NaN or infinite values in array {position}: clean or impute it, since everything "
                    "computed from it would be NaN."
                )
