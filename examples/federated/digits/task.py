"""The model and the rows: scikit-learn's digits, dealt out to clients by number."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sfumato import Objective, cross_entropy
from sfumato.models.basic import mlp

TEST = 397  # of the 1,797 digits; nobody's
PUBLIC_EVERY = 8  # of every eight clients one needs no protection


def objective() -> Objective:
    torch.manual_seed(0)  # all begin with the same weights, which are no secret
    return Objective(nn.Sequential(mlp(64, 10, (16,))), cross_entropy)


def all_rows() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x / 16).float()[order], torch.from_numpy(y).long()[order]


def test_rows() -> tuple[Tensor, Tensor]:
    x, y = all_rows()
    return x[:TEST], y[:TEST]


def rows_of(client: int, clients: int) -> tuple[Tensor, Tensor]:
    x, y = all_rows()
    return x[TEST + client :: clients], y[TEST + client :: clients]
