"""Paper 002: public points beget more by a diffusion model; and many weights around the present one see the valleys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from docs.ideas.drawing import BLACK, BLUE, GREEN, GREY, RED, SKY, WIDE, legend, plane
from examples.spiral import drawn, spiral, trained
from sfumato import Objective, Public
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.gradients import Gradient, clipped_sum

POINTS, MADE, ROUNDS = 200, 600, 5000
VIEWS, RADIUS, RATE, STEPS = 16, 0.8, 0.2, 50
SHARP, FLAT = (-1.0, 0.25), (0.9, -0.1)
TILT = 0.8
START = (-0.75, 0.6)

GRID = np.linspace(-2.0, 2.0, 61), np.linspace(-1.9, 2.1, 61)


@dataclass(frozen=True)
class Found:
    points: Any  # of the spiral, which are public
    made: Any  # by the diffusion model
    plain: Any  # path of the weights, by plain gradients
    many: Any  # path by weight multiplicity
    moved: Any  # the moved weights at the first step
    slopes: Any  # minus the gradient at each of them
    plain_slope: Any  # at the first weights themselves
    many_slope: Any  # the mean over the moved ones


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))

    def forward(self, rows: Tensor) -> Tensor:
        return landscape(self.w) + TILT * rows @ self.w


def landscape(w: Tensor) -> Tensor:
    """A wide valley with a hole beside it."""
    wide = 0.25 * (w - torch.tensor(FLAT)).square() @ torch.tensor([1.0, 1.3])
    hole = 0.7 * torch.exp(-(w - torch.tensor(SHARP)).square().sum(-1) / (2 * 0.3**2))
    return wide - hole


def compute() -> Found:
    points, labels = spiral(POINTS, 0)
    made, _ = drawn(trained(points, labels, rounds=ROUNDS), MADE, 0)
    return Found(points=points, made=made, **valleys())


def valleys() -> dict[str, Any]:
    """Full batches and no noise, to see the two gradients alone."""
    objective = Objective(Weights(), lambda module, rows: module(rows))
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 2))).float()
    rows[16:] -= rows[16:].mean(0)  # so that the level lines are those of the landscape
    public = Public(rows[:16], objective=objective, seed=0)
    asked: list[Any] = []

    def ask(question: Any) -> Gradient:
        asked.append(question)
        total = clipped_sum(
            objective, question.params, rows[16:], clip=question.clip, views=question.views, offsets=question.offsets
        )
        return Gradient(total) * (1 / 48)

    def path(method: Any, **options: Any) -> Any:
        w, places = torch.tensor(START), []
        for _ in range(STEPS):
            places.append(w)
            w = w - RATE * method({"w": w}, public, ask, clip=100.0, **options)["w"]
        return torch.stack([*places, w]).numpy()

    plain = path(dp_sgd)
    asked.clear()
    many = path(weight_multiplicity, views=VIEWS, radius=RADIUS, public_batch=2)
    moved = torch.stack([torch.tensor(START) + v["w"] for v in asked[0].offsets])

    def slope(w: Tensor) -> Any:
        return -(Gradient(clipped_sum(objective, {"w": w}, rows[16:], clip=asked[0].clip)) * (1 / 48))["w"].numpy()

    return {
        "plain": plain,
        "many": many,
        "moved": moved.numpy(),
        "slopes": np.array([slope(w) for w in moved]),
        "plain_slope": (plain[1] - plain[0]) / RATE,
        "many_slope": (many[1] - many[0]) / RATE,
    }


def picture(found: Found) -> Figure:
    figure = Figure(figsize=(WIDE, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    plane(left, "1. Few public points become many")
    left.set(xlim=(-1.75, 1.75), ylim=(-1.75, 1.75))
    left.scatter(*np.asarray(found.made).T, s=9, color=SKY, linewidths=0, label="made by diffusion")
    left.scatter(*np.asarray(found.points).T, s=11, marker="s", color=BLACK, linewidths=0, label="public points")
    plane(right, "2. Many weights see the wide valley")
    right.set(xlim=(-2.0, 2.0), ylim=(-1.9, 2.1))
    heights = landscape(torch.from_numpy(np.stack(np.meshgrid(*GRID), -1)).float()).numpy()
    levels = np.quantile(heights, np.linspace(0, 0.9, 14))
    right.contour(*GRID, heights, levels=levels, colors=GREY, linewidths=0.5, alpha=0.7)
    right.quiver(*found.moved.T, *found.slopes.T, color=GREEN, angles="xy", scale_units="xy", scale=2.5, width=0.005)
    right.scatter(*found.moved.T, s=12, color=GREEN, label="16 moved weights, their steps")
    right.plot(*found.plain.T, color=RED, linestyle="--", linewidth=2, label="steps from the weights")
    right.plot(*found.many.T, color=BLUE, linewidth=2, label="mean of the 16")
    right.plot(*START, "o", color=BLACK, markersize=7, label="weights now", linestyle="")
    for (x, y), name in ((SHARP, "narrow"), (FLAT, "wide")):
        right.text(x, y - 0.62, name, ha="center")
    legend(figure, (left, right), columns=3)
    return figure
