"""Averages of iterates: free, since they only post-process released answers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    """An exponential moving average of the parameters, with decay (1 + t) / (10 + t) after t steps.

    A flat decay would remember the initial weights for as long as a short private training lasts.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.weights = {name: p.detach().clone() for name, p in params.items()}

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor], step: int) -> None:
        decay = (1 + step) / (10 + step)
        torch._foreach_lerp_(list(self.weights.values()), [params[n].detach() for n in self.weights], 1 - decay)
