"""Paper 003: the public loss as mirror map, beside plain noisy steps with the same start and the same noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from docs.ideas.drawing import BLACK, BLUE, GREEN, GREY, RED, WIDE, legend, plane
from sfumato.erm import MirrorDescentRegressor

PRIVATE, PUBLIC = 8000, 25
STEPS, REPEATS = 15, 20
SPREAD = np.array([0.8, 0.12])  # of the rows: the loss is steep along one weight, flat along the other
TURN = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
RATES = {
    "euclidean": 4.0,
    "public": 15.0,
}  # the best of a few for each; the first is all that the steep direction bears


@dataclass(frozen=True)
class Found:
    plain: Any  # path of warm-start DP-SGD
    mirror: Any  # path of mirror descent
    plain_ends: Any  # of other draws of the noise
    mirror_ends: Any
    public_best: Any
    private_best: Any
    hessian: Any  # of the public loss
    excess: Any  # private loss above the least, in the mean over the noise: plain, mirror


class _Watching(MirrorDescentRegressor):
    def _start(self, *given: Any) -> Any:
        """As it is, with the path written down."""
        theta, step = super()._start(*given)
        self.path_ = [theta]

        def watched(theta: Tensor, g: Tensor) -> Tensor:
            self.path_.append(step(theta, g))
            return self.path_[-1]

        return theta, watched


def compute() -> Found:
    """Linear regression whose rows vary much more along one direction than along the other."""
    rng = np.random.default_rng(3)
    X = (rng.uniform(-1, 1, (PRIVATE + PUBLIC, 2)) * SPREAD) @ TURN.T
    y = X @ [0.6, 0.3] + 0.15 * rng.normal(size=len(X))
    private, public = (X[PUBLIC:], y[PUBLIC:]), (X[:PUBLIC], y[:PUBLIC])

    def paths(mirror: str) -> Any:
        return np.array([_path(mirror, seed, private, public) for seed in range(REPEATS)])

    plain, mirror = paths("euclidean"), paths("public")
    best = np.linalg.lstsq(*private)[0]
    excess = [np.square((ends[:, -1] - best) @ private[0].T).mean() for ends in (plain, mirror)]
    return Found(
        plain=plain[0],
        mirror=mirror[0],
        plain_ends=plain[:, -1],
        mirror_ends=mirror[:, -1],
        public_best=plain[0, 0],
        private_best=best,
        hessian=public[0].T @ public[0] / PUBLIC,
        excess=np.array(excess),
    )


def _path(mirror: str, seed: int, private: tuple[Any, Any], public: tuple[Any, Any]) -> Any:
    given = {"max_iter": STEPS, "batch_size": PRIVATE, "clip": 0.5, "strength": 0.01, "learning_rate": RATES[mirror]}
    model = _Watching(epsilon=1.0, delta=1e-5, mirror=mirror, fit_intercept=False, not_private_seed=seed, **given)
    model.fit(*private, *public)
    return np.array([theta.numpy() for theta in model.path_])


def picture(found: Found) -> Figure:
    figure = Figure(figsize=(WIDE, 3.9), layout="constrained")
    panels = figure.subplots(1, 2)
    every = np.concatenate([found.plain, found.mirror, found.plain_ends, found.mirror_ends, [found.private_best]])
    middle, reach = (every.min(0) + every.max(0)) / 2, 0.55 * np.ptp(every, axis=0).max()
    x, y = np.meshgrid(*(c + reach * np.linspace(-1, 1, 120) for c in middle))
    away = np.stack([x, y], -1) - found.public_best
    heights = np.sqrt(np.einsum("...i,ij,...j", away, found.hessian, away))
    paths, ends = (found.plain, found.mirror), (found.plain_ends, found.mirror_ends)
    for number, (panel, kind) in enumerate(zip(panels, ("Plain", "Mirror"), strict=True)):
        plane(panel, f"{kind} steps: excess loss {1e5 * found.excess[number]:.1f}e-5")
        panel.set(xlim=middle[0] + [-reach, reach], ylim=middle[1] + [-reach, reach])
        panel.contour(x, y, heights, levels=14, colors=GREY, linewidths=0.5, alpha=0.7)
        panel.scatter(*ends[number].T, s=12, color=RED, linewidths=0, alpha=0.6, label="ends under other noise")
        panel.plot(*paths[number].T, color=BLUE, marker=".", markersize=4, label="one path")
        marks = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 5}
        panel.plot(*found.public_best, marker="s", color=GREEN, markersize=8, label="best for public rows", **marks)
        panel.plot(*found.private_best, marker="X", color=BLACK, markersize=9.5, label="best for private rows", **marks)
    legend(figure, panels, columns=4)
    return figure
