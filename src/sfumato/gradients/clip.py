"""`Clip`: how one unit's gradient is bounded. Frozen data, not a callback, so that the engine can choose how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.gradients.gradient import Gradient


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are, of those on a CPU: a GPU would have to finish all its work before it can say.

    There, an origin or scale that is not finite makes every unit's norm so, and every contribution zero; where norms
    come from factors, so does a scale that is out of range.
    """
    return all(bool(torch.isfinite(t).all()) for t in tensors if not t.is_cuda)


SMALLEST_SCALE, LARGEST_SCALE = 1e-12, 1e12  # of entries that are not 0: squares of others vanish or outgrow float32


def in_range(scale: Tensor) -> Tensor:
    """Whether all entries are such that norms under this scale can be trusted, as a tensor: nobody waits for a GPU."""
    size = scale.abs()
    return ((size == 0) | ((size >= SMALLEST_SCALE) & (size <= LARGEST_SCALE))).all()


def largest_norm(dtype: torch.dtype) -> float:
    """Beyond it nothing counts: squares overflow soon after."""
    return 0.25 * math.sqrt(torch.finfo(dtype).max)


def fading(norms: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """1, and from half of the largest norm on less and less, down to 0.

    Norms are rounded, perhaps by a row's place: a last bit must not decide between all and nothing.
    """
    return (2 - 2 * norms / largest_norm(dtype)).clamp(0.0, 1.0)


def shortened(rows: Tensor, bound: float) -> Tensor:
    """(rows, values) of float64, each shortened to norm `bound` where it is longer; zeros where it is not finite."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    factors = fading(norms) * (bound / (norms * (1 + 1e-15)).clamp_min(bound))
    return torch.where(torch.isfinite(norms), rows * factors, 0.0)


@dataclass(frozen=True, eq=False)
class Clip:
    """g -> clip(scale * (g - origin), norm): the shifted, scaled gradient, shortened to `norm` where it is longer.

    `origin` and `scale` must be public: computed from public data and already released answers alone.

    With `stability`, every x = scale * (g - origin) becomes norm * x / (|x| + stability) instead (AUTO-S, Bu et al.
    2023): never longer than `norm` either, and there is no norm to tune, since it only multiplies the learning rate.
    0.01 is their value.

    >>> Clip(1.0).norm
    1.0
    """

    norm: float
    origin: Gradient | None = None
    scale: Gradient | None = None
    stability: float | None = None

    def __post_init__(self) -> None:
        if not self.norm > 0:  # also catches NaN; infinity is allowed here and refused by the door
            raise InvalidArgument(f"clip norm={self.norm} must be positive: it bounds what one unit can contribute.")
        object.__setattr__(self, "norm", float(self.norm))  # noise is computed from it exactly
        if self.stability is not None and not 0 < self.stability < math.inf:
            raise InvalidArgument(
                f"stability={self.stability} must be positive and finite, or None to clip: it is what keeps short "
                "gradients short."
            )
        if self.stability is not None and self.bounded and not self.norm / self.stability < 1e30:
            raise InvalidArgument(
                f"stability={self.stability} is too small beside norm={self.norm}: raise it, to 0.01 for instance."
            )
        for argument, value in (("origin", self.origin), ("scale", self.scale)):
            if value is not None:
                if not isinstance(value, Gradient):
                    raise InvalidArgument(
                        f"{argument}={type(value).__name__} must be a Gradient: wrap the tensors in one."
                    )
                if not all_finite(value.values()):
                    raise InvalidArgument(
                        f"{argument} has NaN or infinite entries: check the public data it came from."
                    )
        if self.scale is not None and not all(bool(in_range(t)) for t in self.scale.values() if not t.is_cuda):
            raise InvalidArgument(
                f"scale has entries outside {SMALLEST_SCALE:g}..{LARGEST_SCALE:g} that are not 0: bring them into that "
                "range, since norms under others are lost to rounding."
            )

    @staticmethod
    def check_is_one(clip: Any) -> None:
        """Raise unless it is a Clip itself: a subclass could bound less than it is charged for."""
        if type(clip) is Clip:
            return
        if isinstance(clip, Clip):
            raise InvalidArgument(f"clip={type(clip).__name__} must be a Clip itself, not a class made from it.")
        shown, norm = (clip, clip) if isinstance(clip, Real) else (type(clip).__name__, 1.0)
        raise InvalidArgument(f"clip={shown} must be a Clip: give Clip({norm}).")

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raise unless origin and scale fit the parameters."""
        for argument, value in (("origin", self.origin), ("scale", self.scale)):
            if value is None:
                continue
            if value.keys() != params.keys() or any(value[name].shape != p.shape for name, p in params.items()):
                raise InvalidArgument(
                    f"{argument} does not match the trainable parameters in names and shapes: take it at the same "
                    "parameters."
                )

    def restore(self, answer: Gradient) -> Gradient:
        """Add the origin back to a noisy mean of clipped gradients: answer + scale * origin."""
        if self.origin is None:
            return answer
        return answer + (self.origin if self.scale is None else self.scale * self.origin)

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def largest_factor(self) -> float:
        """What a unit's x is multiplied by at most."""
        return 1.0 if self.stability is None else max(1.0, self.norm / self.stability)

    def factors(self, norms: Tensor) -> Tensor:
        """What each x of these lengths is multiplied by."""
        if self.stability is None:
            return (self.norm / norms.clamp_min(1e-300)).clamp_max(1.0)
        return self.norm / (norms + self.stability)
