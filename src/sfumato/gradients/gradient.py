"""`Gradient`: named tensors that add, scale and measure like one long vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument


class Gradient(Mapping[str, Tensor]):
    """An immutable vector over named parameters.

    >>> g = Gradient({"w": torch.tensor([3.0, 4.0])})
    >>> float(g.norm()), round(float(g.clipped(1.0).norm()), 6)
    (5.0, 1.0)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: t.detach() for name, t in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Gradient({len(self)} tensors, norm {float(self.norm()):.4g})"

    def _with(self, other: Gradient) -> Iterator[tuple[str, Tensor, Tensor]]:
        if self.keys() != other.keys():
            raise InvalidArgument(
                f"The gradients name different parameters ({sorted(self.keys() ^ other.keys())[:3]} ...): take both of "
                "the same objective."
            )
        return ((name, t, other[name]) for name, t in self.items())

    def __add__(self, other: Gradient) -> Gradient:
        return Gradient({name: a + b for name, a, b in self._with(other)})

    def __sub__(self, other: Gradient) -> Gradient:
        return Gradient({name: a - b for name, a, b in self._with(other)})

    def __mul__(self, other: float | Tensor | Gradient) -> Gradient:
        if isinstance(other, Gradient):
            return Gradient({name: a * b for name, a, b in self._with(other)})
        return Gradient({name: t * other for name, t in self.items()})

    __rmul__ = __mul__

    def dot(self, other: Gradient) -> Tensor:
        """The inner product, accumulated in float64."""
        return torch.stack([(a.double() * b.double()).sum() for _, a, b in self._with(other)]).sum()

    def norm(self) -> Tensor:
        """The L2 norm over all parameters together, in float64."""
        return torch.stack([t.double().square().sum() for t in self.values()]).sum().sqrt()

    def clipped(self, norm: float) -> Gradient:
        """The same direction, no longer than `norm`."""
        return self * self.shortening(norm)

    def shortening(self, norm: float) -> Tensor:
        """What makes it no longer than `norm`: a factor of at most 1, left where the gradient is."""
        return (norm / self.norm().clamp_min(1e-300)).clamp_max(1.0)

    def write_to(self, module: nn.Module) -> None:
        """Set `.grad` of the module's parameters, for any `torch.optim` optimiser to use."""
        parameters = dict(module.named_parameters())
        for name, t in self.items():
            parameters[name].grad = t.to(parameters[name].dtype).clone()


def check_named(argument: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless `tensors` has the names and shapes of the trainable parameters."""
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(
            f"{argument}={type(tensors).__name__} must be tensors by name: take them from objective.parameters()."
        )
    if tensors.keys() != expected.keys() or any(tensors[n].shape != p.shape for n, p in expected.items()):
        raise InvalidArgument(
            f"{argument} do not match the trainable parameters: take names and shapes from their objective."
        )
