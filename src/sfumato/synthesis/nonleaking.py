"""Geometric augmentation that a generator is told of, so that it does not leak into samples (Karras et al. 2022, F.2).

Flips, scalings, rotations, stretches and shifts are drawn per image; the network is given what was drawn as labels. To
sample, it is given zeros, which stand for an image as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import InvalidArgument

AUGMENT_LABELS = 9
"""Labels per image: flips along x and y, scale, rotation (2), stretch (2), shift along x and y."""

_SCALE = 0.2  # deviation of log2 of a scaling or stretch
_SHIFT = 0.125  # deviation of a shift, in images


@dataclass(frozen=True, kw_only=True)
class NonLeaking:
    """Random views of images (N, C, H, W) in [-1, 1], and the labels (N, 9) that say how they were made.

    Each of scaling, rotation, stretch and shift happens with probability `p`, a flip upside down with p / 2; mirrored
    are `mirrored` of the images. Randomness comes from torch's global generator of the images' device.

    >>> views, labels = NonLeaking(p=0.12)(torch.rand(8, 3, 32, 32))
    >>> views.shape, labels.shape
    (torch.Size([8, 3, 32, 32]), torch.Size([8, 9]))
    """

    p: float = 0.12
    mirrored: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("p", self.p), ("mirrored", self.mirrored)):
            if not 0 <= value <= 1:
                raise InvalidArgument(f"{name}={value} must be a probability, between 0 and 1.")

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if images.ndim != 4 or not images.is_floating_point():
            raise InvalidArgument(
                f"images have the shape {tuple(images.shape)} and type {images.dtype}: give (N, C, H, W) of floats in "
                "[-1, 1]."
            )
        labels = self.drawn(images)
        return moved(images, labels), labels

    def drawn(self, images: Tensor) -> Tensor:
        """Labels for so many images."""
        one_each = images.flatten(1)[:, 0]

        def happens(p: float) -> Tensor:
            return (torch.rand_like(one_each) < p).to(images.dtype)

        def angle() -> Tensor:
            return (2 * torch.rand_like(one_each) - 1) * math.pi

        def strength() -> Tensor:
            return happens(self.p) * torch.randn_like(one_each)

        turned, stretched, along = happens(self.p) * angle(), strength(), angle()
        return torch.stack(
            [
                happens(self.mirrored),
                happens(self.p / 2),
                strength(),
                turned.cos() - 1,
                turned.sin(),
                stretched * along.cos(),
                stretched * along.sin(),
                strength(),
                strength(),
            ],
            1,
        )


def moved(images: Tensor, labels: Tensor) -> Tensor:
    """The views that labels stand for: reflected at the edges, bicubic in between."""
    _, _, H, W = images.shape
    flip_x, flip_y, scale, cos_1, sin, along_x, along_y, shift_x, shift_y = labels[:, :, None, None].unbind(1)
    # Where pixels of the view lie, about the middle of the image, in pixels; and where they are taken from, which is
    # worked out one operation after the other. Written out, since a matrix product may round coordinates to ten bits.
    y = torch.arange(H, device=images.device, dtype=images.dtype).add_(0.5 - H / 2)[None, :, None]
    x = torch.arange(W, device=images.device, dtype=images.dtype).add_(0.5 - W / 2)[None, None, :]
    x, y = x - _SHIFT * W * shift_x, y - _SHIFT * H * shift_y
    strength = torch.hypot(along_x, along_y)
    some = strength > 0
    e_x = torch.where(some, along_x / strength, 1.0)  # 0 / 0 is not taken
    e_y = torch.where(some, along_y / strength, 0.0)
    factor = torch.exp2(_SCALE * strength)
    on, off = (x * e_x + y * e_y) / factor, (y * e_x - x * e_y) * factor  # longer along e, narrower across
    x, y = on * e_x - off * e_y, on * e_y + off * e_x
    cos = 1 + cos_1
    x, y = x * cos + y * sin, y * cos - x * sin
    size = torch.exp2(_SCALE * scale)
    x, y = x / size * (1 - 2 * flip_x), y / size * (1 - 2 * flip_y)
    grid = torch.stack([x * (2 / W), y * (2 / H)], 3)
    views = F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return views.clamp(-1, 1)
