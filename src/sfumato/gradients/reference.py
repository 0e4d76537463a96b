"""The slow, obvious twin of the engine: `vmap(grad)`, every per-example gradient written out. For tests and audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.gradients.clip import Clip
from sfumato.objective import Batch, Objective


def per_example_gradients(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """(examples, *shape) for every parameter."""

    def loss(p: dict[str, Tensor], row: Batch) -> Tensor:
        return objective.losses(p, tree_map(lambda t: t.unsqueeze(0), row))[0]

    by_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
    gradients: dict[str, Tensor] = by_example(dict(params), batch)
    return gradients


def clipped_sum(
    objective: Objective,
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    clip: Clip,
    offsets: Sequence[Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """What `engine.clipped_sum` computes, for examples as units; with offsets, view k is the same row at w + v_k."""
    moved = [params] if offsets is None else [{n: p + v[n] for n, p in params.items()} for v in offsets]
    views = [per_example_gradients(objective, p, batch) for p in moved]
    mean = {n: sum((view[n].double() for view in views), torch.zeros(())) / len(views) for n in params}
    if clip.origin is not None:
        mean = {n: g - clip.origin[n].double() for n, g in mean.items()}
    if clip.scale is not None:
        mean = {n: g * clip.scale[n].double() for n, g in mean.items()}
    norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in mean.values()]).sum(0).sqrt()
    factors = clip.factors(norms)
    return {n: torch.tensordot(factors, g, 1) for n, g in mean.items()}
