"""EDM: Karras, Aittala, Aila, Laine 2022, "Elucidating the design space of diffusion-based generative models".

Symbols and numbers of equations are those of the paper (arXiv 2206.00364), table 1, column "Ours".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.process import Process, noise_like


@dataclass(frozen=True, kw_only=True)
class Edm(Process):
    """Preconditioning, loss weights and noise levels of EDM, for images in [-1, 1].

    `sigma_data` is the deviation of the images' pixels; ln sigma is normal with mean `P_mean` and deviation `P_std`
    while training; samplers go from `sigma_max` down to `sigma_min`.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> images = torch.rand(4, 3, 8, 8) * 2 - 1
    >>> Edm().losses(lambda x, c_noise, labels, augment_labels: torch.zeros_like(x), images).shape
    torch.Size([4])
    """

    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or (field.name != "P_mean" and value <= 0):
                raise InvalidArgument(f"{field.name}={value} must be a positive number, such as {field.default}.")
        if not self.sigma_min < self.sigma_max:
            raise InvalidArgument(
                f"sigma_min={self.sigma_min} must be below sigma_max={self.sigma_max}: samplers go from one to the "
                "other."
            )

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in and c_noise (table 1; derived in appendix B.6): input and target have variance 1."""
        total = sigma.square() + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data * total.rsqrt(), total.rsqrt(), sigma.log() / 4

    def drawn(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        one_each = images.flatten(1)[:, 0]
        return (self.P_mean + self.P_std * noise_like(one_each, generator)).exp()

    def weight(self, sigma: Tensor) -> Tensor:
        """1 / c_out^2: at first, errors at all levels weigh the same."""
        return (sigma.square() + self.sigma_data**2) / (sigma * self.sigma_data).square()
