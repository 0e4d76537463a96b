"""The baselines of paper 004, section 3.1, and k-center: which public rows to label, with no look at private ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.public import Public
from sfumato.selection.released import Released
from sfumato.selection.strategy import Ask, check_number, entropy, margin, most_uncertain

_AT_ONCE = 256  # farthest points that are looked at together


@dataclass(frozen=True, kw_only=True)
class Random:
    """Any rows."""

    seed: int = 0

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        return torch.from_numpy(np.random.default_rng(self.seed).permutation(len(pool))[:n])


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The rows of largest entropy."""

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        return most_uncertain(model, pool, entropy, n).cpu()


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The rows whose two largest logits differ least: the paper's "difference"."""

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        return most_uncertain(model, pool, margin, n).cpu()


@dataclass(frozen=True, kw_only=True)
class KCenter:
    """Greedy k-center (Gonzalez 1985) on embeddings: each row is the one that is farthest from all before it.

    The first is drawn by `seed`. No set of n rows leaves the pool's farthest row nearer than half as far.
    """

    seed: int = 0

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        points = model.of(pool).embeddings.float()
        points = points - points.mean(0)  # smaller numbers, of which squares round less
        squares = points.square().sum(1)
        chosen = [int(np.random.default_rng(self.seed).integers(len(points)))]
        nearest = torch.full_like(squares, torch.inf)
        latest = chosen
        while True:
            to_latest = torch.addmm(squares[:, None] + squares[latest], points, points[latest].T, alpha=-2)
            nearest = torch.minimum(nearest, to_latest.amin(1))
            nearest[latest] = -torch.inf
            if len(chosen) == n:
                return torch.tensor(chosen)
            latest = _next(points, nearest, n - len(chosen))
            chosen += latest


def _next(points: Tensor, nearest: Tensor, most: int) -> list[int]:
    """The next greedy choices, as far as they are sure: one at least, `most` at most.

    Distances only fall. So the farthest of a few candidates is the farthest of all, as long as it is still as far as
    the best point that is no candidate was before.
    """
    far, where = nearest.topk(min(len(points), _AT_ONCE + 1))
    others = far[-1] if len(far) > _AT_ONCE else far.new_tensor(-torch.inf)
    far, where = far[:_AT_ONCE].clone(), where[:_AT_ONCE]
    between = torch.cdist(points[where], points[where]).square()
    taken: list[int] = []
    while len(taken) < most:
        best = int(far.argmax())
        if taken and not far[best] >= others:
            break
        taken.append(best)
        far = torch.minimum(far, between[best])
        far[best] = -torch.inf
        if not torch.isfinite(far.max()):
            break
    return [int(i) for i in where[taken]]
