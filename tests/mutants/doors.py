"""The real door, with one part exchanged: the question that is asked, or the door itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.method import Ask, Method, StatefulMethod
from sfumato.audit.doors import DELTA, SIZE, adversaries, rows_objective
from sfumato.audit.noise import noise_audit, pure_noise
from sfumato.audit.sensitivity import method_sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.data.samplers import FullBatch, Poisson, Sampler
from sfumato.privacy.budget import Budget
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.questions import GradientMean

PLENTY = 1e9  # of epsilon: what is spent is not the question here

TELLING = (  # of all adversaries those that find the most, so that this is fast
    "a huge row in all layers among nobody",
    "a long row along the public ones among nobody",
    "a row of NaN among nobody",
    "a huge row among people without gradient",
    "a long row against the public ones among people like the public rows",
)


def asked_as(question: type[GradientMean] = GradientMean, private: type[Private] = Private) -> Any:
    """A door like `open_door`, which answers every question about gradients as another kind of question."""

    def opened(
        objective: Any,
        rows: Any,
        noise: float,
        times: int,
        *,
        seed: int | None = None,
        size: int = SIZE,
        batch: float | None = None,
    ) -> Ask:
        sampler: Sampler = FullBatch(size=size) if batch is None else Poisson(size=size, batch_size=batch)
        door = private(
            rows,
            name="mutant",
            size=size,
            objective=objective,
            budget=Budget(PLENTY, DELTA / size),
            seed=None if seed is None else NotPrivateSeed(seed),
        )
        door.plan(Planned(question, noise, sampler, times))
        return lambda q: door.ask(question(q.params, q.clip, q.views, q.augment, q.offsets))

    return opened


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method, and the question that its answers are answers to."""

    method: Method | StatefulMethod
    question: type[GradientMean] = GradientMean
    clip: float = 1.0


def by_neighbours_and_noise(way: Way) -> list[Verdict]:
    """One answer each about a few pairs of neighbours, and four about nobody."""
    door = asked_as(way.question)
    among = [world for world in adversaries() if world.name in TELLING]
    width, noise = 400, 1.0
    nobody = torch.zeros(0, width, dtype=torch.float64)
    name = way.question.__name__
    return [
        method_sensitivity(way.method, name=name, clip=way.clip, among=among, door=door),
        *noise_audit(
            pure_noise(rows_objective(width), nobody, noise=noise, steps=4, door=door), noise=noise, name=name
        ),
    ]
