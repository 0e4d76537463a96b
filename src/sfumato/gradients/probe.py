"""The check that comes before the first private answer, on the user's own model, with a handful of rows.

1. The loss gives one value per example.
2. Examples do not act on each other: exchanging the other rows changes neither an example's loss nor its gradient.
   (Train-mode batch norm, in-batch negatives and losses that normalise over the batch fail here, whatever their name.)
3. The trace of `modes.py`: which function uses which parameter, with the examples in which dimension.
4. The engine agrees with plain autograd, parameter by parameter, on these rows. A use that a rule gets wrong, or that
   nobody saw, cannot pass.

The rows are jittered copies; all that leaves is acceptance, or the name of a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.errors import UnsupportedModel
from sfumato.gradients.clip import Clip
from sfumato.gradients.modes import Trace, TraceMode, module_of, trace
from sfumato.gradients.passes import Performance, check_losses, per_unit
from sfumato.gradients.rules.call import Key
from sfumato.objective import Batch, Objective

_ROWS = 3


class Probe:
    """Accepts or refuses an objective, once per kind of batch."""

    _known: ClassVar[weakref.WeakKeyDictionary[Objective, Probe]] = weakref.WeakKeyDictionary()

    def __init__(self, objective: Objective) -> None:
        self._objective = weakref.ref(objective)
        self._traces: dict[Any, Trace] = {}

    @classmethod
    def of(cls, objective: Objective) -> Probe:
        """The objective's own probe; what it found out is kept as long as the objective lives."""
        return cls._known.setdefault(objective, cls(objective))

    def trace(self, params: Mapping[str, Tensor], batch: Batch) -> Trace:
        objective = self._objective()
        assert objective is not None
        signature = self._signature(objective, params, batch)
        if signature not in self._traces:
            devices = {p.device for p in params.values() if p.device.type == "cuda"}
            with torch.random.fork_rng(devices=list(devices)):
                self._traces[signature] = _investigate(objective, params, batch)
        return self._traces[signature]

    @staticmethod
    def _signature(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Any:
        leaves, spec = tree_flatten(batch)
        kinds = tuple((t.dtype, t.ndim) if isinstance(t, Tensor) else t for t in leaves)
        modes = tuple(m.training for m in objective.module.modules())
        return str(spec), kinds, modes, tuple((name, p.dtype, p.device) for name, p in params.items())


def probe_rows(batch: Batch, count: int, seed: int) -> Batch:
    """`count` finite rows that differ from each other: rows of the batch, in turn, jittered where they are numbers."""
    generator = torch.Generator().manual_seed(seed)

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = value[(torch.arange(count, device=value.device) + seed) % len(value)]
        if not rows.is_floating_point():
            return rows
        rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
        jitter = torch.rand(rows.shape, generator=generator).to(rows) * 2 - 1
        return rows + 0.05 * (1 + rows.abs()) * jitter

    return tree_map(take, batch)


def _mixed(first: Batch, second: Batch, keep: int) -> Batch:
    """`second` with row `keep` taken from `first`."""

    def mix(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        b = b.clone()
        b[keep] = a[keep]
        return b

    return tree_map(mix, first, second)


def _by_autograd(
    objective: Objective, params: Mapping[str, Tensor], batch: Batch, rows: list[int]
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Losses, and the gradients of some of them, by plain autograd on the whole batch."""
    torch.manual_seed(0)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    # A module that keeps its own reference to a parameter (nn.LSTM) is read at its own values: lend it those.
    with torch.enable_grad():
        losses = objective.losses(leaves, batch)
        check_losses(losses, _ROWS)
        inputs = leaves | {f"\0{n}": p for n, p in objective.module.named_parameters() if p.requires_grad}
        gradients = []
        for i in rows:
            values = torch.autograd.grad(losses[i], list(inputs.values()), retain_graph=True, allow_unused=True)
            found = dict(zip(inputs, values, strict=True))
            gradients.append({n: _sum(found[n], found.get(f"\0{n}"), p) for n, p in params.items()})
    return losses.detach(), gradients


def _sum(a: Tensor | None, b: Tensor | None, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for part in (a, b):
        if part is not None:
            total = total + part
    return total


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest difference relative to the whole gradient's norm, and the parameter it is in."""
    size = sum(float(t.double().square().sum()) for t in b.values()) ** 0.5
    gaps = {n: float((a[n].double() - t.double()).norm()) for n, t in b.items()}
    worst = max(gaps, key=lambda n: gaps[n] if gaps[n] == gaps[n] else float("inf"))
    gap = gaps[worst]
    return (float("inf") if gap != gap else gap / max(size, 1e-30)), worst


def _tolerance(params: Mapping[str, Tensor]) -> float:
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    return 1e4 * eps if eps < 1e-4 else 0.1


def _investigate(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Trace:
    tolerance = _tolerance(params)
    rows, others = probe_rows(batch, _ROWS, 0), probe_rows(batch, _ROWS, 1)
    _, gradients = _by_autograd(objective, params, rows, list(range(_ROWS)))
    losses, _ = _by_autograd(objective, params, rows, [])
    for keep in (0, _ROWS - 1):
        changed_losses, (changed,) = _by_autograd(objective, params, _mixed(rows, others, keep), [keep])
        gap = float((changed_losses[keep] - losses[keep]).abs()) / (1 + float(losses[keep].abs()))
        distance, worst = _distance(changed, gradients[keep])
        if not (gap <= tolerance and distance <= tolerance):
            raise UnsupportedModel(_mixing_message(objective, worst))
    found = _trace(objective, params, batch, minor=False)
    distance, worst = _engine_distance(objective, params, rows, found, gradients)
    if distance > tolerance and found.merged:
        found = _trace(objective, params, batch, minor=True)
        distance, worst = _engine_distance(objective, params, rows, found, gradients)
    if distance > tolerance:
        raise UnsupportedModel(
            f"The per-example gradient of {worst!r} does not agree with autograd (relative error {distance:.1e}): "
            f"module {module_of(worst)!r} uses its parameters in a way that is not seen (compiled, checkpointed or "
            "random code); replace it or freeze it."
        )
    return found


def _mixing_message(objective: Objective, worst: str) -> str:
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


def _trace(objective: Objective, params: Mapping[str, Tensor], batch: Batch, *, minor: bool) -> Trace:
    originals = dict(objective.module.named_parameters())

    def run(rows: int, uses: frozenset[Key]) -> TraceMode:
        torch.manual_seed(0)
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        lent = probe_rows(batch, rows, 0)
        mode = TraceMode(leaves, originals, lent, rows, uses)
        with mode:
            objective.losses(leaves, lent)
        return mode

    return trace(run, minor=minor)


def _engine_distance(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, found: Trace, gradients: list[dict[str, Tensor]]
) -> tuple[float, str]:
    """How far the engine's gradients and norms are from autograd's; a norm that is too small counts like a gradient."""
    torch.manual_seed(0)
    addends = per_unit(objective, params, rows, found, count=_ROWS, clip=Clip(float("inf")), performance=Performance())
    worst: tuple[float, str] = (0.0, "")
    for i, gradient in enumerate(gradients):
        pick = torch.zeros_like(addends.factors)
        pick[i] = 1
        ours = {name: c.weighted_sum(pick) for name, c in addends.contributions.items()}
        worst = max(worst, _distance(ours, gradient))
        size = sum(float(t.double().square().sum()) for t in gradient.values()) ** 0.5
        if float(addends.norms[i]) < size * (1 - 1e-3):
            worst = max(worst, (1.0, worst[1] or next(iter(params))))
    return worst
