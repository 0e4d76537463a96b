"""DP-SGD (Abadi et al. 2016, Algorithm 1): the noisy mean of clipped per-example gradients.

An algorithm is a function (params, public, ask) -> gradient; `ask` is the one way to private data. Any torch optimiser
takes the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sfumato.gradients import Clip, Gradient
from sfumato.gradients.passes import Augment
from sfumato.public import Public
from sfumato.questions import GradientMean


def dp_sgd(
    params: Mapping[str, Tensor],
    public: Public | None,
    ask: Callable[[GradientMean], Any],
    *,
    clip: float = 1.0,
    views: int = 1,
    augment: Augment | None = None,
) -> Gradient:
    """One private gradient; public data, if any, is not used."""
    answer: Gradient = ask(GradientMean(params, Clip(clip), views=views, augment=augment))
    return answer
