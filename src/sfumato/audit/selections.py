"""Counts and Gram matrices of private rows: what selection asks, by neighbours and by counting.

Private rows here are points; the model that embeds them is the identity, so a point votes for the nearest public one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.algorithms.method import Ask
from sfumato.audit.conversation import conversation
from sfumato.audit.counts import counts_audit
from sfumato.audit.doors import DELTA
from sfumato.audit.sensitivity import Neighbours, question_sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, DiscreteLaplace, Gaussian
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import Gram, Question
from sfumato.selection import NearPrivate, Released, Threshold, TopK

BINS = 4
_SCALE = 1.0  # of the Laplace noise, in units of what one person can change: epsilon is 1


def vote(rows: Tensor) -> Tensor:
    """A row is (how uncertain, for which bin)."""
    return rows


def votes(voters: Threshold | TopK) -> Question:
    """The question that counts the votes of such rows."""
    return voters.of(vote, BINS)


def electorates() -> list[Neighbours]:
    """One row more, of every kind: certain, uncertain, of a bin that is full or empty, without vote, no number."""
    crowd = torch.tensor([[0.1 * i, i % (BINS - 1)] for i in range(8)], dtype=torch.float64)
    newcomers = [(9.0, 3.0), (9.0, 0.0), (-9.0, 1.0), (0.35, 2.0), (9.0, -1.0), (9.0, 1e6), (torch.nan, 1.0)]
    return [
        Neighbours(
            name=f"the row {row} among {len(others)}",
            one=others,
            other=torch.cat([others, torch.tensor([row], dtype=torch.float64)]),
        )
        for others in (crowd[:0], crowd)
        for row in newcomers
    ]


def votes_sensitivity(voters: Threshold | TopK, *, name: str) -> list[Verdict]:
    """How far one row moves the counts in L1, if it comes, and if it is exchanged for another."""
    added = electorates()
    exchanged = [
        Neighbours(name=f"{a.name} for another", one=a.other, other=b.other)
        for a in added
        for b in added
        if a is not b and len(a.other) == len(b.other) > 1
    ]
    ask = partial(question_sensitivity, lambda _: votes(voters), name=name, order=1)
    return [ask(added), ask(exchanged, adjacency=Adjacency.REPLACE_ONE)]


def votes_audit(voters: Threshold | TopK, *, name: str, trials: int = 3000) -> Verdict:
    """The plain audit of noisy counts: a newcomer who has a vote, and who among top-k voters takes one from another."""
    moved = [-1, 1, 0, 0] if isinstance(voters, TopK) else [0, 1, 0, 0]
    crowd = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    newcomer = torch.tensor([[2.0, 1.0]], dtype=torch.float64)

    def counts(present: bool, times: int) -> Any:
        rows = torch.cat([crowd, newcomer]) if present else crowd
        private = Private(rows, name="audit", size=4, budget=Budget(1e6, DELTA))
        private.plan(Planned(voters.question, DiscreteLaplace(_SCALE), private.everyone(), times))
        return np.stack([private.ask(votes(voters)).numpy() for _ in range(times)])

    return counts_audit(counts, towards=moved, epsilon=1 / _SCALE, name=name, trials=trials)


def gram_sensitivity(*, name: str, width: int = 4, question: type[Gram] = Gram) -> list[Verdict]:
    """How far one row moves the Gram matrix of clipped rows, in Frobenius norm."""
    unit = torch.eye(width, dtype=torch.float64)
    crowd = torch.cat([unit, -3 * unit, torch.ones(1, width, dtype=torch.float64)])
    rows = [unit[0], 1e6 * unit[1], -1e6 * unit.sum(0), 0 * unit[0], torch.nan * unit[0], torch.inf * unit.sum(0)]
    added = [
        Neighbours(name=f"row {i} among {len(others)}", one=others, other=torch.cat([others, row[None]]))
        for others in (crowd[:0], crowd)
        for i, row in enumerate(rows)
    ]
    exchanged = [
        Neighbours(name=f"{a.name} for {b.name}", one=a.other, other=b.other) for a in added[6:] for b in added[6:]
    ]
    ask = partial(question_sensitivity, lambda _: question(lambda part: part, 1.0, width), name=name)
    return [ask(added), ask(exchanged, adjacency=Adjacency.REPLACE_ONE)]


def near_private_conversation(voters: Threshold | TopK, *, name: str) -> list[Verdict]:
    """The whole of NearPrivate, about people with and without one who lies far out: a mean of theirs would move all."""
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])  # sure of points far along the first axis
    model = nn.Sequential(layer)
    pool = torch.rand(30, 3, generator=draws) - 0.5
    crowd = torch.rand(40, 3, generator=draws) - 0.5
    far = torch.tensor([[0.0, 60.0, -60.0]])
    strategy = NearPrivate(components=2, voters=voters, uncertain=3.0)

    def talk(ask: Ask) -> None:
        strategy(Released(model), Public(pool, seed=0), 4, ask)

    def opened(rows: Tensor) -> Ask:
        private = Private(rows, name="audit", size=41, budget=Budget(1e6, DELTA), seed=NotPrivateSeed(3))
        private.plan(*strategy.lines(private, pca=Gaussian(0.02), support=DiscreteLaplace(0.1)))
        return private.ask

    return conversation(talk, opened(crowd), opened(torch.cat([crowd, far])), size=41, name=name)
