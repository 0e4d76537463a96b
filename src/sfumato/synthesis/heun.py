"""Samplers of EDM (Karras et al. 2022): Heun's method, deterministic (algorithm 1) and stochastic (algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.process import noise_like, per_image

Denoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""D(x, sigma, labels), with one sigma per image."""

Guide = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What is added to the score at (x, sigma, labels), such as the gradient of a discriminator's log-ratio."""


@dataclass(frozen=True, kw_only=True)
class Churn:
    """Algorithm 2's fresh noise: S_churn of it in all, where S_min <= t <= S_max, S_noise times as strong.

    >>> Churn(S_churn=40, S_min=0.05, S_max=50, S_noise=1.003).gamma(1.0, steps=256)
    0.15625
    """

    S_churn: float = 40.0
    S_min: float = 0.05
    S_max: float = 50.0
    S_noise: float = 1.003

    def __post_init__(self) -> None:
        for name in ("S_churn", "S_min", "S_max", "S_noise"):
            value = getattr(self, name)
            if not value >= 0:
                raise InvalidArgument(f"{name}={value} must not be negative.")

    def gamma(self, t: float, steps: int) -> float:
        """gamma_i, by how much the noise level t is raised before a step (line 4)."""
        return min(self.S_churn / steps, math.sqrt(2) - 1) if self.S_min <= t <= self.S_max else 0.0


@torch.no_grad()
def heun(
    denoiser: Denoiser,
    noise: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 18,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
    churn: Churn | None = None,
    guide: Guide | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """From standard normal noise to images, in 2 steps - 1 evaluations of the denoiser.

    >>> shrunk = heun(lambda x, sigma, labels: x / (1 + sigma.square()).reshape(-1, 1), torch.ones(2, 1), steps=99)
    >>> [round(float(v), 2) for v in shrunk]  # the exact denoiser of N(0, 1) gives N(0, 1)
    [1.0, 1.0]
    """
    t = times(steps, sigma_min=sigma_min, sigma_max=sigma_max, rho=rho)
    churned = [now * (1 + (churn.gamma(now, steps) if churn else 0.0)) for now in t[:-1]]
    # Every level of a step as a tensor, copied to the device once: a recorded denoiser takes it as an input.
    levels = torch.tensor([*churned, *t[1:]], dtype=noise.dtype).to(noise.device, non_blocking=True)
    sigmas = levels[:, None].repeat(1, len(noise))

    def slope(x: Tensor, sigma: Tensor, value: float) -> Tensor:
        d = (x - denoiser(x, sigma, labels)) / value  # lines 4 and 7 of algorithm 1: d = -sigma * score
        return d if guide is None else d - per_image(sigma, x) * guide(x, sigma, labels)

    x = t[0] * noise
    for i in range(steps):
        t_hat, t_next = churned[i], t[i + 1]
        if churn is not None and t_hat > t[i]:
            added = churn.S_noise * math.sqrt(t_hat**2 - t[i] ** 2)
            x = x + added * noise_like(x, generator)  # algorithm 2, lines 5 and 6
        d = slope(x, sigmas[i], t_hat)
        euler = x + (t_next - t_hat) * d
        if t_next > 0:
            d_next = slope(euler, sigmas[steps + i], t_next)
            x = x + (t_next - t_hat) * (d + d_next) / 2
        else:
            x = euler
    return x


def times(steps: int, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> list[float]:
    """t_0 = sigma_max > ... > t_{steps - 1} = sigma_min > t_steps = 0 (eq. 5)."""
    if not isinstance(steps, int) or steps < 2:
        raise InvalidArgument(f"steps={steps} must be a whole number of at least 2: fewer do not reach sigma_min.")
    if not 0 < sigma_min < sigma_max < math.inf or not rho > 0:
        raise InvalidArgument(
            f"sigma_min={sigma_min}, sigma_max={sigma_max} and rho={rho} must satisfy 0 < sigma_min < sigma_max and "
            "rho > 0."
        )
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return [(first + i / (steps - 1) * (last - first)) ** rho for i in range(steps)] + [0.0]
