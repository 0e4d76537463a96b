"""What methods share of which only the last weights leave the door: bounded rows, and one planned answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sfumato.data.samplers import FullBatch
from sfumato.erm.base import PrivateLinear
from sfumato.erm.budgets import planned_noise
from sfumato.erm.losses import Loss, Needs
from sfumato.erm.questions import features_and_targets, is_ours
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument
from sfumato.gradients import Units
from sfumato.gradients.rowwise import check_row_map
from sfumato.objective import Batch
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private
from sfumato.questions import Sample, Sealed

ROUNDING = 1 + 1e-6  # `summed` over up to 1e7 rows is off by less than this share of what one row can do
ULP = 2.0**-53  # the relative error of one operation
# In standard deviations, per entry: by how much at most a float64 normal that is not rounded to a grid differs from a
# real one. The generator's own steps are 2^-50 up to 3.65; wider ones, in the tails, are taken for what they stand for.
NORMAL_STEP = 2.0**-45
_BLOCK = 32


def summed(X: Tensor, slopes: Tensor) -> Tensor:
    """sum_i slopes_i x_i in short blocks, then pairwise: off by at most `summing_error` sum_i |slopes_i| |x_i|.

    A plain sum can be off by n ULP, and is when rows are sorted.
    """
    whole = len(X) - len(X) % _BLOCK
    blocks = torch.bmm(slopes[:whole].reshape(-1, 1, _BLOCK), X[:whole].reshape(-1, _BLOCK, X.shape[1]))[:, 0]
    parts = torch.cat([blocks, (slopes[whole:] @ X[whole:])[None]])
    while (half := len(parts) // 2) > 0:
        parts = torch.cat([parts[:half] + parts[half : 2 * half], parts[2 * half :]])
    return parts[0]


def summing_error(n: int) -> float:
    """_BLOCK products and additions, and one more each time that the blocks are halved."""
    return (_BLOCK + math.log2(n) + 3) * ULP


def largest_rate(loss: Loss, l2: float) -> float:
    """Up to it a gradient step on the loss of any rows + l2 / 2 |w|^2 brings no two points further apart."""
    assert loss.smoothness is not None, "Needs has refused it"
    return 2 / (loss.smoothness + l2)


def check_targets(loss: Loss, target_bound: float) -> None:
    """Raise for targets with which a classifier's loss is steeper and more curved than it says."""
    if target_bound > 1 and not loss.regression:
        raise InvalidArgument(
            f"target_bound={target_bound} must be at most 1 for {loss}, which is about classes -1, 1."
        )


def check_rate(rate: float, loss: Loss, l2: float) -> None:
    """Raise for steps that are too long for the proofs."""
    if not 0 < rate <= largest_rate(loss, l2):
        raise InvalidArgument(
            f"learning_rate={rate} must be positive and at most 2 / (smoothness + l2) = {largest_rate(loss, l2):.4g} "
            f"for {loss}: larger steps move neighbours apart."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SealedLinear(Sealed):
    """Weights that were learned from all rows; `L` bounds slopes, `target_bound` targets, `radius` weights.

    *Formal guarantee.* The proofs are about rows with |x| <= 1, |y| <= target_bound and |slope| <= L, which is enforced
    row by row: longer rows are shortened, targets and slopes cut, and a row that is not finite is one of zeros, which
    contributes nothing. Convexity and smoothness are the loss's word. What float64 makes of noise that stays inside is
    counted by each proof.
    """

    loss: Loss
    width: int
    L: float
    l2: float = 0.0
    radius: float | None = None
    target_bound: float = 1.0

    draws: ClassVar[bool] = False

    def check(self, sample: Sample) -> None:
        Needs(smooth=True, lipschitz=True).check(self.loss, self.kind(), radius=self.radius)
        check_targets(self.loss, self.target_bound)
        for batch, units in sample.parts():
            self._covered(batch, units)
        rows = sample.first_rows()
        if rows is not None and not is_ours(self.loss):
            w = torch.linspace(-1, 1, self.width, dtype=torch.float64)
            check_row_map(lambda batch: self.loss.slope((batch[0] * w).sum(1), batch[1]), rows)

    def _covered(self, batch: Batch, units: Units) -> tuple[Tensor, Tensor]:
        """Rows that the proofs are about: one person's each, in float64, whose rounding they count."""
        if units.weights is not None:
            raise InvalidArgument(
                f"unit='user' is not covered by the proof of {self.kind()}, which exchanges rows: use 'example'."
            )
        return features_and_targets(batch)

    def _rows(self, sample: Sample) -> Rows:
        parts = [self._within(*self._covered(*part)) for part in sample.parts(lend=is_ours(self.loss))]
        return Rows(torch.cat([part.X for part in parts]), torch.cat([part.y for part in parts]))

    def _within(self, X: Tensor, y: Tensor) -> Rows:
        usable = torch.isfinite(X).all(1) & torch.isfinite(y)
        norm = torch.linalg.vector_norm(X, dim=1, keepdim=True) * (1 + X.shape[1] * 2.0**-52)
        usable &= torch.isfinite(norm[:, 0])
        shortened = torch.where(usable[:, None], X / norm.clamp_min(1.0), 0.0)
        return Rows(shortened, torch.where(usable, y.clamp(-self.target_bound, self.target_bound), 1.0))

    def _slopes(self, w: Tensor, rows: Rows) -> Tensor:
        return self.loss.slope(rows.X @ w, rows.y).clamp(-self.L, self.L)

    def _slope_error(self, longest: float) -> float:
        """The most by which a computed slope is off while |w| <= longest: a score of `width` products, some ULPs."""
        assert self.loss.smoothness is not None
        score = (self.width + 8) * (longest + self.target_bound + 2)
        return ULP * (self.loss.smoothness * score + 8 * self.L)

    def _projected(self, w: Tensor) -> Tensor:
        return w if self.radius is None else w * min(1.0, self.radius / (float(w.norm()) + 1e-300))


@dataclass(kw_only=True, eq=False, repr=False)
class SealedEstimator(PrivateLinear):
    """A method whose proof is about smooth Lipschitz losses and exchanged rows, and hides its iterates.

    Beside the arguments of `PrivateLinear`, whose adjacency must be "replace-one":

    Args:
        radius: weights are projected to this norm; without it the square loss is refused, since its slopes have no
            bound. It is declared: a norm estimated from private rows would leak.
        target_bound: targets of regressions are cut to [-target_bound, target_bound].
    """

    radius: float | None = None
    target_bound: float = 1.0

    _needs = Needs(smooth=True, lipschitz=True)
    _merges_public = True

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.adjacency != Adjacency.REPLACE_ONE:
            raise InvalidArgument(
                f"adjacency={self.adjacency!r} is not covered by the proof of {type(self).__name__}, which exchanges "
                "rows: use 'replace-one'."
            )
        for name in ("radius", "target_bound"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e100:
                raise InvalidArgument(f"{name}={value} must be positive and finite.")

    def _loss(self) -> Loss:
        loss = super()._loss()
        check_targets(loss, self.target_bound)
        return loss

    def _lipschitz(self, loss: Loss) -> float:
        if loss.lipschitz is not None:
            return loss.lipschitz
        assert self.radius is not None, "Needs has refused it"
        return loss.lipschitz_within(self.radius, self.target_bound)

    def _noise(self) -> float:
        """The least Gaussian noise multiplier that the budget allows for one answer from all rows, however many."""
        return planned_noise(Budget(self.epsilon, self.delta), FullBatch(size=1), 1, Adjacency(self.adjacency))

    def _ask_once(
        self, private: Private, question: SealedLinear, law: Gaussian | None = None, note: str = ""
    ) -> tuple[Tensor, float]:
        """The weights, and what they cost; by default with the Gaussian noise that the budget allows."""
        law = law or Gaussian(self._noise())
        plan = private.plan(Planned(question, law, private.everyone()), note=note)
        try:
            w: Tensor = private.ask(question)
        finally:
            plan.close()
        alike = Mechanism(
            question=question.kind(), noise=law, sampler=FullBatch(size=1), replace_factor=question.replace_factor
        )
        return w, accounting.epsilon([alike], delta=self.delta, adjacency=private.adjacency).epsilon
