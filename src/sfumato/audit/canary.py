"""The white-box canary: one step of a method, asked again and again with and without one person's row.

The attacker knows everything but that row: weights, the other rows, the public ones. It sees the update. The noise is
Gaussian and everybody takes part, so that no amplification hides a leak: the step claims mu = 1 / noise multiplier, and
what the attack proves is compared with that. The data sets are those in which known leaks show, since a mean over
typical others hides a leak that is infinite without them: nobody else there, others without gradient, others along the
public gradient. Little noise, which claims a large mu, shows a wrong factor with the fewest trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.algorithms.method import Ask, Method, StatefulMethod, algorithm
from sfumato.audit.bounds import Scores, epsilon_of_mu, mu_lower_bound, split
from sfumato.audit.verdict import Verdict
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.objective import Batch, Objective
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean

WIDTH = 24
_SIZE = 8  # declared number of people; who is there is not told
_DELTA = 1e-5


class Rows(nn.Module):
    """A model in which a row is its own gradient: loss(row) = <row, w>."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.w


def inner_product(module: nn.Module, batch: Batch) -> Tensor:
    values: Tensor = module(batch)
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A data set, and the row of the person who may be in it or not."""

    name: str
    others: Tensor  # (rows, width)
    canary: Tensor  # (width,)
    public: Tensor  # (rows, width)


Door = Callable[[Objective, Tensor, float, int], Ask]
"""(objective, private rows, noise multiplier, how many answers) -> ask"""


def open_door(objective: Objective, rows: Tensor, noise: float, times: int) -> Ask:
    """The real one: answers are planned, charged and drawn as for any user."""
    everyone = Mechanism(
        question=GradientMean.kind(),
        noise=Gaussian(noise),
        sampler=Private(rows[:0], name="size", size=_SIZE, budget=Budget(1.0, _DELTA)).everyone(),
        times=times,
    )
    cost = accounting.epsilon([everyone], delta=_DELTA, adjacency=Adjacency.ADD_REMOVE, tolerance=0.1).epsilon
    budget = Budget(1.01 * cost + 0.1, _DELTA)
    private = Private(rows, name="audit", size=_SIZE, objective=objective, budget=budget)
    private.plan(Planned(GradientMean, noise, private.everyone(), times))
    return private.ask


def worlds(width: int = WIDTH) -> list[World]:
    """Where leaks show: alone, among people without gradient, among people who are like the public rows."""
    first, second = torch.eye(width, dtype=torch.float64)[:2]
    public = (0.9 * first).repeat(6, 1)
    still = torch.zeros(_SIZE - 1, width, dtype=torch.float64)
    return [
        World(name="alone, far", others=still[:0], canary=50.0 * second, public=public),
        World(name="alone, along the public rows", others=still[:0], canary=5.0 * first, public=public),
        World(name="alone, against the public rows", others=still[:0], canary=-5.0 * first, public=public),
        World(name="among people without gradient", others=still, canary=second, public=public),
        World(
            name="among people like the public rows",
            others=public[:1].repeat(_SIZE - 1, 1),
            canary=-first,
            public=public,
        ),
    ]


def white_box(
    method: Method | StatefulMethod,
    *,
    name: str,
    noise: float = 0.5,
    trials: int = 600,
    confidence: float = 1 - 1e-6,
    among: Sequence[World] | None = None,
    door: Door = open_door,
) -> list[Verdict]:
    """One verdict per world: what an attacker who sees `trials` updates with the row and as many without proves.

    >>> from functools import partial
    >>> from sfumato.algorithms.dp_sgd import dp_sgd
    >>> found = white_box(partial(dp_sgd, clip=1.0), name="dp_sgd", trials=60)
    >>> [verdict.holds for verdict in found]
    [True, True, True, True, True]
    """
    if trials < 12:
        raise InvalidArgument(f"trials={trials} is too few: an attack learns from the first of them, so give some 600.")
    tried = worlds() if among is None else list(among)
    each = 1 - (1 - confidence) / len(tried)
    return [_verdict(method, world, name, noise, trials, each, door) for world in tried]


def _verdict(
    method: Method | StatefulMethod, world: World, name: str, noise: float, trials: int, confidence: float, door: Door
) -> Verdict:
    outs = updates(method, world, world.others, noise, trials, door)
    ins = updates(method, world, torch.cat([world.others, world.canary[None]]), noise, trials, door)
    mu = mu_lower_bound(split(*_scores(outs, ins), share=0.25), confidence=confidence)
    return Verdict(
        method=name,
        audit=f"canary, {world.name}",
        claimed=epsilon_of_mu(1 / noise, _DELTA),
        lower_bound=epsilon_of_mu(mu, _DELTA),
        confidence=confidence,
        trials=trials,
    )


def updates(
    method: Method | StatefulMethod, world: World, rows: Tensor, noise: float, trials: int, door: Door
) -> Scores:
    """(trials, width): first updates from the same weights."""
    objective = Objective(Rows(world.public.shape[1]), inner_product)
    way, ask = algorithm(method), door(objective, rows, noise, trials)
    params: Mapping[str, Tensor] = objective.parameters()
    found = []
    for trial in range(trials):
        public = Public(world.public, objective=objective, seed=trial)
        update, _ = way.step(way.init(params), params, public, ask)
        found.append(_flat(update))
    return np.stack(found)


def _scores(outs: Scores, ins: Scores) -> tuple[Scores, Scores]:
    """Along the direction in which the means differ on a sixth of the trials; the others are scored."""
    some = max(1, len(outs) // 6)
    towards = ins[:some].mean(0) - outs[:some].mean(0)
    return outs[some:] @ towards, ins[some:] @ towards


def _flat(update: Gradient) -> Any:
    return torch.cat([t.detach().double().flatten() for t in update.values()]).cpu().numpy()
