"""AutoAugment: each image draws one of the policy's pairs of operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sfumato.augment.batch import check_images, with_images
from sfumato.augment.operations import blended, fixed_point, looked_up, moved
from sfumato.augment.policy import CIFAR10, Operation, Policy, Step, amount, movement
from sfumato.errors import InvalidArgument


@dataclass(frozen=True)
class AutoAugment:
    """A batch with each image changed by a sub-policy it draws for itself: same shape, same type, channels-last memory.

    The default is the published policy for CIFAR-10. Images are of one or three channels: uint8, or floats in 0..1,
    which are rounded to 256 grey levels where an operation changes their colours. What is moved into sight from beyond
    the edges is mid-grey, as in `Augmentation`.

    The batch is a tensor of images (N, C, H, W), or a tuple or list that begins with one; the rest is left alone. A row
    depends on itself alone, so private rows may be augmented too. All randomness comes from torch's global generator of
    the images' device, N numbers at a time whatever the images hold.

    >>> images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    >>> views, same_labels = AutoAugment()((images, labels))
    >>> views.shape, same_labels is labels
    (torch.Size([8, 3, 32, 32]), True)
    """

    policy: Policy = CIFAR10

    def __post_init__(self) -> None:
        if not (isinstance(self.policy, tuple) and self.policy and all(map(_is_pair, self.policy))):
            raise InvalidArgument(f"policy={self.policy!r} must be a tuple of pairs of Step, such as policy.CIFAR10.")

    def __call__(self, batch: Any) -> Any:
        return with_images(batch, self._views)

    def _views(self, images: Tensor) -> Tensor:
        check_images(images)
        N, C, H, W = images.shape
        if C not in (1, 3):
            raise InvalidArgument(f"images have {C} channels: AutoAugment is for grey (1) or red, green and blue (3).")
        which = torch.randint(0, len(self.policy), (N,), device=images.device)
        for slot in _slots(self.policy, H, W, images.device):
            sign = torch.randint(0, 2, (N,), device=images.device)
            applied = torch.rand(N, device=images.device) < slot.probability[which]
            operation = torch.where(applied, slot.operation[which], Operation.IDENTITY)
            images = _recoloured(images, operation, slot.amount[which, sign])
            images = moved(images, torch.where(applied[:, None], slot.movement[which, sign], slot.standstill))
        return images.contiguous(memory_format=torch.channels_last)


def _recoloured(images: Tensor, operation: Tensor, by: Tensor) -> Tensor:
    if not images.is_floating_point():
        return looked_up(blended(images, operation, by), operation, by)
    # Halves are rounded down, so that mid-grey is 127 as it is in bytes.
    levels = (images.float().clamp(0, 1) * 255 - 0.5).ceil().to(torch.uint8)
    recoloured = looked_up(blended(levels, operation, by), operation, by).to(images.dtype) / 255
    return torch.where((operation >= Operation.BRIGHTNESS)[:, None, None, None], recoloured, images)


@dataclass(frozen=True, eq=False)
class _Slot:
    """The first steps of a policy's pairs, or the second ones, as tensors: one row per pair, one column per sign."""

    probability: Tensor
    operation: Tensor
    amount: Tensor
    movement: Tensor
    standstill: Tensor


@lru_cache(maxsize=64)  # made once: a copy to the GPU cannot be part of a CUDA graph
def _slots(policy: Policy, H: int, W: int, device: torch.device) -> tuple[_Slot, ...]:
    signs = (-1, 1)
    return tuple(
        _Slot(
            probability=torch.tensor([s.probability for s in steps], device=device),
            operation=torch.tensor([int(s.operation) for s in steps], device=device),
            amount=torch.tensor([[amount(s, sign) for sign in signs] for s in steps], device=device),
            movement=torch.tensor(
                [[fixed_point(*movement(s, sign, H, W)) for sign in signs] for s in steps], device=device
            ),
            standstill=torch.tensor(fixed_point(1, 0, 0, 0, 1, 0), device=device),
        )
        for steps in zip(*policy, strict=True)
        if any(s.probability for s in steps)
    )


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(step, Step) for step in pair)
