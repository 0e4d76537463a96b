"""Every question of a whole conversation, by neighbours: given the same earlier answers, what may one person change?

A method may choose its next question by all answers before. So both neighbours are told the same answers, those about
the first one: then every question must be the same to the last bit, since it may depend on public data and on answers
alone; and every answer may differ by one unit. A method that keeps a private gradient without noise, or asks where
private rows lead it, is found in the step after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.method import Ask
from sfumato.audit.sensitivity import TOLERANCE
from sfumato.audit.verdict import Verdict
from sfumato.erm.questions import LinearGradientMean
from sfumato.generators import own_generators
from sfumato.gradients import Clip
from sfumato.questions import GradientMean, NoisyMean

Talk = Callable[[Ask], Any]
"""What asks: a few steps of a method, a strategy. Called twice, it must make the same public choices."""

_MEANS = (GradientMean, NoisyMean, LinearGradientMean)  # whose answers are divided by the declared batch


def conversation(
    talk: Talk,
    one: Ask,
    other: Ask,
    *,
    size: float,
    name: str,
    where: str = "",
    unit: Callable[[Any], float] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Verdict]:
    """Two verdicts: how far answers of the doors `one` and `other` differ, and whether their questions do.

    The doors are about neighbours and draw the same noise; `size` is the declared batch of both. `unit` is how far the
    answer to a question may move, by default as far as one person more or less can move it.
    """
    asked: list[Any] = []
    answers: list[Any] = []

    def first(question: Any, **options: Any) -> Any:
        asked.append(public_part(question))
        answers.append(one(question, **options))
        return answers[-1]

    apart, different, count = 0.0, 0, 0

    def second(question: Any, **options: Any) -> Any:
        nonlocal apart, different, count
        place, count = count, count + 1
        if place >= len(asked):
            different += 1
            return other(question, **options)
        different += not _same(asked[place], public_part(question))
        most = unit(question) if unit else question.unit / (size if isinstance(question, _MEANS) else 1.0)
        order = 1 if getattr(question, "discrete", False) else 2
        with np.errstate(invalid="ignore"):
            moved = float(np.linalg.norm(_row(other(question, **options)) - _row(answers[place]), order)) / most
        apart = max(apart, moved if moved == moved else float("inf"))
        return answers[place]

    for ask in (first, second):
        with own_generators(0):
            talk(ask)
    different += max(0, len(asked) - count)
    said = f" ({where})" if where else ""
    return [
        Verdict(
            method=name,
            audit=f"conversation, answers{said}",
            claimed=1.0 + tolerance,
            lower_bound=apart,
            confidence=1.0,
            trials=len(asked),
            unit="sensitivity",
        ),
        Verdict(
            method=name,
            audit=f"conversation, questions{said}",
            claimed=0.0,
            lower_bound=float(different),
            confidence=1.0,
            trials=len(asked),
            unit="questions that differ",
        ),
    ]


def public_part(question: Any) -> list[Any]:
    """All that a question holds but functions of rows, which are compared by what they answer.

    What it does not know how to look into is itself a leaf: two of them are the same if they are one, or equal.
    """
    found: list[Any] = [question.kind(), question.unit]
    for field in fields(question):
        found += _leaves(getattr(question, field.name))
    return found


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes() if value.dtype != object else value.tolist()]
    if isinstance(value, np.generic):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, Clip):
        return [leaf for part in (value.norm, value.origin, value.scale, value.stability) for leaf in _leaves(part)]
    if isinstance(value, Mapping):
        return [leaf for name in value for leaf in (name, *_leaves(value[name]))]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(leaf for field in fields(value) for leaf in _leaves(getattr(value, field.name)))]
    return [] if callable(value) else [value]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(a, b, strict=True)
    )


def _row(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return np.concatenate([_row(part) for part in answer.values()])
    if isinstance(answer, tuple):
        return np.concatenate([_row(part) for part in answer])
    return np.asarray(torch.as_tensor(answer).double().cpu()).ravel()
