"""Public gradients that are stepped along, made no longer than is safe.

After a warm-up the public loss is a narrow valley: what is left of its gradient points at the walls, and a step as long
as the clip norm jumps over them. One more public gradient, at the place where the step would end, tells whether the
loss still falls there. If it rises, the step ends where a line through both slopes is zero (the rule of the secant).
"""

from __future__ import annotations

import math

import torch

from sfumato.algorithms.method import Params, needed
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public


def public_step(
    params: Params,
    public: Public | None,
    batch: int | None,
    longest: float | None = None,
    step_size: float | None = None,
    *,
    scale: Gradient | None = None,
) -> Gradient:
    """The gradient of a public batch, no longer than `longest` (under the scale, if any).

    With a `step_size`, what it is going to be multiplied by, the step also ends where the loss of another public batch
    stops falling.
    """
    longest = math.inf if longest is None else longest
    if not longest > 0:
        raise InvalidArgument(f"origin_clip={longest} must be positive: it is the longest public step.")
    if step_size is not None and not 0 < step_size < math.inf:
        raise InvalidArgument(f"step_size={step_size} must be positive and finite: it is the learning rate, or None.")
    found = (public := needed(public)).gradient(params, batch)
    g = found if longest == math.inf else found * under(scale, found).shortening(longest)
    if step_size is None:
        return g
    step = under(scale, g)
    end = {name: p - step_size * step[name].to(p) for name, p in params.items()}
    falls, falls_at_end = found.dot(step), public.gradient(end, batch).dot(step)
    falls_at_end = torch.where(falls_at_end.isfinite(), falls_at_end, -math.inf)
    return g * torch.where(falls_at_end < 0, falls / (falls - falls_at_end), torch.ones_like(falls))


def under(scale: Gradient | None, gradient: Gradient) -> Gradient:
    return gradient if scale is None else scale * gradient
