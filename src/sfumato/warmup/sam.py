"""Sharpness-aware minimisation (Foret et al. 2020), and its adaptive form ASAM (Kwon et al. 2021).

"Improving private training ...", equation (4): w_{t+1} = w_t - eta grad l(w_t + rho grad l(w_t) / |grad l(w_t)|).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient

Params = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sam:
    """Steps along the gradient of a worse place near by, at distance `radius` uphill: what is found so is flat.

    `adaptive` measures the distance of each weight by its own size, T_w = |w| + `stabiliser`, so that rescaling layers
    in ways that leave the network the same function changes nothing; it wants a larger radius, 0.5 and above.

    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> Sam(radius=1.0).gradient(params, lambda at: Gradient({"w": at["w"]}))["w"]  # of |w|^2 / 2
    tensor([3.6000, 4.8000])
    """

    radius: float = 0.1  # rho
    adaptive: bool = False
    stabiliser: float = 0.01  # eta of ASAM: without it, a weight of zero would never be moved

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise InvalidArgument(f"radius={self.radius} must not be negative: it is how far the weights are moved.")
        if not (math.isfinite(self.stabiliser) and self.stabiliser >= 0):
            raise InvalidArgument(
                f"stabiliser={self.stabiliser} must not be negative: it is added to the size of each weight."
            )

    def gradient(self, params: Params, gradient_at: Callable[[Params], Gradient]) -> Gradient:
        """The gradient at the moved weights; `gradient_at` is called at `params` first, then there."""
        return gradient_at(self.moved(params, gradient_at(params)))

    @torch.no_grad()
    def moved(self, params: Params, gradient: Gradient) -> dict[str, Tensor]:
        """w + rho T^2 g / |T g| as new leaves, with T = 1 unless adaptive; what has no gradient stays where it is."""
        g = dict(gradient)
        if self.adaptive:
            sizes = {name: params[name].abs() + self.stabiliser for name in g}  # T_w
            g = {name: sizes[name] * g[name] for name in g}
        if not g:
            return dict(params)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in g.values()]))
        # At a stationary point there is no uphill: stay. Nothing here waits for the GPU.
        scale = self.radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        if self.adaptive:
            g = {name: sizes[name] * g[name] for name in g}
        steps = {name: params[name] + scale * t for name, t in g.items()}
        return {name: steps.get(name, p).detach().requires_grad_() for name, p in params.items()}
