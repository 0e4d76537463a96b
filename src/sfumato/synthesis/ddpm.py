"""DDPM: Ho, Jain, Abbeel 2020 (arXiv 2006.11239), the model that DOPE-SGD's authors made public data with.

Its images shrink while they are noised, x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps (eq. 4). Divided by sqrt(abar_t)
they are x_0 + sigma_t eps with sigma_t^2 = (1 - abar_t) / abar_t: the form that samplers here work with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.process import Process


@dataclass(frozen=True, kw_only=True)
class Ddpm(Process):
    """Linear betas, a network that predicts eps, and the unweighted loss L_simple (eq. 14), for images in [-1, 1].

    >>> process = Ddpm()
    >>> round(process.sigma_min, 4), round(process.sigma_max, 1)
    (0.01, 157.4)
    """

    beta_1: float = 1e-4
    beta_T: float = 0.02  # noqa: N815
    T: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.beta_1 <= self.beta_T < 1:
            raise InvalidArgument(
                f"beta_1={self.beta_1} and beta_T={self.beta_T} must satisfy 0 < beta_1 <= beta_T < 1, such as 1e-4 "
                "and 0.02."
            )
        if not isinstance(self.T, int) or self.T < 2:
            raise InvalidArgument(f"T={self.T} must be a whole number of at least 2, such as 1000.")

    @property
    def sigma_min(self) -> float:
        return float(self.sigmas()[0])

    @property
    def sigma_max(self) -> float:
        return float(self.sigmas()[-1])

    def sigmas(self, device: torch.device | None = None) -> Tensor:
        """sigma_1, ..., sigma_T in float64, rising."""
        betas = torch.linspace(self.beta_1, self.beta_T, self.T, dtype=torch.float64, device=device)
        abar = (1 - betas).cumprod(0)
        return ((1 - abar) / abar).sqrt()

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """D(x; sigma) = x - sigma eps(x): eq. 15's estimate of x_0.

        The network sees x_t = sqrt(abar_t) x. It is told t by ln sigma_t, which also lies between the t of training
        where samplers want it to.
        """
        return torch.ones_like(sigma), -sigma, (1 + sigma.square()).rsqrt(), sigma.log() / 4

    def drawn(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """At t uniform in 1..T (algorithm 1)."""
        t = torch.randint(self.T, (len(images),), device=images.device, generator=generator)
        return self.sigmas(images.device).to(images.dtype)[t]

    def weight(self, sigma: Tensor) -> Tensor:
        """D - x_0 is sigma (eps - eps(x)), so the loss is L_simple, |eps - eps(x)|^2."""
        return sigma.square().reciprocal()
