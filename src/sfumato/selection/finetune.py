"""Fine-tuning on public rows that were newly labelled: post-processing of a released model, free of budget."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.gradients.passes import Augment
from sfumato.objective import Objective, cross_entropy
from sfumato.public import Public
from sfumato.selection.released import Released
from sfumato.warmup import warm_up


def fine_tune(
    objective: Objective,
    labelled: Public,
    *,
    unlabelled: Public | None = None,
    share: float = 0.5,
    epochs: int = 10,
    learning_rate: float = 0.01,
    batch_size: int = 100,
    augment: Augment | None = None,
    seed: int = 0,
    progress: bool = False,
) -> list[float]:
    """Train the objective's module on `labelled` rows, in place, and return the mean loss of every step's batch.

    The rows that were chosen for labelling are unlike the others, and a model that sees only those forgets the others.
    Give the rest of the pool as `unlabelled`: those rows are trained on, too, towards what the model says of them now.
    Which rows to label is what strategies choose; labels come from people, never from private data.

    Args:
        unlabelled: public inputs without labels; the loss has to be `cross_entropy`.
        share: how much of the training labelled rows are then, repeated as often as that takes.
        epochs: passes over all these rows.
        seed: of the order in which they come, with `unlabelled`; else that of `labelled` holds.

    >>> from sfumato import Objective, Public, cross_entropy
    >>> objective = Objective(torch.nn.Linear(2, 2), cross_entropy)
    >>> rows = torch.linspace(-1, 1, 40).repeat(2, 1).T
    >>> labelled = Public((rows[:10], (rows[:10, 0] > 0).long()), seed=0)
    >>> len(fine_tune(objective, labelled, unlabelled=Public(rows[10:]), epochs=3, batch_size=20))
    9
    """
    if not isinstance(epochs, int) or epochs < 1:
        raise InvalidArgument(f"epochs={epochs} must be a whole number of at least 1.")
    if not 0 < share < 1:
        raise InvalidArgument(f"share={share} must lie between 0 and 1: it is the part of the labelled rows.")
    for name, rows in (("labelled", labelled), ("unlabelled", unlabelled)):
        if not isinstance(rows, Public) and (name, rows) != ("unlabelled", None):
            raise InvalidArgument(f"{name}={type(rows).__name__} must be a Public, of inputs and their labels if any.")
    both = labelled if unlabelled is None else _with_answers(objective, labelled, unlabelled, share, seed)
    return warm_up(
        objective,
        both,
        steps=epochs * max(1, len(both) // batch_size),
        batch_size=batch_size,
        learning_rate=learning_rate,
        augment=augment,
        progress=progress,
    )


def _with_answers(objective: Objective, labelled: Public, unlabelled: Public, share: float, seed: int) -> Public:
    """Labelled rows, as often as makes them a share of all, and the others with what the model says of them."""
    if objective.loss is not cross_entropy:
        raise InvalidArgument("unlabelled rows need the loss cross_entropy: what a model says of them are classes.")
    batch = labelled.batch()
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InvalidArgument("labelled must be a Public of (inputs, labels).")
    inputs, labels = batch
    released = Released(objective.module)
    others = _inputs(unlabelled.batch())
    answers = released.per_row(others, lambda views: views.logits.float().softmax(1)).to(labels.device)
    known = F.one_hot(labels.long(), answers.shape[1]).to(answers)
    again = torch.arange(len(inputs)).repeat(max(1, round(share / (1 - share) * len(others) / len(inputs))))
    return Public((torch.cat([others, inputs[again]]), torch.cat([answers, known[again]])), seed=seed)


def _inputs(batch: object) -> Tensor:
    if not isinstance(batch, Tensor):
        raise InvalidArgument("unlabelled must be a Public of inputs alone: labels that are known belong to labelled.")
    return batch
