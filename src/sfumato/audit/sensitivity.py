"""Sensitivity by neighbours: two data sets that differ by one person, the same noise, and how far the answers differ.

The door is the real one, with noise that repeats, so it cancels in the difference; what is left of it is the rounding
to the noise's grid, far below the tolerance. Nothing is left to chance: one pair of data sets beyond the bound is a
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sfumato.algorithms.method import Method, StatefulMethod
from sfumato.audit.canary import flat, step_by_step
from sfumato.audit.doors import DELTA, SIZE, SeededDoor, World, adversaries, open_door, rows_objective
from sfumato.audit.verdict import Verdict
from sfumato.generators import own_generators
from sfumato.objective import Batch
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Private
from sfumato.public import Public
from sfumato.questions import Question, Sealed

TOLERANCE = 1e-6
_NOISE = 0.02  # little, so that its grid, std / 2^20, is finer than the tolerance
_SEED = 11


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """Two data sets that differ by one person."""

    name: str
    one: Any
    other: Any


def sensitivity(
    answer: Callable[[Any], Any],
    pairs: Iterable[Neighbours],
    *,
    claimed: float,
    name: str,
    audit: str = "sensitivity",
    order: int = 2,
) -> Verdict:
    """How far answers about neighbours are apart, in units of what is `claimed`; `answer` must repeat its noise.

    >>> pairs = [Neighbours(name="one more", one=[1.0, 2.0], other=[1.0, 2.0, 9.0])]
    >>> sensitivity(lambda rows: [sum(min(row, 1.0) for row in rows)], pairs, claimed=1.0, name="a clipped sum").holds
    True
    >>> sensitivity(lambda rows: [min(sum(rows), 5.0)], pairs, claimed=1.0, name="a clipped aggregate").lower_bound
    2.0
    """
    worst, where, count = 0.0, "", 0
    known: dict[int, Any] = {}  # pairs often share a data set
    kept = []

    def answered(rows: Any) -> Any:
        if id(rows) not in known:
            kept.append(rows)  # else another data set might get its id
            known[id(rows)] = np.asarray(answer(rows), dtype=np.float64).ravel()
        return known[id(rows)]

    for pair in pairs:
        count += 1
        with np.errstate(invalid="ignore"):
            apart = float(np.linalg.norm(answered(pair.one) - answered(pair.other), order)) / claimed
        if not apart <= worst:  # also NaN: an answer that is no number shows one person's row to all
            worst, where = (apart if apart == apart else float("inf")), pair.name
    return Verdict(
        method=name,
        audit=audit,
        claimed=1.0 + TOLERANCE,
        lower_bound=worst,
        confidence=1.0,
        trials=count,
        unit="sensitivity",
        told=f"The most is moved by {where}." if where else "",
    )


def method_sensitivity(
    method: Method | StatefulMethod,
    *,
    name: str,
    clip: float = 1.0,
    among: Sequence[World] | None = None,
    door: SeededDoor = open_door,
) -> Verdict:
    """How far one row moves the first update of a method, in units of clip / batch.

    The worlds have gradients that are zero, 1e6 along an axis, aligned with the public one, NaN and infinite; nobody
    else, people without gradient, and people aligned with the public gradient.

    >>> from functools import partial
    >>> from sfumato.algorithms.dp_sgd import dp_sgd
    >>> method_sensitivity(partial(dp_sgd, clip=1.0), name="dp-sgd", among=adversaries()[:3]).holds
    True
    """
    tried = adversaries() if among is None else list(among)
    objectives = {width: rows_objective(width) for width in {world.public.shape[1] for world in tried}}

    def answer(asked: tuple[World, Tensor]) -> Any:
        world, rows = asked
        objective = objectives[world.public.shape[1]]  # the same for all: each new one would be probed
        with own_generators(_SEED):  # of doors that are not ours
            ask = door(objective, rows, _NOISE, 1, seed=_SEED)
            public = Public(world.public, objective=objective, seed=_SEED)
            return flat(step_by_step(method, objective.parameters(), public, ask, 1))

    crowds: dict[int, tuple[World, Tensor]] = {}
    pairs = []
    for world in tried:
        one = crowds.setdefault(id(world.others), (world, world.others))
        pairs.append(Neighbours(name=world.name, one=one, other=(world, world.everybody)))
    return sensitivity(answer, pairs, claimed=clip / SIZE, name=name)


def question_sensitivity(
    question: Callable[[int], Question | Sealed],
    pairs: Iterable[Neighbours],
    *,
    name: str,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    release: Callable[[Private, Question | Sealed], Any] | None = None,
    order: int = 2,
) -> Verdict:
    """How far one person moves the answer to a question of any kind, in units of what the door takes it for.

    `question` is made for a declared number of people. Under replace-one the pairs must be equally large.
    """
    sized = list(pairs)
    size = max(_count(pair.other) for pair in sized)
    asked = question(size)
    factor = asked.replace_factor if adjacency is Adjacency.REPLACE_ONE else 1.0
    ask = release or _asked

    def answer(rows: Batch) -> Any:
        private = Private(
            rows,
            name="audit",
            size=size,
            adjacency=adjacency,
            budget=Budget(1e6, DELTA),
            seed=NotPrivateSeed(_SEED),
        )
        return ask(private, asked)

    return sensitivity(
        answer, sized, claimed=factor * asked.unit, name=name, audit=f"sensitivity, {adjacency}", order=order
    )


def _asked(private: Private, question: Question | Sealed) -> Any:
    noise = 0.1 if isinstance(question, Question) and question.discrete else _NOISE
    return private.ask(question, noise=noise, sampler=private.everyone())


def _count(rows: Batch) -> int:
    return len(rows[0]) if isinstance(rows, tuple) else len(rows)
