"""What a user does with the weights that the server sends: some local steps, of which the sum is the user's update.

McMahan et al. 2017 (arXiv 1602.05629): FederatedSGD is one step of all the user's rows, FederatedAveraging several
epochs over batches of them. With one step and a learning rate of 1 the second is the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.objective import Batch, Objective

Params = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Plain SGD on the user's own rows, in their order; the update is local weights - global weights.

    The defaults are FedSGD: minus the mean gradient of all rows. Anything more is FedAvg.

    >>> LocalWork(epochs=5, batch_size=10, learning_rate=0.1).is_fed_sgd
    False
    """

    epochs: int = 1
    batch_size: int | None = None  # all rows of the user
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.epochs, int) and self.epochs >= 1):
            raise InvalidArgument(f"epochs={self.epochs!r} must be a whole number of at least 1.")
        if self.batch_size is not None and not (isinstance(self.batch_size, int) and self.batch_size >= 1):
            raise InvalidArgument(f"batch_size={self.batch_size!r} must be a whole number of rows, or None for all.")
        if not 0 < self.learning_rate < float("inf"):
            raise InvalidArgument(f"learning_rate={self.learning_rate} must be positive and finite.")

    @property
    def is_fed_sgd(self) -> bool:
        return self == LocalWork()


FED_SGD = LocalWork()


def update_of(objective: Objective, work: LocalWork, params: Params, rows: Batch, weights: Tensor) -> dict[str, Tensor]:
    """One user's update. Rows of weight zero are padding: they count for nothing."""
    records = len(weights)
    size = work.batch_size or records
    moved = {name: torch.zeros_like(p) for name, p in params.items()}
    for _ in range(work.epochs):
        for start in range(0, records, size):
            part = slice(start, start + size)
            share = weights[part] / weights[part].sum().clamp_min(1e-30)

            def loss(moved: dict[str, Tensor], part: slice = part, share: Tensor = share) -> Tensor:
                local = {name: p + moved[name] for name, p in params.items()}
                return (objective.losses(local, tree_map(lambda t: t[part], rows)) * share).sum()

            gradient = grad(loss)(moved)
            moved = {name: m - work.learning_rate * gradient[name] for name, m in moved.items()}
    return {name: m.detach() for name, m in moved.items()}


def updates_of(objective: Objective, work: LocalWork, params: Params, rows: Batch, weights: Tensor) -> dict[str, Any]:
    """The updates of many users with equally many (padded) rows at once: (users, rows, ...) -> (users, ...)."""

    def one(rows: Batch, weights: Tensor) -> dict[str, Tensor]:
        return update_of(objective, work, params, rows, weights)

    found: dict[str, Any] = vmap(one, randomness="different")(rows, weights)
    return found
