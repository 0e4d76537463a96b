"""How to split one budget between training, PCA and support, decided from public constants before anything is asked.

The paper (section 5.2) tries many checkpoints of one run and fine-tunes from the best. That looks at all of them, so it
costs what the whole run costs, whichever is chosen. Here the number of steps follows from the budget instead: train for
so many, and start from the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.data.samplers import FullBatch, Sampler
from sfumato.errors import InvalidArgument
from sfumato.privacy import accounting, calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, DiscreteLaplace, Gaussian, Mechanism
from sfumato.questions import GradientMean, Gram
from sfumato.selection.near_private import NearPrivate
from sfumato.selection.support import Threshold

_PCA = 0.1  # of epsilon: the paper finds 0.3 of 3 to 5 enough
_SUPPORT = (0.05, 0.25)  # of epsilon, at least and at most


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Noise for each of the three, what each costs alone, and what they cost together, all at the budget's delta.

    `training`, `pca` and `support` are noise multipliers, for `train(noise=...)` and `NearPrivate.lines(...)`;
    `votes` is how many votes a public row gets in the mean, and `spread` the standard deviation of the noise on them.
    """

    budget: Budget
    steps: int
    training: float
    pca: float
    support: float
    training_alone: float
    pca_alone: float
    support_alone: float
    together: float
    votes: float
    spread: float

    def to_text(self) -> str:
        """For people."""
        added = self.training_alone + self.pca_alone + self.support_alone
        rows = (
            (f"training, {self.steps} steps", self.training, self.training_alone),
            ("PCA, one Gram matrix", self.pca, self.pca_alone),
            ("support, one histogram", self.support, self.support_alone),
        )
        return "\n".join(
            [
                f"Budget: epsilon = {self.budget.epsilon:g} at delta = {self.budget.delta:g}.",
                *(f"  {name:24}noise {noise:8.4g}   epsilon {alone:.3f} alone" for name, noise, alone in rows),
                f"  together epsilon {self.together:.3f} in one plan ({added:.3f} if added up).",
                f"A public row gets {self.votes:.3g} votes in the mean, with noise of standard deviation "
                f"{self.spread:.3g}.",
                f"Start from the weights of step {self.steps}, the last. To choose among the weights of a longer run "
                "by looking at them costs what the whole run costs.",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class QuestionAdvice:
    """Noise multipliers of the two questions, for `NearPrivate.lines(...)`, and what both cost together."""

    pca: float
    support: float
    together: float


def advise(
    near: NearPrivate,
    *,
    budget: Budget,
    sampler: Sampler,
    points: int,
    steps: int | None = None,
    noise: float | None = None,
    pca: float | None = None,
    support: float | None = None,
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
) -> Advice:
    """How much noise to give to the training, the PCA and the support, so that one plan of all three fits `budget`.

    Args:
        sampler: of the training's batches.
        points: k, how many uncertain public rows are voted for: `near.uncertain` times the labels, at most the pool.
        steps: how long to train; the noise of the training follows. Or give its `noise`, and the steps follow: that is
            the checkpoint to start from.
        pca: what the PCA may cost alone, as an epsilon; None: a tenth of the budget's.
        support: what the support may cost alone; None: so much that its noise is no larger than the votes a public row
            gets in the mean, within a twentieth and a quarter of the budget's epsilon.

    >>> from sfumato.data.samplers import Poisson
    >>> batches = Poisson(size=60_000, batch_size=600)
    >>> advice = advise(NearPrivate(), budget=Budget(3.2, 1e-5), sampler=batches, points=2000, steps=1000)
    >>> print(advice.to_text().splitlines()[4])
      together epsilon 3.200 in one plan (3.612 if added up).
    """
    adjacency = Adjacency(adjacency)
    if (steps is None) == (noise is None):
        raise InvalidArgument("Give either steps or noise of the training: the other follows from the budget.")
    if not isinstance(points, int) or points < 1:
        raise InvalidArgument(f"points={points} must be a whole number of at least 1: public rows to vote for.")
    everyone = FullBatch(size=sampler.size)
    moved = _moved(near, adjacency)
    unit = 1.0 if isinstance(near.voters, Threshold) else 2.0
    votes = _voters(near, sampler.size, points) / points
    if support is None:
        low, high = (share * budget.epsilon for share in _SUPPORT)
        support = min(max(math.sqrt(2) * unit * moved / votes, low), high)
    pca = _PCA * budget.epsilon if pca is None else pca
    for name, value in (("pca", pca), ("support", support)):
        if not 0 < value < budget.epsilon:
            raise InvalidArgument(
                f"{name}={value} must be positive and below epsilon={budget.epsilon}, of which it is a part."
            )

    def alone(mechanism: Mechanism) -> float:
        return accounting.epsilon([mechanism], delta=budget.delta, adjacency=adjacency).epsilon

    gram = _gram(Budget(pca, budget.delta), everyone, adjacency)
    counts = _counts(near, support, everyone, adjacency)
    terms = {"epsilon": budget.epsilon, "delta": budget.delta}
    if steps is None:
        assert noise is not None
        steps = calibration.steps(
            **terms, noise_multiplier=noise, sampler=sampler, adjacency=adjacency, extra=(gram, counts)
        )
    else:
        noise = calibration.noise_multiplier(
            **terms, sampler=sampler, steps=steps, adjacency=adjacency, extra=(gram, counts)
        )
    training = Mechanism(question=GradientMean.kind(), noise=Gaussian(noise), sampler=sampler, times=steps)
    together = accounting.epsilon([training, gram, counts], delta=budget.delta, adjacency=adjacency)
    return Advice(
        budget=budget,
        steps=steps,
        training=noise,
        pca=gram.noise.scale,
        support=counts.noise.scale,
        training_alone=alone(training),
        pca_alone=alone(gram),
        support_alone=support,
        together=together.epsilon,
        votes=votes,
        spread=math.sqrt(2) * moved / support * unit,
    )


def advise_questions(
    near: NearPrivate,
    *,
    budget: Budget,
    size: int,
    support: float = 0.5,
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
) -> QuestionAdvice:
    """How much noise to give to the PCA and the support of a model that is trained already, in a plan of their own.

    Args:
        budget: of both together.
        size: the declared number of privacy units.
        support: the share of epsilon that the support costs alone; the PCA gets what that leaves.

    >>> advice = advise_questions(NearPrivate(), budget=Budget(1.0, 1e-5), size=60_000)
    >>> advice.support, round(advice.together, 3)
    (2.0, 1.0)
    """
    if not 0 < support < 1:
        raise InvalidArgument(f"support={support} must be above 0 and below 1: it is a share of epsilon.")
    adjacency, everyone = Adjacency(adjacency), FullBatch(size=size)
    counts = _counts(near, support * budget.epsilon, everyone, adjacency)
    gram = _gram(budget, everyone, adjacency, beside=[counts])
    together = accounting.epsilon([gram, counts], delta=budget.delta, adjacency=adjacency)
    return QuestionAdvice(pca=gram.noise.scale, support=counts.noise.scale, together=together.epsilon)


def _gram(budget: Budget, everyone: FullBatch, adjacency: Adjacency, beside: Sequence[Mechanism] = ()) -> Mechanism:
    """The Gram matrix with the least noise that keeps the budget, for it and what is asked beside it."""
    noise = calibration.noise_multiplier(
        epsilon=budget.epsilon,
        delta=budget.delta,
        sampler=everyone,
        steps=1,
        adjacency=adjacency,
        extra=beside,
        replace_factor=Gram.replace_factor,
    )
    return Mechanism(question=Gram.kind(), noise=Gaussian(noise), sampler=everyone, replace_factor=Gram.replace_factor)


def _counts(near: NearPrivate, epsilon: float, everyone: FullBatch, adjacency: Adjacency) -> Mechanism:
    """The votes, at this cost alone."""
    question = near.voters.question
    return Mechanism(
        question=question.kind(),
        noise=DiscreteLaplace(_moved(near, adjacency) / epsilon),
        sampler=everyone,
        replace_factor=question.replace_factor,
    )


def _moved(near: NearPrivate, adjacency: Adjacency) -> float:
    """How far one unit of privacy moves the votes, in units of what one person can contribute."""
    return near.voters.question.replace_factor if adjacency is Adjacency.REPLACE_ONE else 1.0


def _voters(near: NearPrivate, size: int, points: int) -> float:
    """How many private rows vote, if they are as uncertain as public ones."""
    if isinstance(near.voters, Threshold):
        return (1 - near.voters.quantile) * size
    return min(size, near.voters.k or points)
