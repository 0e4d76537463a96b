"""DOPE-SGD for public data of unknown worth: the origin is shrunk by a factor that earlier answers chose.

beta = <u, p> / |p|^2 is how much of the public gradient p the released private gradient u holds. It settles where the
residuals g_i - beta * p are shortest, even if most of them are clipped: while beta is too small, u reaches beyond
beta * p; if it is too large, not that far. Useless public data gives 0, and that is DP-SGD. Only released answers are
looked at, so it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.dope_sgd import bounded_gradient
from sfumato.algorithms.method import Ask, Params, needed, scaled
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public
from sfumato.questions import GradientMean


@dataclass(frozen=True, kw_only=True)
class ShrunkOrigin(Upon):
    """DOPE-SGD around beta * p, with beta in [0, 1] from the answers so far; `memory` is how long they count."""

    origin_clip: float = 1.0  # the longest public step; usually the clip norm
    public_batch: int | None = 640
    memory: float = 0.8

    def __post_init__(self) -> None:
        if not (0 <= self.memory < 1 and self.origin_clip > 0):
            raise InvalidArgument(f"memory={self.memory} must lie in [0, 1), origin_clip={self.origin_clip} above 0.")

    def init(self, params: Params) -> Any:
        nothing = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return {"along": nothing, "squared": nothing, "below": super().init(params)}

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        p = bounded_gradient(params, needed(public), self.public_batch, self.origin_clip, handed.get("scale"))
        seen: list[Gradient] = []  # of the door itself: below, public gradients may be mixed in

        def heard(question: GradientMean, **options: Any) -> Any:
            seen.append(question.clip.restore(answer := ask(question, **options)))
            return answer

        update, below = super().step(state["below"], params, public, heard, origin=p * beta(state), **handed)
        state, step = {**state, "below": below}, scaled(p, handed)
        for u in seen:
            for name, value in (("along", u.dot(step)), ("squared", step.dot(step))):
                state[name] = self.memory * state[name] + (1 - self.memory) * value
        return update, state


def beta(state: Any) -> torch.Tensor:
    """How much of the public gradient is taken as the origin; nothing before the first answer."""
    share: torch.Tensor = state["along"] / state["squared"].clamp_min(1e-300)
    return share.clamp(0.0, 1.0)
