"""AdaDPS (Li et al. 2022): public second moments scale the gradient before it is clipped.

Noise is then equally strong in every *scaled* coordinate. The step is not multiplied by A again. Dividing after the
clip would not be private, dividing after the noise would gain nothing. It goes on top of others, which then scale the
public gradients they add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.method import Ask, Params, needed
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class AdaDPS(Upon):
    """g -> clip(g / A), with A = sqrt(mean of squared public gradients) + damping.

    A is measured in its own root mean square, and the scaled public gradient is as long as the public gradient: so
    clip norm and learning rate mean what they mean to DP-SGD. A large `damping` is DP-SGD.
    """

    damping: float = 1.0
    memory: float = 0.95
    public_batch: int | None = 640

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise InvalidArgument(f"damping={self.damping} must be positive: it bounds what the scale can blow up.")
        if not 0 <= self.memory < 1:
            raise InvalidArgument(f"memory={self.memory} must lie in 0..1, below 1: it is what past gradients weigh.")

    def init(self, params: Params) -> Any:
        v = {name: torch.zeros_like(p) for name, p in params.items()}
        return {"v": v, "below": super().init(params)}

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        g = needed(public).gradient(params, self.public_batch)
        v = {n: self.memory * state["v"][n] + (1 - self.memory) * g[n].square() for n in g}
        update, below = super().step(state["below"], params, public, ask, scale=self.scale(g, v), **handed)
        return update, {"v": v, "below": below}

    def scale(self, g: Gradient, v: Params) -> Gradient:
        root = Gradient({n: t.sqrt() for n, t in v.items()})  # its length is divided out, also that of a young mean
        typical = root.norm() / sum(t.numel() for t in v.values()) ** 0.5
        inverse = Gradient({n: 1 / (t / typical.clamp_min(1e-30).to(t) + self.damping) for n, t in root.items()})
        shrunk = (inverse * g).norm()
        # Without a public gradient there is nothing to scale by: 1 everywhere.
        return inverse * torch.where(shrunk > 0, g.norm() / shrunk, torch.full_like(shrunk, self.damping))
