"""Ledgers that say less than was spent: before, after and beside the answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats

from sfumato.audit.doors import open_door, rows_objective
from sfumato.audit.ledger import ledger_audit
from sfumato.audit.noise import noise_audit, resumed_noise
from sfumato.audit.verdict import Verdict
from sfumato.data.samplers import Poisson
from sfumato.erm.budgets import TruncatedAllowance, truncated_filter
from sfumato.privacy import tcdp
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency
from sfumato.privacy.repetitions import Repetitions
from sfumato.private import Planned, Private
from sfumato.questions import NoisyMean, Question
from sfumato.tuning import Candidate, Trial, tune
from tests.mutants.doors import PLENTY
from tests.mutants.mutant import Mutant

# ------------------------------------------------------------------------------------------------ noise, ledger


def replayed(objective: Any, rows: Any, noise: float, times: int, folder: Path) -> Any:
    """The generator's state is kept in the checkpoint: after a resume other batches get the same noise."""
    return [open_door(objective, rows, noise, times, seed=3) for _ in ("before", "after")]


def by_noise_after_a_resume(resume: Any) -> list[Verdict]:
    width = 400
    nobody = torch.zeros(0, width, dtype=torch.float64)
    noises = resumed_noise(rows_objective(width), nobody, noise=1.0, steps=2, resume=resume)
    return noise_audit(noises, noise=1.0, name="door", about="a resume")


def charges_afterwards(path: Path, again: bool) -> Any:
    """Answers are written down when the training is over: a crash comes first, and what follows begins at nothing."""
    rows, budget = torch.zeros(3, 1, dtype=torch.float64), Budget(1e4, 1e-6)
    private = Private(rows, name="audit", size=1000, ledger=path if again else None, budget=budget)
    private.plan(Planned(NoisyMean, 1.0, private.poisson(100.0), 3))
    return private


def by_ledger(opened: Any) -> list[Verdict]:
    return ledger_audit(name="ledger", steps=6, opened=opened)


# ------------------------------------------------------------------------------------------------ PPSGD

PEOPLE, BATCH = 10_000, 64
PROMISED = Budget(0.5, 1e-6)


class Uncapped(TruncatedAllowance):
    """Paper 001, footnote 3: Theorem 4's conditions are left to the reader, and no step is too large for it."""

    def __init__(self, private: Private, kind: type[Question], sampler: Any, *, budget: Budget, steps: int) -> None:
        q, total = BATCH / PEOPLE, tcdp.budget(budget.epsilon, budget.delta)
        enough = tcdp.minimum_steps(total, q)
        super().__init__(private, kind, sampler, budget=budget, steps=enough)
        self.noise = tcdp.gaussian_noise(total.rho / steps / (13 * q**2), sensitivity=2.0)  # equation (4), unchecked

    def share(self, noise: float) -> float:
        return float(13 * self._q**2 * 2 / noise**2 / self._total.rho)


def by_ledger_of_ppsgd(made: tuple[type[TruncatedAllowance], int]) -> list[Verdict]:
    """The answers of an allowance, against the budget that it says to keep.

    It replaces one of all rows; if that row's neighbour is zero and so are all others, its answers are those of a
    sampled Gaussian under add/remove: what these cost at the least, replacement costs at the least, too.
    """
    kind, steps = made
    private = Private(
        torch.zeros(PEOPLE, 1, dtype=torch.float64),
        name="audit",
        adjacency=Adjacency.REPLACE_ONE,
        budget=Budget(PLENTY, PROMISED.delta),  # the ledger's own account would refuse it
        filter=truncated_filter(PROMISED),
    )
    with kind(private, NoisyMean, private.fixed(BATCH), budget=PROMISED, steps=steps) as allowance:
        told = SimpleNamespace(
            ask=lambda question: allowance.ask(question, allowance.noise),
            statement=lambda: SimpleNamespace(epsilon=allowance.epsilon),
        )
        return ledger_audit(
            name=kind.__name__,
            noise=allowance.noise,
            steps=steps,
            sampler=Poisson(size=PEOPLE, batch_size=float(BATCH)),
            opened=lambda path, again: told,
        )


def _enough_steps() -> int:
    return tcdp.minimum_steps(tcdp.budget(PROMISED.epsilon, PROMISED.delta), BATCH / PEOPLE)


# ------------------------------------------------------------------------------------------------ search

TRIALS, NOISE, SEARCH_DELTA = 10, 2.0, 1e-5
ROWS = torch.zeros(4, 1, dtype=torch.float64)
Law = tuple[tuple[int, float], ...]
Search = Callable[[Private, list[Candidate]], Law]


def scored(options: Any, private: Private) -> Trial[None]:
    """A trial that is nothing but its score."""
    private.plan(Planned(NoisyMean, NOISE, private.everyone()))
    return Trial(score=float(private.ask(NoisyMean(lambda rows: rows, bound=1.0))), outcome=None)


def random_search(private: Private, options: list[Candidate]) -> Law:
    law = Repetitions(mean=float(TRIALS))
    tune(options, private=private, trial=scored, repetitions=law)
    return tuple(islice(law.probabilities(), 3000))


def pays_for_the_best_alone(private: Private, options: list[Candidate]) -> Law:
    """Ten trainings, of which the best is released and charged: the others "were never published"."""
    scratch = Private(ROWS, name="scratch", size=len(ROWS), budget=Budget(PLENTY, SEARCH_DELTA))
    found = [scored({}, scratch) for _ in range(TRIALS - 1)]
    found.append(scored({}, private))
    assert len({one.score for one in found}) >= TRIALS - 1  # they are trials of their own, on a grid
    return ((TRIALS, 1.0),)


@lru_cache(maxsize=8)
def least_cost_of_the_best(law: Law, mu: float, delta: float) -> float:
    """A lower bound on epsilon, from one event: that the best of K scores, each N(present * mu, 1), is below t."""
    numbers, weights = (np.array(part, dtype=np.float64) for part in zip(*law, strict=True))
    t = np.linspace(-6.0, 8.0, 4000)[:, None]
    without, present = ((weights * np.exp(numbers * stats.norm.logcdf(t - m))).sum(1) for m in (0.0, mu))
    pairs = ((without, present), (1 - present, 1 - without))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [np.log((often - delta) / rarely)[(often > delta) & (rarely > 1e-12)] for often, rarely in pairs]
    return max(0.0, *(float(part.max(initial=-math.inf)) for part in ratios))


def by_cost_of_the_best(search: Search) -> list[Verdict]:
    private = Private(ROWS, name="audit", size=len(ROWS), budget=Budget(100.0, SEARCH_DELTA))
    asked = private._mechanism(Planned(NoisyMean, NOISE, private.everyone()))
    law = search(private, [Candidate(options={}, asks=(asked,))])
    return [
        Verdict(
            method=search.__name__,
            audit="ledger, the best of several",
            claimed=private.statement().epsilon,
            lower_bound=least_cost_of_the_best(law, 1 / NOISE, SEARCH_DELTA),
            confidence=1.0,
            trials=1,
        )
    ]


MUTANTS = (
    Mutant(
        name="M13",
        wrong="the same noise again after a resume",
        right=None,
        broken=replayed,
        audits=by_noise_after_a_resume,
    ),
    Mutant(
        name="M15",
        wrong="PPSGD without the condition on the order",
        right=(TruncatedAllowance, _enough_steps()),
        broken=(Uncapped, 2),
        audits=by_ledger_of_ppsgd,
    ),
    Mutant(
        name="M27",
        wrong="charged after the answers, which a crash forgets",
        right=None,
        broken=charges_afterwards,
        audits=by_ledger,
    ),
    Mutant(
        name="M28",
        wrong="a search that pays for its best trial alone",
        right=random_search,
        broken=pays_for_the_best_alone,
        audits=by_cost_of_the_best,
    ),
)
