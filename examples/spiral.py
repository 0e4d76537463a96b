"""What a diffusion model learns of few rows: the spiral of paper 002 (figure 1, section 4.1 and appendix D.1).

    python examples/spiral.py

trains on 100, 250 and 2,500 points of a spiral whose density falls along its arms, makes 1,000 points by each model,
fits a support vector machine to those, and draws it all in spiral.png, in a minute or two on a CPU.

As in the paper: two blocks of 64 units, 20 steps, 10,000 rounds of Adam at 0.001, an RBF machine with C = 1,000. Ours:
the two classes are two arms, since a machine needs two; the process is EDM with Heun's sampler; a round has at most 256
points.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from rich.progress import track
from sklearn.svm import SVC
from torch import Tensor, nn

from sfumato.synthesis.edm import Edm
from sfumato.synthesis.features import pixel_features
from sfumato.synthesis.heun import heun
from sfumato.synthesis.measures import precision, recall
from sfumato.synthesis.memorised import Memorised, memorised

SIZES = (100, 250, 2500)
PROCESS = Edm(sigma_data=0.5)
LENGTH, WIDTH = 3 * np.pi, 0.025  # of an arm in radians, and across it
SPREAD = 0.5 / 0.32  # so that points deviate by 0.5


def spiral(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of two arms, half of them each; the density along an arm falls linearly to zero at its end."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    along = 1 - np.sqrt(rng.random(count))  # density 2 (1 - s) on 0..1
    angle = LENGTH * along + np.pi * labels
    radius = 0.1 + 0.9 * along
    points = radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
    points += WIDTH * rng.normal(size=points.shape)
    return torch.from_numpy(SPREAD * points).float(), torch.from_numpy(labels)


def place_on_arm(points: Tensor) -> Any:
    """From 0 in the middle to 1 at the end, by the distance from the middle."""
    return (torch.linalg.vector_norm(points, dim=1).numpy() / SPREAD - 0.1) / 0.9


class Blocks(nn.Module):
    """F(x; c_noise, labels) of points in the plane."""

    def __init__(self, units: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(2, units)
        self.told = nn.ModuleList([nn.Linear(5, units) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.Linear(units, units) for _ in range(2)])
        self.last = nn.Linear(units, 2)

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None, augment_labels: Tensor | None) -> Tensor:
        assert labels is not None
        facts = [c_noise, (3 * c_noise).sin(), (3 * c_noise).cos(), labels == 0, labels == 1]
        told = torch.stack([fact.float() for fact in facts], 1)
        hidden = self.first(x)
        for say, block in zip(self.told, self.blocks, strict=True):
            hidden = hidden + block(nn.functional.silu(hidden + say(told)))
        found: Tensor = self.last(nn.functional.silu(hidden))
        return found


def trained(points: Tensor, labels: Tensor, *, rounds: int, seed: int = 0) -> Blocks:
    torch.manual_seed(seed)
    network = Blocks()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    for _ in track(range(rounds), f"{len(points):5} points"):
        rows = torch.randint(len(points), (min(len(points), 256),))
        loss = PROCESS.losses(network, points[rows], labels[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def drawn(network: Blocks, count: int, seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 2
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def denoiser(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        return PROCESS.denoised(network, x, sigma, labels)

    return heun(denoiser, noise, labels, steps=20), labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What came of one number of training points."""

    points: Tensor
    made: Tensor
    labels: Tensor
    machine: Any
    accuracy: float
    copies: Memorised

    @property
    def outer(self) -> float:
        """The share of made points on the outer half of the arms; of the truth it is a quarter."""
        return float((place_on_arm(self.made) > 0.5).mean())


def outcome(size: int, *, rounds: int, seed: int = 0) -> Outcome:
    points, labels = spiral(size, seed)
    made, classes = drawn(trained(points, labels, rounds=rounds, seed=seed), 1000, seed)
    machine = SVC(C=1000).fit(made.numpy(), classes.numpy())
    test, truth = spiral(10_000, seed + 1)
    accuracy = float(machine.score(test.numpy(), truth.numpy()))
    copies = memorised(made, points)
    return Outcome(points=points, made=made, labels=classes, machine=machine, accuracy=accuracy, copies=copies)


def picture(outcomes: list[Outcome], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(outcomes), figsize=(4 * len(outcomes), 6.4), height_ratios=(4, 2))
    grid = np.linspace(-1.7, 1.7, 250)
    x, y = np.meshgrid(grid, grid)
    bins = np.linspace(0, 1, 21)
    for (above, below), found in zip(axes.T, outcomes, strict=True):
        regions = found.machine.predict(np.column_stack([x.ravel(), y.ravel()])).reshape(x.shape)
        above.contourf(x, y, regions, levels=[-0.5, 0.5, 1.5], colors=["#dbe9f6", "#fde5d2"])
        above.scatter(*found.made.T, s=5, c=np.array(["#2f6fab", "#c9601c"])[found.labels], linewidths=0)
        above.scatter(*found.points[:250].T, s=2, c="black", linewidths=0)  # more would hide what was made
        above.set(title=f"{len(found.points):,} points", xticks=[], yticks=[], aspect="equal")
        above.set_xlabel(f"accuracy {100 * found.accuracy:.1f} %, near-copies {100 * found.copies.share:.0f} %")
        below.hist(place_on_arm(found.made), bins=bins, density=True, color="#9aa7b1", label="made")
        below.plot(bins, 2 * (1 - bins), color="black", label="truth")
        below.set(xlabel="place on the arm", xlim=(0, 1), ylim=(0, 3.5))
    axes[1, 0].set_ylabel("density")
    axes[1, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(rounds: int = 10_000) -> list[Outcome]:
    outcomes = [outcome(size, rounds=rounds) for size in SIZES]
    test, _ = spiral(1000, 7)
    for found in outcomes:
        print(
            f"{len(found.points):5} points: accuracy {found.accuracy:.3f}, outer half {found.outer:.3f} (truth 0.250), "
            f"near-copies {found.copies.share:.3f} (of each other {found.copies.within:.3f}), "
            f"precision {precision(found.made, test, features=pixel_features()).value:.3f}, "
            f"recall {recall(found.made, test, features=pixel_features()).value:.3f}"
        )
    return outcomes


if __name__ == "__main__":
    torch.set_num_threads(1)  # for numbers this few, more only get in each other's way
    found = main()
    picture(found, Path(__file__).with_suffix(".png"))
    few, _, many = found
    if not many.copies.share < few.copies.share:
        sys.exit("The model of few points is expected to repeat more of them.")
