"""Weight multiplicity ("Improving private training ...", Algorithm 1): every view has its own weights, moved uphill.

The K moves come from K public batches and are shared by all examples; the K gradients of an example are averaged inside
the clip. So a flat, smooth neighbourhood is sought at the price of DP-SGD.
"""

from __future__ import annotations

from typing import Any

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import Ask, Method, Params, needed
from sfumato.gradients import Gradient
from sfumato.public import Public


def weight_multiplicity(
    params: Params,
    public: Public | None,
    ask: Ask,
    *,
    views: int = 16,
    radius: float = 0.1,
    public_batch: int | None = 64,
    method: Method = dp_sgd,
    **handed: Any,
) -> Gradient:
    """One private gradient, averaged over `views` moved weights and views of the rows; `radius` is the paper's rho."""
    v = [uphill(needed(public).gradient(params, public_batch), radius) for _ in range(views)]  # v_t^k
    return method(params, public, ask, views=views, offsets=v, **handed)


def uphill(gradient: Gradient, radius: float) -> Gradient:
    return gradient * (radius / gradient.norm().clamp_min(1e-12))
