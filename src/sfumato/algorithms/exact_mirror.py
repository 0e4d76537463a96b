"""PDA-DPMD, exact (Amid et al. 2022, Algorithm 1): the public loss, made strongly convex, is the mirror map.

Line 4 moves from theta to where grad Psi = grad Psi(theta) - eta g: far where the public loss is flat, little where it
is steep, so noise does least harm. Psi is divided by its strong convexity, as the paper assumes, so a step is never
longer than eta g. All of it is post-processing. For convex losses, such as that of a linear head on frozen features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.algorithms.method import Ask, Params, needed
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.mirror_map import ObjectiveMap
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class ExactMirror(Upon):
    """(theta_t - theta_{t+1}) / step_size: plain SGD with that learning rate takes the mirror step.

    Psi = (mean public loss + strength / 2 |theta|^2) / strength, solved for by Newton's method and conjugate gradients.
    """

    step_size: float  # eta
    strength: float
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("step_size", "strength", "tolerance"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be positive.")

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        g, state = super().step(state, params, public, ask, **handed)
        psi = ObjectiveMap(needed(public), params, self.strength)
        theta = psi.flat(params)
        moved = psi.moved(theta, -self.step_size * psi.flat(g), self.tolerance)
        return Gradient(psi.named((theta - moved) / self.step_size)), state
