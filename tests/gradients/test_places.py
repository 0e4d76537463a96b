"""Where a row lies in its batch: kernels may round by that, and at a kink that is worth a clip norm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato import Clip, Objective, cross_entropy
from sfumato.gradients import Performance
from sfumato.gradients.engine import clipped_sum
from sfumato.gradients.probed_rows import jittered
from tests.gradients import layers
from tests.gradients.places import MADE_UP, alike

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


def moved(module: nn.Module, rows: Tensor, performance: Performance) -> float:
    """By how many clip norms the sum moves when the row in front of all others leaves."""
    objective, labels = Objective(module, cross_entropy), torch.zeros(len(rows), dtype=torch.long)

    def total(first: int) -> Tensor:
        batch = (rows[first:].clone(), labels[first:])
        options: dict[str, Any] = {"clip": Clip(1.0), "largest": len(rows), "performance": performance}
        found = clipped_sum(objective, objective.parameters(), batch, **options)
        return torch.cat([t.double().flatten() for t in found.values()])

    return float((total(0) - total(1)).norm())


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="matrices are multiplied by another library")
@pytest.mark.parametrize("micro_batch", [None, 1, 64, ROWS])
def test_a_row_that_leaves_moves_nobody_elses_gradient(micro_batch: int | None) -> None:
    torch.manual_seed(1)
    assert moved(Scored(), crafted(), Performance(micro_batch=micro_batch)) <= 1 + 1e-6


@pytest.mark.parametrize("own", [None, "COMPATIBLE"])
def test_the_library_for_matrices_is_asked_to_round_alike_unless_it_was_told_otherwise(own: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment |= {} if own is None else {"MKL_CBWR": own}
    said = "import os, sfumato; print(os.environ['MKL_CBWR'])"
    out = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == (own or "AUTO,STRICT")


# ------------------------------------------------------------------------------------------------ every layer


def odd(places: Tensor, h: Tensor) -> Tensor:
    return (places % 2 == 1).expand_as(h)


def odd_and_hidden(places: Tensor, h: Tensor) -> Tensor:
    """Only what the ReLU that follows makes zero of anyway."""
    return odd(places, h) & (h < 0)


def in_large_batches(places: Tensor, h: Tensor) -> Tensor:
    return torch.full_like(h, len(h) >= 64, dtype=torch.bool)


class Rounded(nn.Module):
    """A kernel that rounds by place, by a few units in the last place."""

    def __init__(self, by: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.by = nn.Linear(6, 8), nn.Linear(8, 3), by

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * (1 + self.by(torch.arange(len(h))[:, None], h.detach()) * 2.0**-21)
        out: Tensor = self.head(torch.relu(h))
        return out


@pytest.mark.parametrize("by", [odd, odd_and_hidden, in_large_batches])
def test_what_rounds_by_place_is_seen(by: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(MADE_UP, 6), torch.arange(MADE_UP) % 3)
    assert not all(alike(Objective(Rounded(by), cross_entropy), rows, (64, 32)))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="matrices are multiplied by another library")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", layers.TABLE)
def test_rows_come_out_of_all_places_alike(name: str) -> None:
    """In sizes of micro-batches that samples are cut into, and the same in all of them."""
    objective, batch = layers.make(name, torch.float32)
    rows = jittered(tree_map(lambda t: torch.cat([t, t])[:MADE_UP] if isinstance(t, Tensor) else t, batch), 0)
    found = alike(objective, rows, (96, 64, 32))
    assert all(found)
    assert len(found) > 2


@pytest.mark.parametrize("micro_batch", [None, 20, 64])
@pytest.mark.parametrize("count", [1, 31, 33, 64, 100])
def test_shapes_are_of_a_few_declared_sizes(count: int, micro_batch: int | None) -> None:
    """How many rows were drawn decides how many passes there are, and which multiple of 32 the last one has."""
    sizes: set[int] = set()

    def seen(module: nn.Module, batch: Any) -> Tensor:
        sizes.add(len(batch[0]))
        return cross_entropy(module, batch)

    objective, rows = Objective(nn.Linear(6, 3), seen), (torch.randn(count, 6), torch.arange(count) % 3)
    options: dict[str, Any] = {"largest": 70, "performance": Performance(micro_batch=micro_batch)}
    clipped_sum(objective, objective.parameters(), rows, clip=Clip(1.0), **options)
    sizes.clear()  # the probe's
    clipped_sum(objective, objective.parameters(), rows, clip=Clip(1.0), **options)
    assert sizes <= ({20} if micro_batch == 20 else {32, 64} if micro_batch == 64 else {32, 64, 96})


# ------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_decided_by_the_last_bits_of_a_norm(dtype: torch.dtype) -> None:
    """Norms are rounded by place, too: from all to nothing, before squares overflow, it goes little by little."""

    class Itself(nn.Module):
        """A row is its own gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    objective = Objective(Itself(), lambda module, x: module(x))
    largest = 0.25 * torch.finfo(dtype).max ** 0.5

    def length(norm: float) -> float:
        rows = torch.tensor([[norm, 0.0, 0.0]], dtype=dtype)
        return float(clipped_sum(objective, objective.parameters(), rows, clip=Clip(1.0))["w"].norm())

    sizes = torch.cat([torch.linspace(0.4, 1.1, 141), torch.tensor([2.0, 3.9, 4.1, 1e3])])
    found = [length(float(s) * largest) for s in sizes]
    assert found[0] == pytest.approx(1.0, rel=1e-5)
    assert found[-1] == 0.0
    assert max(abs(a - b) for a, b in pairwise(found)) < 0.02
