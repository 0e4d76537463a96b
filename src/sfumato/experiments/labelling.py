"""Paper 004 as an experiment: label some rows of a public pool, chosen with a private model, and train on those.

The labels are those of the data set, hidden until a row is chosen: an oracle instead of people.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sfumato.data.samplers import Poisson
from sfumato.experiments.build import make_augment, private_batch
from sfumato.experiments.data import Rows
from sfumato.experiments.scores import accuracy
from sfumato.experiments.settings import Selection, Settings
from sfumato.generators import own_generators
from sfumato.objective import Objective
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.questions import GradientMean
from sfumato.selection import (
    Advice,
    Ask,
    DiversePublic,
    Entropy,
    KCenter,
    Margin,
    NearPrivate,
    Random,
    Released,
    Strategy,
    Threshold,
    advise,
    fine_tune,
)


def make_strategy(selection: Selection, seed: int) -> Strategy:
    if selection.strategy == "random":
        return Random(seed=seed)
    if selection.strategy == "k-center":
        return KCenter(seed=seed)
    shared: dict[str, Any] = {"uncertain": selection.uncertain, "components": selection.components}
    if selection.strategy == "diverse-public":
        return DiversePublic(**shared, each=selection.each, seed=seed)
    if selection.strategy == "near-private":
        return NearPrivate(**shared, voters=Threshold(quantile=selection.quantile))
    return Entropy() if selection.strategy == "entropy" else Margin()


@cache
def split(settings: Settings) -> Advice | None:
    """How the budget is split between the training and what the strategy asks; None if it asks nothing."""
    selection, training, data = settings.selection, settings.training, settings.data
    near = None if selection is None else make_strategy(selection, seed=0)
    if selection is None or not isinstance(near, NearPrivate) or training.epsilon is None:
        return None
    return advise(
        near,
        budget=Budget(training.epsilon, training.delta),
        sampler=Poisson(size=data.private, batch_size=private_batch(settings)),
        points=min(round(selection.uncertain * max(selection.labels)), data.public + data.pollution),
        steps=training.steps,
        pca=selection.pca_epsilon,
        support=selection.support_epsilon,
    )


def before_labels(settings: Settings) -> Settings:
    """The training that the strategy starts from, with the noise that leaves room for what is asked afterwards.

    It does not know of the strategy, nor of the pool: cells share it.
    """
    advice, training = split(settings), settings.training
    if advice is not None:
        training = replace(training, epsilon=None, noise=advice.training)
    return replace(settings, selection=None, training=training, data=replace(settings.data, pollution=0))


def questions(private: Private, settings: Settings, advice: Advice) -> Ask:
    """The door for one strategy, with all that it rests on in one plan: training, PCA and support.

    The training's answers are those that were given when the weights were made, which several strategies start from
    here; each of them is accounted for as if it were the only one, as it would be for a user.
    """
    training = settings.training
    assert settings.selection is not None
    near = make_strategy(settings.selection, seed=0)
    assert isinstance(near, NearPrivate)
    batches = Poisson(size=private.size, batch_size=private_batch(settings))
    trained = (GradientMean, advice.training, batches, training.steps)
    plan = private.plan(trained, *near.lines(private, pca=advice.pca, support=advice.support))
    for _ in range(training.steps):
        plan.take(GradientMean.kind())
    return private.ask


def curve(
    objective: Objective, settings: Settings, rows: Rows, *, seed: int, ask: Callable[[], Ask | None]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """By number of labels: test accuracy in percent, and the share of the chosen rows that are pollution.

    `objective` holds the private model, and gets it back after each training on labels; `ask` opens the door anew.
    """
    selection = settings.selection
    assert selection is not None
    begun = {name: t.detach().clone() for name, t in objective.module.state_dict().items()}
    released, pool = Released(objective.module), Public(rows.public[0])
    strategy = make_strategy(selection, seed)
    scores: dict[str, dict[str, float]] = {}
    polluted: dict[str, float] = {}
    for n in selection.labels:
        chosen = strategy(released, pool, n, ask()).to(rows.public[1].device)
        _tune(objective, selection, rows, chosen, seed)
        scores[str(n)] = {"test": accuracy(objective, rows.test)}
        polluted[str(n)] = round(float((chosen >= len(rows.public[1]) - rows.pollution).double().mean()), 4)
        objective.module.load_state_dict(begun)
    return scores, polluted


def _tune(objective: Objective, selection: Selection, rows: Rows, chosen: Tensor, seed: int) -> list[float]:
    inputs, labels = rows.public
    rest = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    rest[chosen] = False
    with own_generators(seed):  # views come from torch's own
        return fine_tune(
            objective,
            Public((inputs[chosen], labels[chosen]), seed=seed),
            unlabelled=None if selection.labels_alone else Public(inputs[rest]),
            epochs=selection.epochs,
            learning_rate=selection.learning_rate,
            batch_size=selection.batch_size,
            augment=make_augment(selection.augment),
            seed=seed,
        )
