"""The loop of plain training: shuffled passes over public rows, any torch optimiser, a cosine schedule.

The defaults are those of "Improving private training via in-distribution public data ...", table 12, for CIFAR-10.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.augment import recordable
from sfumato.averages import Ema
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.gradients.graphs import Graphs, state_of
from sfumato.gradients.passes import Augment, check_losses, rows_of
from sfumato.nn.modes import being_trained
from sfumato.objective import Batch, Loss, Objective
from sfumato.public import Public
from sfumato.warmup.sam import Params, Sam

_LOOK_EVERY = 0.5  # seconds between looks at the loss for the progress bar, since each waits for the GPU


def warm_up(
    objective: Objective,
    public: Public,
    *,
    steps: int,
    batch_size: int = 100,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    learning_rate: float = 0.05,
    augment: Augment | None = None,
    sharpness: Sam | None = None,
    loss: Loss | None = None,
    ema: bool = False,
    progress: bool = False,
    cuda_graph: bool | None = None,
) -> list[float]:
    """Train the objective's module on public rows, in place, and return the mean loss of every step's batch.

    Args:
        steps: how many batches; one pass over the rows has `len(public) // batch_size`, the ragged rest is left out.
        optimizer: makes a torch optimiser of the parameters; by default SGD with `learning_rate`, momentum 0.9 and
            weight decay 5e-4. Whatever learning rates it begins with fall to zero along half a cosine.
        augment: applied to each batch, on the parameters' device; it may mix rows and their labels.
        sharpness: `Sam()` for a flat minimum, at twice the cost.
        loss: used in place of the objective's own.
        ema: end with the moving average of the weights instead of the last ones.
        cuda_graph: record the step and replay it, True or False; None where Python is seen to hold the GPU up. A model
            or loss whose Python code draws random numbers of its own needs False: a replay does not run it again.

    >>> import torch
    >>> from sfumato import Objective, Public, cross_entropy
    >>> objective = Objective(torch.nn.Linear(2, 2), cross_entropy)
    >>> rows = torch.linspace(-1, 1, 40).repeat(2, 1).T
    >>> losses = warm_up(objective, Public((rows, (rows[:, 0] > 0).long()), seed=0), steps=50, batch_size=10)
    >>> len(losses), sum(losses[-10:]) < sum(losses[:10])
    (50, True)
    """
    module = objective.module
    _check(objective, steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    own: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    device = next(iter(own.values())).device
    wanted = objective if loss is None else Objective(module, loss, objective.autocast)
    if optimizer is None:
        updater: torch.optim.Optimizer = torch.optim.SGD(
            own.values(), lr=learning_rate, momentum=0.9, weight_decay=5e-4
        )
    else:
        updater = optimizer(list(own.values()))
    set_rates = _Rates(updater)
    average = Ema(own) if ema else None
    within = augment if recordable(augment) else None  # many small operations, which Python is slow to queue
    step = _Step(wanted, own, sharpness, cuda_graph, within)
    losses = torch.empty(steps, dtype=torch.float64, device=device)

    with being_trained(module), _bar(steps, shown=progress) as tell:
        for t, rows in enumerate(islice(_shuffled(public, batch_size), steps)):
            batch = tree_map(lambda v: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v, rows)
            batch = batch if augment is None or within is not None else augment(batch)
            losses[t], gradient = step(batch)
            for name, p in own.items():
                p.grad = gradient.get(name)
            set_rates(cosine(t, steps))
            updater.step()
            if average is not None:
                average.update(own, t + 1)
            tell(t, losses, batch)
    if average is not None:
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(average.weights[name])
    kept: list[float] = losses.tolist()
    return kept


def cosine(step: int, steps: int) -> float:
    """The share of the first learning rate that is left at a step, counted from 0."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def _check(objective: Objective, *, steps: int, batch_size: int, learning_rate: float) -> None:
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"{name}={value} must be a whole number of at least 1.")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InvalidArgument(f"learning_rate={learning_rate} must be a positive number, such as 0.05.")
    if not objective.parameters():
        raise InvalidArgument("objective has no trainable parameters: set requires_grad on those to be trained.")


def _shuffled(public: Public, batch_size: int) -> Iterator[Batch]:
    """Pass after pass without the ragged last batch, unless the rows are fewer than one batch."""
    whole = max(1, len(public) // batch_size)
    while True:
        yield from islice(public.batches(batch_size, shuffle=True), whole)


class _Step:
    """The loss of a batch and the gradient to step along, on a GPU perhaps replayed from a recording."""

    def __init__(
        self,
        objective: Objective,
        own: Params,
        sharpness: Sam | None,
        cuda_graph: bool | None,
        augment: Augment | None,
    ) -> None:
        self._objective, self._own, self._sharpness, self._augment = objective, own, sharpness, augment
        self._always = cuda_graph is True
        on_gpu = next(iter(own.values())).is_cuda
        self._graphs = Graphs() if on_gpu and cuda_graph is not False else None

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = tree_flatten(batch)[0]
        if self._graphs is None or not all(isinstance(v, Tensor) for v in leaves):
            found = self._compute(batch)
        else:
            # The recording reads the module's own parameters, which optimisers change in place.
            shapes = tuple((tuple(v.shape), v.stride(), v.dtype) for v in leaves)
            key = (shapes, state_of(self._objective.module, self._objective.loss, self._augment))
            keep = (self._objective, self._augment)
            found = self._graphs.run(key, self._compute, batch, always=self._always, keep=keep)
        return found["loss"], {name.removeprefix("of "): g for name, g in found.items() if name != "loss"}

    def _compute(self, batch: Batch) -> dict[str, Tensor]:
        means: list[Tensor] = []
        batch = batch if self._augment is None else self._augment(batch)

        def gradient_at(params: Params) -> Gradient:
            with torch.enable_grad():
                losses = self._plainly(batch) if params is self._own else self._objective.losses(params, batch)
                check_losses(losses, rows_of(batch))
                means.append(losses.mean())
            found = torch.autograd.grad(means[-1], list(params.values()), allow_unused=True)
            return Gradient({name: g for name, g in zip(params, found, strict=True) if g is not None})

        if self._sharpness is None:
            gradient = gradient_at(self._own)
        else:
            gradient = self._sharpness.gradient(self._own, gradient_at)
        return {"loss": means[0].detach(), **{f"of {name}": g for name, g in gradient.items()}}

    def _plainly(self, batch: Batch) -> Tensor:
        """The losses of the module itself, so that running statistics, where it has any, move: once per step."""
        kind = self._objective.autocast
        with torch.autocast(next(iter(self._own.values())).device.type, kind, enabled=kind is not None):
            losses = self._objective.loss(self._objective.module, batch)
        return losses if kind is None else losses.float()


class _Rates:
    """Scales the learning rates that an optimiser began with, numbers or tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        rates = (group["lr"] for group in self._groups)
        self._first = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def __call__(self, share: float) -> None:
        for group, first in zip(self._groups, self._first, strict=True):
            if isinstance(first, Tensor):
                group["lr"].copy_(first * share)
            else:
                group["lr"] = first * share


@contextmanager
def _bar(steps: int, *, shown: bool) -> Iterator[Callable[[int, Tensor, Batch], None]]:
    """A progress bar with the loss and the speed, told of the step, all losses and the batch."""
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[facts]}"))
    start = looked = time.perf_counter()
    with Progress(TextColumn("{task.description}"), *columns, disable=not shown) as bar:
        task = bar.add_task("warm-up", total=steps, facts="")

        def tell(step: int, losses: Tensor, batch: Batch) -> None:
            nonlocal looked
            now = time.perf_counter()
            if not shown or (now - looked < _LOOK_EVERY and step + 1 < steps):
                return
            looked = now
            rate = (step + 1) * rows_of(batch) / (now - start)
            bar.update(task, completed=step + 1, facts=f"loss {float(losses[step]):.3f} · {rate:,.0f} rows/s")

        yield tell
