"""Augmentation of images, each drawn for itself: windows of the reflect-padded image, mirroring, a grey hole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.augment.batch import check_images, grey, with_images
from sfumato.errors import InvalidArgument
from sfumato.kernels import usable


@dataclass(frozen=True)
class Augmentation:
    """A batch with each image's random view of itself: same shape, same type, in channels-last memory.

    The view is a window of the image reflected `pad` pixels past each edge, mirrored half of the time if `flip`; then a
    square of side `cutout` about a random pixel, cut at the edges, is made mid-grey: 127 where images are uint8, 0.5
    where they are floats, which `Pixels` takes to lie in 0..1.

    The batch is a tensor of images (N, C, H, W), or a tuple or list that begins with one; the rest is left alone. All
    randomness comes from torch's global generator of the images' device, N numbers at a time whatever the images hold.

    >>> images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    >>> views, same_labels = Augmentation(cutout=8)((images, labels))
    >>> views.shape, same_labels is labels
    (torch.Size([8, 3, 32, 32]), True)
    """

    pad: int = 4
    flip: bool = True
    cutout: int = 0

    def __post_init__(self) -> None:
        for name, value in (("pad", self.pad), ("cutout", self.cutout)):
            if not isinstance(value, int) or value < 0:
                raise InvalidArgument(f"{name}={value!r} must be a whole number of pixels, or 0 for none.")

    def __call__(self, batch: Any) -> Any:
        return with_images(batch, self._views)

    def _views(self, images: Tensor) -> Tensor:
        self._check(images)
        N, _, H, W = images.shape

        def drawn(below: int) -> Tensor:
            return torch.randint(0, below, (N,), device=images.device)

        top, left, mirror = drawn(2 * self.pad + 1), drawn(2 * self.pad + 1), drawn(2 if self.flip else 1)
        hole = (drawn(H), drawn(W)) if self.cutout else None
        if N and usable(images):
            from sfumato.kernels.crops import crop

            return crop(images, top, left, mirror, hole, self.pad, self.cutout)
        return crop_slowly(images, top, left, mirror, hole, self.pad, self.cutout)

    def _check(self, images: Tensor) -> None:
        check_images(images)
        if self.cutout > min(images.shape[2:]):
            raise InvalidArgument(
                f"cutout={self.cutout} is larger than images of {images.shape[2]} x {images.shape[3]} pixels: lower it."
            )
        if self.pad >= min(images.shape[2:]):
            raise InvalidArgument(
                f"pad is {self.pad}, but images of {images.shape[2]} x {images.shape[3]} pixels can be reflected only "
                f"{min(images.shape[2:]) - 1} past an edge: pad less."
            )


def crop_slowly(
    images: Tensor, top: Tensor, left: Tensor, mirror: Tensor, hole: tuple[Tensor, Tensor] | None, pad: int, side: int
) -> Tensor:
    """What the kernel `crop` computes, as a gather in plain PyTorch."""
    N, _, H, W = images.shape
    device = images.device
    h, w = torch.arange(H, device=device), torch.arange(W, device=device)
    from_h = _reflected(top[:, None] + h - pad, H)
    from_w = _reflected(left[:, None] + torch.where(mirror[:, None] != 0, W - 1 - w, w) - pad, W)
    n = torch.arange(N, device=device)
    views = images[n[:, None, None], :, from_h[:, :, None], from_w[:, None, :]]  # (N, H, W, C): indexed dims go first
    if hole is not None:
        from_top, from_left = (p - centre[:, None] + side // 2 for p, centre in zip((h, w), hole, strict=True))
        rows, columns = ((d >= 0) & (d < side) for d in (from_top, from_left))
        views.masked_fill_((rows[:, :, None] & columns[:, None, :])[..., None], grey(images))
    return views.permute(0, 3, 1, 2)


def _reflected(i: Tensor, size: int) -> Tensor:
    i = i.abs()
    return torch.where(i >= size, 2 * (size - 1) - i, i)


def mirrored(batch: Any) -> Any:
    """Every image as in a mirror, for the `views` of `sfumato.ensembles`; the batch is as for `Augmentation`.

    >>> mirrored(torch.arange(3.0).reshape(1, 1, 1, 3)).flatten().tolist()
    [2.0, 1.0, 0.0]
    """
    return with_images(batch, lambda images: images.flip(-1))
