"""Paper 001: a few public rows say when a private gradient drowns in noise, and finish the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from docs.ideas.drawing import BLACK, BLUE, GREEN, ORANGE, PALE, RED, WIDE, legend, plane
from sfumato.erm import PPSGDRegressor
from sfumato.erm.budgets import Allowance
from sfumato.erm.losses import Square
from sfumato.erm.minimise import mean_gradient
from sfumato.erm.rows import Rows

PRIVATE, PUBLIC = 400, 12
BEST = np.array([1.5, -1.0])
SEED = 0
RULES = {"growth": 0.3, "growth_ratio": 1.0, "shrink": 0.3, "shrink_ratio": 2.0}  # the paper's shares; ratios for a toy


@dataclass(frozen=True)
class Found:
    weights: Any  # at each question
    clip: Any  # norm of each question
    noise: Any  # expected length of the noise on each answer
    share: Any  # of the budget that each answer took, in percent
    public: Any  # length of the public gradient after each answer
    first: Any  # result of the first stage
    result: Any
    public_best: Any
    private_best: Any
    contours: Any  # of the public loss: its Hessian


class _Watched(Allowance):
    """Hands everything on, and writes down what was asked."""

    def __init__(self, inner: Allowance) -> None:
        self.inner, self.noise, self.epsilon, self.asked = inner, inner.noise, inner.epsilon, []

    def share(self, noise: float) -> float:
        return self.inner.share(noise)

    def ask(self, question: Any, noise: float) -> Any:
        self.asked.append((question.w, question.clip, noise, self.share(noise)))
        return self.inner.ask(question, noise)

    def close(self) -> None:
        self.inner.close()


class _Watching(PPSGDRegressor):
    def _stage_1(self, allowance: Allowance, recipe: Any, *rest: Any) -> tuple[Tensor, int]:
        self.watched_, self.recipe_ = _Watched(allowance), recipe
        w, steps = super()._stage_1(self.watched_, recipe, *rest)
        self.first_ = w
        return w, steps


def compute() -> Found:
    """Linear regression in a plane. As in the paper, noise and clip norm follow the public gradient."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(-1, 1, (PRIVATE + PUBLIC, 2)) * [0.7, 0.5]
    y = X @ BEST + 0.25 * rng.normal(size=len(X))
    few = Rows(torch.from_numpy(X[:PUBLIC]), torch.from_numpy(y[:PUBLIC]))
    given = {"max_iter": 200, "batch_size": PRIVATE, "learning_rate": 0.15, "clip": 0.5, "average": 0.0, "reuse": 0.1}
    plain = {"head_start": False, "fit_intercept": False, "not_private_seed": SEED}
    model = _Watching(epsilon=0.5, delta=1e-4, **RULES, **given, **plain)
    model.fit(X[PUBLIC:], y[PUBLIC:], X_public=X[:PUBLIC], y_public=y[:PUBLIC])
    w, clip, z, share = zip(*model.watched_.asked, strict=True)
    weights = torch.stack([*w, model.first_])
    return Found(
        weights=weights.numpy(),
        clip=np.array(clip),
        noise=np.sqrt(2) * np.array(z) * clip / model.recipe_.sampler.expected,
        share=100 * np.array(share),
        public=np.array([float(mean_gradient(Square(), v, few).norm()) for v in weights[:-1]]),
        first=model.first_.numpy(),
        result=model.coef_,
        public_best=np.linalg.lstsq(X[:PUBLIC], y[:PUBLIC])[0],
        private_best=np.linalg.lstsq(X[PUBLIC:], y[PUBLIC:])[0],
        contours=X[:PUBLIC].T @ X[:PUBLIC] / PUBLIC,
    )


def picture(found: Found) -> Figure:
    figure = Figure(figsize=(WIDE, 4.1), layout="constrained")
    axes = figure.subplot_mosaic(
        [["steer", "finish"], ["budget", "finish"]], height_ratios=(2.2, 1), width_ratios=(1.15, 1)
    )
    steps, stairs = np.arange(1, len(found.clip) + 1), {"drawstyle": "steps-mid", "linewidth": 1.8}
    axes["steer"].plot(steps, found.clip, color=BLUE, linestyle="--", label="clip norm", **stairs)
    axes["steer"].plot(steps, found.public, color=GREEN, linewidth=1.8, label="length of the public gradient")
    axes["steer"].plot(steps, found.noise, color=ORANGE, label="length of the noise", **stairs)
    axes["steer"].set(yscale="log", title="1. Public rows steer private steps", xticklabels=[])
    axes["steer"].set_yticks([0.1, 0.2, 0.5], ["0.1", "0.2", "0.5"])
    axes["steer"].set_yticks([], minor=True)
    axes["steer"].grid(visible=True, linewidth=0.3)
    axes["budget"].plot(steps, found.share, color=BLACK, **stairs)
    axes["budget"].set(xlabel="step", ylabel="% of the budget", ylim=(0, 1.25), yticks=[0, 0.5, 1])
    axes["budget"].grid(visible=True, linewidth=0.3)
    _finish(axes["finish"], found)
    legend(figure, axes.values(), columns=3)
    return figure


def _finish(panel: Any, found: Found) -> None:
    plane(panel, "2. Public rows finish the result")
    points = np.array([found.first, found.result, found.public_best, found.private_best])
    middle, reach = (points.min(0) + points.max(0)) / 2, 0.75 * np.ptp(points, axis=0).max()
    panel.set(xlim=middle[0] + [-reach, reach], ylim=middle[1] + [-reach, reach])
    x, y = np.meshgrid(*(c + reach * np.linspace(-1, 1, 100) for c in middle))
    away = np.stack([x, y], -1) - found.public_best
    heights = np.sqrt(np.einsum("...i,ij,...j", away, found.contours, away))
    panel.contour(x, y, heights, levels=8, colors=PALE, linewidths=0.9)
    panel.plot(*found.weights.T, color=BLUE, linewidth=0.8, alpha=0.8, label="private steps")
    marks = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 5}
    panel.plot(*found.public_best, marker="s", color=GREEN, markersize=8, label="best for public rows", **marks)
    panel.plot(*found.first, marker="o", color=BLUE, markersize=8, label="after private steps", **marks)
    panel.plot(*found.result, marker="D", color=RED, markersize=7.5, label="finished", **marks)
    panel.plot(*found.private_best, marker="X", color=BLACK, markersize=9.5, label="best for private rows", **marks)
    arrow = {"arrowstyle": "->", "color": RED, "linewidth": 1.5, "shrinkA": 5, "shrinkB": 5}
    panel.annotate("", found.result, found.first, arrowprops=arrow)
