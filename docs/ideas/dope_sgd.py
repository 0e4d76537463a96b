"""Paper 000: the same private gradients clipped around zero and around the gradient of public rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from docs.ideas.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, RED, WIDE, legend, plane
from sfumato import Objective, Public
from sfumato.data.samplers import FullBatch
from sfumato.gradients import Clip, Gradient, clipped_sum
from sfumato.gradients.probe import Probe
from sfumato.objective import squared_error
from sfumato.privacy.calibration import noise_multiplier
from sfumato.privacy.mechanisms import Adjacency

ROWS, PUBLIC = 30, 8
SMALL, LARGE = 0.75, 2.75  # clip norms: the large one shortens hardly any gradient


SHADE = {"color": ORANGE, "alpha": 0.45, "linewidth": 0, "zorder": 0.5}


@dataclass(frozen=True)
class Found:
    gradients: Any  # of the private rows, before the clip
    public: Any  # the mean gradient of the public rows
    clipped: Any  # by panel, row by row
    means: Any  # of the clipped, by panel
    norms: Any  # clip norms, by panel
    noise: Any  # standard deviation of the noise on each mean


def compute() -> Found:
    """Linear regression far from its best weights: gradients point one way, and scatter less than they are long."""
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(ROWS + PUBLIC), 0.5 + 0.2 * rng.normal(size=ROWS + PUBLIC)])
    y = X @ [-0.85, -0.35] + 0.2 * rng.normal(size=len(X))
    rows = torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]
    objective = Objective(torch.nn.Linear(2, 1, bias=False), squared_error)
    params = {"weight": torch.zeros(1, 2)}
    public = Public(tuple(part[:PUBLIC] for part in rows), objective=objective).gradient(params)
    private = [tuple(part[i : i + 1] for part in rows) for i in range(PUBLIC, ROWS + PUBLIC)]
    probe = Probe.of(objective)

    def clip_each(ball: Clip) -> Any:
        """One row at a time, to see each; over a batch the engine sums them."""
        sums = [Gradient(clipped_sum(objective, params, row, clip=ball, probe=probe)) for row in private]
        return np.array([_flat(ball.restore(one)) for one in sums])

    balls = [Clip(SMALL), Clip(LARGE), Clip(SMALL, origin=public)]
    clipped = np.array([clip_each(ball) for ball in balls])
    everyone = FullBatch(size=ROWS)
    sigma = noise_multiplier(epsilon=2.0, delta=1e-3, sampler=everyone, steps=15, adjacency=Adjacency.ADD_REMOVE)
    norms = np.array([ball.norm for ball in balls])
    return Found(clip_each(Clip(math.inf)), _flat(public), clipped, clipped.mean(1), norms, sigma * norms / ROWS)


def _flat(gradient: Gradient) -> Any:
    return gradient["weight"].numpy().ravel()


def picture(found: Found) -> Figure:
    figure = Figure(figsize=(WIDE, 3.35), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = (
        "Short, around zero:\nthe mean is far too short",
        "Long, around zero:\nthe mean is right, the noise large",
        "Short, around the public gradient:\nthe mean is right, the noise small",
    )
    for number, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        plane(panel, title)
        panel.set(xlim=(-0.95, 3.15), ylim=(-1.25, 2.5))
        centre = found.public if number == 2 else np.zeros(2)
        ball = {"fill": False, "color": GREY, "linestyle": "--", "linewidth": 1.4, "label": "clip norm"}
        panel.add_patch(Circle(centre, found.norms[number], **ball))
        cloud = Circle(found.means[number], 2 * found.noise[number], label="noise, twice its deviation", **SHADE)
        panel.add_patch(cloud)
        for before, after in zip(found.gradients, found.clipped[number], strict=True):
            panel.plot(*zip(before, after, strict=True), color=BLUE, linewidth=0.5, alpha=0.5)
        hollow = {"s": 16, "facecolors": "none", "edgecolors": BLUE, "linewidths": 0.8}
        panel.scatter(*found.gradients.T, label="gradients of private rows", **hollow)
        panel.scatter(*found.clipped[number].T, s=8, color=BLUE, label="the same, clipped")
        marks = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 5}
        panel.plot(*found.public, marker="s", color=GREEN, markersize=7, label="public gradient", **marks)
        panel.plot(*found.gradients.mean(0), marker="X", color=BLACK, markersize=9, label="true mean", **marks)
        panel.plot(*found.means[number], marker="D", color=RED, markersize=6, label="mean of the clipped", **marks)
        panel.plot(0, 0, "+", color=BLACK, markersize=9, markeredgewidth=1.5, label="zero")
    legend(figure, panels[:1], columns=4)
    return figure
