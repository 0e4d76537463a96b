"""The samplers on normal data, where the exact denoiser, and so the exact result, is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.ddpm import Ddpm
from sfumato.synthesis.edm import Edm
from sfumato.synthesis.heun import Churn, heun, times
from sfumato.synthesis.process import per_image

DEVIATIONS = torch.tensor([0.1, 0.5, 2.0]).double()
MIXED = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
COVARIANCE = MIXED @ DEVIATIONS.square().diag() @ MIXED.T


def exact(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
    """E[y | x] for y ~ N(0, COVARIANCE) and x = y + sigma n."""
    assert torch.equal(sigma, sigma[:1].expand(len(x)))
    return x @ torch.linalg.solve(COVARIANCE + sigma[0] ** 2 * torch.eye(3).double(), COVARIANCE)


def noise(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# What the equation dx/dsigma = (x - D) / sigma makes of N(0, 80^2) instead of N(0, COVARIANCE + 80^2).
SOLUTION = COVARIANCE @ torch.linalg.inv(torch.eye(3).double() + COVARIANCE / 80**2)


def error(covariance: Tensor, of: Tensor = SOLUTION) -> float:
    return float(torch.linalg.norm(covariance - of) / torch.linalg.norm(of))


def heun_error(steps: int) -> float:
    """Of the samples' covariance. The sampler is linear, so that it is known from three samples."""
    linear = heun(exact, torch.eye(3).double(), steps=steps)
    return error(linear.T @ linear)


def test_times_are_those_of_equation_5() -> None:
    t = times(18)
    assert len(t) == 19
    assert [t[0], t[17], t[18]] == pytest.approx([80, 0.002, 0])
    roots = [v ** (1 / 7) for v in t[:18]]
    steps = [a - b for a, b in pairwise(roots)]
    assert steps == pytest.approx([(80 ** (1 / 7) - 0.002 ** (1 / 7)) / 17] * 17)


def test_the_covariance_is_reached_and_the_error_falls_fourfold_when_steps_double() -> None:
    errors = [heun_error(steps) for steps in (20, 40, 80, 160)]
    assert errors[0] < 0.1
    assert errors[-1] < 1e-3
    for coarse, fine in pairwise(errors):
        assert 3.5 < coarse / fine < 4.8
    assert error(SOLUTION, COVARIANCE) < 1e-3


def test_euler_alone_would_be_of_first_order() -> None:
    """So the ratio above can tell: the same slopes without the correction."""

    def euler(steps: int) -> float:
        t, x = times(steps), 80 * torch.eye(3).double()
        for now, later in pairwise(t):
            x = x + (later - now) * (x - exact(x, torch.tensor([now] * 3).double(), None)) / now
        return error(x.T @ x)

    assert 1.5 < euler(80) / euler(160) < 2.5


def test_samples_of_normal_noise_have_the_covariance() -> None:
    samples = heun(exact, noise(40_000), steps=40)
    assert torch.allclose(samples.T @ samples / 40_000, COVARIANCE, atol=0.08)
    assert torch.allclose(samples.mean(0), torch.zeros(3).double(), atol=0.05)


@pytest.mark.parametrize(
    ("S_noise", "right"), [(1.0, True), (1.3, False), (0.7, False)], ids=["as it should be", "too strong", "too weak"]
)
def test_stochastic_samples_have_it_too(S_noise: float, right: bool) -> None:
    churn = Churn(S_churn=30, S_min=0.01, S_max=50, S_noise=S_noise)
    generator = torch.Generator().manual_seed(2)
    samples = heun(exact, noise(40_000), steps=60, churn=churn, generator=generator)
    found = samples.T @ samples / 40_000
    assert torch.allclose(found, COVARIANCE, atol=0.12) is right
    plain = heun(exact, noise(40_000), steps=60)
    assert float((samples * plain).mean()) < 0.9 * float(plain.square().mean())  # new noise takes the old one's place


def test_fresh_noise_is_drawn_where_it_was_asked_for() -> None:
    churn = Churn(S_churn=20, S_min=0.1, S_max=10)
    most = math.sqrt(2) - 1
    assert [churn.gamma(t, 40) for t in (0.05, 0.1, 1.0, 10.0, 20.0)] == [0, most, most, most, 0]
    assert churn.gamma(1.0, 100) == 0.2
    plain = heun(exact, noise(5), steps=10)
    assert torch.equal(heun(exact, noise(5), steps=10, churn=Churn(S_churn=0)), plain)
    assert torch.equal(heun(exact, noise(5), steps=10, churn=Churn(S_min=100, S_max=200)), plain)

    def drawn(seed: int) -> Tensor:
        return heun(exact, noise(5), steps=10, churn=churn, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.allclose(drawn(0), drawn(1), atol=1e-3)


@pytest.mark.parametrize("churn", [None, Churn(S_churn=20)])
def test_a_guide_is_added_to_the_score(churn: Churn | None) -> None:
    """The score of N(m, C) less that of N(0, C), both noised: samples move by m."""
    m = torch.tensor([1.0, -2.0, 0.5]).double()

    def guide(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        return torch.linalg.solve(COVARIANCE + sigma[0] ** 2 * torch.eye(3).double(), m).expand_as(x)

    def samples(**options: Any) -> Tensor:
        return heun(exact, noise(500), steps=80, churn=churn, generator=torch.Generator().manual_seed(0), **options)

    # The start is not moved, which costs m a share of 1 - 80 / sqrt(80^2 + 2^2) at most.
    assert torch.allclose(samples(guide=guide) - samples(), m.expand(500, 3), atol=0.03)


def test_labels_and_levels_reach_denoiser_and_guide() -> None:
    labels, seen = torch.arange(4), []

    def watched(result: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        def call(x: Tensor, sigma: Tensor, given: Tensor | None) -> Tensor:
            assert given is labels
            assert sigma.shape == (4,)
            seen.append(float(sigma[0]))
            return result(x)

        return call

    heun(watched(lambda x: 0.5 * x), noise(4), labels, steps=5, guide=watched(torch.zeros_like))
    t = times(5)
    expected = [v for now, later in pairwise(t) for v in ((now, later) if later else (now,))]
    assert seen[::2] == pytest.approx(expected)  # 2 * 5 - 1 evaluations
    assert seen[1::2] == pytest.approx(expected)


@pytest.mark.parametrize("process", [Edm(sigma_data=0.7), Ddpm()])
def test_processes_with_an_optimal_network_sample_the_data(process: Any) -> None:
    """Of N(0, 0.7^2), for which F is known: zero for EDM, and for DDPM the eps that is expected."""

    def network(x: Tensor, c_noise: Tensor, *_: Any) -> Tensor:
        if isinstance(process, Edm):
            return torch.zeros_like(x)
        sigma = (4 * c_noise).exp()
        return per_image((1 + sigma.square()).sqrt() * sigma / (0.49 + sigma.square()), x) * x

    def denoiser(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        found: Tensor = process.denoised(network, x, sigma, labels)
        return found

    start = torch.ones(1, 1, 1, 1).double()
    end = heun(denoiser, start, steps=100, sigma_min=process.sigma_min, sigma_max=process.sigma_max)
    assert float(end) == pytest.approx(0.7, rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1}, "steps=1 must be a whole number of at least 2"),
        ({"sigma_min": 0.0}, "must satisfy 0 < sigma_min"),
        ({"rho": -1.0}, "rho > 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        heun(exact, noise(1), **options)
    with pytest.raises(InvalidArgument, match="S_churn=-1 must not be negative"):
        Churn(S_churn=-1)
