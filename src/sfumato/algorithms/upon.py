"""Algorithms that stand on another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import Algorithm, Ask, Method, Params, StatefulMethod, algorithm
from sfumato.gradients import Gradient
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class Upon(Algorithm):
    """Stands on `method`: hands down to it what it knows, and does something with its update. No state of its own."""

    method: Method | StatefulMethod = dp_sgd

    def init(self, params: Params) -> Any:
        return self.below().init(params)

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        return self.below().step(state, params, public, ask, **handed)

    def answers(self, steps: int) -> int:
        return self.below().answers(steps)

    def below(self) -> Algorithm:
        return algorithm(self.method)
