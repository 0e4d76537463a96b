"""Whole trainings for `one_run` and `membership`: handwritten digits, with canaries that join by coins.

Canaries are images with random labels and random pixels where digits are blank: nobody else's gradient points where
theirs do, in the first layer. Small digits (scikit-learn's) take a second; MNIST, from $SFUMATO_DATA, a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.algorithms.method import Algorithm, Ask, Method, Params, StatefulMethod, algorithm
from sfumato.audit.one_run import Training
from sfumato.data.images import mnist
from sfumato.data.samplers import Poisson
from sfumato.generators import own_generators
from sfumato.gradients import Gradient
from sfumato.models.basic import mlp
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Private
from sfumato.public import Public
from sfumato.training import train

Batch = tuple[Tensor, Tensor]
Coins = np.ndarray[Any, np.dtype[np.bool_]]
Scores = np.ndarray[Any, np.dtype[np.float64]]
Seen = Callable[[Params, Gradient], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One training: what is private, what is public, who may join, and what it may cost."""

    private: Batch
    public: Batch
    canaries: Batch
    model: Callable[[], nn.Module]
    steps: int
    batch: int
    learning_rate: float
    epsilon: float
    delta: float

    @property
    def size(self) -> int:
        """Declared: all that could be in."""
        return len(self.private[1]) + len(self.canaries[1])

    @property
    def noise(self) -> float:
        return _noise(self.epsilon, self.delta, self.size, self.batch, self.steps)


@lru_cache(maxsize=16)
def _noise(epsilon: float, delta: float, size: int, batch: int, steps: int) -> float:
    sampler = Poisson(size=size, batch_size=batch)
    return calibration.noise_multiplier(
        epsilon=epsilon, delta=delta, sampler=sampler, steps=steps, adjacency=Adjacency.ADD_REMOVE
    )


@dataclass(frozen=True, kw_only=True)
class Watched(Algorithm):
    """A method, and somebody who sees what it asks and hears: the weights and the noisy answer."""

    method: Method | StatefulMethod
    seen: Seen

    def init(self, params: Params) -> Any:
        return algorithm(self.method).init(params)

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        def heard(question: Any, **options: Any) -> Any:
            answer = ask(question, **options)
            self.seen(question.params, answer)
            return answer

        return algorithm(self.method).step(state, params, public, heard, **handed)

    def answers(self, steps: int) -> int:
        return algorithm(self.method).answers(steps)


def white_box_scores(setting: Setting, method: Method | StatefulMethod) -> Training:
    """Every canary's score is how far its gradient in the first layer points along the answers, in all steps."""

    def training(included: Coins) -> Scores:
        objective = _objective(setting)
        scores = torch.zeros(len(included), dtype=torch.float64)

        def seen(params: Params, answer: Gradient) -> None:
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            each = torch.ones(len(included), requires_grad=True)  # the weight of each canary's loss
            first = next(iter(leaves))  # all layers hear of digits, this one alone has pixels that only canaries use
            with torch.enable_grad():
                total = (objective.losses(leaves, setting.canaries) * each.to(leaves[first])).sum()
                (gradient,) = torch.autograd.grad(total, [leaves[first]], create_graph=True)
                # Linear in the weights: its derivative by each of them is <answer, that canary's gradient>.
                (along,) = torch.autograd.grad((gradient * answer[first]).sum(), [each])
            scores.add_(along.detach().double().cpu())

        _train(setting, objective, Watched(method=method, seen=seen), included)
        return scores.numpy()

    return training


def confidences(setting: Setting, method: Method | StatefulMethod) -> Training:
    """Every canary's score is the final model's confidence in its label, log p / (1 - p): what an outsider sees."""

    def training(included: Coins) -> Scores:
        objective = _objective(setting)
        _train(setting, objective, method, included)
        with torch.no_grad():
            log_p = -objective.losses(objective.parameters(), setting.canaries).double()
        found: Scores = (log_p - torch.log(-torch.expm1(log_p.clamp_max(-1e-12)))).cpu().numpy()
        return found

    return training


def _objective(setting: Setting) -> Objective:
    with own_generators(0):
        return Objective(setting.model(), cross_entropy)


def _train(setting: Setting, objective: Objective, method: Method | StatefulMethod, included: Coins) -> None:
    chosen = torch.from_numpy(np.flatnonzero(included))
    joined = [torch.cat([rows, more[chosen]]) for rows, more in zip(setting.private, setting.canaries, strict=True)]
    private = Private(
        tuple(joined),
        name="digits",
        size=setting.size,
        objective=objective,
        budget=Budget(setting.epsilon, setting.delta),
    )
    train(
        objective.module,
        private=private,
        public=Public(setting.public, objective=objective, seed=0),
        method=method,
        steps=setting.steps,
        batch_size=setting.batch,
        noise=setting.noise,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=setting.learning_rate),
        metrics={},
        evaluate_every=setting.steps,
        progress=False,
    )


def small_digits(canaries: int = 400) -> Setting:
    """1,200 private and 100 public digits of 8 x 8 pixels, in a blank frame."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))[:1300]
    framed = F.pad(torch.from_numpy(x[order] / 16).float().reshape(-1, 8, 8), (3, 3, 3, 3))
    rows = framed, torch.from_numpy(y[order]).long()
    # So little epsilon that 400 guesses, were they all right, would prove more.
    return _setting(rows, public=100, canaries=canaries, hidden=(), steps=30, batch=800, learning_rate=2.0, epsilon=2.0)


def large_digits(canaries: int = 1000) -> Setting:
    """MNIST: 59,000 private and 1,000 public digits of 28 x 28 pixels."""
    images, labels = mnist().train
    rows = images.float() / 255, labels
    return _setting(
        rows, public=1000, canaries=canaries, hidden=(32,), steps=100, batch=6000, learning_rate=1.0, epsilon=3.0
    )


def _setting(rows: Batch, *, public: int, canaries: int, hidden: tuple[int, ...], **options: Any) -> Setting:
    x, y = rows
    draws = torch.Generator().manual_seed(1)
    ink = x[:public].flatten(1).square().mean(0)
    blank = ink <= ink.sort().values[len(ink) // 3]
    pixels = (2 * torch.randint(0, 2, (canaries, len(ink)), generator=draws) - 1) * blank
    return Setting(
        private=(x[public:], y[public:]),
        public=(x[:public], y[:public]),
        canaries=(pixels.to(x).reshape(canaries, *x.shape[1:]), torch.randint(0, 10, (canaries,), generator=draws)),
        model=lambda: mlp(int(x[0].numel()), 10, hidden),
        delta=1e-11,
        **options,
    )
