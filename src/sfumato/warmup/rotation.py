"""Pre-training by rotations (Gidaris et al. 2018): to say how an image was turned, a network must see what it shows.

Labels are not used, so any public images of the kind will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.gradients.passes import Augment
from sfumato.objective import Batch, Objective
from sfumato.public import Public
from sfumato.warmup.loop import warm_up
from sfumato.warmup.sam import Sam

_TURNS = 4


def rotation_pretrain(
    module: nn.Module,
    public: Public,
    *,
    head: str,
    steps: int,
    batch_size: int = 128,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    learning_rate: float = 0.1,
    augment: Augment | None = None,
    sharpness: Sam | None = None,
    autocast: torch.dtype | None = None,
    progress: bool = False,
    cuda_graph: bool | None = None,
) -> list[float]:
    """Train all but the head of `module` to tell the four rotations of public images apart; returns the losses.

    Args:
        public: square images (N, C, H, W), alone or first in a tuple or list whose rest is not looked at.
        head: the name of the last linear layer. Another one, of four outputs, takes its place meanwhile; then it is
            put back with fresh weights, since the features that it knew have changed.
        batch_size: images per step; the network sees each of them in all four rotations.

    The other arguments are those of `warm_up`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> losses = rotation_pretrain(model, Public(torch.rand(20, 1, 4, 4)), head="3", steps=2, batch_size=5)
    >>> len(losses), model[3].out_features
    (2, 3)
    """
    layer = _linear(module, head)
    images = _images(next(public.batches(1)))
    if images.ndim != 4 or images.shape[2] != images.shape[3]:
        raise InvalidArgument(
            f"public images have the shape {tuple(images.shape[1:])}: rotations need square ones, (N, C, H, H)."
        )

    def turned(batch: Batch) -> tuple[Tensor, Tensor]:
        views = _images(batch) if augment is None else augment(_images(batch))
        return rotations(views)

    objective = Objective(module, _which_rotation, autocast)
    for_turns = nn.Linear(layer.in_features, _TURNS, device=layer.weight.device, dtype=layer.weight.dtype)
    _put(module, head, for_turns)
    try:
        losses = warm_up(
            objective,
            public,
            steps=steps,
            batch_size=batch_size,
            optimizer=optimizer,
            learning_rate=learning_rate,
            augment=turned,
            sharpness=sharpness,
            progress=progress,
            cuda_graph=cuda_graph,
        )
    finally:
        _put(module, head, layer)
    layer.reset_parameters()
    return losses


def rotations(images: Tensor) -> tuple[Tensor, Tensor]:
    """Every image in each of the four rotations, and which it is: quarter turns from 0 to 3."""
    turned = torch.cat([torch.rot90(images, quarter, (2, 3)) for quarter in range(_TURNS)])
    return turned, torch.arange(_TURNS, device=images.device).repeat_interleave(len(images))


def _which_rotation(module: nn.Module, batch: Batch) -> Tensor:
    images, turns = batch
    logits = module(images)
    if logits.shape != (len(images), _TURNS):
        raise InvalidArgument(
            f"head must name the last layer of the module: with {_TURNS} outputs there, {len(images)} images gave the "
            f"shape {tuple(logits.shape)}."
        )
    return F.cross_entropy(logits, turns, reduction="none")


def _images(batch: Batch) -> Tensor:
    first = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(first, Tensor):
        raise InvalidArgument(
            f"public gives batches of type {type(batch).__name__}: give images, alone or first in a tuple or list."
        )
    return first


def _linear(module: nn.Module, head: str) -> nn.Linear:
    layer = dict(module.named_modules()).get(head)
    if not head or not isinstance(layer, nn.Linear):
        linear = [name for name, part in module.named_modules() if name and isinstance(part, nn.Linear)]
        raise InvalidArgument(f"head={head!r} must name the module's last linear layer: it has {linear}.")
    return layer


def _put(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, layer)
