"""The oracle: ordinary autograd on batches of one, in the same precision; everything else in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.gradients import Clip, Gradient
from sfumato.objective import Objective


def one_by_one(objective: Objective, params: Mapping[str, Tensor], batch: Any, rows: int) -> dict[str, Tensor]:
    """(rows, *shape) gradients, one backward pass per row, on the module's own parameters."""
    own = dict(objective.module.named_parameters())
    saved = {name: own[name].detach().clone() for name in params}
    gradients: dict[str, list[Tensor]] = {name: [] for name in params}
    try:
        for name, p in params.items():
            own[name].data.copy_(p)
        for i in range(rows):
            row = tree_map(lambda t, i=i: t[i : i + 1], batch)
            loss = objective.loss(objective.module, row).sum()
            found = torch.autograd.grad(loss, [own[name] for name in params], allow_unused=True)
            for (name, p), g in zip(params.items(), found, strict=True):
                gradients[name].append(torch.zeros_like(p) if g is None else g.detach())
    finally:
        for name, p in saved.items():
            own[name].data.copy_(p)
    return {name: torch.stack(g) for name, g in gradients.items()}


def clipped(gradients: Mapping[str, Tensor], clip: Clip) -> dict[str, Tensor]:
    """(rows, *shape): each row shifted, scaled and clipped, in float64."""
    rows = {n: g.double() for n, g in gradients.items()}
    if clip.origin is not None:
        rows = {n: g - clip.origin[n].double() for n, g in rows.items()}
    if clip.scale is not None:
        rows = {n: g * clip.scale[n].double() for n, g in rows.items()}
    norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    if clip.stability is None:
        c = (clip.norm / norms.clamp_min(1e-300)).clamp_max(1.0)
    else:
        c = clip.norm / (norms + clip.stability)
    return {n: g * c.reshape(-1, *[1] * (g.ndim - 1)) for n, g in rows.items()}


def relative_error(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Error over all parameters relative to the norm of the true sum."""
    gap = sum(float((ours[n].double() - t.double()).square().sum()) for n, t in truth.items()) ** 0.5
    size = sum(float(t.double().square().sum()) for t in truth.values()) ** 0.5
    return gap / max(size, 1e-30)


def like(params: Mapping[str, Tensor], seed: int, *, positive: bool = False) -> Gradient:
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.rand(p.shape, generator=generator, dtype=torch.float64) for n, p in params.items()}
    shift = 0.5 if positive else -0.5
    return Gradient({n: ((t + shift) * (1.0 if positive else 0.2)).to(params[n]) for n, t in tensors.items()})


def mean_of(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([p[n].double() for p in parts]).mean(0) for n in parts[0]}
