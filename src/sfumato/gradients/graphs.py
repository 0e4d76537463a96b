"""A micro-batch as a CUDA graph: recorded once, replayed with other numbers.

Python takes some ten milliseconds to queue the operations of one pass. Where the GPU is done sooner it would wait; a
replay queues them all at once. Nothing is computed otherwise than without. Recorded is only what was seen to be held up
by Python, and never to wait for the GPU itself.

A recording repeats operations on the very memory they used. So the tensors that the model read besides its inputs are
kept alive, and what can be seen of the model's and the augmentation's own state is part of the key: after a change, a
new recording is made. Python code that changes by other means from call to call is not run again;
`Performance(cuda_graph=False)` is for that.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

Compute = Callable[[Any], dict[str, Tensor]]

_MOST = 8  # recordings kept; they share their memory, but each has inputs of its own
_BY_VALUE = (bool, int, float, str, type(None))
_OF_RNN = ("_flat_weights", "_flat_weight_refs")  # lists of its parameters, made anew when others are lent to it
_HELD_UP = 0.8  # share of the time that Python may take to queue a micro-batch, before it is recorded


class Graphs:
    """Recordings of one objective's micro-batches, by what they have in common: shapes, augmentation, clip norm."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, int] = {}
        self._plain: set[Hashable] = set()
        self._recorded: dict[Hashable, _Recording] = {}

    def run(self, key: Hashable, compute: Compute, inputs: Any, *, always: bool, keep: Any) -> dict[str, Tensor]:
        """compute(inputs): first as it is, which compiles what is to be; then watched; then, perhaps, recorded.

        `always`: record even if Python does not hold it up. `keep` lives as long as the recording, so that an id in the
        key stays its own.
        """
        if key in self._recorded:
            return self._recorded[key].replay(inputs)
        if len(self._runs) > 64:  # keys that never come back
            self._runs.clear()
            self._plain.clear()
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs == 1 or key in self._plain:
            return compute(inputs)
        if runs == 2:
            sums, held_up = _watched(compute, inputs)
            if sums is None and always:
                warnings.warn(
                    "The model waits for the GPU while it computes, so cuda_graph=True cannot record it: it runs "
                    "without.",
                    stacklevel=2,
                )
            if sums is None or not (held_up or always):
                self._plain.add(key)
            return compute(inputs) if sums is None else sums
        if len(self._recorded) >= _MOST:
            self._recorded.clear()
        recording = _Recording(compute, inputs, keep, next(iter(self._recorded.values()), None))
        self._recorded[key] = recording
        return recording.replay(inputs)


def _watched(compute: Compute, inputs: Any) -> tuple[dict[str, Tensor] | None, bool]:
    """compute(inputs), and whether Python held the GPU up. None if it waits for the GPU on the way.

    That is found out beforehand, since a recording that fails leaves torch's generators broken.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    try:
        sums = compute(inputs)
        queued = time.perf_counter() - start
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # without its text, which may quote private rows
        return None, False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()
    return sums, queued > _HELD_UP * (time.perf_counter() - start)


class _Witness(TorchFunctionMode):
    """Keeps every tensor that is read and was there before."""

    def __init__(self) -> None:
        super().__init__()
        self._there = {_memory(o) for o in gc.get_objects() if issubclass(type(o), Tensor)}
        self.kept: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, Tensor) and (memory := _memory(value)) in self._there:
                self.kept[memory] = value
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """Where a tensor lies on a GPU; 0 if nowhere."""
    if not tensor.is_cuda or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


class _Recording:
    def __init__(self, compute: Compute, inputs: Any, keep: Any, other: _Recording | None) -> None:
        self._inputs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs)
        self._graph = torch.cuda.CUDAGraph()
        self.pool: Any = other.pool if other is not None else torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording has memory of its own, and cannot take what torch keeps for later
        # Other threads (noise drawn ahead) go on meanwhile.
        with torch.cuda.graph(self._graph, pool=self.pool, capture_error_mode="thread_local"), _Witness() as witness:
            self._outputs = compute(self._inputs)
        self._keep = (keep, witness.kept)

    def replay(self, inputs: Any) -> dict[str, Tensor]:
        mine, theirs = (
            [v for v in tree_flatten(values)[0] if isinstance(v, Tensor)] for values in (self._inputs, inputs)
        )
        torch._foreach_copy_(mine, theirs)
        self._graph.replay()
        # The next replay of any recording overwrites these.
        return {name: t.clone() for name, t in self._outputs.items()}


def state_of(*things: Any) -> Hashable:
    """What can be seen of the state of modules and functions: numbers by value, tensors and all else by identity."""
    return tuple(item for thing in things for item in _state_of(thing))


def _state_of(thing: Any) -> Iterator[Hashable]:
    if isinstance(thing, nn.Module):
        for module in thing.modules():
            yield id(type(module))
            derived = _OF_RNN if isinstance(module, nn.RNNBase) else ()
            yield from _attributes({name: value for name, value in vars(module).items() if name not in derived})
        for tensor in (*(p for p in thing.parameters() if not p.requires_grad), *thing.buffers()):
            yield tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)
    elif isinstance(thing, partial):
        yield from _state_of(thing.func)
        yield from _attributes({**dict(enumerate(thing.args)), **thing.keywords})
    else:
        cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        yield id(thing)
        yield from _attributes({**dict(enumerate(cells)), **getattr(thing, "__dict__", {})})


def _attributes(values: dict[Any, Any]) -> Iterator[Hashable]:
    for name, value in values.items():
        if isinstance(value, _BY_VALUE):
            yield name, value
        elif isinstance(value, Tensor):
            yield name, id(value), value.data_ptr()
        elif not isinstance(value, dict):  # of a module: its parameters, buffers and children, which come by themselves
            yield name, id(value)
