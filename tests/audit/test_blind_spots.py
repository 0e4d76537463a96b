"""What an attack must not be blind to: answers that are not finite, and whatever a question carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sfumato import Budget, NoisyMean, NotPrivateSeed, Private
from sfumato.audit import conversation, counts_audit, distinguish
from sfumato.erm.losses import HuberisedHinge
from sfumato.errors import InvalidArgument

NAN, INF = float("nan"), float("inf")

# Each tells by something other than the size of a number whether the person is there.
TELLTALES: dict[str, Callable[[np.random.Generator, bool], list[float]]] = {
    "NaN where present": lambda rng, present: [NAN if present else rng.normal()],
    "NaN where absent": lambda rng, present: [rng.normal() if present else NAN],
    "an infinity where present": lambda rng, present: [INF if present else rng.normal()],
    "its sign": lambda rng, present: [INF if present else -INF],
    "one NaN among large numbers": lambda rng, present: [*rng.normal(scale=1e6, size=50), NAN if present else 0.0],
    "a copy beside a NaN of everybody": lambda rng, present: [float(present), NAN],
}


@pytest.mark.parametrize("name", TELLTALES)
@pytest.mark.parametrize("gaussian", [True, False])
def test_a_nan_hides_nothing(name: str, gaussian: bool) -> None:
    claim = {"name": name, "audit": "canary", "epsilon": 4.4 if gaussian else 1.0, "delta": 1e-5}
    release = partial(TELLTALES[name], np.random.default_rng(0))
    assert not distinguish(release, gaussian=gaussian, trials=600, **claim).holds


def test_a_nan_that_tells_nothing_is_no_finding() -> None:
    rng = np.random.default_rng(0)
    claim = {"name": "always there", "audit": "canary", "epsilon": 4.4, "delta": 1e-5}
    found = distinguish(lambda present: [rng.normal(present, 1.0), NAN, INF], gaussian=True, trials=600, **claim)
    assert found.holds
    assert found.lower_bound > 0.2  # and the numbers beside it are still looked at


def test_counts_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not finite"):
        counts_audit(lambda present, times: np.full((times, 1), NAN), towards=[1], epsilon=0.5, name="counts")


@dataclass(frozen=True, eq=False)
class Centred(NoisyMean):
    """Asks around something that should be public."""

    centre: object = None


@dataclass(frozen=True)
class Unknown:
    value: float


class Opaque:
    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


CARRIED: dict[str, Callable[[float], object]] = {
    "a number": float,
    "an array": lambda value: np.array([value]),
    "an array of objects": lambda value: np.array([value], dtype=object),
    "numpy's number": np.float32,
    "a tensor": torch.tensor,
    "a loss": lambda value: HuberisedHinge(h=value + 0.1),
    "a dataclass": Unknown,
    "some object": Opaque,
    "a mapping": lambda value: {"deep": [np.float64(value)]},
}


@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("leaks", [True, False])
def test_whatever_a_question_carries_is_compared(kind: str, leaks: bool) -> None:
    one = torch.zeros(7, 1, dtype=torch.float64)
    sides = [one, torch.cat([one, torch.ones(1, 1, dtype=torch.float64)])]

    def asked(rows: torch.Tensor) -> Callable[[Any], Any]:
        door = Private(rows, name="a", size=8, budget=Budget(1e9, 1e-6), seed=NotPrivateSeed(1))
        return lambda question: door.ask(question, noise=0.02, sampler=door.everyone())

    turns = iter(sides)

    def talk(ask: Callable[[Any], Any]) -> None:
        exact = float(next(turns).sum())  # which nobody outside may know
        ask(Centred(lambda rows: rows, bound=1.0, centre=CARRIED[kind](exact if leaks else 0.5)))

    answers, questions = conversation(talk, *map(asked, sides), size=8, name=kind)
    assert answers.holds
    assert questions.holds is not leaks
