"""What audits ask, and through which door: a model whose rows are their own gradients, and data sets where leaks show.

Everything under audit is an argument, so that a broken one can stand in its place: a `Door` is whatever answers
questions about rows. `open_door` is the real one. Noise cannot be switched off there. It need not be: with
`NotPrivateSeed` two neighbours get the same noise, sample and views, and the answers differ by what the people do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sfumato.algorithms.method import Ask
from sfumato.data.samplers import FullBatch, Poisson, Sampler
from sfumato.distributed import Processes
from sfumato.objective import Batch, Objective
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.questions import GradientMean

WIDTH = 24
SIZE = 8  # declared number of people; who is there is not told
DELTA = 1e-5


class Rows(nn.Module):
    """A model in which a row is its own gradient: loss(row) = <row, (w, v)>. Two layers, so that each can be wrong."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width - width // 3, dtype=torch.float64))
        self.v = nn.Parameter(torch.zeros(width // 3, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ torch.cat([self.w, self.v])


def inner_product(module: nn.Module, batch: Batch) -> Tensor:
    values: Tensor = module(batch)
    return values


def rows_objective(width: int = WIDTH) -> Objective:
    return Objective(Rows(width), inner_product)


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A data set, and the row of the person who may be in it or not."""

    name: str
    others: Tensor  # (rows, width)
    canary: Tensor  # (width,)
    public: Tensor  # (rows, width)

    @property
    def everybody(self) -> Tensor:
        return torch.cat([self.others, self.canary[None]])


Door = Callable[[Objective, Batch, float, int], Ask]
"""(objective, private rows, noise multiplier, how many answers) -> ask"""


class SeededDoor(Protocol):
    """A door that draws the same noise again for the same seed, by whatever generator."""

    def __call__(self, objective: Objective, rows: Batch, noise: float, times: int, *, seed: int) -> Ask: ...


def open_door(
    objective: Objective,
    rows: Batch,
    noise: float,
    times: int,
    *,
    seed: int | None = None,
    size: int = SIZE,
    batch: float | None = None,
    ledger: Any = None,
    processes: Processes | None = None,
) -> Ask:
    """The real one: answers are planned, charged and drawn as for any user. `batch` samples by Poisson's law.

    With `processes` every one of them opens its own door, to its own rows, and gets the answer of all.
    """
    sampler: Sampler = FullBatch(size=size) if batch is None else Poisson(size=size, batch_size=batch)
    private = Private(
        rows,
        name="audit",
        size=size,
        objective=objective,
        budget=Budget(1.01 * _cost(sampler, noise, times) + 0.1, DELTA / size),
        seed=None if seed is None else NotPrivateSeed(seed),
        ledger=ledger,
        processes=processes,
    )
    private.plan(Planned(GradientMean, noise, sampler, times))
    return private.ask


@lru_cache(maxsize=64)
def _cost(sampler: Sampler, noise: float, times: int) -> float:
    planned = Mechanism(question=GradientMean.kind(), noise=Gaussian(noise), sampler=sampler, times=times)
    delta = DELTA / sampler.size
    return accounting.epsilon([planned], delta=delta, adjacency=Adjacency.ADD_REMOVE, tolerance=0.1).epsilon


def worlds(width: int = WIDTH) -> list[World]:
    """Where leaks show: alone, among people without gradient, among people who are like the public rows."""
    first, second = torch.eye(width, dtype=torch.float64)[:2]
    public = (0.9 * first).repeat(6, 1)
    still = torch.zeros(SIZE - 1, width, dtype=torch.float64)
    return [
        World(name="alone, far", others=still[:0], canary=50.0 * second, public=public),
        World(name="alone, along the public rows", others=still[:0], canary=5.0 * first, public=public),
        World(name="alone, against the public rows", others=still[:0], canary=-5.0 * first, public=public),
        World(name="among people without gradient", others=still, canary=second, public=public),
        World(
            name="among people like the public rows",
            others=public[:1].repeat(SIZE - 1, 1),
            canary=-first,
            public=public,
        ),
    ]


def adversaries(width: int = WIDTH) -> list[World]:
    """Who stretches a bound the most: everyone of `worlds`, met by rows that are zero, huge, aligned or no numbers."""
    unit = torch.eye(width, dtype=torch.float64)
    first, last = unit[0], unit[-1]
    public = (0.9 * first + 0.1 * last).repeat(6, 1)
    still = torch.zeros(SIZE - 1, width, dtype=torch.float64)
    crowds = {"nobody": still[:0], "people without gradient": still, "people like the public rows": public[:1] * 7.0}
    crowds["people like the public rows"] = crowds["people like the public rows"].repeat(SIZE - 1, 1)
    rows = {
        "a zero row": 0 * first,
        "a huge row": 1e6 * unit[1],
        "a huge row downwards": -1e6 * unit[2],
        "a huge row in all layers": 1e6 * (first + last),
        "a row like the public ones": public[0],
        "a long row along the public ones": 50.0 * public[0],
        "a long row against the public ones": -50.0 * public[0],
        "a row of NaN": torch.full((width,), torch.nan, dtype=torch.float64),
        "an infinite row": torch.full((width,), torch.inf, dtype=torch.float64),
        "a row with one infinity": torch.where(first > 0, -torch.inf, first),
    }
    return [
        World(name=f"{row} among {crowd}", others=others, canary=canary, public=public)
        for crowd, others in crowds.items()
        for row, canary in rows.items()
    ]
