"""Where a row lies in its batch: kernels may round by that, and at a kink that is worth a clip norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfumato import Clip, Objective, cross_entropy
from sfumato.gradients import Performance
from sfumato.gradients.engine import clipped_sum

ROWS, WIDTH, KEYS = 128, 33, 17


def scores(x: Tensor) -> Tensor:
    """Every row's own query with its own keys: a product whose last bit may depend on the row's place."""
    return torch.bmm(x[:, :1].contiguous(), x[:, 1:].transpose(1, 2).contiguous())[:, 0]


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(KEYS, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(scores(x)) * 1e9)
        return out


def on_the_kink() -> Tensor:
    """A row whose scores are zero but for rounding."""
    rng = torch.Generator().manual_seed(1)
    query, keys = torch.randn(WIDTH, generator=rng).double(), torch.randn(KEYS, WIDTH, generator=rng).double()
    keys[:, -1] = -(keys[:, :-1] @ query[:-1]) / query[-1]
    return torch.cat([query[None], keys]).float()


def crafted() -> Tensor:
    """That row wherever one place further on it would be rounded to the other side, all in the same direction."""
    row = on_the_kink()
    signs = scores(row.expand(ROWS, -1, -1).contiguous()).sign().clamp_min(0)
    changes, which, often = torch.unique(signs[1:] - signs[:-1], dim=0, return_inverse=True, return_counts=True)
    often[(changes == 0).all(1)] = 0
    rows = torch.zeros(ROWS, KEYS + 1, WIDTH)
    rows[1:][which == often.argmax()] = row
    return rows


def moved(performance: Performance) -> float:
    """By how many clip norms the sum moves when a row of zeros, in front of all others, leaves."""
    torch.manual_seed(1)
    objective, rows, labels = Objective(Scored(), cross_entropy), crafted(), torch.zeros(ROWS, dtype=torch.long)

    def total(first: int) -> Tensor:
        batch = (rows[first:].clone(), labels[first:])
        found = clipped_sum(objective, objective.parameters(), batch, clip=Clip(1.0), performance=performance)
        return torch.cat([t.double().flatten() for t in found.values()])

    return float((total(0) - total(1)).norm())


def test_rows_that_are_computed_one_by_one_depend_on_no_place() -> None:
    assert moved(Performance(micro_batch=1)) <= 1 + 1e-6
