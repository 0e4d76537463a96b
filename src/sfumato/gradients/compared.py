"""Rows by plain autograd, compared: the same row among other rows, or among more, must be worth what it was.

Used by `probe.py`; what is raised names a module, and no number of any row.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.errors import SfumatoError, UnsupportedModel
from sfumato.generators import seed_torch
from sfumato.gradients.chance import WithoutChance
from sfumato.gradients.modes import module_of
from sfumato.gradients.passes import check_losses, rows_of
from sfumato.objective import Batch, Objective

Named = dict[str, Tensor]
Row = tuple[Tensor, Named]  # its loss and its gradient
Place = tuple[Batch, int]  # a batch, and a row of it
Found = tuple[Tensor, list[dict[str, Tensor]]]  # losses, and gradients of some


def by_autograd(
    objective: Objective, params: Mapping[str, Tensor], batch: Batch, rows: list[int], *, seed: int = 0
) -> Found:
    """Losses, and the gradients of some of them, by plain autograd on the whole batch."""
    seed_torch(seed)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    # A module that keeps its own reference to a parameter (nn.LSTM) is read at its own values: lend it those.
    with torch.enable_grad():
        frozen = {n: p for n, p in objective.module.named_parameters() if n not in params}
        lent = leaves | {n: p.detach().clone() for n, p in frozen.items()}
        losses = objective.losses(lent, batch)
        for name, p in {**params, **frozen}.items():
            if not torch.allclose(lent[name], p, 0, 0, equal_nan=True):  # as max_norm does, for the tokens it is shown
                raise UnsupportedModel(
                    f"module {module_of(name)!r} writes to its parameter {name!r} while it computes, which would leave "
                    "a trace of private rows in it: switch that off, for instance max_norm."
                )
        check_losses(losses, rows_of(batch))
        inputs = leaves | {f"\0{n}": p for n, p in objective.module.named_parameters() if p.requires_grad}
        gradients = []
        for i in rows:
            try:
                values = torch.autograd.grad(losses[i], list(inputs.values()), retain_graph=True, allow_unused=True)
            except RuntimeError:  # without its text, which may quote private rows
                raise UnsupportedModel(
                    f"module {type(objective.module).__name__!r} cannot be differentiated: replace what autograd "
                    "refuses, for instance torch.utils.checkpoint."
                ) from None
            found = dict(zip(inputs, values, strict=True))
            gradients.append({n: _sum(found[n], found.get(f"\0{n}"), p) for n, p in params.items()})
    return losses.detach(), gradients


def compare(objective: Objective, row: int, before: Found, after: Found, tolerance: float) -> None:
    """Raise if a row's loss or gradient has changed."""
    (losses, gradients), (changed_losses, (changed,)) = before, after
    refuse_changed(objective, (losses[row], gradients[row]), (changed_losses[row], changed), tolerance)


def refuse_resized(
    objective: Objective,
    params: Mapping[str, Tensor],
    ends: tuple[Row, ...],
    places: tuple[Place, Place],
    tolerance: float,
) -> None:
    """Raise if a row's loss or gradient is another among more rows: `ends` is what was found at the two places.

    Rounding goes by the number of rows. Where a row lies on a kink, as one colour does under a kernel of mean 0, that
    decides its gradient. So what differs, and differs again, is refused if it does so in float64, too, or if that
    cannot be computed: there rounding is a billionth, and next to nothing lies as near to a kink.
    """
    gap, worst = gap_of(*ends)
    if gap <= tolerance:
        return
    again, _ = gap_of(*(_at(objective, params, place) for place in places))
    with contextlib.suppress(Exception):
        if not again <= tolerance and _gap_in_float64(objective, params, places) <= tolerance:
            return
    raise UnsupportedModel(mixing_message(objective, worst))


def _at(objective: Objective, params: Mapping[str, Tensor], place: Place) -> Row:
    batch, row = place
    with WithoutChance():
        losses, (gradient,) = by_autograd(objective, params, batch, [row])
    return losses[row], gradient


def _gap_in_float64(objective: Objective, params: Mapping[str, Tensor], places: tuple[Place, Place]) -> float:
    """Of a copy of the model; an error where the model or its loss wants float32."""
    with in_float64(objective, params) as (wide, lent):
        return gap_of(*(_at(wide, lent, (doubled(batch), row)) for batch, row in places))[0]


@contextlib.contextmanager
def in_float64(objective: Objective, params: Mapping[str, Tensor]) -> Iterator[tuple[Objective, dict[str, Tensor]]]:
    """A copy of the model and its parameters, and while it is used what whole numbers become."""
    wide = Objective(copy.deepcopy(objective.module).double(), objective.loss)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield wide, {name: p.detach().double() for name, p in params.items()}
    finally:
        torch.set_default_dtype(before)


def doubled(batch: Batch) -> Batch:
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, batch)


def refuse_changed(objective: Objective, before: Row, after: Row, tolerance: float) -> None:
    gap, worst = gap_of(before, after)
    if not gap <= tolerance:
        raise UnsupportedModel(mixing_message(objective, worst))


def gap_of(before: Row, after: Row) -> tuple[float, str]:
    """How far a row's loss or gradient has changed, and in which parameter most."""
    loss = float((after[0] - before[0]).abs()) / (1 + float(before[0].abs()))
    distance, worst = distance_of(after[1], before[1])
    return (max(loss, distance) if loss == loss else math.inf), worst


def _sum(a: Tensor | None, b: Tensor | None, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for part in (a, b):
        if part is not None:
            total = total + part
    return total


def distance_of(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest difference relative to the whole gradient's norm, and the parameter it is in."""
    size = sum(float(t.double().square().sum()) for t in b.values()) ** 0.5
    gaps = {n: float((a[n].double() - t.double()).norm()) for n, t in b.items()}
    worst = max(gaps, key=lambda n: gaps[n] if gaps[n] == gaps[n] else float("inf"))
    gap = gaps[worst]
    return (float("inf") if gap != gap else gap / max(size, 1e-30)), worst


def mixing_message(objective: Objective, worst: str) -> str:
    suspects = [
        name
        for name, module in objective.module.named_modules()
        if "BatchNorm" in type(module).__name__ and module.training
    ]
    where = f"module {suspects[0]!r} normalises over the batch" if suspects else f"it shows in {worst!r}"
    return (
        f"Examples act on each other's loss or gradient ({where}): use layers and losses that treat examples one by "
        "one, such as GroupNorm instead of batch norm."
    )


def attempt(objective: Objective, params: Mapping[str, Tensor], batch: Batch, rows: list[int]) -> list[Row]:
    """Some rows; none if the model raises an error: nothing like them need ever have been there."""
    try:
        with WithoutChance():
            losses, gradients = by_autograd(objective, params, batch, rows)
    except SfumatoError:
        raise
    except Exception:
        return []
    return list(zip(losses[rows], gradients, strict=True))


def is_finite(found: list[Row]) -> bool:
    return bool(found) and all(bool(torch.isfinite(t).all()) for t in (found[0][0], *found[0][1].values()))


def tolerance_of(params: Mapping[str, Tensor]) -> float:
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    return 1e4 * eps if eps < 1e-4 else 0.1


def same_of(params: Mapping[str, Tensor]) -> float:
    """The tolerance between two runs of one computation, whose shapes are equal: next to nothing."""
    return 64 * max(torch.finfo(p.dtype).eps for p in params.values())
