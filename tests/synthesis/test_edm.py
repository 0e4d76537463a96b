"""The two processes: variances and optimal denoisers that are known in closed form for normal data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.ddpm import Ddpm
from sfumato.synthesis.edm import Edm
from sfumato.synthesis.process import per_image

SIGMAS = [0.002, 0.05, 0.5, 3.0, 80.0]


def normal(shape: tuple[int, ...], deviation: float = 1.0, seed: int = 0) -> Tensor:
    return deviation * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Seen:
    """A network of zeros that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> Tensor:
        self.calls.append(given)
        return torch.zeros_like(given[0])


# ------------------------------------------------------------------------------------------------ EDM


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(("sigma_data", "deviation", "fits"), [(0.5, 0.5, True), (2.0, 2.0, True), (0.5, 1.0, False)])
def test_input_and_target_have_variance_one(sigma: float, sigma_data: float, deviation: float, fits: bool) -> None:
    y, n = normal((50_000,), deviation), normal((50_000,), sigma, seed=1)
    c_skip, c_out, c_in, c_noise = Edm(sigma_data=sigma_data).preconditioning(torch.tensor(sigma).double())
    given, target = c_in * (y + n), (y - c_skip * (y + n)) / c_out
    variances = [float(given.var()), float(target.var())]
    assert c_noise == pytest.approx(math.log(sigma) / 4, rel=1e-6)
    assert (variances == pytest.approx([1.0, 1.0], abs=0.03)) is fits
    if fits:  # c_skip leaves no part of the target that the input alone foretells
        assert float((given * target).mean()) == pytest.approx(0, abs=0.02)


def test_for_independent_normal_pixels_nothing_is_left_to_learn() -> None:
    """F = 0 is the optimal denoiser then, sigma_data^2 / (sigma_data^2 + sigma^2) x, and its loss 1 at every sigma."""
    y = normal((4000, 1, 5, 5), 0.5)
    seen = Seen()
    losses = Edm().losses(seen, y, generator=torch.Generator().manual_seed(1))
    sigma = (4 * seen.calls[0][1]).exp()
    assert losses.shape == (4000,)
    for part in losses[sigma.argsort()].chunk(4):
        assert float(part.mean()) == pytest.approx(1, abs=0.04)
    x = normal((3, 1, 5, 5))
    levels = torch.tensor([0.1, 1.0, 10.0]).double()
    exact = x * per_image(0.25 / (0.25 + levels.square()), x)
    assert torch.allclose(Edm().denoised(Seen(), x, levels), exact)


def test_noise_levels_are_log_normal() -> None:
    seen = Seen()
    Edm(P_mean=-0.7, P_std=0.4).losses(seen, normal((20_000, 1, 1, 1)), generator=torch.Generator().manual_seed(1))
    logs = 4 * seen.calls[0][1]
    assert float(logs.mean()) == pytest.approx(-0.7, abs=0.02)
    assert float(logs.std()) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("process", [Edm(), Ddpm()])
def test_one_image_has_one_loss(process: Any) -> None:
    y, changed = normal((6, 3, 4, 4)), normal((6, 3, 4, 4))
    changed[2] += 1

    def losses(images: Tensor) -> Tensor:
        found: Tensor = process.losses(lambda x, *_: x.tanh(), images, generator=torch.Generator().manual_seed(0))
        return found

    different = losses(y) != losses(changed)
    assert different.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("process", [Edm(), Ddpm()])
def test_labels_reach_the_network(process: Any) -> None:
    seen = Seen()
    labels, augment_labels = torch.arange(2), torch.ones(2, 9)
    process.losses(seen, normal((2, 1, 4, 4)), labels, augment_labels)
    process.denoised(seen, normal((2, 1, 4, 4)), torch.ones(2).double(), labels)
    assert seen.calls[0][2] is labels
    assert seen.calls[0][3] is augment_labels
    assert seen.calls[1][2:] == (labels, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Edm(sigma_data=0.0), "sigma_data=0.0 must be a positive number"),
        (lambda: Edm(sigma_min=90.0), "sigma_min=90.0 must be below sigma_max=80.0"),
        (lambda: Ddpm(beta_1=0.5), "must satisfy 0 < beta_1 <= beta_T < 1"),
        (lambda: Ddpm(T=1), "T=1 must be a whole number of at least 2"),
    ],
)
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


# ------------------------------------------------------------------------------------------------ DDPM


def test_sigma_is_that_of_the_markov_chain() -> None:
    """q(x_t | x_{t-1}) = N(sqrt(1 - beta_t) x_{t-1}, beta_t), followed step by step for the signal and the variance."""
    signal, variance, expected = 1.0, 0.0, []
    for beta in np.linspace(1e-4, 0.02, 1000):
        signal, variance = signal * math.sqrt(1 - beta), (1 - beta) * variance + beta
        expected.append(math.sqrt(variance) / signal)
    assert np.allclose(Ddpm().sigmas().numpy(), expected, rtol=1e-9)
    assert Ddpm().sigma_min == pytest.approx(expected[0], rel=1e-9)
    assert Ddpm().sigma_max == pytest.approx(expected[-1], rel=1e-9)


@pytest.mark.parametrize("t", [0, 10, 500, 999])
def test_a_network_that_knows_eps_gives_the_image_back(t: int) -> None:
    """Also, it is shown x_t as the chain makes it: of variance 1 if the images have it."""
    process = Ddpm()
    sigma = process.sigmas()[t].expand(3)
    x_0, eps = normal((3, 1, 30, 30)), normal((3, 1, 30, 30), seed=1)
    abar = math.prod(1 - b for b in np.linspace(1e-4, 0.02, 1000)[: t + 1])
    x_t = math.sqrt(abar) * x_0 + math.sqrt(1 - abar) * eps
    shown: list[Tensor] = []

    def knows(x: Tensor, c_noise: Tensor, *_: Any) -> Tensor:
        shown.append(x)
        return eps

    assert torch.allclose(process.denoised(knows, x_0 + per_image(sigma, x_0) * eps, sigma), x_0, atol=1e-9)
    assert torch.allclose(shown[0], x_t, atol=1e-9)
    assert float(shown[0].var()) == pytest.approx(1, abs=0.1)


def test_loss_is_that_of_eps_at_uniform_t() -> None:
    """For a network of zeros the loss is |eps|^2; t is told by ln sigma."""
    process, seen = Ddpm(T=4), Seen()
    losses = process.losses(seen, normal((8000, 1, 3, 3)), generator=torch.Generator().manual_seed(0))
    assert float(losses.mean()) == pytest.approx(1, abs=0.02)
    assert float(losses.var()) == pytest.approx(2 / 9, abs=0.02)  # of a mean of nine squares
    told = (4 * seen.calls[0][1]).exp()
    shares = [float(torch.isclose(told, sigma).double().mean()) for sigma in process.sigmas()]
    assert shares == pytest.approx([0.25] * 4, abs=0.02)


def test_loss_is_zero_for_the_network_that_is_right() -> None:
    """Of images that are all zero, x_t / sqrt(1 - abar_t) is eps."""

    def right(x: Tensor, c_noise: Tensor, *_: Any) -> Tensor:
        sigma = (4 * c_noise).exp()
        return x * per_image((1 + sigma.square()).sqrt() / sigma, x)

    assert float(Ddpm().losses(right, torch.zeros(100, 1, 3, 3).double()).max()) < 1e-20
