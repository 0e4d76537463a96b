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
from sfumato.errors import InvalidArgument, shown
from sfumato.privacy.repetitions import Repetitions

_LEAST, _MOST = 1e-30, 1e30  # beyond, accountants divide infinities


class Adjacency(StrEnum):
    """Which datasets count as neighbours: one unit more or less, or one unit exchanged for another."""

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Noise:
    """A noise distribution, with its scale in the question's unit."""

    scale: float

    def __post_init__(self) -> None:
        if not _LEAST <= self.scale <= _MOST:
            raise InvalidArgument(
                f"noise={self.scale} must lie between {_LEAST:g} and {_MOST:g}, times the question's unit: noise is "
                "what makes it private."
            )


class Gaussian(Noise):
    """Continuous Gaussian; `scale` is the noise multiplier: standard deviation / unit."""


@dataclass(frozen=True, kw_only=True)
class SealedGaussian(Gaussian):
    """Gaussian noise inside a method; what leaves has another law, of which only an (epsilon, delta) is known.

    `epsilon` and `delta` are what the method's own proof gives for one answer with that noise, under `adjacency` alone.
    They, and not the scale, are charged. For questions that say so by replace_factor=0, such as objective perturbation;
    `Mechanism.check_terms` holds it against what the question itself says.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= 500:  # beyond, exp(epsilon) is no number, and nobody is protected
            raise InvalidArgument(f"epsilon={self.epsilon} must be positive and at most 500: lower it.")
        if not 0 <= self.delta < 1:
            raise InvalidArgument(f"delta={self.delta} must be at least 0 and below 1: it is a probability.")


class DiscreteGaussian(Noise):
    """Gaussian on the integers, for counts; `scale` is sigma / unit."""


class DiscreteLaplace(Noise):
    """Two-sided geometric on the integers, for counts: P(z) ~ exp(-|z| / (scale * unit)), unit in L1."""


@dataclass(frozen=True, kw_only=True)
class BestOf(Noise):
    """The best of a secret random number of independent trials; only that one leaves, with the score it was chosen by.

    Each trial is drawn secretly from `trials`, which has for each kind everything that it asks. `scale` is the least
    noise in any of them, for people; the trials are charged.
    """

    repetitions: Repetitions
    trials: tuple[tuple[Mechanism, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [mechanism for trial in self.trials for mechanism in trial]
        if not asked or not all(self.trials) or any(isinstance(m.noise, BestOf) for m in asked):
            raise InvalidArgument(f"trials={self.trials} must each ask something, and none may be a search itself.")


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One kind of question asked `times` times, each time on a fresh sample with fresh noise.

    `replace_factor` is how much further the exact answer can move when a unit is replaced than when one is added:
    2 for clipped sums, sqrt(2) for a Gram matrix in Frobenius norm, 2 for L1 counts. It is 0 for a question whose
    answers have no such bound, and which is charged what its own proof states: a `SealedGaussian`.
    """

    question: str
    noise: Noise
    sampler: Sampler
    times: int = 1
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler):
            raise InvalidArgument(f"sampler={shown(self.sampler)} must be a Sampler, such as private.poisson(100).")
        if not isinstance(self.times, int) or self.times < 1:
            raise InvalidArgument(f"times={self.times} must be a whole number of at least 1.")
        stated = isinstance(self.noise, SealedGaussian)
        if self.replace_factor == 0 and not stated:
            raise InvalidArgument(
                f"noise={self.noise} does not say what {self.question} costs: give the SealedGaussian of its proof."
            )
        if self.replace_factor != 0 and stated:
            raise InvalidArgument(
                f"noise={self.noise} is for questions with a proof of their own, and {self.question} has none: use "
                "Gaussian."
            )
        if not (stated or 1.0 <= self.replace_factor <= 2.0):
            raise InvalidArgument(f"replace_factor={self.replace_factor} must lie between 1 and 2.")

    def check_terms(self, question: Any, adjacency: Adjacency) -> None:
        """Refuse to charge a question for other terms than those of its own proof, where it has any.

        Such a question names the one noise that its proof is about, `charged` (None: any Gaussian), and the number `n`
        of units. Both follow from its own numbers, so its class alone will not do. Its proof exchanges one of all rows.
        """
        if isinstance(question, type) and hasattr(question, "charged"):
            raise InvalidArgument(
                f"question={self.question} is a class, and what it costs depends on its numbers: give the question."
            )
        proven = getattr(question, "charged", None)
        if 0 in (self.replace_factor, question.replace_factor) and not isinstance(proven, SealedGaussian):
            raise InvalidArgument(
                f"question={self.question} has replace_factor=0 and does not say what it costs: define `charged`."
            )
        inside = getattr(question, "inside", 0)
        if inside and not 0 <= inside < question.releases:
            raise InvalidArgument(
                f"inside={inside} of {self.question} must be below releases={question.releases}: round what leaves."
            )
        whole = type(self.sampler) is FullBatch and adjacency is Adjacency.REPLACE_ONE
        if hasattr(question, "charged") and not whole:
            raise InvalidArgument(
                f"question={self.question} is proven for the exchange of one of all rows: ask it with "
                f"private.everyone() under adjacency='replace-one', not with {self.sampler} under {adjacency.value!r}."
            )
        if proven is not None and self.noise != proven:
            raise InvalidArgument(
                f"noise={self.noise} is not what the proof of {self.question} is about, {proven}: use its `charged`."
            )
        if hasattr(question, "charged") and getattr(question, "n", self.sampler.size) != self.sampler.size:
            raise InvalidArgument(
                f"n={question.n} of {self.question} must be the number of units, {self.sampler.size}: declare that."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data for the ledger."""
        sampler = {"kind": type(self.sampler).__name__, **vars(self.sampler)}
        noise = {"kind": type(self.noise).__name__, **vars(self.noise)}
        if isinstance(self.noise, BestOf):
            law = self.noise.repetitions
            shape = law.shape if math.isfinite(law.shape) else "inf"  # JSON has no infinity
            noise["repetitions"] = {"mean": law.mean, "shape": shape}
            noise["trials"] = [[mechanism.to_json() for mechanism in trial] for trial in self.noise.trials]
        return {
            "question": self.question,
            "noise": noise,
            "sampler": sampler,
            "times": self.times,
            "replace_factor": self.replace_factor,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Mechanism:
        kinds = (Gaussian, SealedGaussian, DiscreteGaussian, DiscreteLaplace, BestOf)
        noises: dict[str, type[Noise]] = {kind.__name__: kind for kind in kinds}
        samplers: dict[str, type[Sampler]] = {k.__name__: k for k in (Poisson, FixedSize, FullBatch)}
        sampler, noise = dict(data["sampler"]), dict(data["noise"])
        if "adjacency" in noise:
            noise["adjacency"] = Adjacency(noise["adjacency"])
        if "trials" in noise:
            noise["repetitions"] = Repetitions(**{key: float(value) for key, value in noise["repetitions"].items()})
            noise["trials"] = tuple(tuple(map(Mechanism.from_json, trial)) for trial in noise["trials"])
        return Mechanism(
            question=data["question"],
            noise=noises[noise.pop("kind")](**noise),
            sampler=samplers[sampler.pop("kind")](**sampler),
            times=data["times"],
            replace_factor=data["replace_factor"],
        )
