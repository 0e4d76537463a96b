"""What all strategies share: one signature, and how uncertainty about a row is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.public import Public
from sfumato.questions import Question
from sfumato.selection.released import Released

Ask = Callable[[Question], Any]
"""The door's verb: `private.ask`."""

Uncertainty = Callable[[Tensor], Tensor]
"""From logits (rows, classes) to one number per row, the larger the less certain; a function of each row alone."""


class Strategy(Protocol):
    """Which `n` rows of a public pool to have labelled, the best first: distinct int64 indices.

    `ask` is `private.ask` for a strategy that looks at private rows, through the door; all others ignore it.
    """

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor: ...


def entropy(logits: Tensor) -> Tensor:
    """Of the predicted distribution, in nats.

    >>> entropy(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).round(decimals=3)
    tensor([0.6930, 0.0010], dtype=torch.float64)
    """
    values: Tensor = torch.special.entr(logits.double().softmax(1)).sum(1)
    return values


def margin(logits: Tensor) -> Tensor:
    """Minus the paper's "difference": how far the largest logit is above the second.

    >>> margin(torch.tensor([[3.0, 1.0, 0.0]]))
    tensor([-2.], dtype=torch.float64)
    """
    best = logits.double().topk(2, dim=1).values
    return best[:, 1] - best[:, 0]


def check_number(pool: Public, n: int) -> None:
    if not isinstance(n, int) or not 1 <= n <= len(pool):
        raise InvalidArgument(f"n={n} must be a whole number from 1 to {len(pool)}, the rows of the pool.")


def descending(scores: Tensor) -> Tensor:
    """Indices, the largest score first; of equal ones the first row."""
    return torch.sort(scores, descending=True, stable=True).indices


def most_uncertain(model: Released, pool: Public, uncertainty: Uncertainty, k: int) -> Tensor:
    """SelectUncertain(D_public, k) of Algorithms 1 and 2: the indices of the k rows the model is least sure of."""
    return descending(uncertainty(model.of(pool).logits))[:k]


def candidates(pool: Public, n: int, uncertain: float) -> int:
    """k, how many uncertain rows are looked at for n labels: `uncertain` times as many, at most all."""
    if not 1 <= uncertain < float("inf"):
        raise InvalidArgument(f"uncertain={uncertain} must be at least 1: k = uncertain * n rows are looked at.")
    return min(len(pool), round(uncertain * n))
