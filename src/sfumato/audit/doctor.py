"""The doctor: a user's own model and loss, examined before a training, on rows that may be looked at.

It asks the real door about public or made-up rows, so no private value is needed. Whether examples act on each other is
looked at first, by the door's own probe: nothing else can be trusted before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.audit.canary import flat
from sfumato.audit.doors import SIZE, SeededDoor, open_door
from sfumato.audit.ledger import ledger_audit
from sfumato.audit.noise import noise_audit, pure_noise, resumed_noise
from sfumato.audit.sampler import sampler_audit
from sfumato.audit.sensitivity import Neighbours, sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.data.samplers import FixedSize, Poisson, Sampler
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.gradients import Clip
from sfumato.gradients.probe import Probe
from sfumato.objective import Batch, Objective
from sfumato.questions import GradientMean

_PRESENT = 24  # people whose sampling is looked at
_NOISE = 1.0


def doctor(
    objective: Objective, rows: Batch, *, name: str = "your model", sampler: Sampler | None = None
) -> list[Verdict]:
    """Verdicts about a model and its loss, with a few rows of the right shape; `sampler` is that of the training.

    >>> import torch
    >>> from sfumato import Objective, cross_entropy
    >>> rows = torch.rand(8, 3), torch.arange(8) % 2
    >>> normed = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    >>> [verdict.audit for verdict in doctor(Objective(normed, cross_entropy), rows) if not verdict.holds]
    ['examples apart']
    """
    if _length(rows) < 2:
        raise InvalidArgument(f"rows has {_length(rows)} rows: give at least two, public or made up.")
    apart = examples_apart(objective, rows, name=name)
    if not apart.holds:
        return [apart]
    drawn = sampler or Poisson(size=1000, batch_size=100.0)
    nobody = tree_map(lambda t: t[:0] if isinstance(t, Tensor) else t, rows)
    noises = pure_noise(objective, nobody, noise=_NOISE, steps=3)
    resumed = resumed_noise(objective, nobody, noise=_NOISE, steps=2)
    return [
        apart,
        row_sensitivity(objective, rows, name=name),
        *noise_audit(noises, noise=_NOISE, name=name),
        *noise_audit(resumed, noise=_NOISE, name=name, about="a resume"),
        *_sampling(drawn, name),
        *ledger_audit(name=name, sampler=None if isinstance(drawn, FixedSize) else drawn),
    ]


def examples_apart(objective: Objective, rows: Batch, *, name: str) -> Verdict:
    """Whether the loss has one value per example, none acts on another, and all gradients are seen."""
    told = ""
    try:
        Probe(objective).trace(objective.parameters(), rows)
    except SfumatoError as refused:
        told = str(refused)
    except Exception as error:  # the user's own code; the rows may be quoted
        told = f"The model fails with {type(error).__name__}: {' '.join(str(error).split())}"
    return Verdict(
        method=name,
        audit="examples apart",
        claimed=0.0,
        lower_bound=float(bool(told)),
        confidence=1.0,
        trials=1,
        unit="findings",
        told=told,
    )


def row_sensitivity(
    objective: Objective, rows: Batch, *, name: str, clip: float = 1.0, door: SeededDoor = open_door
) -> Verdict:
    """How far one row, as it is, huge, zero, NaN or infinite, moves the answer about nobody and about others."""
    question = GradientMean(objective.parameters(), Clip(clip))

    def answer(data: Batch) -> Any:
        return flat([door(objective, data, 0.02, 1, seed=7)(question)])

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "a row as it is": lambda t: t,
        "a row of zeros": torch.zeros_like,
        "a huge row": lambda t: t * 1e6,
        "a row of NaN": partial(torch.full_like, fill_value=torch.nan),
        "an infinite row": partial(torch.full_like, fill_value=torch.inf),
    }
    pairs = []
    for count in (0, min(_length(rows), SIZE) - 1):
        others = _first(rows, count)
        for told, change in changes.items():
            more = tree_map(partial(_changed, at=count, change=change), _first(rows, count + 1))
            pairs.append(Neighbours(name=f"{told} among {count}", one=others, other=more))
    return sensitivity(answer, pairs, claimed=clip / SIZE, name=name)


def _sampling(sampler: Sampler, name: str) -> list[Verdict]:
    rng = np.random.default_rng()  # of the audit's own draws; the door has a cipher
    rate = sampler.expected / sampler.size
    if isinstance(sampler, FixedSize):  # whose rows are not independent, and whose batches are never empty
        few = FixedSize(size=_PRESENT, batch_size=max(1, round(rate * _PRESENT)))
        draw = partial(few.draw, _PRESENT, rng)
        return sampler_audit(draw, present=_PRESENT, rate=few.expected / few.size, name=name)[:1]
    return sampler_audit(partial(sampler.draw, _PRESENT, rng), present=_PRESENT, rate=rate, name=name, draws=4000)


def _changed(tensor: Any, *, at: int, change: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor  # labels and tokens: another number may not exist
    tensor = tensor.clone()
    tensor[at] = change(tensor[at])
    return tensor


def _first(rows: Batch, count: int) -> Batch:
    return tree_map(lambda t: t[:count] if isinstance(t, Tensor) else t, rows)


def _length(rows: Batch) -> int:
    return next((len(t) for t in tree_flatten(rows)[0] if isinstance(t, Tensor)), 0)
