"""What networks, noising processes and samplers have in common: a denoiser D(x; sigma) of images in [-1, 1]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Any]
"""F(x; c_noise, labels, augment_labels): a module, given images, one number per image, classes, and 0 or more labels
of an augmentation per image, where None stands for zeros."""


class Process(ABC):
    """A way to noise images, x = y + sigma n, and to train a network to undo it.

    Processes differ in three functions of sigma; what is made of them is common (Karras et al. 2022, section 5 and
    table 1, where DDPM is one of the columns).
    """

    @property
    @abstractmethod
    def sigma_min(self) -> float:
        """The least noise that is trained for."""

    @property
    @abstractmethod
    def sigma_max(self) -> float:
        """The most noise that is trained for, beside which images are nothing."""

    @abstractmethod
    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in and c_noise."""

    @abstractmethod
    def drawn(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """A random sigma for each image, as training wants them."""

    @abstractmethod
    def weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma), what an error counts at each level of noise."""

    def denoised(
        self,
        network: Network,
        x: Tensor,
        sigma: Tensor,
        labels: Tensor | None = None,
        augment_labels: Tensor | None = None,
    ) -> Tensor:
        """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), eq. 7: what the network takes the images to be."""
        c_skip, c_out, c_in, c_noise = self.preconditioning(sigma)
        F: Tensor = network(per_image(c_in, x) * x, c_noise, labels, augment_labels).to(x.dtype)
        return per_image(c_skip, x) * x + per_image(c_out, x) * F

    def losses(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor | None = None,
        augment_labels: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """lambda(sigma) |D(y + n; sigma) - y|^2 per image at a random sigma (eq. 8), the mean over its pixels."""
        sigma = self.drawn(images, generator)
        n = per_image(sigma, images) * noise_like(images, generator)
        D = self.denoised(network, images + n, sigma, labels, augment_labels)
        return self.weight(sigma) * (D - images).square().flatten(1).mean(1)


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """One number per image, in a shape that multiplies images."""
    return values.reshape(-1, *[1] * (images.ndim - 1))


def noise_like(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers; a public draw, which protects nobody."""
    return torch.randn(images.shape, dtype=images.dtype, device=images.device, generator=generator)
