"""What is augmented: images first, then whatever else a batch holds; and augmentations one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument


class Chain:
    """Several augmentations of a batch, in the order given.

    It maps row to row if all of them do. (It is no frozen dataclass on purpose: the door checks those only once, and
    what is chained here may change.)

    >>> from sfumato.augment import Augmentation, CutMix
    >>> warm_up = Chain(Augmentation(pad=2), CutMix(classes=10))
    >>> images, soft_labels = warm_up((torch.rand(8, 3, 16, 16), torch.arange(8)))
    >>> images.shape, soft_labels.shape
    (torch.Size([8, 3, 16, 16]), torch.Size([8, 10]))
    """

    def __init__(self, *augmentations: Callable[[Any], Any]) -> None:
        for one in augmentations:
            if not callable(one):
                raise InvalidArgument(
                    f"Chain was given {one!r}, which cannot be called: give augmentations one by one, not in a list."
                )
        self.augmentations = augmentations

    @property
    def mixes_rows(self) -> bool:
        return any(getattr(one, "mixes_rows", False) for one in self.augmentations)

    def __call__(self, batch: Any) -> Any:
        for augmentation in self.augmentations:
            batch = augmentation(batch)
        return batch

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.augmentations))})"


def with_images(batch: Any, views: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `views` of its images, and the rest as it was."""
    if isinstance(batch, Tensor):
        return views(batch)
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):
        changed = [views(batch[0]), *batch[1:]]
        return changed if isinstance(batch, list) else tuple(changed)
    raise InvalidArgument(
        f"batch is of type {type(batch).__name__}: augment a tensor of images, or a tuple or list that begins with one."
    )


def check_images(images: Tensor) -> None:
    """Raise unless they are (N, C, H, W) of uint8 or floats."""
    if images.ndim != 4 or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise InvalidArgument(
            f"images have the shape {tuple(images.shape)} and type {images.dtype}: give (N, C, H, W) of uint8 or "
            "floats."
        )


def grey(images: Tensor) -> float:
    """What holes and borders are filled with: the middle of the range."""
    return 0.5 if images.is_floating_point() else 127
