"""Losses of a linear score z = <w, x> and a target y, with the constants that privacy proofs rest on.

Everything is a function of z alone, so the gradient of one row is slope(z, y) x and its Hessian curvature(z, y) x x'.
For rows with |x| <= 1 the loss is `lipschitz`-Lipschitz and `smoothness`-smooth in w. Targets of classifiers are -1, 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument


@dataclass(frozen=True)
class Loss(ABC):
    """A convex loss of a score; everything is entry by entry."""

    classification: ClassVar[bool] = False
    """Whether it makes sense for targets -1 and 1."""
    regression: ClassVar[bool] = False
    twice_differentiable: ClassVar[bool] = False

    @abstractmethod
    def value(self, z: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """d value / dz; at a kink, one of the subgradients."""

    @abstractmethod
    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        """The second derivative where it exists; at its jumps, one of the two limits. Zero for the hinge."""

    @property
    @abstractmethod
    def lipschitz(self) -> float | None:
        """The largest |slope|; None if there is none."""

    @property
    @abstractmethod
    def smoothness(self) -> float | None:
        """The largest curvature; None if the slope jumps."""

    def lipschitz_within(self, radius: float, target_bound: float) -> float:
        """The largest |slope| while |w| <= radius, |x| <= 1 and |y| <= target_bound."""
        if self.lipschitz is None:
            raise InvalidArgument(
                f"loss={type(self).__name__} has no largest slope: define lipschitz_within, or use another loss."
            )
        return self.lipschitz


@dataclass(frozen=True)
class Logistic(Loss):
    """log(1 + exp(-y z)).

    >>> Logistic().slope(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 1.0]))
    tensor([-0.5000, -0.0000])
    """

    classification = True
    twice_differentiable = True
    lipschitz = 1.0
    smoothness = 0.25

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-y * z)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -y * torch.sigmoid(-y * z)

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(y * z) * torch.sigmoid(-y * z) * y * y


@dataclass(frozen=True)
class Hinge(Loss):
    """max(0, 1 - y z): Lipschitz, not smooth, so proofs that need stability of gradient descent do not cover it."""

    classification = True
    lipschitz = 1.0
    smoothness = None

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return (1 - y * z).clamp_min(0)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -y * (y * z < 1)

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(z)


@dataclass(frozen=True)
class HuberisedHinge(Loss):
    """The hinge with its kink rounded to a parabola for margins within h of 1; never more than h / 4 above it."""

    h: float = 0.5
    classification = True
    lipschitz = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.h) and self.h > 0):
            raise InvalidArgument(f"h={self.h} must be positive: it is how widely the hinge's kink is rounded.")

    @property
    def smoothness(self) -> float:
        return 1 / (2 * self.h)

    def _share(self, z: Tensor, y: Tensor) -> Tensor:
        """How far down the parabola the margin is, 0 at 1 + h and 1 from 1 - h on; this is |slope|."""
        return ((1 + self.h - y * z) / (2 * self.h)).clamp(0, 1)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return self.h * self._share(z, y) ** 2 + (1 - self.h - y * z).clamp_min(0)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -y * self._share(z, y)

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return ((1 - y * z).abs() < self.h).to(z.dtype) * y * y * self.smoothness


@dataclass(frozen=True)
class Square(Loss):
    """(z - y)^2, as paper 001 has it (no 1/2); for classifiers, too. Lipschitz only while |w| is bounded."""

    classification = True
    regression = True
    twice_differentiable = True
    lipschitz = None
    smoothness = 2.0

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y) ** 2

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * (z - y)

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, 2.0)

    def lipschitz_within(self, radius: float, target_bound: float) -> float:
        """2 (radius + target_bound), from |z| <= |w| |x|; the radius must be a projection, never an estimate."""
        if not (math.isfinite(radius) and radius > 0 and math.isfinite(target_bound) and target_bound >= 0):
            raise InvalidArgument(
                f"radius={radius} and target_bound={target_bound} must be finite: project the weights, bound the "
                "targets, or use Huber."
            )
        return 2 * (radius + target_bound)


@dataclass(frozen=True)
class Huber(Loss):
    """(z - y)^2 / 2 up to a residual of delta, then linear."""

    delta: float = 1.0
    regression = True
    smoothness = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise InvalidArgument(f"delta={self.delta} must be positive: it is where the Huber loss becomes linear.")

    @property
    def lipschitz(self) -> float:
        return self.delta

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        residual = (z - y).abs()
        inner = residual.clamp_max(self.delta)
        return inner * (residual - inner / 2)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).clamp(-self.delta, self.delta)

    def curvature(self, z: Tensor, y: Tensor) -> Tensor:
        return ((z - y).abs() <= self.delta).to(z.dtype)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the proof of a solver needs of a loss. `check` refuses before anything starts, and names a remedy.

    >>> Needs(smooth=True).check(Hinge(), "output perturbation")
    Traceback (most recent call last):
    ...
    sfumato.errors.InvalidArgument: loss=Hinge() is not smooth, which output perturbation needs: use HuberisedHinge.
    """

    lipschitz: bool = False
    smooth: bool = False
    twice_differentiable: bool = False

    def check(self, loss: Loss, solver: str, *, radius: float | None = None) -> None:
        """`radius` is that of the ball to which the solver projects the weights, if it does."""
        if self.smooth and loss.smoothness is None:
            raise InvalidArgument(f"loss={loss} is not smooth, which {solver} needs: use HuberisedHinge.")
        if self.twice_differentiable and not loss.twice_differentiable:
            other = "Logistic" if loss.classification else "Square"
            raise InvalidArgument(f"loss={loss} is not twice differentiable, which {solver} needs: use {other}.")
        if self.lipschitz and loss.lipschitz is None and radius is None:
            raise InvalidArgument(
                f"loss={loss} has unbounded slopes, and {solver} needs it to be Lipschitz: "
                f"{'use Huber, or ' if loss.regression else ''}give a projection radius."
            )
