"""PDA-DPMD to first order (Amid et al. 2022, equation 1): a mixture of the private and the public gradient.

The paper's weight cos(pi t / 2K) turns negative after K: here it ends at `alpha_min`; at 0 nothing is asked, or paid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sfumato.algorithms.method import Ask, Params, scaled
from sfumato.algorithms.public_step import public_step
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class MirrorDescent(Upon):
    """alpha_t * private + (1 - alpha_t) * public gradient, alpha_t = max(alpha_min, cos(pi t / (2 decay_steps)))."""

    decay_steps: float  # K, in steps; math.inf keeps alpha at 1
    alpha_min: float = 0.0
    public_batch: int | None = 640
    public_clip: float | None = None  # the longest public step; from a warm start, say the clip norm
    answer_clip: float | None = None  # also shortens the noisy mean, as the paper does for images: post-processing
    step_size: float | None = None  # as of `dope_sgd`: the public part of a step ends where its loss stops falling

    def __post_init__(self) -> None:
        if not self.decay_steps > 0:
            raise InvalidArgument(f"decay_steps={self.decay_steps} must be positive: alpha falls until then.")
        if not 0 <= self.alpha_min <= 1:
            raise InvalidArgument(f"alpha_min={self.alpha_min} must lie in 0..1: it is a weight.")
        for name in ("public_clip", "answer_clip"):
            if (norm := getattr(self, name)) is not None and not norm > 0:
                raise InvalidArgument(f"{name}={norm} must be positive, or None.")

    def alpha(self, t: int) -> float:
        """The weight of the private gradient in step t, counted from 0."""
        return max(self.alpha_min, math.cos(math.pi / 2 * t / self.decay_steps) if t < self.decay_steps else 0.0)

    def init(self, params: Params) -> Any:
        return {"t": 0, "below": super().init(params)}

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        alpha, below, parts = self.alpha(state["t"]), state["below"], list[Gradient]()
        if alpha > 0:
            private, below = super().step(below, params, public, ask, **handed)
            parts.append(alpha * (private if self.answer_clip is None else private.clipped(self.answer_clip)))
        if alpha < 1:
            rate = None if self.step_size is None else (1 - alpha) * self.step_size
            p = public_step(params, public, self.public_batch, self.public_clip, rate, scale=handed.get("scale"))
            parts.append((1 - alpha) * scaled(p, handed))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1], {"t": state["t"] + 1, "below": below}

    def answers(self, steps: int) -> int:
        asking = steps if self.alpha_min > 0 else math.ceil(min(self.decay_steps, steps))
        return super().answers(asking)
