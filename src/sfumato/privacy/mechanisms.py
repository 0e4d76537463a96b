"""What is asked, as data: the noise, how often, on which sample. What it costs is computed elsewhere.

Units. Everywhere in Sfumato the *unit* of a question is the most that one privacy unit can contribute to the exact
answer (the clip norm C of a clipped sum), and every noise scale is stated in that unit, under every adjacency.
Accountants disagree about the unit under replace-one; `privacy.accounting` converts at the border and nobody else does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sfumato.data.samplers import FixedSize, FullBatch, Poisson, Sampler
from sfumato.errors import InvalidArgument


class Adjacency(StrEnum):
    """Which datasets count as neighbours: one unit more or less, or one unit exchanged for another."""

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Noise:
    """A noise distribution, with its scale in the question's unit."""

    scale: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidArgument(
                f"noise={self.scale} must be a positive, finite number: noise is what makes it private."
            )


class Gaussian(Noise):
    """Continuous Gaussian; `scale` is the noise multiplier: standard deviation / unit."""


class DiscreteGaussian(Noise):
    """Gaussian on the integers, for counts; `scale` is sigma / unit."""


class DiscreteLaplace(Noise):
    """Two-sided geometric on the integers, for counts: P(z) ~ exp(-|z| / (scale * unit)), unit in L1."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One kind of question asked `times` times, each time on a fresh sample with fresh noise.

    `replace_factor` is how much further the exact answer can move when a unit is replaced than when one is added:
    2 for clipped sums, sqrt(2) for a Gram matrix in Frobenius norm, 2 for L1 counts.
    """

    question: str
    noise: Noise
    sampler: Sampler
    times: int = 1
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or self.times < 1:
            raise InvalidArgument(f"times={self.times} must be a whole number of at least 1.")
        if not 1.0 <= self.replace_factor <= 2.0:
            raise InvalidArgument(f"replace_factor={self.replace_factor} must lie between 1 and 2.")

    def to_json(self) -> dict[str, Any]:
        """Plain data for the ledger."""
        sampler = {"kind": type(self.sampler).__name__, **vars(self.sampler)}
        noise = {"kind": type(self.noise).__name__, "scale": self.noise.scale}
        return {
            "question": self.question,
            "noise": noise,
            "sampler": sampler,
            "times": self.times,
            "replace_factor": self.replace_factor,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Mechanism:
        noises: dict[str, type[Noise]] = {k.__name__: k for k in (Gaussian, DiscreteGaussian, DiscreteLaplace)}
        samplers: dict[str, type[Sampler]] = {k.__name__: k for k in (Poisson, FixedSize, FullBatch)}
        sampler = dict(data["sampler"])
        return Mechanism(
            question=data["question"],
            noise=noises[data["noise"]["kind"]](data["noise"]["scale"]),
            sampler=samplers[sampler.pop("kind")](**sampler),
            times=data["times"],
            replace_factor=data["replace_factor"],
        )
