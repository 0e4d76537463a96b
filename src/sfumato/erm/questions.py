"""What linear models ask of private rows: the clipped sum of their gradients, at the price of two matrix products.

The batch is (X, y): float64 rows and targets. The gradient of row i is slope(<w, x_i>, y_i) x_i, so its length is
known without writing it out, and the clipped sum is X' c for one coefficient per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Loss, Square
from sfumato.erm.rows import scores
from sfumato.errors import InvalidArgument
from sfumato.gradients.clip import fading
from sfumato.gradients.rowwise import check_row_map
from sfumato.gradients.watched import AT_ONCE, apart
from sfumato.objective import Batch
from sfumato.questions import Exact, Question, Sample

_OURS = (Logistic, Hinge, HuberisedHinge, Square, Huber)
# Squares below it vanish in float64; added to |x|, so that a tiny row times a huge slope is never taken for short.
_TINY = 1e-150
_LARGE = 1e150  # below it nothing overflows and nothing fades
_SMALLER = 1e-150  # a length may be so much larger than a norm, whose squares must not overflow


@dataclass(frozen=True, kw_only=False, eq=False)
class LinearGradientMean(Question):
    """The noisy mean of clipped gradients of a linear model at `w`, over the declared batch.

    *Formal guarantee.* A unit's gradient is shortened to a little less than `clip`, which covers the rounding of its
    norm, so it contributes at most `clip`; a row that is not finite, or too large for float64, contributes exactly
    zero. How a row is computed depends on that row alone: also its score, whose last bit decides the slope at a kink.
    """

    loss: Loss
    w: Tensor
    clip: float
    draws: ClassVar[bool] = False

    @property
    def unit(self) -> float:
        return self.clip

    def check(self, sample: Sample) -> None:
        if not 1e-100 < self.clip < 1e100:  # far inside float64, whose squares must neither vanish nor overflow
            raise InvalidArgument(f"clip={self.clip} must be positive and finite: it is what one row can contribute.")
        if self.w.ndim != 1 or self.w.dtype != torch.float64:
            raise InvalidArgument(f"w has shape {tuple(self.w.shape)}, {self.w.dtype}: give a vector of float64.")
        rows = sample.first_rows()
        if rows is not None:
            X, _ = features_and_targets(rows)
            if X.shape[1] != len(self.w):
                raise InvalidArgument(f"w has {len(self.w)} entries and a row has {X.shape[1]}: make them the same.")
            if not is_ours(self.loss):
                check_row_map(lambda batch: self.loss.slope((batch[0] * self.w).sum(1), batch[1]), rows)

    def exact(self, sample: Sample) -> Exact:
        total: Tensor | None = None
        for batch, units in sample.parts(lend=is_ours(self.loss)):
            X, y = features_and_targets(batch)
            # Zero times a target that is not finite is NaN, also where the loss would bound its slope.
            slope = self._slopes(scores(X, self.w), y).add(y, alpha=0)
            if units.weights is None:
                part = self._of_rows(X, slope)
            else:
                part = self._of_units(X, slope * units.weights, units.records)
            total = part if total is None else total + part
        return torch.zeros_like(self.w) if total is None else total

    def _slopes(self, z: Tensor, y: Tensor) -> Tensor:
        """Ours round a row by its place only where they do not jump; of others that is not known."""
        if is_ours(self.loss):
            return self.loss.slope(z, y)

        def one_pass(rows: Batch) -> Tensor:
            return self.loss.slope(*rows)

        return apart(self, one_pass, (z, y), AT_ONCE)

    def _of_rows(self, X: Tensor, slope: Tensor) -> Tensor:
        norm, clip = torch.linalg.vector_norm(X, dim=1), self._rounded_clip
        length = norm.add(_TINY).mul_(slope.abs())
        if not float(norm.sum() + length.sum()) < _LARGE:  # zero times NaN is NaN: such rows must not be read
            slope = slope * fading(norm) * fading(length * _SMALLER)
            usable = torch.isfinite(length) & (slope != 0)
            slope, X, length = slope[usable], X[usable], length[usable]
        return torch.mv(X.T, slope * (clip / length.clamp_min_(clip)))

    def _of_units(self, X: Tensor, slope: Tensor, records: int) -> Tensor:
        gradients = (X * slope[:, None]).reshape(-1, records, X.shape[1])
        usable = torch.isfinite(gradients).all(2, keepdim=True)
        reduced = torch.where(usable, gradients, 0.0).sum(1)
        length, clip = torch.linalg.vector_norm(reduced, dim=1), self._rounded_clip
        usable = torch.isfinite(length)
        factor = torch.where(usable, fading(length) * clip / length.clamp_min(clip), 0.0)
        return factor @ torch.where(usable[:, None], reduced, 0.0)

    @property
    def _rounded_clip(self) -> float:
        """A little less than `clip`, which covers the rounding of a sum of len(w) squares."""
        return self.clip / (1 + (len(self.w) + 8) * 2.0**-52)

    def release(self, noisy: Any, expected: float) -> Tensor:
        result: Tensor = noisy / expected
        return result


def is_ours(loss: Loss) -> bool:
    """Whether it is known to work entry by entry, and to write to none: those of others are tried out, on copies."""
    return type(loss) in _OURS


def features_and_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InvalidArgument("data must be (X, y), rows and targets, for questions about linear models.")
    X, y = batch
    if X.ndim != 2 or y.ndim != 1 or X.dtype != torch.float64 or y.dtype != torch.float64:
        raise InvalidArgument(
            f"data must be a float64 matrix X and a float64 vector y, not {X.ndim}-dimensional {X.dtype} and "
            f"{y.ndim}-dimensional {y.dtype}."
        )
    return X, y
