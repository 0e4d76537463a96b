"""Samples that are not what was charged, and people with several rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from sfumato.audit.canary import flat
from sfumato.audit.doors import DELTA, SIZE, rows_objective
from sfumato.audit.sampler import axes, drawn_by, planned, sampler_audit
from sfumato.audit.sensitivity import Neighbours, sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.data.samplers import Poisson
from sfumato.gradients import Clip
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Mechanism
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Private
from sfumato.questions import GradientMean
from sfumato.sampled import Sampled
from tests.mutants.doors import PLENTY
from tests.mutants.mutant import Mutant

PRESENT, RATE, DRAWS = 12, 0.1, 300
UNION = 3 * PRESENT  # private and public rows together


class SkipsEmptyBatches(Private):
    """Draws again until somebody is there."""

    def _drawn(self, mechanism: Mechanism) -> Sampled:
        while not len(drawn := mechanism.sampler.draw(self._present, self._noise.sampling)):
            pass
        return self._sample(drawn, largest=mechanism.sampler.largest())


class PrivateLoaderAlone(Private):
    """Charged at B / (N_private + N_public), and the loader draws B of the private rows."""

    def _drawn(self, mechanism: Mechanism) -> Sampled:
        loader = Poisson(size=self._present, batch_size=mechanism.sampler.expected)
        return self._sample(loader.draw(self._present, self._noise.sampling), largest=mechanism.sampler.largest())


class SamplesBySeed(Private):
    """Batches of a generator with a fixed seed, as a loader's: who takes part is the same after every start."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rng = np.random.default_rng(0)

    def _drawn(self, mechanism: Mechanism) -> Sampled:
        return self._sample(mechanism.sampler.draw(self._present, self._rng), largest=mechanism.sampler.largest())


def by_draws(private: type[Private], size: int = PRESENT) -> list[Verdict]:
    batch = RATE * size
    door = private(axes(PRESENT), name="mutant", size=size, budget=Budget(PLENTY, DELTA))
    door.plan(planned(batch, door, DRAWS))
    draw = drawn_by(door, present=PRESENT, batch=batch)
    return sampler_audit(draw, present=PRESENT, rate=RATE, name=private.__name__, draws=DRAWS)


def by_draws_after_a_resume(private: type[Private]) -> list[Verdict]:
    """Those before a crash and those after it take turns, so that "successive draws" compares them."""
    half, batch = DRAWS // 2, RATE * PRESENT
    found = []
    with TemporaryDirectory() as folder:
        for again in (False, True):
            path = Path(folder) / "ledger.db"
            door = private(axes(PRESENT), name="mutant", size=PRESENT, ledger=path, budget=Budget(PLENTY, DELTA))
            if again:
                door.resume("training")
            else:  # many more than are asked: those that may have left before the crash stay counted
                door.plan(planned(batch, door, 20 * half), resume_key="training")
            draw = drawn_by(door, present=PRESENT, batch=batch)
            found.append([draw() for _ in range(half)])
    turns = iter([one for both in zip(*found, strict=True) for one in both])
    return sampler_audit(lambda: next(turns), present=PRESENT, rate=RATE, name=private.__name__, draws=DRAWS)


# ------------------------------------------------------------------------------------------------ users

Terms = Callable[[Any], dict[str, Any]]
"""Whose row each is -> what the door is told about that."""


def of_users(users: Any) -> dict[str, Any]:
    return {"unit": "user", "users": users}


def users_as_rows(users: Any) -> dict[str, Any]:
    """Rows are clipped and counted one by one, and people are promised what rows are."""
    return {}


def by_people(terms: Terms) -> list[Verdict]:
    """One person more or less, who has four rows."""
    objective = rows_objective()
    crowd = torch.zeros(6, 24, dtype=torch.float64)
    newcomer = (9.0 * torch.eye(24, dtype=torch.float64)[:1]).repeat(4, 1)
    whose = [0, 0, 1, 1, 2, 2, 7, 7, 7, 7]

    def answer(rows: Any) -> Any:
        private = Private(
            rows,
            name="mutant",
            size=SIZE,
            objective=objective,
            budget=Budget(PLENTY, DELTA),
            seed=NotPrivateSeed(3),
            **terms(np.array(whose[: len(rows)])),
        )
        question = GradientMean(objective.parameters(), Clip(1.0))
        return flat([private.ask(question, noise=0.02, sampler=private.everyone())])

    pairs = [Neighbours(name="a person of four rows", one=crowd, other=torch.cat([crowd, newcomer]))]
    return [sensitivity(answer, pairs, claimed=1.0 / SIZE, name=terms.__name__)]


MUTANTS = (
    Mutant(
        name="M3",
        wrong="empty batches are skipped",
        right=Private,
        broken=SkipsEmptyBatches,
        audits=by_draws,
    ),
    Mutant(
        name="M14",
        wrong="charged for the rate in the union, and the loader draws private rows alone",
        right=Private,
        broken=PrivateLoaderAlone,
        audits=partial(by_draws, size=UNION),
    ),
    Mutant(
        name="M25",
        wrong="the same batches again after a resume",
        right=Private,
        broken=SamplesBySeed,
        audits=by_draws_after_a_resume,
    ),
    Mutant(
        name="M26",
        wrong="people are counted as rows",
        right=of_users,
        broken=users_as_rows,
        audits=by_people,
    ),
)
