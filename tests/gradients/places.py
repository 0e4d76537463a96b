"""Whether rows come out of all places of a micro-batch alike, to the last bit: a watch over the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sfumato import Clip, Objective
from sfumato.gradients import Performance
from sfumato.gradients.passes import exact_products, per_unit
from sfumato.gradients.probe import Probe
from sfumato.gradients.watched import by_row
from sfumato.objective import Batch

# Different rows, in turn. Odd, so that each comes to lie wherever a place's number matters by its last binary digits.
MADE_UP = 7


class Seen:
    """What passes make of rows: whether it is what is known of them, in every place."""

    def __init__(self) -> None:
        self.alike: list[bool] = []
        self._known: dict[tuple[int, int], Tensor] = {}

    def begin(self, size: int) -> None:
        self.of_place, self._results = torch.arange(size) % MADE_UP, 0

    def note(self, result: Tensor) -> None:
        """A result that has all rows in one of its dimensions, perhaps together with something else."""
        ways = list(by_row(result, len(self.of_place)))
        if ways:
            found = next(filter(None, map(self._among, ways)), None)
            self.alike.append(found is not None)
            self._known.update(found or {})
            self._results += 1

    def _among(self, way: Tensor) -> dict[tuple[int, int], Tensor] | None:
        """What is now known of all rows; None if there are two truths about one of them."""
        found = {}
        for row in range(MADE_UP):
            here, key = way[self.of_place == row], (self._results, row)
            found[key] = self._known.get(key, here[0].clone())
            if found[key].shape != here.shape[1:] or not torch.equal(found[key].expand_as(here), here):
                return None
        return found


class Watch(TorchDispatchMode):
    """Notes every result that is made of the batch: at the end, a ReLU may have hidden what was different."""

    def __init__(self, seen: Seen, batch: Batch) -> None:
        super().__init__()
        self._seen = seen
        self._alive = _tensors(batch)  # so that no memory is used again
        self._memory = {_memory(t) for t in self._alive}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(_memory(t) in self._memory for t in _tensors((args, kwargs))):
            for t in _tensors(out):
                self._alive.append(t)
                self._memory.add(_memory(t))
                nothing = func.is_view or any(word in func.name() for word in ("empty", "set_", "resize_"))
                if t.is_floating_point() and not nothing:  # what only finds memory, or shows it once more
                    self._seen.note(t.detach())
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def alike(objective: Objective, rows: Batch, sizes: tuple[int, ...]) -> list[bool]:
    """By result of the forward pass: whether `MADE_UP` rows are the same in all places of all these micro-batches."""
    params, seen = objective.parameters(), Seen()
    found = Probe.of(objective).trace(params, rows)

    def watched(module: nn.Module, batch: Batch) -> Tensor:
        with Watch(seen, batch):
            return objective.loss(module, batch)

    for size in sizes:
        seen.begin(size)
        batch = tree_map(lambda t: t[seen.of_place] if isinstance(t, Tensor) else t, rows)
        how = {"count": size, "clip": Clip(1.0), "performance": Performance()}
        with exact_products(Performance(), recurring=False):
            per_unit(Objective(objective.module, watched), params, batch, found, **how)
    return seen.alike
