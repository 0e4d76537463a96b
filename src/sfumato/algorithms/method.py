"""What an algorithm is, and how algorithms are stacked.

An algorithm turns (params, public, ask) into an update; `ask` is its one way to private data. Most of them compute
something public (an origin, a scale, offsets) and hand it down by keyword to the `method` they stand on; at the bottom
`dp_sgd` makes one question of all that. So they compose, and the question costs the same whatever is in it.

A plain function has no state. One that carries something from step to step is an `Algorithm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sfumato.errors import InvalidArgument, shown
from sfumato.gradients import Gradient
from sfumato.public import Public

Params = Mapping[str, Tensor]
Ask = Callable[..., Any]
Method = Callable[..., Gradient]
"""(params, public, ask, **what is handed down) -> update"""


@runtime_checkable
class StatefulMethod(Protocol):
    """An algorithm that carries state from step to step; the state must be public and survives a resume."""

    def init(self, params: Params) -> Any: ...

    def step(
        self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any
    ) -> tuple[Gradient, Any]: ...


class Algorithm(ABC):
    """A `StatefulMethod` that also says how often it will ask. States are made of tensors, numbers, lists and dicts."""

    @abstractmethod
    def init(self, params: Params) -> Any:
        """The state before the first step."""

    @abstractmethod
    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        """One update and the state after it."""

    def answers(self, steps: int) -> int:
        """How many answers the first `steps` steps take."""
        return steps


@dataclass(frozen=True)
class _Plain(Algorithm):
    """A function, or somebody's own object with `init` and `step`."""

    method: Method | StatefulMethod

    def init(self, params: Params) -> Any:
        return self.method.init(params) if isinstance(self.method, StatefulMethod) else None

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        if isinstance(self.method, StatefulMethod):
            return self.method.step(state, params, public, ask, **handed)
        return self.method(params, public, ask, **handed), state

    def answers(self, steps: int) -> int:
        said = getattr(self.method, "answers", None)
        return steps if said is None else int(said(steps))


def algorithm(method: Method | StatefulMethod) -> Algorithm:
    """Any method as an `Algorithm`."""
    if isinstance(method, type):
        raise InvalidArgument(f"method={method.__name__} is a class: give one that is set up, {method.__name__}(...).")
    if not (callable(method) or isinstance(method, StatefulMethod)):
        raise InvalidArgument(
            f"method={shown(method)} must be a function, such as sfumato.algorithms.dope_sgd.dope_sgd, or an object "
            "with init and step."
        )
    return method if isinstance(method, Algorithm) else _Plain(method)


def needed(public: Public | None) -> Public:
    """The public data, for algorithms that cannot do without."""
    if public is None:
        raise InvalidArgument("public is missing: this algorithm takes public gradients, so give public=Public(...).")
    return public


def scaled(gradient: Gradient, handed: Mapping[str, Any]) -> Gradient:
    """A public gradient that joins a private one, under the scale that was handed down for both."""
    scale: Gradient | None = handed.get("scale")
    return gradient if scale is None else scale * gradient
