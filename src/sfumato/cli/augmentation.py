"""The keys crop, flip and cutout, which several sections have: views of images."""

from __future__ import annotations

from typing import Protocol

from sfumato.augment import Augmentation
from sfumato.errors import InvalidArgument


class Augmented(Protocol):
    """A section with these keys."""

    @property
    def crop(self) -> int: ...
    @property
    def flip(self) -> bool: ...
    @property
    def cutout(self) -> int: ...


def augmentation(section: Augmented) -> Augmentation | None:
    if not (section.crop or section.flip or section.cutout):
        return None
    return Augmentation(pad=section.crop, flip=section.flip, cutout=section.cutout)


def check_augmentation(name: str, section: Augmented, shape: tuple[int, ...]) -> None:
    """Raise if rows of this shape cannot be augmented as the section of this name says."""
    if augmentation(section) is None:
        return
    key = next(key for key in ("crop", "flip", "cutout") if getattr(section, key))
    if len(shape) != 3:
        raise InvalidArgument(
            f"[{name}] {key} is for images, and rows have the shape {list(shape)}: give [model] shape = [channels, "
            "height, width], or leave it out."
        )
    if section.crop >= min(shape[1:]):
        raise InvalidArgument(f"[{name}] crop={section.crop} must be below the images' {shape[1]} x {shape[2]}.")
    if section.cutout > min(shape[1:]):
        raise InvalidArgument(f"[{name}] cutout={section.cutout} is larger than images of {shape[1]} x {shape[2]}.")
