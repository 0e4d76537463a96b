"""What methods share of which only the last weights leave the door: bounded rows, and one planned answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sfumato.data.samplers import FullBatch
from sfumato.erm.base import PrivateLinear
from sfumato.erm.budgets import planned_noise
from sfumato.erm.losses import Loss, Needs
from sfumato.erm.questions import _ENTRY_BY_ENTRY
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument
from sfumato.gradients.rowwise import check_row_map
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private
from sfumato.questions import Sample, Sealed

ROUNDING = 1 + 1e-6  # sums over up to 1e8 rows, in float64, are off by less than this share of what one row can do


def largest_rate(loss: Loss, l2: float) -> float:
    """Up to it a gradient step on the loss of any rows + l2 / 2 |w|^2 brings no two points further apart."""
    assert loss.smoothness is not None, "Needs has refused it"
    return 2 / (loss.smoothness + l2)


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
    contributes nothing. Convexity and smoothness are the loss's word.
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
        rows = sample.first_rows()
        if rows is not None and type(self.loss) not in _ENTRY_BY_ENTRY:  # our own are; others are tried out
            w = torch.linspace(-1, 1, self.width, dtype=torch.float64)
            check_row_map(lambda batch: self.loss.slope((batch[0] * w).sum(1), batch[1]), rows)

    def _rows(self, sample: Sample) -> Rows:
        parts = [self._within(*batch) for batch, _ in sample.parts()]
        return Rows(torch.cat([part.X for part in parts]), torch.cat([part.y for part in parts]))

    def _within(self, X: Tensor, y: Tensor) -> Rows:
        usable = torch.isfinite(X).all(1) & torch.isfinite(y)
        norm = torch.linalg.vector_norm(X, dim=1, keepdim=True) * (1 + X.shape[1] * 2.0**-52)
        usable &= torch.isfinite(norm[:, 0])
        shortened = torch.where(usable[:, None], X / norm.clamp_min(1.0), 0.0)
        return Rows(shortened, torch.where(usable, y.clamp(-self.target_bound, self.target_bound), 1.0))

    def _slopes(self, w: Tensor, rows: Rows) -> Tensor:
        return self.loss.slope(rows.X @ w, rows.y).clamp(-self.L, self.L)

    def _projected(self, w: Tensor) -> Tensor:
        return w if self.radius is None else w * min(1.0, self.radius / (float(w.norm()) + 1e-300))


@dataclass(kw_only=True, eq=False, repr=False)
class SealedEstimator(PrivateLinear):
    """A method whose proof is about smooth Lipschitz losses and exchanged rows, and hides its iterates.

    Args (beside those of `PrivateLinear`, whose adjacency must be "replace-one"):
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

    def _lipschitz(self, loss: Loss) -> float:
        if loss.lipschitz is not None:
            return loss.lipschitz
        assert self.radius is not None, "Needs has refused it"
        return loss.lipschitz_within(self.radius, self.target_bound)

    def _noise(self) -> float:
        """The least Gaussian noise multiplier that the budget allows for one answer from all rows, however many."""
        return planned_noise(Budget(self.epsilon, self.delta), FullBatch(size=1), 1, Adjacency(self.adjacency))

    def _ask_once(self, private: Private, question: SealedLinear) -> tuple[Tensor, float]:
        """The weights, and what they cost."""
        noise = self._noise()
        plan = private.plan(Planned(question, noise, private.everyone()))
        try:
            w: Tensor = private.ask(question)
        finally:
            plan.close()
        alike = Mechanism(question=question.kind(), noise=Gaussian(noise), sampler=FullBatch(size=1))
        return w, accounting.epsilon([alike], delta=self.delta, adjacency=private.adjacency).epsilon
