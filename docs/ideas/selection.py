"""Paper 004: which points of a public pool are worth a label, where some belong to nobody's data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from docs.ideas.drawing import BLACK, BLUE, ORANGE, RED, WIDE, legend, plane
from sfumato import Budget, Objective, Private, Public, cross_entropy, train
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.selection import DiversePublic, Entropy, NearPrivate, Released, advise
from sfumato.selection.strategy import entropy

CENTRES = np.array([[-1.0, 0.4], [1.0, 0.8]])
SPREAD = np.array([0.7, 0.75])
POLLUTION = np.array([0.35, -2.4])  # where the model is unsure, and no private row is
PRIVATE, POOL, POLLUTED, LABELS = 1500, 250, 50, 20
SHOWN = 150  # private rows


GRID = np.linspace(-2.9, 2.9, 60), np.linspace(-3.1, 2.7, 60)
SHADES = ("#f4f4f4", "#e8e8e8", "#dcdcdc", "#d0d0d0")  # the darker, the less sure the model is


@dataclass(frozen=True)
class Found:
    pool: Any  # of which the last points belong to nobody's data
    private: Any  # some of the private rows, to see where they are
    chosen: Any  # rows of the pool, by strategy
    weight: Any  # of the private model
    bias: Any


def compute() -> Found:
    rng = np.random.default_rng(1)
    rows, pool = _mixture(PRIVATE, rng), _mixture(POOL, rng)[0]
    junk = torch.from_numpy(POLLUTION + [0.35, 0.25] * rng.normal(size=(POLLUTED, 2))).float()
    public = Public(torch.cat([pool, junk]))
    head = torch.nn.Linear(2, len(CENTRES))
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    model = torch.nn.Sequential(torch.nn.Identity(), head)  # the plane itself is the embedding
    near = NearPrivate(components=2, uncertain=4.0)
    private = _trained(model, rows, near)
    strategies = (Entropy(), DiversePublic(components=2, each=1, uncertain=4.0), near)
    chosen = [strategy(Released(model), public, LABELS, private.ask) for strategy in strategies]
    private.close()
    return Found(
        pool=public.batch().numpy(),
        private=rows[0][:SHOWN].numpy(),
        chosen=torch.stack(chosen).numpy(),
        weight=head.weight.detach().numpy(),
        bias=head.bias.detach().numpy(),
    )


def _trained(model: torch.nn.Module, rows: tuple[Tensor, Tensor], near: NearPrivate) -> Private:
    """Trains the model in one plan with what is asked afterwards; its door is still open for that."""
    objective, budget = Objective(model, cross_entropy), Budget(epsilon=3.0, delta=1e-4)
    seed = NotPrivateSeed(0)  # these rows are nobody's
    private = Private(rows, name="plane", size=PRIVATE, objective=objective, budget=budget, seed=seed)
    sampler = private.poisson(300)
    advice = advise(near, budget=budget, sampler=sampler, steps=30, points=round(near.uncertain * LABELS))
    lines = near.lines(private, pca=advice.pca, support=advice.support)
    options = {"steps": 30, "sampler": sampler, "noise": advice.training, "afterwards": lines, "progress": False}
    train(model, private=private, optimizer=partial(torch.optim.SGD, lr=2.0), **options)
    return private


def _mixture(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    labels = np.arange(count) % len(CENTRES)
    points = CENTRES[labels] + SPREAD * rng.normal(size=(count, 2))
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


def picture(found: Found) -> Figure:
    figure = Figure(figsize=(WIDE, 3.35), layout="constrained")
    panels = figure.subplots(1, 3)
    logits = np.stack(np.meshgrid(*GRID), -1) @ found.weight.T + found.bias
    unsure = entropy(torch.from_numpy(logits.reshape(-1, len(CENTRES)))).reshape(logits.shape[:2])
    ring = {"s": 9, "facecolors": "none", "edgecolors": BLUE, "linewidths": 0.7, "label": "public pool"}
    for panel, name, chosen in zip(panels, ("Entropy", "DiversePublic", "NearPrivate"), found.chosen, strict=True):
        plane(panel, f"{name}:\n{sum(chosen >= POOL)} of {LABELS} are pollution")
        panel.set(xlim=GRID[0][[0, -1]], ylim=GRID[1][[0, -1]])
        panel.contourf(*GRID, unsure, levels=np.linspace(0.3, 0.7, 5), colors=SHADES)
        panel.scatter(*found.private.T, s=4, color=ORANGE, linewidths=0, label="private rows")
        panel.scatter(*found.pool[:POOL].T, **ring)
        panel.scatter(
            *found.pool[POOL:].T, s=10, marker="x", color=BLACK, linewidths=0.9, label="pollution in the pool"
        )
        diamond = {"s": 26, "marker": "D", "color": RED, "edgecolors": "white", "linewidths": 0.6, "zorder": 4}
        panel.scatter(*found.pool[chosen].T, label="chosen", **diamond)
    legend(figure, panels, columns=4)
    return figure
