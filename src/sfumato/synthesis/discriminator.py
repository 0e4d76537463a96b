"""Discriminator guidance (Kim et al. 2023, "Refining generative process with discriminator guidance in score-based
diffusion models"), which paper 002 uses with large weights to make samples more diverse (section 4.3, appendix D.2).

A discriminator d(x; sigma) is trained to tell noised real rows from noised samples. At its optimum d / (1 - d) is the
ratio of the two densities, so grad log d / (1 - d) is the score of the real rows less the score of the samples: what is
missing in the generator's. With weight w_d the sampler follows score + w_d grad log d / (1 - d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn import GroupNormAct
from sfumato.nn.functional import at_least_float32
from sfumato.nn.modes import being_trained
from sfumato.public import Public
from sfumato.synthesis import store
from sfumato.synthesis.features import public_rows
from sfumato.synthesis.generator import Generator
from sfumato.synthesis.images import scaled
from sfumato.synthesis.process import noise_like, per_image

# (x, sigma, labels) -> log d / (1 - d), one number per row; sigma has one entry per row, labels may be None
LogRatio = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_OCTAVES = 4  # frequencies by which the level of noise is told to the network


@dataclass(frozen=True, eq=False)
class Guidance:
    """What is added to the score while sampling: `weight` times the gradient of log d / (1 - d) at the noised images.

    `between`: the levels of noise at which it acts; elsewhere it adds nothing.

    >>> shift = Guidance(lambda x, sigma, labels: 2 * x.sum(1), weight=3.0)
    >>> shift(torch.zeros(1, 2), torch.tensor(1.0))
    tensor([[6., 6.]])
    """

    discriminator: LogRatio = field(repr=False)  # the rest is what provenance says of it
    weight: float = 1.0  # w_d
    between: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise InvalidArgument(f"weight={self.weight} must be a number: 1 corrects the score, more exaggerates.")
        if not 0 <= self.between[0] < self.between[1]:
            raise InvalidArgument(f"between={self.between} must be two levels of noise, the lower one first.")

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        levels = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).reshape(-1).expand(len(x))
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.discriminator(at, levels, labels).sum(), at)
        acts = (levels >= self.between[0]) & (levels <= self.between[1])
        return self.weight * slope * per_image(acts, x)


def discriminator(
    image: tuple[int, int, int] = (3, 32, 32),
    *,
    classes: int = 0,
    channels: int = 64,
    multipliers: Sequence[int] = (1, 2, 2),
    blocks: int = 1,
    sigma_data: float = 0.5,
) -> Discriminator:
    """A new discriminator of images (channels, height, width), of a class each if `classes` is not zero.

    The image is halved between the widths that `multipliers` give. `sigma_data` is the generator's.

    >>> network = discriminator((1, 8, 8), channels=16, multipliers=(1, 2))
    >>> network(torch.zeros(5, 1, 8, 8), torch.ones(5)).shape
    torch.Size([5])
    """
    counts = {"channels": channels, "blocks": blocks, "image": min(image)}
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(f"{name}={value} must be at least 1.")
    if channels % 4:
        raise InvalidArgument(f"channels={channels} must be a multiple of 4: they are normalised in groups.")
    if not multipliers or min(multipliers) < 1 or min(image[1:]) < 2 ** (len(multipliers) - 1):
        raise InvalidArgument(
            f"multipliers={tuple(multipliers)} must be positive and so few that an image of {image[1]} x {image[2]} "
            "can be halved between them."
        )
    return Discriminator(image[0], classes, channels, tuple(multipliers), blocks, sigma_data)


def save_discriminator(network: Discriminator, path: Path) -> None:
    """A safetensors file with the weights and what `load_discriminator` makes the network from."""
    store.write(path, network.state_dict(), {"made_from": network.made_from})


def load_discriminator(path: Path, device: torch.device | str = "cpu") -> Discriminator:
    """What `save_discriminator` wrote, ready to guide."""
    state, facts = store.read(path)
    made_from = facts["made_from"]
    network = Discriminator(**{**made_from, "multipliers": tuple(made_from["multipliers"])})
    store.put_into(network.state_dict(), state, str(path))
    return network.to(device).requires_grad_(False).eval()


class Discriminator(nn.Module):
    """The encoder of a small UNet that is told how much noise there is; gives log d / (1 - d)."""

    def __init__(
        self,
        colours: int,
        classes: int,
        channels: int,
        multipliers: tuple[int, ...],
        blocks: int,
        sigma_data: float,
    ) -> None:
        super().__init__()
        self.classes, self.sigma_data = classes, sigma_data
        self.made_from = {
            "colours": colours,
            "classes": classes,
            "channels": channels,
            "multipliers": multipliers,
            "blocks": blocks,
            "sigma_data": sigma_data,
        }
        told = 4 * channels
        self.noise = nn.Sequential(nn.Linear(2 * _OCTAVES + 1, told), nn.SiLU(), nn.Linear(told, told), nn.SiLU())
        self.kind = nn.Linear(classes, told, bias=False) if classes else None
        self.first = nn.Conv2d(colours, channels, 3, padding=1)
        layers: list[nn.Module] = []
        before = channels
        for level, multiplier in enumerate(multipliers):
            for block in range(blocks):
                halved = level > 0 and block == 0
                layers.append(_Residual(before, channels * multiplier, told, halved=halved))
                before = channels * multiplier
        self.blocks = nn.ModuleList(layers)
        self.norm = GroupNormAct(_groups(before), before, "silu")
        self.last = nn.Linear(before, 1)
        nn.init.zeros_(self.last.weight)  # d = 1/2 everywhere: no guidance before training
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        """`x`: images in -1..1 plus noise; `sigma`: (N,) how much; `labels`: (N,) numbers of classes, or one-hot."""
        weight = self.first.weight
        sigma = sigma.to(weight.dtype)
        c_in = (sigma.square() + self.sigma_data**2).rsqrt()  # as in the denoiser: Karras et al. 2022, table 1
        told = self.noise(_waves(sigma.log() / 4))  # c_noise
        if self.kind is not None:
            if labels is None:
                raise InvalidArgument("labels=None, but the discriminator was made for classes: give one per image.")
            told = told + self.kind(_one_hot(labels, self.classes).to(weight.dtype))
        hidden = self.first(x.to(weight.dtype) * c_in[:, None, None, None])
        for block in self.blocks:
            hidden = block(hidden, told)
        logits: Tensor = self.last(self.norm(hidden).mean((2, 3)))
        return at_least_float32(logits[:, 0])


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, told: int, *, halved: bool) -> None:
        super().__init__()
        self.halved = halved
        self.norm_in = GroupNormAct(_groups(before), before, "silu")
        self.conv_in = nn.Conv2d(before, after, 3, padding=1)
        self.told = nn.Linear(told, after)
        self.norm_out = GroupNormAct(_groups(after), after, "silu")
        self.conv_out = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        inner = self.norm_in(x)
        if self.halved:
            inner, x = F.avg_pool2d(inner, 2), F.avg_pool2d(x, 2)
        inner = self.conv_in(inner) + self.told(told)[:, :, None, None]
        summed: Tensor = self.shortcut(x) + self.conv_out(self.norm_out(inner))
        return summed * math.sqrt(0.5)


def train_discriminator(
    network: nn.Module,
    real: Public,
    synthetic: Public,
    *,
    steps: int,
    batch_size: int = 256,
    learning_rate: float = 3e-4,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    augment: Callable[[Tensor], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
) -> list[float]:
    """Train a discriminator in place to tell public rows from samples, all noised; returns the loss of every step.

    Without knowledge the loss is log 2 = 0.693; what is below it was learnt, or learnt by heart: with few public rows,
    few steps. A short training finds the direction of the guidance before its length, which larger weights make up for.
    Half of each batch is real. Levels of noise are drawn log-uniformly from the sampler's range, so that the guidance
    is defined wherever the sampler comes by. Classes are taken from labels, where `network` has any.

    Args:
        network: (x, sigma, labels) -> log d / (1 - d), such as a `discriminator(...)`.
        real, synthetic: images (N, C, H, W), uint8 or floats in 0..1, alone or with labels; other rows are taken as
            they are.
        augment: applied to real and synthetic images alike, in -1..1, before the noise.

    >>> made = Public(torch.randint(0, 255, (20, 1, 8, 8), dtype=torch.uint8))
    >>> losses = train_discriminator(discriminator((1, 8, 8), channels=8), made, made, steps=2, batch_size=8)
    >>> round(losses[0], 3)
    0.693
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise InvalidArgument(f"{name}={value} must be at least 1.")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise InvalidArgument(f"sigma_min={sigma_min} must be positive and below sigma_max={sigma_max}.")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InvalidArgument(f"learning_rate={learning_rate} must be a positive number, such as 3e-4.")
    for name, data in (("real", real), ("synthetic", synthetic)):
        if not isinstance(data, Public):
            raise InvalidArgument(
                f"{name}={type(data).__name__} must be a Public: a discriminator that saw private rows would carry "
                "them into every guided sample."
            )
        public_rows(next(data.batches(1)), name)
    parameters = list(network.parameters())
    device = parameters[0].device
    draws = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses = torch.empty(steps, dtype=torch.float64, device=device)
    each = max(1, batch_size // 2)

    def loss_of(public: Public, target: float) -> Tensor:
        rows, labels = public_rows(public.batch(each), "public")
        rows = rows.to(device, non_blocking=True)
        images = scaled(rows) if rows.ndim == 4 else rows
        images = images if augment is None else augment(images)
        share = torch.rand(len(images), generator=draws, device=device)
        sigma = sigma_min * (sigma_max / sigma_min) ** share
        noised = images + per_image(sigma, images) * noise_like(images, draws)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = network(noised, sigma, None if labels is None else labels.to(device, non_blocking=True))
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

    with being_trained(network):
        for step in track(range(steps), "discriminator", disable=not progress):
            loss = (loss_of(real, 1.0) + loss_of(synthetic, 0.0)) / 2
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach()
    kept: list[float] = losses.tolist()
    return kept


def train_guidance(
    generator: Generator,
    public: Public,
    *,
    network: nn.Module,
    weight: float,
    steps: int,
    rows: int | None = None,
    batch_size: int = 256,
    learning_rate: float = 3e-4,
    between: tuple[float, float] = (0.0, math.inf),
    seed: int = 0,
    progress: bool = False,
) -> Guidance:
    """Train a discriminator, in place, of a generator's public rows and its own unguided samples, and guide by it.

    Args:
        public: what the generator was trained on, in the order of its batches' seed.
        rows: how many samples; by default as many as there are public rows.
        between: levels of noise, see `Guidance`.
        seed: of the samples; give them another one than those that are to be guided.
    """
    guidance = Guidance(network, weight=weight, between=between)  # checked before the work
    samples = generator.sample(rows or len(public), seed=seed, progress=progress)
    train_discriminator(
        network,
        public,
        Public(samples if generator.classes else samples[0], seed=seed),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        sigma_min=generator.process.sigma_min,
        sigma_max=generator.process.sigma_max,
        autocast=generator.autocast,
        seed=seed,
        progress=progress,
    )
    network.requires_grad_(False).eval()
    return guidance


def _waves(c_noise: Tensor) -> Tensor:
    """c_noise itself, and its sines and cosines at four octaves; levels from 0.002 to 80 span less than one period."""
    frequencies = math.pi / 2 * 2.0 ** torch.arange(_OCTAVES, device=c_noise.device, dtype=c_noise.dtype)
    angles = c_noise[:, None] * frequencies
    return torch.cat([c_noise[:, None], angles.sin(), angles.cos()], 1)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return F.one_hot(labels.long(), classes) if labels.ndim == 1 else labels


def _groups(channels: int) -> int:
    return min(32, channels // 4)
