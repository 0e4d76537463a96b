"""One use of parameters: what a rule is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sfumato.gradients.tape import Layout, Tape


def function_name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `torch.autocast` would hand them to a product, if it is on; parameters come detached."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@dataclass(frozen=True)
class Key:
    """A site of use: which function, which parameters at which arguments, how many dimensions the data has."""

    func: Any
    name: str
    arguments: tuple[str | int | None, ...]

    @staticmethod
    def of(func: Any, args: Any, kwargs: Any, labels: Mapping[int, str]) -> Key:
        arguments = tuple(
            (labels.get(id(v), v.ndim) if isinstance(v, Tensor) else None) for v in tree_flatten((args, kwargs))[0]
        )
        return Key(func, function_name(func), arguments)


@dataclass(frozen=True)
class Site:
    """Where the examples lie in the tensors of a use, by position among its flattened arguments and results."""

    arguments: Mapping[int, Layout]
    outputs: Mapping[int, Layout]

    def joined(self, other: Site) -> Site:
        """Two uses at one site, whose rows may be of different lengths."""
        return Site(
            {place: layout.joined(other.arguments[place]) for place, layout in self.arguments.items()},
            {place: layout.joined(other.outputs[place]) for place, layout in self.outputs.items()},
        )


@dataclass(frozen=True)
class Call:
    """One use of parameters at a known site."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    site: Site
    tape: Tape
    tracked: set[int]

    def is_tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.tracked

    def layout_of(self, value: Tensor) -> Layout | None:
        """The layout of a data argument; None where it holds no examples."""
        for position, leaf in enumerate(tree_flatten((self.args, self.kwargs))[0]):
            if leaf is value:
                return self.site.arguments.get(position)
        return None
