"""A map of private rows gives every row what it gives it alone: tried with made-up rows, watched on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.gradients.row_by_row import RowByRow, passes
from sfumato.gradients.watched import AT_ONCE, apart, comes_out_alike

NETWORK = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)).requires_grad_(False)
ULP = 2.0**-21  # a few units in the last place


def odd(x: Tensor) -> Tensor:
    return x * (1 + (torch.arange(len(x)) % 2) * ULP)


def the_last(x: Tensor) -> Tensor:
    return torch.cat([x[:-1], x[-1:] * (1 + ULP)])


def the_second_half(x: Tensor) -> Tensor:
    return x * (1 + (torch.arange(len(x)) >= len(x) // 2) * ULP)


def hidden(by: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (by(x[:, 0]) > 0.1).long()


@pytest.mark.parametrize("size", [2, 7, 64, AT_ONCE])
@pytest.mark.parametrize("by", [odd, the_last, the_second_half])
def test_what_rounds_by_place_is_seen_although_a_label_hides_it(by: Callable[[Tensor], Tensor], size: int) -> None:
    assert not comes_out_alike(hidden(by), torch.zeros(1, 3), size)
    assert comes_out_alike(hidden(torch.clone), torch.zeros(1, 3), size)


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: torch.from_numpy(np.exp(x.numpy()[:, 0])),
    "numpy on the way": lambda x: torch.where(torch.from_numpy(x.numpy()[:, 0] > 0.1), x[:, 1], x[:, 2]),
    "numpy in its place": lambda x: (np.exp(x.numpy(), out=np.asarray(x)), (x[:, 0] > 0.1).long())[1],
    "numpy by another name": lambda x: torch.from_numpy(np.asarray(x)[:, 0] > 0.1),
    "a list": lambda x: torch.tensor([float(v) for v in x[:, 0]]),
    "a list on the way": lambda x: x[:, 1] + torch.tensor([float(v) for v in x[:, 0]]),
    "some rows only": lambda x: torch.zeros(len(x)).masked_scatter(x[:, 0] > 0.1, x[:, 1][x[:, 0] > 0.1].exp()),
    "a mask that keeps all made-up rows": lambda x: torch.zeros(len(x)).index_put((k := x[:, 0] < 100,), x[k, 1].exp()),
    "a branch on a number": lambda x: x[:, 0].exp() if float(x.max()) < 50 else x[:, 0],
    "cut to the longest": lambda x: x[:, : int(x.abs().max()) % 2 + 1].sum(1),
    "as many classes as there are": lambda x: F.one_hot(x[:, 0].abs().long())[:, 0],
    "by all rows": lambda x: x[:, 0] / x.sum(),
    "an error": lambda x: x[:, 7],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_watched_is_not_trusted(name: str) -> None:
    assert not comes_out_alike(UNSEEN[name], torch.zeros(1, 3), 64)


WIDE = torch.arange(64.0)  # as many as rows pass: a constant all the same
SEEN: dict[str, tuple[Callable[[Any], Tensor], Any]] = {
    "labels": (lambda batch: batch[1], (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))),
    "one-hot": (lambda batch: F.one_hot(batch[1], 10), (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))),
    "by a table of integers": (lambda batch: NETWORK[0].weight[batch], torch.zeros(1, dtype=torch.long)),
    "where": (lambda x: torch.where(x[:, 0] > 0, x[:, 1], 0.0), torch.zeros(1, 3)),
    "masked": (lambda x: x.masked_fill(x > 0, 1.0)[:, 0], torch.zeros(1, 3)),
    "comparison": (lambda x: (x[:, 0] > 0.1).long(), torch.zeros(1, 3)),
    "the rows themselves": (lambda x: x, torch.zeros(1, 3)),
    "memory of its own": (lambda x: torch.zeros(len(x)).copy_(x[:, 0]).mul_(2), torch.zeros(1, 3)),
    "constants from outside": (lambda x: x - torch.from_numpy(np.ones(3, np.float32)), torch.zeros(1, 3)),
    "constants as wide as a pass": (lambda x: x @ WIDE, torch.zeros(1, 64)),
    "levels of grey": (lambda x: x.float().flatten(1).amax(1) / 255, torch.zeros(1, 1, 4, 4, dtype=torch.uint8)),
    "a table": (lambda x: torch.arange(10.0)[x], torch.zeros(1, dtype=torch.long)),
    "loss": (
        lambda batch: F.cross_entropy(batch[0], batch[1], reduction="none"),
        (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)),
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_maps_that_are_common_pass_together(name: str) -> None:
    row_map, schema = SEEN[name]
    assert comes_out_alike(row_map, schema, 64)


def test_a_trial_looks_at_no_row() -> None:
    seen: list[Tensor] = []
    comes_out_alike(lambda x: seen.append(x) or x, torch.full((5, 3), 123.0), 64)  # type: ignore[func-returns-value]
    assert seen
    assert not any(bool((x == 123.0).any()) for x in seen)


def test_a_trial_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    comes_out_alike(lambda x: x, torch.zeros(1, 3), 64)
    assert torch.equal(torch.get_rng_state(), before)


class Owner:
    pass


def test_who_asks_again_does_not_try_again() -> None:
    calls: list[int] = []
    owner = Owner()

    def one_pass(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    apart(owner, one_pass, torch.zeros(100, 3), 64)
    first = len(calls)
    apart(owner, one_pass, torch.zeros(200, 3), 64)
    assert calls[first:] == [64] * 4


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
def test_passes_have_one_shape_and_lose_no_row(count: int) -> None:
    rows = (torch.rand(count, 3), torch.arange(count))
    parts = list(passes(rows, 64))
    assert {len(x) for part in parts for x in part} == {64}
    assert torch.equal(torch.cat([y for _, y in parts])[:count], rows[1])
    assert torch.equal(RowByRow(lambda batch: batch[0], 64)(rows), rows[0])


def test_what_follows_is_given_the_rows_as_well_and_alone_is_alone() -> None:
    rows, sizes = (torch.rand(5, 3), torch.arange(5)), set()

    def one_pass(batch: Any) -> Tensor:
        sizes.add(len(batch[0]))
        return batch[0]

    followed = RowByRow(one_pass, 64).then(lambda found, batch: found[:, 0].long() + batch[1])
    assert torch.equal(followed(rows), torch.arange(5))
    assert torch.equal(followed.alone()(rows), torch.arange(5))
    assert sizes == {64, 1}
