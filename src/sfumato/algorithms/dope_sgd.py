"""DOPE-SGD (Nasr et al. 2023, Algorithm 2): gradients clipped around the gradient of public data.

As printed it adds the origin once per sampled row, which tells how many rows there are; here it is added to the mean
(docs/papers/000.md, deviation 1). And it is bounded (appendix E, equation 3), with a `step_size` also by how far the
public loss falls: from a warm start a longer public step diverges.
"""

from __future__ import annotations

from typing import Any

from sfumato.algorithms.dp_sgd import as_clip, dp_sgd
from sfumato.algorithms.method import Ask, Method, Params
from sfumato.algorithms.public_step import public_step
from sfumato.gradients import Clip, Gradient
from sfumato.public import Public


def dope_sgd(
    params: Params,
    public: Public | None,
    ask: Ask,
    *,
    clip: float | Clip = 1.0,
    origin_clip: float | None = None,
    public_batch: int | None = 640,
    step_size: float | None = None,
    scale: Gradient | None = None,
    method: Method = dp_sgd,
    **handed: Any,
) -> Gradient:
    """One private gradient around a public one.

    `origin_clip` is the papers' lambda, the longest public step: the clip norm by default; math.inf lets it be. With a
    `step_size`, the learning rate of plain descent, it also ends where the public loss stops falling; that takes one
    more public gradient, and keeps large steps from undoing a warm start.
    """
    longest = as_clip(clip).norm if origin_clip is None else origin_clip
    g_s = public_step(params, public, public_batch, longest, step_size, scale=scale)  # lines 4-5 and equation (3)
    return method(params, public, ask, clip=clip, origin=g_s, scale=scale, **handed)  # lines 6-12
