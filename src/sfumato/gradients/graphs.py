"""A micro-batch as a CUDA graph: recorded once, replayed with other numbers.

Python takes some ten milliseconds to queue the operations of one pass. Where a pass has few rows, as with K passes at K
weights, the GPU would wait for it; a replay queues them all at once. Nothing is computed otherwise than without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

Compute = Callable[[Any], dict[str, Tensor]]

_NEVER = 1 << 60  # runs of what cannot be recorded
_MOST = 8  # recordings kept; they share their memory, but each has inputs of its own


class Graphs:
    """Recordings of one objective's micro-batches, by what they have in common: shapes, augmentation, clip norm."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, _Recording] = {}

    def run(self, key: Hashable, compute: Compute, inputs: Any, keep: Any) -> dict[str, Tensor]:
        """compute(inputs): as it is the first time, which compiles what is to be; then watched; recorded from then on.

        `keep` lives as long as the recording, so that an id in the key stays its own.
        """
        if key in self._recorded:
            return self._recorded[key].replay(inputs)
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs == 2:
            sums = _without_waiting(compute, inputs)
            if sums is not None:
                return sums
            self._runs[key] = _NEVER
            warnings.warn(
                "The model waits for the GPU while it computes, so it cannot be recorded as a CUDA graph and runs "
                "without: give Performance(cuda_graph=False) to not try.",
                stacklevel=2,
            )
        if runs <= 2 or runs > _NEVER:
            return compute(inputs)
        if len(self._recorded) >= _MOST:
            self._recorded.clear()
        recording = _Recording(compute, inputs, keep, next(iter(self._recorded.values()), None))
        self._recorded[key] = recording
        return recording.replay(inputs)


def _without_waiting(compute: Compute, inputs: Any) -> dict[str, Tensor] | None:
    """compute(inputs), or None if it waits for the GPU: a recording that fails leaves torch's generators broken."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        return compute(inputs)
    except RuntimeError:  # without its text, which may quote private rows
        return None
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Recording:
    def __init__(self, compute: Compute, inputs: Any, keep: Any, other: _Recording | None) -> None:
        self._keep = keep
        self._inputs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs)
        self._graph = torch.cuda.CUDAGraph()
        self.pool: Any = other.pool if other is not None else torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        # Other threads (noise drawn ahead) go on meanwhile.
        with torch.cuda.graph(self._graph, pool=self.pool, capture_error_mode="thread_local"):
            self._outputs = compute(self._inputs)

    def replay(self, inputs: Any) -> dict[str, Tensor]:
        mine, theirs = (
            [v for v in tree_flatten(values)[0] if isinstance(v, Tensor)] for values in (self._inputs, inputs)
        )
        torch._foreach_copy_(mine, theirs)
        self._graph.replay()
        # The next replay of any recording overwrites these.
        return {name: t.clone() for name, t in self._outputs.items()}
