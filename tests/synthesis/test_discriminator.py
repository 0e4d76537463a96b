"""Discriminator guidance: its value is a difference of scores, and following it leads to the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.synthesis import Edm, Generator, unet
from sfumato.synthesis.discriminator import (
    Guidance,
    discriminator,
    load_discriminator,
    save_discriminator,
    train_discriminator,
    train_guidance,
)
from sfumato.synthesis.heun import heun

Law = tuple[float, float]  # mean and deviation
MODEL: Law = (0.0, 1.0)


def noised(law: Law, sigma: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(torch.full_like(sigma, law[0]), (law[1] ** 2 + sigma.square()).sqrt())


def perfect(real: Law, model: Law = MODEL) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """log d / (1 - d) = log p_real - log p_model at this level of noise."""

    def log_ratio(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        return noised(real, sigma).log_prob(x[:, 0]) - noised(model, sigma).log_prob(x[:, 0])

    return log_ratio


def score(law: Law, x: Tensor, sigma: float) -> Tensor:
    return -(x - law[0]) / (law[1] ** 2 + sigma**2)


def denoiser_of(law: Law, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
    """E[y | y + sigma n = x] for y of this law: x + sigma^2 score."""
    variance = sigma[:, None].square()
    return x - variance * (x - law[0]) / (law[1] ** 2 + variance)


# ------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("sigma", [0.002, 0.5, 3.0, 80.0])
@pytest.mark.parametrize("real", [(2.0, 1.0), (-1.0, 0.5)])
def test_a_perfect_discriminator_gives_the_difference_of_scores(real: Law, sigma: float) -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)[:, None]
    expected = score(real, x, sigma) - score(MODEL, x, sigma)
    levels = torch.tensor(sigma, dtype=torch.float64)
    for given in (levels, levels.expand(13)):  # one level for all, or one for each
        assert torch.allclose(Guidance(perfect(real))(x, given, None), expected, rtol=1e-10, atol=1e-14)
    if real[1] == 1:  # N(m, 1): the same everywhere
        assert torch.allclose(expected, torch.full_like(x, real[0] / (1 + sigma**2)), rtol=1e-12)
    triple = Guidance(perfect(real), weight=3.0)(x, levels, None)
    assert torch.allclose(triple, 3 * expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("real", [(2.0, 1.0), (-1.0, 0.5)])
def test_the_sampler_with_a_perfect_discriminator_draws_from_the_data(real: Law) -> None:
    """The flow from N(0, 80^2) to N(m, s^2) is increasing: it takes 80 e to m + s e."""
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    flow = partial(heun, partial(denoiser_of, MODEL), noise, steps=60)
    assert torch.allclose(flow(), noise, atol=0.02)
    guided = flow(guide=Guidance(perfect(real)))
    start = 80 / math.sqrt(80**2 + real[1] ** 2)  # noise of 80 is not yet the noised data, by a little
    expected = real[0] + real[1] * (start * noise - real[0] / 80)
    assert torch.allclose(guided, expected, atol=0.03)


@pytest.mark.parametrize(("weight", "sign"), [(0.3, 1), (3.0, 1), (-1.0, -1)])
def test_a_larger_weight_moves_further_and_a_negative_one_away(weight: float, sign: int) -> None:
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    flow = partial(heun, partial(denoiser_of, MODEL), noise, steps=20)
    moved = (flow(guide=Guidance(perfect((2.0, 1.0)), weight=weight)) - flow()).mean().item()
    assert sign * moved > 0
    assert moved == pytest.approx(2.0 * weight, rel=0.05)  # a shift of the score by w m / (1 + sigma^2)


def test_between_limits_where_it_acts() -> None:
    guide = Guidance(perfect((2.0, 1.0)), between=(0.1, 10.0))
    x = torch.zeros(4, 1)
    found = guide(x, torch.tensor([0.05, 0.1, 10.0, 20.0]), None)[:, 0]
    assert (found != 0).tolist() == [False, True, True, False]


def test_images_and_labels_reach_the_discriminator() -> None:
    seen: list[Any] = []

    def note(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        seen.append((sigma, labels))
        return x.square().sum((1, 2, 3)) / 2

    x, labels = torch.randn(3, 1, 4, 4), torch.tensor([0, 2, 1])
    with torch.no_grad():  # as in a sampler
        assert torch.allclose(Guidance(note)(x, torch.tensor(2.0), labels), x)
    assert torch.equal(seen[0][0], torch.full((3,), 2.0))
    assert seen[0][1] is labels
    assert not x.requires_grad


# ------------------------------------------------------------------------------------------------ the network


def test_the_networks_slope_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    network = discriminator((1, 8, 8), classes=3, channels=8, multipliers=(1, 2)).double()
    nn.init.normal_(network.last.weight)
    x, way = torch.randn(2, 4, 1, 8, 8, dtype=torch.float64)
    sigma, labels = torch.tensor([0.01, 0.5, 5.0, 80.0], dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    slope = (Guidance(network)(x, sigma, labels) * way).sum((1, 2, 3))
    step = 1e-5
    with torch.no_grad():
        ends = [network(x + sign * step * way, sigma, labels) for sign in (1, -1)]
    assert torch.allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-9)
    assert all(p.grad is None for p in network.parameters())
    hot = torch.nn.functional.one_hot(labels, 3)
    assert torch.equal(network(x, sigma, hot), network(x, sigma, labels))
    assert not torch.allclose(network(x, sigma, labels.flip(0)), network(x, sigma, labels))


def test_a_new_network_guides_nowhere_and_rows_do_not_mix() -> None:
    network = discriminator((3, 8, 8), channels=8)
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(Guidance(network)(x, torch.tensor(1.0)), torch.zeros_like(x))
    nn.init.normal_(network.last.weight)
    together, sigma = Guidance(network), torch.tensor([0.1, 1.0, 10.0])
    assert torch.allclose(together(x, sigma)[1:2], together(x[1:2], sigma[1:2]), atol=1e-6)


class Line(nn.Module):
    """Enough for Gaussians of equal spread: a(sigma) x + b(sigma), with a and b learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        a, b = self.coefficients(sigma.log()[:, None] / 2).T
        found: Tensor = (a * x[:, 0] + b) / (1 + sigma)
        return found


def test_training_finds_the_ratio_of_densities() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(20_000, 1, generator=generator)
    real = torch.randn(20_000, 1, generator=generator) + 2
    network = Line()
    losses = train_discriminator(
        network, Public(real, seed=0), Public(made, seed=1), steps=600, batch_size=512, learning_rate=0.02, sigma_max=10
    )
    assert sum(losses[-50:]) < 0.9 * sum(losses[:10]) * 5
    for sigma in (0.1, 0.5, 1.0, 3.0):
        found = Guidance(network)(torch.zeros(1, 1), torch.tensor(sigma)).item()
        assert found == pytest.approx(2 / (1 + sigma**2), abs=0.25), sigma


def test_a_trained_discriminator_moves_samples_to_the_public_images() -> None:
    """Flat grey images with a little grain; those of the generator are darker by 0.4 on average."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    level, grain = 0.25**2, 0.1**2  # variances

    def images(mean: float) -> Tensor:
        grey = mean + level**0.5 * torch.randn(1000, 1, 1, 1, generator=generator)
        pixels = grey + grain**0.5 * torch.randn(1000, 1, 8, 8, generator=generator)
        return ((pixels + 1) / 2).clamp(0, 1)

    def denoiser(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        """Of the generator's law: the mean of the 64 pixels and what deviates from it are independent normals."""
        variance = sigma.square().reshape(-1, 1, 1, 1)
        mean = x.mean((1, 2, 3), keepdim=True)
        of_mean = level + grain / 64
        return -0.2 + of_mean / (of_mean + variance / 64) * (mean + 0.2) + grain / (grain + variance) * (x - mean)

    network = discriminator((1, 8, 8), channels=8, multipliers=(1, 2))
    real, made = Public(images(0.2), seed=0), Public(images(-0.2), seed=0)
    losses = train_discriminator(network, real, made, steps=120, batch_size=64, learning_rate=3e-3, sigma_max=10.0)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert sum(losses[-10:]) / 10 < 0.6
    assert all(p.grad is None for p in network.parameters())

    flow = partial(heun, denoiser, torch.randn(16, 1, 8, 8, generator=generator), steps=12, sigma_max=10.0)
    moved = {w: (flow(guide=Guidance(network, weight=w)) - flow()).mean((1, 2, 3)) for w in (-1.0, 1.0)}
    assert moved[1.0].min() > 0  # every image becomes brighter
    assert moved[-1.0].max() < 0
    assert 0.1 < moved[1.0].mean() < 0.5  # a perfect discriminator moves them by 0.4, a short training by less


def test_a_training_is_repeatable() -> None:
    made = Public(torch.randint(0, 255, (20, 1, 8, 8), dtype=torch.uint8), seed=0)
    state = made.random_state

    def run(seed: int) -> list[float]:
        torch.manual_seed(0)
        made.random_state = state
        network = discriminator((1, 8, 8), channels=8, multipliers=(1,))
        return train_discriminator(network, made, made, steps=4, batch_size=8, seed=seed)

    assert run(1) == run(1)
    assert run(1)[1:] != run(2)[1:]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("classes", [0, 2])
def test_a_generator_is_guided_to_its_public_rows(classes: int) -> None:
    """Its weights are as they begin, so that pixels are grey, 127 on average; the public ones are brighter by 26."""
    torch.manual_seed(0)
    network = unet(image=(1, 8, 8), classes=classes, channels=8, multipliers=(1,), blocks=1, attention=())
    generator = Generator(network=network, process=Edm(sigma_data=0.4, sigma_max=10.0), provenance={})
    bright = (0.6 + 0.2 * torch.randn(300, 1, 8, 8)).clamp(0, 1)
    public = Public((bright, torch.arange(300) % 2) if classes else bright, seed=0)
    d = discriminator((1, 8, 8), classes=classes, channels=8, multipliers=(1, 2))
    options: dict[str, Any] = {"steps": 80, "batch_size": 64, "learning_rate": 3e-3, "seed": 7}
    guide = train_guidance(generator, public, network=d, weight=1.0, between=(0.01, 10.0), **options)
    assert guide.discriminator is d
    assert (guide.weight, guide.between) == (1.0, (0.01, 10.0))
    assert not d.training
    assert not any(p.requires_grad for p in d.parameters())
    plain, guided = (float(generator.sample(32, steps=8, seed=0, guide=g)[0].float().mean()) for g in (None, guide))
    assert plain + 2 < guided < plain + 26


def test_a_discriminator_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = discriminator((1, 8, 8), classes=3, channels=8, multipliers=(1, 2), blocks=2, sigma_data=0.3)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    save_discriminator(network, tmp_path / "d.safetensors")
    again = load_discriminator(tmp_path / "d.safetensors")
    given = (torch.rand(4, 1, 8, 8), torch.rand(4), torch.tensor([0, 1, 2, 0]))
    assert torch.equal(network.eval()(*given), again(*given))
    assert not any(p.requires_grad for p in again.parameters())
    (tmp_path / "d.safetensors").write_bytes(b"no")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_discriminator(tmp_path / "d.safetensors")


def test_private_rows_are_refused() -> None:
    rows = torch.rand(20, 1, 8, 8)
    private = Private(rows, name="clinic", size=20, budget=Budget(1.0, 1e-3))
    network: Any = discriminator((1, 8, 8), channels=8)
    for pair in ((private, Public(rows)), (Public(rows), private), (rows, Public(rows))):
        with pytest.raises(InvalidArgument, match="must be a Public"):
            train_discriminator(network, *pair, steps=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: Guidance(perfect(MODEL), weight=math.nan), "weight=nan"),
        (lambda: Guidance(perfect(MODEL), between=(2.0, 1.0)), "between"),
        (lambda: discriminator((3, 2, 2)), "halved"),
        (lambda: discriminator(channels=6), "channels=6"),
        (
            lambda: discriminator((1, 8, 8), classes=2, channels=8)(torch.zeros(2, 1, 8, 8), torch.ones(2)),
            "labels=None",
        ),
        (lambda: train_discriminator(Line(), *[Public(torch.rand(3, 1))] * 2, steps=0), "steps=0"),
        (lambda: train_discriminator(Line(), *[Public(torch.rand(3, 1))] * 2, steps=1, sigma_min=0), "sigma_min=0"),
    ],
)
def test_nonsense_is_refused(call: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        call()


@pytest.mark.gpu
def test_it_trains_and_guides_on_a_gpu() -> None:
    dark = torch.randint(0, 128, (200, 3, 16, 16), dtype=torch.uint8).cuda()
    network = discriminator((3, 16, 16), channels=32).cuda()
    public = [Public(dark + 64, seed=0), Public(dark, seed=0)]
    losses = train_discriminator(network, *public, steps=60, batch_size=64, learning_rate=1e-3, autocast=torch.bfloat16)
    assert sum(losses[-10:]) / 10 < 0.6
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64).cuda()
    found = Guidance(network)(x, torch.tensor(0.5).cuda())
    assert found.dtype == torch.float64
    assert found.mean() > 0
