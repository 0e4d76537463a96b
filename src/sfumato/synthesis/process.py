"""What networks, noising processes and samplers have in common: a denoiser D(x; sigma) of images in [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Any]
"""F(x; c_noise, labels, augment_labels): a module, given images, one number per image, classes, and 0 or more labels
of an augmentation per image, where None stands for zeros."""


class Process(Protocol):
    """A way to noise images, x = y + sigma n, and to train a network to undo it."""

    @property
    def sigma_min(self) -> float:
        """The least noise that is trained for."""

    @property
    def sigma_max(self) -> float:
        """The most noise that is trained for, beside which images are nothing."""

    def denoised(
        self,
        network: Network,
        x: Tensor,
        sigma: Tensor,
        labels: Tensor | None = None,
        augment_labels: Tensor | None = None,
    ) -> Tensor:
        """D(x; sigma): what the network takes the images to be, with one sigma per image."""

    def losses(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor | None = None,
        augment_labels: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """One loss per image at a random noise level."""


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """One number per image, in a shape that multiplies images."""
    return values.reshape(-1, *[1] * (images.ndim - 1))


def noise_like(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers; a public draw, which protects nobody."""
    return torch.randn(images.shape, dtype=images.dtype, device=images.device, generator=generator)
