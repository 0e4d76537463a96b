"""The rule for everything without a rule: run it once per row under `vmap`, with a copy of the parameter each.

The copies are stride-0 views, so they cost no memory until gradients flow back into them, one per row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sfumato.gradients.rules.call import Call

# `x += parameter` rebinds x, so the out-of-place function says the same without writing into saved tensors.
IN_PLACE: Mapping[Any, Any] = {
    Tensor.__iadd__: operator.add,
    Tensor.__isub__: operator.sub,
    Tensor.__imul__: operator.mul,
    Tensor.__itruediv__: operator.truediv,
    Tensor.add_: torch.add,
    Tensor.mul_: torch.mul,
}

WITHOUT = frozenset({F.embedding})  # vmap forgets padding_idx

REPEATS = frozenset({Tensor.repeat, torch.tile, Tensor.tile, torch.repeat_interleave, Tensor.repeat_interleave})
EXPANSIONS = REPEATS | {Tensor.expand, torch.broadcast_to, Tensor.expand_as, Tensor.broadcast_to}


def expanded_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The sizes that an expansion results in."""
    source = args[0]
    if func is Tensor.expand_as:
        return list(args[1].shape)
    if func in (torch.repeat_interleave, Tensor.repeat_interleave):
        return _interleaved_sizes(*args, **kwargs)
    sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], Sequence) else list(args[1:])
    sizes = sizes or list(kwargs.get("size", kwargs.get("repeats", kwargs.get("dims", ()))))
    if func in REPEATS:
        sizes = [1] * (source.ndim - len(sizes)) + sizes
    aligned = [1] * (len(sizes) - source.ndim) + list(source.shape)
    if func in REPEATS:
        return [size * before for size, before in zip(sizes, aligned, strict=True)]
    return [before if size == -1 else size for size, before in zip(sizes, aligned, strict=True)]


def _interleaved_sizes(input: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> list[int]:
    """Of `repeat_interleave` along a dimension of size one, where it repeats what it is given as a whole."""
    if not isinstance(repeats, int) or dim is None or input.shape[dim] != 1:
        raise TypeError("it repeats the entries of a parameter one by one")
    sizes = list(input.shape)
    sizes[dim] = repeats
    return sizes


def by_vmap(call: Call) -> Any:
    rows = call.tape.rows
    if call.func in EXPANSIONS:
        return _expand(call)
    flat, spec = tree_flatten((call.args, dict(call.kwargs)))
    moving: list[int] = []
    values: list[Tensor] = []
    dims: list[int] = []
    for position, value in enumerate(flat):
        layout = call.site.arguments.get(position)
        if call.is_tracked(value):
            with torch.enable_grad():
                value, dim = call.tape.copies(value), 0
        elif layout is not None:
            value, dim = layout.split(value, rows)
        else:
            continue
        moving.append(position)
        values.append(value)
        dims.append(dim)

    out_spec: list[Any] = []

    def one_row(*row: Tensor) -> tuple[Any, ...]:
        leaves = list(flat)
        for position, value in zip(moving, row, strict=True):
            leaves[position] = value
        args, kwargs = tree_unflatten(leaves, spec)
        out, tree = tree_flatten(IN_PLACE.get(call.func, call.func)(*args, **kwargs))
        out_spec[:] = [tree]
        return tuple(out)

    def out_dim(position: int) -> int:
        layout = call.site.outputs[position]
        return layout.dim + layout.minor

    positions = range(max(call.site.outputs, default=-1) + 1)
    if list(positions) != sorted(call.site.outputs):
        raise TypeError("some of its results hold no examples")
    out = torch.vmap(one_row, in_dims=tuple(dims), out_dims=tuple(map(out_dim, positions)), randomness="different")(
        *values
    )
    joined = [value.flatten(call.site.outputs[i].dim, call.site.outputs[i].dim + 1) for i, value in enumerate(out)]
    return tree_unflatten(joined, out_spec[0])


def _expand(call: Call) -> Tensor:
    """`parameter.expand(rows, ...)`: the copies themselves, moved to where the rows belong."""
    parameter = call.args[0]
    sizes = expanded_sizes(call.func, call.args, call.kwargs)
    dim = call.site.outputs[0].dim
    repeated = sizes[dim] // call.tape.rows
    if repeated != 1:
        raise TypeError("it repeats a parameter several times per example")
    with torch.enable_grad():
        rows = call.tape.copies(parameter)
        aligned = rows.reshape(call.tape.rows, *[1] * (len(sizes) - parameter.ndim), *parameter.shape)
        moved = aligned.movedim(0, dim).squeeze(dim + 1)
        if call.func in REPEATS:
            return moved.repeat(
                [1 if d == dim else s // n for d, (s, n) in enumerate(zip(sizes, moved.shape, strict=True))]
            )
        return moved.expand(sizes)
