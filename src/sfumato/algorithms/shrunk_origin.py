"""DOPE-SGD for public data of unknown worth: the origin is shrunk by a factor that earlier answers chose.

<u, p> / |p|^2, the share of the public gradient p that a released u holds, settles where the residuals g_i - beta * p
are shortest, even if most are clipped. beta is the share less two standard errors: without shown worth it is 0, DP-SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.method import Ask, Params, scaled
from sfumato.algorithms.public_step import public_step
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public
from sfumato.questions import GradientMean


@dataclass(frozen=True, kw_only=True)
class ShrunkOrigin(Upon):
    """DOPE-SGD around beta * p, with beta in [0, 1] from the answers so far, which costs nothing."""

    origin_clip: float = 1.0  # the longest public step; usually the clip norm
    public_batch: int | None = 640
    memory: float = 0.8  # how long answers count
    caution: float = 2.0  # standard errors
    step_size: float | None = None  # as of `dope_sgd`

    def __post_init__(self) -> None:
        if not (0 <= self.memory < 1 and self.origin_clip > 0):
            raise InvalidArgument(f"memory={self.memory} must lie in [0, 1), origin_clip={self.origin_clip} above 0.")

    def init(self, params: Params) -> Any:
        return {"means": next(iter(params.values())).new_zeros(3, dtype=torch.float64), "below": super().init(params)}

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        p = public_step(params, public, self.public_batch, self.origin_clip, self.step_size, scale=handed.get("scale"))
        seen: list[Gradient] = []  # of the door itself: below, public gradients may be mixed in

        def heard(question: GradientMean, **options: Any) -> Any:
            seen.append(question.clip.restore(answer := ask(question, **options)))
            return answer

        (share, beta), step = self.worth(state), scaled(p, handed)
        update, below = super().step(state["below"], params, public, heard, origin=p * beta, **handed)
        for u in seen:
            new = torch.stack([along := u.dot(step), squared := step.dot(step), (along - share * squared) ** 2])
            state = {"means": new.lerp(state["means"], self.memory)}
        return update, {**state, "below": below}

    def worth(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The share, and beta; nothing before the first answer."""
        along, squared, surprise = state["means"]
        error = self.caution * (surprise * (1 - self.memory) / (1 + self.memory)).sqrt()  # of a mean of n: over n
        share, beta = torch.stack([along, along - error]) / squared.clamp_min(1e-300)  # where p is zero, so is <u, p>
        return share, beta.clamp(0.0, 1.0)
