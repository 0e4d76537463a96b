"""Chance that rows share: a model has every unit in a pass of its own then, and an augmentation is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import Budget, Clip, GradientSum, Objective, Planned, Private
from sfumato.augment import TRIVIAL, Augmentation, AutoAugment, Chain
from sfumato.errors import InvalidArgument
from sfumato.gradients import clipped_sum
from sfumato.gradients.probe import Probe
from sfumato.gradients.rowwise import check_augment
from sfumato.gradients.watched import comes_out_alike

ROWS, WIDTH = 60, 4


class Product(nn.Module):
    """Of weights and a row, by a chance."""

    def __init__(self, chance: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.chance = nn.Parameter(torch.ones(WIDTH)), chance

    def forward(self, x: Tensor) -> Tensor:
        return self.chance(x, self.weight)


def signs(*shape: int) -> Tensor:
    return 2 * torch.bernoulli(torch.full(shape, 0.5)) - 1


def in_order(x: Tensor) -> Tensor:
    """Half of the rows turned round, whichever they are."""
    turned = torch.ones(len(x), 1)
    turned[torch.randperm(len(x))[: len(x) // 2]] = -1.0
    return turned


SHARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one coin for all rows": lambda x, w: (x * w * signs(1, 1)).sum(1),
    "one number taken out": lambda x, w: (x * w * float(signs(1))).sum(1),
    "dropped weights": lambda x, w: (x * F.dropout(w, 0.5)).sum(1),
    "noise on weights": lambda x, w: (x * (w + 9 * torch.randn_like(w))).sum(1),
    "one coin beside each row's": lambda x, w: (x * w * signs(1) * signs(len(x), 1)).sum(1),
    "a whole number drawn in place": lambda x, w: (x * w * (2.0 * torch.empty(1).random_(2) - 1)).sum(1),
    "a count": lambda x, w: (x * w * torch.binomial(torch.ones(1), torch.full((1,), 0.5))).sum(1),
    "an order of the rows": lambda x, w: (x * w * in_order(x)).sum(1),
}
OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, w: (x * w).sum(1),
    "a coin for every row": lambda x, w: (x * w * signs(len(x), 1)).sum(1),
    "dropout": lambda x, w: (F.dropout(x, 0.5) * w).sum(1),
    "noise and dropout": lambda x, w: (F.dropout(x + torch.randn_like(x), 0.5) * w * signs(len(x), 1)).sum(1),
}


def alone(module: nn.Module, rows: Any, loss: Any = None) -> bool:
    objective = Objective(module, loss or (lambda m, x: m(x)))
    return Probe.of(objective).trace(objective.parameters(), rows).alone


@pytest.mark.parametrize("name", SHARED)
def test_who_shares_chance_passes_alone(name: str) -> None:
    torch.manual_seed(0)
    assert alone(Product(SHARED[name]), torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("name", OWN)
def test_who_has_its_own_passes_with_others(name: str) -> None:
    torch.manual_seed(0)
    assert not alone(Product(OWN[name]), torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("name", ["one coin for all rows", "one number taken out"])
def test_each_row_has_a_coin_of_its_own(name: str) -> None:
    """All rows are alike: with one coin they add up to as many times one of them, one way or the other."""
    objective = Objective(Product(SHARED[name]), lambda m, x: m(x))
    rows = torch.zeros(ROWS, WIDTH)
    rows[:, 0] = 1.0
    sums = [float(clipped_sum(objective, objective.parameters(), rows, clip=Clip(1.0))["weight"][0]) for _ in range(8)]
    assert max(map(abs, sums)) < 0.8 * ROWS  # six standard deviations of 60 coins
    assert len(set(sums)) > 1


def test_ordinary_layers_in_training_mode_share_nothing() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 3, 8)
    norm = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).train()
    assert not alone(norm, rows, lambda m, x: m(x).flatten(1).square().sum(1))
    recurrent = nn.LSTM(8, 4, 2, batch_first=True, dropout=0.5).train()
    assert not alone(recurrent, rows, lambda m, x: m(x)[0].flatten(1).square().sum(1))


def test_a_coin_that_comes_later_is_seen_when_the_model_is_looked_at_again() -> None:
    """As a rate that grows with the steps does; at the 4th question, the 16th, and so on."""
    later = [False]
    module = Product(lambda x, w: (x * w * (signs(1, 1) if later[0] else 1.0)).sum(1))
    objective, rows = Objective(module, lambda m, x: m(x)), torch.randn(ROWS, WIDTH)
    probe, params = Probe.of(objective), objective.parameters()
    for _ in range(3):
        probe.check(params, rows)
    assert not probe.trace(params, rows).alone
    later[0] = True
    probe.check(params, rows)
    assert probe.trace(params, rows).alone


# ------------------------------------------------------------------------------------------------ augmentations


def flipped(batch: Tensor) -> Tensor:
    return batch.flip(-1) if float(torch.rand(())) < 0.5 else batch


def flipped_where(batch: Tensor) -> Tensor:
    return torch.where(torch.rand(1) < 0.5, batch.flip(-1), batch)


def half_flipped(batch: Tensor) -> Tensor:
    chosen = torch.randperm(len(batch))[: len(batch) // 2]
    out = batch.clone()
    out[chosen] = batch[chosen].flip(-1)
    return out


def flipped_by_python(batch: Tensor) -> Tensor:
    return batch.flip(-1) if random.random() < 0.5 else batch


def flipped_by_numpy(batch: Tensor) -> Tensor:
    return batch.flip(-1) if np.random.rand() < 0.5 else batch  # noqa: NPY002


@pytest.mark.parametrize("augment", [flipped, flipped_where, half_flipped, flipped_by_python, flipped_by_numpy])
def test_augmentations_that_share_a_coin_are_refused(augment: Any) -> None:
    with pytest.raises(InvalidArgument, match="rows share"):
        check_augment(augment, torch.rand(10, 3, 8, 8))


def test_they_are_refused_at_the_door_before_anything_is_charged() -> None:
    objective = Objective(nn.Sequential(nn.Flatten(), nn.Linear(12, 1)), lambda m, x: m(x)[:, 0])
    private = Private(torch.rand(20, 3, 2, 2), name="p", size=20, objective=objective, budget=Budget(5.0, 1e-5))
    private.plan(Planned(GradientSum, 2.0, private.everyone(), 2))
    with pytest.raises(InvalidArgument, match="rows share"):
        private.ask(GradientSum(objective.parameters(), Clip(1.0), augment=flipped))
    assert sum(line.answers for line in private.statement().asked) == 0


@pytest.mark.parametrize(
    "augment",
    [
        Augmentation(pad=2, flip=True, cutout=3),
        Chain(Augmentation(pad=1), AutoAugment(TRIVIAL), Augmentation(pad=0, flip=False, cutout=2)),
        partial(F.dropout, p=0.3),
        lambda batch: torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, batch.flip(-1), batch),
    ],
)
def test_ours_and_those_that_draw_for_every_row_are_not(augment: Any) -> None:
    check_augment(augment, torch.rand(10, 3, 8, 8))


def test_row_maps_that_draw_pass_their_rows_one_by_one() -> None:
    """A rare coin would come down on the same side in every trial."""

    def rarely(rows: Tensor) -> Tensor:
        return rows[:, 0] + (torch.rand(()) < 1e-9)

    assert not comes_out_alike(rarely, torch.zeros(1, 3), 32)
    assert comes_out_alike(lambda rows: rows[:, 0] + 1, torch.zeros(1, 3), 32)
