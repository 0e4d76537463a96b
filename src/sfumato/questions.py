"""The questions that can be asked of private data.

A question is frozen public knowledge: what is asked, and its *unit*, the most that one privacy unit can contribute to
the exact answer. It enforces that bound itself, row by row, inside the door; the door adds noise in proportion to it.
Every quantity in a question (parameters, origin, scale, offsets, row maps, bounds) must be public: computed from
public data and already released answers alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Gradient, Performance, Units, clipped_sum
from sfumato.gradients.clip import shortened
from sfumato.gradients.gradient import check_named
from sfumato.gradients.passes import Augment
from sfumato.gradients.probe import Probe
from sfumato.gradients.row_by_row import RowByRow
from sfumato.gradients.rowwise import check_augment, check_on, check_row_map, checked_values
from sfumato.gradients.watched import apart
from sfumato.objective import Batch, Objective
from sfumato.privacy.mechanisms import DiscreteLaplace, Gaussian, Noise

RowMap = Callable[[Batch], Tensor]
"""A public function of rows, applied row by row: (rows, ...) -> (rows, values)."""

Exact = Tensor | dict[str, Tensor]


class Sample(Protocol):
    """The sampled units as a question sees them, inside the door only."""

    @property
    def objective(self) -> Objective | None: ...

    @property
    def performance(self) -> Performance: ...

    @property
    def reduction(self) -> str: ...

    @property
    def largest(self) -> int | None: ...

    @property
    def at_once(self) -> int:
        """How many rows a row map may be given in one pass: by declared numbers and the schema."""

    def parts(self, *, lend: bool = False) -> Iterator[tuple[Batch, Units]]:
        """The rows in parts that fit into memory; padded rows weigh 0. Only who never writes to them may borrow."""

    def first_rows(self) -> Batch | None:
        """A few rows to check shapes with; None if there are none."""

    def no_rows(self) -> Batch | None:
        """The types and shapes of rows, which are public, in a batch without any; None if they are not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Base(ABC):
    """Common ground of questions and sealed questions."""

    replace_factor: ClassVar[float] = 2.0
    adds_up: ClassVar[bool] = True  # whether exact answers of two parts of the data add up to that of the whole
    draws: ClassVar[bool] = True  # whether rows may draw random numbers: views, dropout, a row map's own

    @classmethod
    def kind(cls) -> str:
        """The name under which plans and ledgers know this question."""
        return cls.__name__

    @classmethod
    def law(cls, scale: float) -> Noise:
        """The noise that a plain number stands for."""
        return Gaussian(scale)

    def check(self, sample: Sample) -> None:
        """Raise what can be raised before anything is charged. Only shapes and types may be looked at."""


class Question(_Base):
    """One bounded question."""

    @property
    @abstractmethod
    def unit(self) -> float:
        """The most that one privacy unit contributes to the exact answer (L2; L1 under discrete Laplace noise)."""

    @abstractmethod
    def exact(self, sample: Sample) -> Exact:
        """The sum over the sampled units of their bounded contributions. Private: only the door calls it."""

    def release(self, noisy: Any, expected: float) -> Any:
        """Public post-processing of the noisy sum, by default none; `expected` is the declared batch."""
        return noisy

    symmetric: ClassVar[bool] = False
    discrete: ClassVar[bool] = False


# ------------------------------------------------------------------------------------------------ gradients


@dataclass(frozen=True, kw_only=False, eq=False)
class GradientSum(Question):
    """The noisy sum of clipped per-unit gradients at `params`.

    `views` copies of every row go through `augment` (a random row-by-row map) and are averaged inside the clip;
    `offsets` evaluate view k at params + offsets[k]. All of that costs no privacy.
    """

    params: Mapping[str, Tensor]
    clip: Clip
    views: int = 1
    augment: Augment | None = None
    offsets: Sequence[Mapping[str, Tensor]] | None = None

    @property
    def unit(self) -> float:
        return self.clip.norm

    def check(self, sample: Sample) -> None:
        if sample.objective is None:
            raise InvalidArgument("objective is missing: give Private(..., objective=Objective(module, loss)).")
        Clip.check_is_one(self.clip)
        if not self.clip.bounded:
            raise InvalidArgument(f"clip norm={self.clip.norm} must be finite: noise is drawn in proportion to it.")
        if self.views < 1:
            raise InvalidArgument(f"views={self.views} must be at least 1.")
        if self.offsets is not None and len(self.offsets) != self.views:
            raise InvalidArgument(f"offsets has {len(self.offsets)} entries but views={self.views}: give one per view.")
        if self.clip.origin is not None and sample.reduction == "sum":
            raise InvalidArgument("clip has an origin, the mean gradient, which needs reduction='mean', not 'sum'.")
        for argument, tensors in (("params", self.params), *(("offsets", v) for v in self.offsets or ())):
            check_named(argument, tensors, sample.objective.parameters())
        self.clip.check(self.params)
        # Contributions next to zero, where numbers are few, would be rounded up beyond the clip norm.
        least = max((torch.finfo(p.dtype).tiny for p in self.params.values()), default=0.0) ** 0.5
        if self.clip.norm < least:
            raise InvalidArgument(f"clip norm={self.clip.norm} is below {least:.0e}: the parameters need a larger one.")
        rows, none, probe = sample.first_rows(), sample.no_rows(), Probe.of(sample.objective)
        if (known := none if rows is None else rows) is not None:
            probe.check(self.params, known)
        if self.augment is not None:
            check_on(rows, none, partial(probe.once, self.augment, check=check_augment))

    def exact(self, sample: Sample) -> Exact:
        assert sample.objective is not None
        total: dict[str, Tensor] = {}
        for batch, units in sample.parts():
            part = clipped_sum(
                sample.objective,
                self.params,
                batch,
                clip=self.clip,
                views=self.views,
                augment=self.augment,
                offsets=self.offsets,
                units=units,
                largest=sample.largest,
                performance=sample.performance,
            )
            for name, value in part.items():
                total[name] = total[name].double().add_(value) if name in total else value
        return total or {n: torch.zeros_like(p) for n, p in self.params.items()}

    def release(self, noisy: Any, expected: float) -> Gradient:
        return Gradient({n: t.to(self.params[n].dtype) for n, t in noisy.items()})


class GradientMean(GradientSum):
    """`GradientSum` divided by the *declared* expected batch, a public constant; never by the sampled number."""

    def release(self, noisy: Any, expected: float) -> Gradient:
        return Gradient({n: (t / expected).to(self.params[n].dtype) for n, t in noisy.items()})


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True, kw_only=False, eq=False)
class _OfRows(Question):
    """Questions about a public map of the rows."""

    row_map: RowMap

    def check(self, sample: Sample) -> None:
        check_on(sample.first_rows(), sample.no_rows(), partial(check_row_map, self._values))

    def _values(self, batch: Batch) -> Tensor:
        """What the map gives, (rows,) or (rows, values)."""
        return checked_values(self.row_map(batch), batch, self._width)

    @property
    @abstractmethod
    def _width(self) -> int:
        """How many values the map gives per row."""

    def _answers(self, sample: Sample) -> Iterator[tuple[Tensor, Units]]:
        """What the map gives for the sampled rows, in parts: for each row by that row alone, to the last bit."""
        asked, known = self, isinstance(self.row_map, RowByRow)
        if isinstance(self.row_map, RowByRow) and sample.at_once == 1:
            asked = replace(self, row_map=self.row_map.alone())
        for batch, units in sample.parts():
            yield (asked._values(batch) if known else apart(self, self._values, batch, sample.at_once)), units

    def _vectors(self, sample: Sample, bound: float) -> Iterator[Tensor]:
        """(units, records, width) float64, each row of norm <= bound times its weight; non-finite rows are zero."""
        for answers, units in self._answers(sample):
            values = shortened(answers.double().reshape(len(answers), -1), bound)
            if units.weights is not None:
                values = values * units.weights.to(values).unsqueeze(1)
            yield values.reshape(-1, units.records, values.shape[1])


@dataclass(frozen=True, kw_only=False, eq=False)
class NoisyMean(_OfRows):
    """The mean of a bounded row map over the declared batch, for instance accuracy on a private hold-out."""

    bound: float
    width: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _checked_bound(self.bound))

    @property
    def unit(self) -> float:
        return self.bound

    @property
    def _width(self) -> int:
        return self.width

    def exact(self, sample: Sample) -> Exact:
        total = torch.zeros(self.width, dtype=torch.float64)
        for vectors in self._vectors(sample, self.bound):
            total = total + shortened(vectors.sum(1), self.bound).sum(0).cpu()
        return total

    def release(self, noisy: Any, expected: float) -> Tensor:
        result: Tensor = noisy / expected
        return result


@dataclass(frozen=True, kw_only=False, eq=False)
class Gram(_OfRows):
    """sum_i x_i x_i' of rows with |x_i| <= bound: what DP-PCA needs. Nothing is centred: a private mean would leak."""

    bound: float
    width: int
    replace_factor: ClassVar[float] = math.sqrt(2)  # |xx' - yy'|^2 = |x|^4 + |y|^4 - 2<x,y>^2
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _checked_bound(self.bound))

    @property
    def unit(self) -> float:
        return self.bound**2

    @property
    def _width(self) -> int:
        return self.width

    def exact(self, sample: Sample) -> Exact:
        total = torch.zeros(self.width, self.width, dtype=torch.float64)
        for vectors in self._vectors(sample, self.bound):
            # A user's records together stay within the bound: sum of squares <= bound^2 bounds the Frobenius norm.
            size = vectors.square().sum((1, 2)).sqrt()
            rows = vectors * (self.bound / (size * (1 + 1e-15)).clamp_min(self.bound))[:, None, None]
            flat = rows.reshape(-1, self.width)
            total = total + (flat.T @ flat).cpu()
        return total


@dataclass(frozen=True, kw_only=False, eq=False)
class Histogram(_OfRows):
    """Counts of an integer row map over `bins` bins; other values (such as -1) count nowhere.

    A unit adds at most `cap_per_unit` to the counts in all: of a user's records the first ones count. The noise is
    discrete, so that floating point betrays nothing.
    """

    bins: int
    cap_per_unit: int = 1
    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("bins", self.bins), ("cap_per_unit", self.cap_per_unit)):
            if value < 1:
                raise InvalidArgument(f"{name}={value} must be at least 1.")

    @classmethod
    def law(cls, scale: float) -> Noise:
        return DiscreteLaplace(scale)

    @property
    def unit(self) -> float:
        return float(self.cap_per_unit)

    @property
    def _width(self) -> int:
        return 1

    def _values(self, batch: Batch) -> Tensor:
        values = super()._values(batch)
        if values.is_floating_point():
            raise InvalidArgument("row_map must return one integer bin per row for a Histogram.")
        return values.reshape(-1).long()

    def exact(self, sample: Sample) -> Exact:
        counts = torch.zeros(self.bins, dtype=torch.int64)
        for values, units in self._answers(sample):
            inside = (values >= 0) & (values < self.bins)
            if units.weights is not None:
                inside &= (units.weights > 0).to(inside.device)
            inside = inside.reshape(-1, units.records)
            inside = inside & (inside.cumsum(1) <= self.cap_per_unit)
            counts += torch.bincount(values[inside.reshape(-1)], minlength=self.bins).cpu()
        return counts


@dataclass(frozen=True, kw_only=False, eq=False)
class NoisyArgmin(_OfRows):
    """Which of `candidates` has the least total loss; the row map gives one loss per candidate, cut to [0, loss_bound].

    The whole vector of sums is made noisy and only its smallest index leaves: post-processing of a Gaussian mechanism.
    """

    candidates: int
    loss_bound: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_bound", _checked_bound(self.loss_bound))
        if self.candidates < 2:
            raise InvalidArgument(f"candidates={self.candidates} must be at least 2: there is nothing to choose.")

    @property
    def unit(self) -> float:
        return self.loss_bound * math.sqrt(self.candidates)

    @property
    def _width(self) -> int:
        return self.candidates

    def exact(self, sample: Sample) -> Exact:
        total = torch.zeros(self.candidates, dtype=torch.float64)
        for answers, units in self._answers(sample):
            losses = torch.nan_to_num(answers.double(), nan=self.loss_bound, posinf=self.loss_bound, neginf=0.0)
            losses = losses.clamp(0.0, self.loss_bound)
            if units.weights is not None:
                losses = losses * units.weights.to(losses).unsqueeze(1)
            per_unit = losses.reshape(-1, units.records, self.candidates).sum(1)
            total = total + shortened(per_unit, self.unit).sum(0).cpu()
        return total

    def release(self, noisy: Any, expected: float) -> int:
        return int(noisy.argmin())


def _checked_bound(bound: float) -> float:
    if not 1e-100 < float(bound) < 1e100:  # far inside float64, whose squares must neither vanish nor overflow
        raise InvalidArgument(f"bound={bound} must be positive and finite: it is what one row can contribute.")
    return float(bound)  # noise is computed from it exactly


# ------------------------------------------------------------------------------------------------ several at once


@dataclass(frozen=True, kw_only=False, eq=False)
class Joint(Question):
    """Several questions about one sampled batch, answered together by one Gaussian mechanism.

    Every part is scaled to its own unit; with m parts one unit moves the joint answer by at most sqrt(m), so each part
    gets sqrt(m) times the noise it would get alone. One sample is charged instead of m.
    """

    parts: tuple[Question, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise InvalidArgument(f"Joint needs at least two questions, not {len(self.parts)}.")
        for part in self.parts:
            if not isinstance(part, Question):
                raise InvalidArgument(f"Joint was given {type(part).__name__}: its parts must be bounded questions.")

    @property
    def unit(self) -> float:
        return math.sqrt(len(self.parts))

    def check(self, sample: Sample) -> None:
        for part in self.parts:
            part.check(sample)
            _checked_bound(part.unit)

    def exact(self, sample: Sample) -> Exact:
        joint: dict[str, Tensor] = {}
        for i, part in enumerate(self.parts):
            exact = part.exact(sample)
            for name, value in (exact if isinstance(exact, dict) else {"": exact}).items():
                joint[f"{i}/{name}"] = value.double() / part.unit
        return joint

    def release(self, noisy: Any, expected: float) -> tuple[Any, ...]:
        answers = []
        for i, part in enumerate(self.parts):
            own = {k.split("/", 1)[1]: v * part.unit for k, v in noisy.items() if k.startswith(f"{i}/")}
            value: Any = own[""] if list(own) == [""] else own
            if part.symmetric:
                value = (value + value.T) / 2
            answers.append(part.release(value, expected))
        return tuple(answers)


class Sealed(_Base):
    """A method that runs inside the door and of which only the final answer leaves: no iterates, no checkpoints.

    For objective and output perturbation and PNSGD, whose proofs hide the iterates and exchange one of all rows: it is
    asked of everyone, under replace-one. `run` may look at all rows. `noisy` adds the noise that was charged, at most
    `releases` times, which the method's own proof allows. The first `inside` draws are not rounded to the noise's grid,
    so their last digits may tell of rows: what leaves must come from a draw after the first `inside` ones.
    """

    releases: ClassVar[int] = 1
    inside: ClassVar[int] = 0

    @property
    def charged(self) -> Gaussian | None:
        """The one noise that the proof is about; None if it holds for any Gaussian."""
        return None

    @property
    @abstractmethod
    def unit(self) -> float:
        """The sensitivity that the method's own proof gives for what it passes to `noisy`."""

    @abstractmethod
    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        """Compute the answer; `noisy(exact)` adds noise of scale * unit."""
