"""What a training refuses before anything is charged: arguments of other kinds, and public rows that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.sources import form_of_rows
from sfumato.errors import InvalidArgument, shown
from sfumato.objective import Batch
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public

Metric = Callable[[nn.Module, Any], Tensor]
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "private": ((Private,), "a Private: give Private(rows, name=..., size=..., objective=..., budget=...)"),
    "public": ((Public, type(None)), "a Public: give Public(rows, objective=...)"),
    "test": ((Public, type(None)), "a Public: give Public(rows)"),
    "budget": ((Budget, type(None)), "a Budget: give Budget(epsilon=2.0, delta=1e-5)"),
    "batch_size": ((Real, type(None)), "a number of units: give batch_size=200"),
    "metrics": ((Mapping, type(None)), "functions by name: give {'accuracy': accuracy}"),
}


def check_kinds(**arguments: Any) -> None:
    for name, value in arguments.items():
        kinds, wanted = _KINDS[name]
        if not isinstance(value, kinds):
            raise InvalidArgument(f"{name}={shown(value)} must be {wanted}.")


def made_optimizer(optimizer: Any, model: nn.Module) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """The optimiser of the trainable parameters, and those."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InvalidArgument("model has no parameters to train: set requires_grad=True on some of them.")
    if optimizer is None:
        return torch.optim.SGD(trained, lr=0.5), trained
    if not callable(optimizer):
        raise InvalidArgument(
            f"optimizer={shown(optimizer)} must be what makes one of parameters: give "
            "functools.partial(torch.optim.SGD, lr=0.5)."
        )
    return optimizer(trained), trained


def one_per_row(name: str, measure: Metric) -> Metric:
    """The same measure, which is refused where it gives a mean."""

    def measured(module: nn.Module, batch: Batch) -> Tensor:
        values = measure(module, batch)
        if not isinstance(values, Tensor) or values.ndim != 1:
            raise InvalidArgument(
                f"{name}(module, batch) must give one value per row: leave out the mean, or use reduction='none'."
            )
        return values

    return measured


@contextmanager
def compared_with(private: Private, role: str, rows: Public) -> Iterator[None]:
    """Where the loss fails for public rows, say whether they are unlike the private ones.

    Only then: a model may take rows of several forms. That of private arrays is their schema, which neighbours share;
    that of a dataset's items is not known without a look at them.
    """
    try:
        yield
    except Exception as error:
        own, others = private._source.form, form_of_rows(rows._source.gather(np.arange(1)))
        if own in (None, others):
            error.add_note("loss(module, batch) must give one value per example.")
            raise
        raise InvalidArgument(
            f"{role} has rows of {others}, for which the loss fails, and private of {own}: give both the same types, "
            "shapes and order."
        ) from error
