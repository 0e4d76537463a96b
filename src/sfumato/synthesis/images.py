"""The rows of a `Public` as a generator takes them: images and classes, and what can be said of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """All images (N, C, H, W) of a `Public`, uint8 or floats in 0..1 as `Pixels` takes them, and their classes."""

    images: Tensor
    labels: Tensor | None

    @staticmethod
    def of(public: Public) -> PublicImages:
        """Anything but a `Public` is refused."""
        if not isinstance(public, Public):
            raise InvalidArgument(
                f"public={type(public).__name__} must be a Public: what is trained on private rows, or on anything "
                "computed of them, is not public, and neither is what it makes; give Public(rows that may be seen)."
            )
        batch = public.batch()
        given = list(batch) if isinstance(batch, tuple | list) else [batch]
        images, labels = given[0], given[1] if len(given) == 2 else None
        if len(given) > 2 or not all(isinstance(t, Tensor) for t in given):
            raise InvalidArgument(
                f"public has rows of {len(given)} parts in a {type(batch).__name__}: give Public(images) or "
                "Public((images, labels))."
            )
        _check_images(images)
        if labels is not None and (labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool):
            raise InvalidArgument(
                f"public has labels of the shape {tuple(labels.shape)} and type {labels.dtype}: give one whole number "
                "per image."
            )
        return PublicImages(images=images, labels=None if labels is None else labels.long())

    def to(self, device: torch.device) -> PublicImages:
        labels = None if self.labels is None else self.labels.to(device)
        return PublicImages(images=self.images.to(device), labels=labels)

    def check_fit(self, image: tuple[int, ...], classes: int) -> None:
        """Raise unless a network of such images and classes can be trained on these."""
        if tuple(self.images.shape[1:]) != tuple(image):
            raise InvalidArgument(
                f"network takes images {tuple(image)}, but public has {tuple(self.images.shape[1:])}: make one fit the "
                "other."
            )
        if classes and self.labels is None:
            raise InvalidArgument(
                f"network has classes={classes}, but public has no labels: give Public((images, labels)), or "
                "unet(classes=0)."
            )
        if classes and self.labels is not None and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < classes:
            raise InvalidArgument(
                f"public has labels from {int(self.labels.min())} to {int(self.labels.max())}, but network has "
                f"classes={classes}: number them from 0."
            )

    def facts(self) -> dict[str, Any]:
        """What identifies the rows: how many, of what kind, and a hash of every one of them in this order."""
        counts = None if self.labels is None else torch.bincount(self.labels.cpu()).tolist()
        digest = hashlib.sha256(f"{self.images.dtype} {tuple(self.images.shape)}".encode())
        for tensor in (self.images, self.labels):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return {
            "rows": len(self.images),
            "image": list(self.images.shape[1:]),
            "rows_per_class": counts,
            "sha256": digest.hexdigest(),
        }


def scaled(images: Tensor) -> Tensor:
    """Pixels, uint8 or floats in 0..1, as float32 in [-1, 1].

    >>> scaled(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    [-1.0, 1.0]
    """
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float() * 2 - 1


def pixels(values: Tensor) -> Tensor:
    """The nearest uint8 of what should lie in [-1, 1].

    >>> pixels(torch.tensor([-1.2, 0.0, 1.0])).tolist()
    [0, 128, 255]
    """
    return ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise InvalidArgument(
            f"public has images of the shape {tuple(images.shape)} and type {images.dtype}: give (N, C, H, W) of uint8 "
            "or floats in 0..1."
        )
    if images.is_floating_point() and not 0 <= float(images.min()) <= float(images.max()) <= 1:
        raise InvalidArgument(
            f"public has pixels from {float(images.min()):.3g} to {float(images.max()):.3g}: floats must lie in 0..1, "
            "so divide them by what white is."
        )
