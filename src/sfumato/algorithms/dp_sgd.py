"""DP-SGD (Abadi et al. 2016, Algorithm 1): the noisy mean of clipped per-example gradients.

It is also what all other algorithms stand on: what they know from public data, they hand down to it by keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sfumato.algorithms.method import Ask, Params
from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Gradient
from sfumato.gradients.passes import Augment
from sfumato.public import Public
from sfumato.questions import GradientMean


def dp_sgd(
    params: Params,
    public: Public | None,
    ask: Ask,
    *,
    clip: float | Clip = 1.0,
    origin: Gradient | None = None,
    scale: Gradient | None = None,
    offsets: Sequence[Params] | None = None,
    views: int = 1,
    augment: Augment | None = None,
) -> Gradient:
    """One private gradient. `Clip(1.0, stability=0.01)` normalises gradients instead of clipping them (AUTO-S).

    Around an `origin` the gradients are clipped, and it is added back; under a `scale` they are measured, and stay.
    """
    bare = as_clip(clip)
    if bare.origin is not None or bare.scale is not None:
        raise InvalidArgument("clip has an origin or a scale of its own: give them as origin= and scale=.")
    around = replace(bare, origin=origin, scale=scale)
    answer: Gradient = ask(GradientMean(params, around, views=views, augment=augment, offsets=offsets))
    return around.restore(answer)


def as_clip(clip: float | Clip) -> Clip:
    """A bare number is a norm."""
    return clip if isinstance(clip, Clip) else Clip(clip)
