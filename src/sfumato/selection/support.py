"""Which private rows vote for public ones, and the question that counts their votes (paper 004, Algorithm 2).

As printed, the k most uncertain private rows vote and the counts get Laplace noise of scale 1 / epsilon. But a newcomer
among them pushes another out: one vote more and one less. So the counts move by 2, and 2 epsilon is spent. `TopK` is
that form with its true sensitivity. `Threshold` lets every row vote whose uncertainty exceeds a public number: then one
row is one vote, whatever the others do, and half the noise is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.gradients.row_by_row import RowByRow
from sfumato.objective import Batch
from sfumato.privacy.mechanisms import DiscreteLaplace, Noise
from sfumato.questions import Exact, Histogram, Question, Sample, _OfRows

Votes = Callable[[Batch], Tensor]
"""A row map to (rows, 2) float64: how uncertain a row is, and the number of its public row, -1 if it has no vote."""


@dataclass(frozen=True, kw_only=False, eq=False)
class TopKHistogram(_OfRows):
    """Counts over `bins` bins of the `top` rows of largest score; the row map gives (score, bin) per row.

    *Formal guarantee.* The counts move by at most 2 in L1, under add/remove and under replace-one: of the others the
    order does not change, so a newcomer displaces at most one of them. A user's most uncertain record alone counts.
    Rows whose score is not finite, or whose bin does not exist, count nowhere.
    """

    bins: int
    top: int
    discrete: ClassVar[bool] = True
    replace_factor: ClassVar[float] = 1.0
    adds_up: ClassVar[bool] = False  # the top of two parts is not that of the whole

    def __post_init__(self) -> None:
        for name, value in (("bins", self.bins), ("top", self.top)):
            if value < 1:
                raise InvalidArgument(f"{name}={value} must be at least 1.")

    @classmethod
    def law(cls, scale: float) -> Noise:
        return DiscreteLaplace(scale)

    @property
    def unit(self) -> float:
        return 2.0

    @property
    def _width(self) -> int:
        return 2

    def exact(self, sample: Sample) -> Exact:
        scores, places = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
        for answers, units in self._answers(sample):
            score, place = answers.double().unbind(1)
            usable = torch.isfinite(score) & (place >= 0) & (place < self.bins)
            if units.weights is not None:
                usable &= (units.weights > 0).to(usable.device)
            score = torch.where(usable, score, -torch.inf).reshape(-1, units.records)
            best = score.argmax(1, keepdim=True)
            score, place = score.gather(1, best)[:, 0], place.reshape(-1, units.records).gather(1, best)[:, 0]
            votes = score > -torch.inf
            scores.append(score[votes].cpu())
            places.append(place[votes].long().cpu())
        order = torch.sort(torch.cat(scores), descending=True, stable=True).indices[: self.top]
        return torch.bincount(torch.cat(places)[order], minlength=self.bins)


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Private rows vote that are at least as uncertain as this quantile of the public pool: L1 sensitivity 1."""

    quantile: float = 0.8
    question: ClassVar[type[Question]] = Histogram

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise InvalidArgument(f"quantile={self.quantile} must be at least 0 and below 1, such as 0.8.")

    def least(self, scores: Tensor) -> float:
        """How uncertain a private row has to be, given the public pool's scores."""
        return float(np.quantile(scores.double().cpu().numpy(), self.quantile))

    def of(self, votes: Votes, k: int) -> Question:
        """The question, given who votes for what and the number of public rows."""
        if isinstance(votes, RowByRow):
            return Histogram(votes.then(lambda found, _: found[:, 1].long()), k)
        return Histogram(lambda rows: votes(rows)[:, 1].long(), k)


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The k most uncertain private rows vote, as the paper has it, with the true L1 sensitivity of 2.

    `k` is a declared number; None: as many as there are public rows to vote for.
    """

    k: int | None = None
    question: ClassVar[type[Question]] = TopKHistogram

    def __post_init__(self) -> None:
        if self.k is not None and (not isinstance(self.k, int) or self.k < 1):
            raise InvalidArgument(f"k={self.k} must be a whole number of at least 1: so many private rows vote.")

    def least(self, scores: Tensor) -> float:
        """Every private row may be among the k."""
        return -math.inf

    def of(self, votes: Votes, k: int) -> Question:
        """The question, given who votes for what and the number of public rows."""
        return TopKHistogram(votes, k, self.k or k)
