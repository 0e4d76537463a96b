"""DOPE-SGD (Nasr et al. 2023, Algorithm 2): gradients clipped around the gradient of public data.

As printed it adds the origin once per sampled row, which tells how many rows there are; here it is added to the mean
(docs/papers/000.md, deviation 1). And it is bounded (appendix E, equation 3): from a warm start the
unbounded public step diverges.
"""

from __future__ import annotations

from typing import Any

from sfumato.algorithms.dp_sgd import as_clip, dp_sgd
from sfumato.algorithms.method import Ask, Method, Params, needed
from sfumato.errors import InvalidArgument
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
    scale: Gradient | None = None,
    method: Method = dp_sgd,
    **handed: Any,
) -> Gradient:
    """One private gradient around a public one.

    `origin_clip` is the papers' lambda, the longest public step: the clip norm by default; math.inf lets it be.
    """
    longest = as_clip(clip).norm if origin_clip is None else origin_clip
    g_s = bounded_gradient(params, needed(public), public_batch, longest, scale)  # lines 4-5 and equation (3)
    return method(params, public, ask, clip=clip, origin=g_s, scale=scale, **handed)  # lines 6-12


def bounded_gradient(
    params: Params, public: Public, batch: int | None, longest: float, scale: Gradient | None
) -> Gradient:
    """The gradient of a public batch, so that the step it makes (under the scale, if any) is no longer than that."""
    if not longest > 0:
        raise InvalidArgument(f"origin_clip={longest} must be positive: it is the longest public step.")
    g_s = public.gradient(params, batch)
    return g_s * (g_s if scale is None else scale * g_s).shortening(longest)
