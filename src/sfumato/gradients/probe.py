"""The check that comes before the first private answer, on the user's own model, with a handful of rows.

1. The loss gives one value per example.
2. Examples do not act on each other: neither exchanging the other rows nor adding more changes an example's loss or
   gradient. (Train-mode batch norm, in-batch negatives and losses that normalise over the batch fail here, whatever
   their name.)
3. The trace of `modes.py`: which function uses which parameter, with the examples in which dimension.
4. The engine agrees with plain autograd, parameter by parameter, on these rows. A use that a rule gets wrong, or that
   nobody saw, cannot pass.
5. Nor do examples act on each other in a way that ordinary rows hide: a row's loss and gradient stay what they are
   among rows of NaN (`spoiled.py`), and among longer and shorter ones.

The rows are jittered copies; all that leaves is acceptance, or the name of a module.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.errors import SfumatoError, UnsupportedModel
from sfumato.generators import seed_torch
from sfumato.gradients.chance import WithoutChance
from sfumato.gradients.clip import Clip
from sfumato.gradients.compared import (
    Row,
    by_autograd,
    compare,
    distance_of,
    gap_of,
    mixing_message,
    refuse_changed,
    refuse_resized,
)
from sfumato.gradients.flow import Flow
from sfumato.gradients.graphs import Graphs
from sfumato.gradients.modes import Trace, TraceMode, module_of, trace
from sfumato.gradients.passes import Addends, Performance, exact_products, per_unit, rows_of
from sfumato.gradients.probed_rows import (
    LARGEST,
    alike_in,
    cut_short,
    extremes_of,
    integers_of,
    jittered,
    joined,
    mixed,
    probe_rows,
    taken,
)
from sfumato.gradients.rules.call import Key
from sfumato.gradients.spoiled import Entrances, Others
from sfumato.objective import Batch, Objective

_ROWS = 3
_HALF_TOLERANCE = 0.25  # between two computations in bfloat16, whose rounding can flip a ReLU


class Probe:
    """Accepts or refuses an objective, once per kind of batch."""

    _known: ClassVar[weakref.WeakKeyDictionary[Objective, Probe]] = weakref.WeakKeyDictionary()

    def __init__(self, objective: Objective) -> None:
        self._objective = weakref.ref(objective)
        self._traces: dict[Any, tuple[Trace, frozenset[int]]] = {}
        self.sizes: dict[Any, int] = {}
        """Micro-batches that were chosen, by what is asked."""
        self.graphs = Graphs()
        self._questions = 0
        self._checked: deque[tuple[Any, Any]] = deque(maxlen=16)  # the functions themselves: an id may be used again

    @classmethod
    def of(cls, objective: Objective) -> Probe:
        """The objective's own probe; what it found out is kept as long as the objective lives."""
        return cls._known.setdefault(objective, cls(objective))

    def trace(self, params: Mapping[str, Tensor], batch: Batch) -> Trace:
        """What was found out about such batches."""
        objective = self._objective()
        assert objective is not None
        signature = self._signature(objective, params, batch)
        known, alike = self._traces.get(signature, (None, frozenset()))
        # Integers that were the same in all rows say nothing about what happens when they differ.
        if known is not None and (not alike or alike <= alike_in(batch)):
            return known
        with _set_apart(params):
            if known is not None and not _says_something(objective, params, batch):
                return known
            found = _investigate(objective, params, batch)
        self._traces[signature] = found, alike_in(batch)
        return found

    def check(self, params: Mapping[str, Tensor], batch: Batch) -> None:
        """Find out, before a question is charged; and look again at the 4th, 16th, 64th, ... of them.

        A loss may have come to mix rows since, by a term that is switched on after a while, say. Then made-up rows are
        looked at: no person's row may decide whether a training goes on.
        """
        self.trace(params, batch)
        self._questions += 1
        power_of_4 = self._questions.bit_count() == 1 and self._questions.bit_length() % 2 == 1
        if self._questions > 1 and power_of_4:
            objective = self._objective()
            assert objective is not None
            made_up = tree_map(_zeros, batch)
            with _set_apart(params):
                if _says_something(objective, params, made_up):
                    _investigate(objective, params, made_up)

    def once(self, function: Any, rows: Batch, check: Callable[[Any, Batch], None]) -> None:
        """check(function, rows), every time; but a frozen dataclass, which cannot change, once for such rows."""
        kinds = tuple((t.dtype, t.shape[1:]) for t in tree_flatten(rows)[0] if isinstance(t, Tensor))
        if not any(known is function and kinds == seen for known, seen in self._checked):
            check(function, rows)
            parameters = getattr(type(function), "__dataclass_params__", None)
            if parameters is not None and parameters.frozen:
                self._checked.append((function, kinds))

    @staticmethod
    def _signature(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Any:
        leaves, spec = tree_flatten(batch)
        kinds = tuple((t.dtype, t.shape[1:]) if isinstance(t, Tensor) else t for t in leaves)
        modes = tuple((type(m), m.training) for m in objective.module.modules())
        return str(spec), kinds, modes, tuple((name, p.dtype, p.device) for name, p in params.items())


def _zeros(value: Any) -> Any:
    return value.new_zeros(2 * _ROWS, *value.shape[1:]) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _set_apart(params: Mapping[str, Tensor]) -> Iterator[None]:
    devices = {p.device for p in params.values() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), exact_products(Performance(), recurring=False):
        yield


def _says_something(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> bool:
    """Whether rows are finite where the parameters are now: one that overflows must not end a training."""
    rows = joined(probe_rows(batch, _ROWS, 0), probe_rows(batch, _ROWS, 1))
    found = _attempt(objective, params, rows, list(range(2 * _ROWS)))
    return bool(found) and all(_is_finite([row]) for row in found)


def _tolerance(params: Mapping[str, Tensor]) -> float:
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    return 1e4 * eps if eps < 1e-4 else 0.1


def _same(params: Mapping[str, Tensor]) -> float:
    """The tolerance between two runs of one computation, whose shapes are equal: next to nothing."""
    return 64 * max(torch.finfo(p.dtype).eps for p in params.values())


def _investigate(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Trace:
    for name, p in params.items():
        if p.dtype not in (torch.float32, torch.float64):
            # In bfloat16 a sum of a thousand contributions is a multiple of 4 C: one more moves it by that, or not.
            raise UnsupportedModel(
                f"parameter {name!r} is {p.dtype}, in which a sum of bounded contributions is not itself bounded: keep "
                "parameters in float32."
            )
    if objective.autocast is not None:
        # Examples are looked for in each other's gradients in full precision, where rounding hides nothing.
        found = _investigate(objective.exactly(), params, batch)
        _, gradients = by_autograd(objective, params, probe_rows(batch, _ROWS, 0), list(range(_ROWS)))
        distance, worst = _engine_distance(objective, params, probe_rows(batch, _ROWS, 0), found, gradients)
        _refuse_distant(distance, worst, _HALF_TOLERANCE)
        return found
    tolerance = _tolerance(params)
    rows, others = probe_rows(batch, _ROWS, 0), probe_rows(batch, _ROWS, 1)
    _, gradients = by_autograd(objective, params, rows, list(range(_ROWS)))
    losses, _ = by_autograd(objective, params, rows, [])
    for keep in (0, _ROWS - 1):
        changed = by_autograd(objective, params, mixed(rows, others, keep), [keep])
        compare(objective, keep, (losses, gradients), changed, _same(params))
    with WithoutChance():
        few, more = (by_autograd(objective, params, b, [0]) for b in (rows, joined(rows, others)))
        again = by_autograd(objective, params, rows, [0], seed=1)
    if torch.equal(few[0], again[0]):  # else there is chance that torch does not draw, and nothing can be said
        ends = tuple((losses[0], found[0]) for losses, found in (few, more))
        refuse_resized(objective, params, ends, ((rows, 0), (joined(rows, others), 0)), tolerance)
    _refuse_if_integers_matter(objective, params, rows, batch, tolerance)
    found = _trace(objective, params, batch, minor=False)
    distance, worst = _engine_distance(objective, params, rows, found, gradients)
    if distance > tolerance and found.merged:
        found = _trace(objective, params, batch, minor=True)
        distance, worst = _engine_distance(objective, params, rows, found, gradients)
    _refuse_distant(distance, worst, tolerance)
    _refuse_if_spoiled(objective, params, rows, joined(rows, others), found)
    return found


def _refuse_if_integers_matter(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, batch: Batch, tolerance: float
) -> None:
    """Raise if a row is worth something else where others are longer, shorter, or in other classes.

    The rows that were chosen may all have one length, and integers cannot be jittered: so rows are compared with
    themselves among the batch's extremes, and a row that is cut short among others that are and that are not.
    """
    extremes = jittered(taken(batch, extremes_of(batch)), 0)
    pairs = [_attempt(objective, params, taken(extremes, torch.tensor([i, i])), [0]) for i in range(rows_of(extremes))]
    usable = [i for i, pair in enumerate(pairs) if _is_finite(pair)]  # an empty row may be worth 0 / 0
    among = (
        _attempt(objective, params, taken(extremes, torch.tensor(usable)), list(range(len(usable)))) if usable else []
    )
    for place, row in enumerate(among):
        i = usable[place]
        places = (taken(extremes, torch.tensor([i, i])), 0), (taken(extremes, torch.tensor(usable)), place)
        refuse_resized(objective, params, (pairs[i][0], row), places, tolerance)
    last = _ROWS - 1
    for length in (1, 2) if any(t.shape[1] > 1 for t in integers_of(batch)) else ():
        short = cut_short(rows, batch, length)
        alike, unlike = (_attempt(objective, params, b, [last]) for b in (short, mixed(short, rows, last)))
        if unlike and _is_finite(alike):
            refuse_changed(objective, alike[0], unlike[0], tolerance)
            break  # else a single token has no loss


def _attempt(objective: Objective, params: Mapping[str, Tensor], batch: Batch, rows: list[int]) -> list[Row]:
    """Some rows; none if the model raises an error: nothing like them need ever have been there."""
    try:
        with WithoutChance():
            losses, gradients = by_autograd(objective, params, batch, rows)
    except SfumatoError:
        raise
    except Exception:
        return []
    return list(zip(losses[rows], gradients, strict=True))


def _is_finite(found: list[Row]) -> bool:
    return bool(found) and all(bool(torch.isfinite(t).all()) for t in (found[0][0], *found[0][1].values()))


def _refuse_distant(distance: float, worst: str, tolerance: float) -> None:
    if distance > tolerance:
        raise UnsupportedModel(
            f"The per-example gradient of {worst!r} does not agree with autograd: "
            f"module {module_of(worst)!r} uses its parameters in a way that is not seen (compiled, checkpointed or "
            "random code); replace it or freeze it."
        )


def _trace(objective: Objective, params: Mapping[str, Tensor], batch: Batch, *, minor: bool) -> Trace:
    originals = dict(objective.module.named_parameters())

    def run(rows: int, uses: frozenset[Key], earlier: Flow | None) -> TraceMode:
        seed_torch(0)
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        lent = probe_rows(batch, rows, 0)
        mode = TraceMode(leaves, originals, lent, uses, earlier)
        with torch.enable_grad(), mode:
            objective.losses(leaves, lent)
        return mode

    return trace(run, minor=minor)


def _by_engine(objective: Objective, params: Mapping[str, Tensor], rows: Batch, found: Trace) -> Addends:
    seed_torch(0)
    return per_unit(objective, params, rows, found, count=_ROWS, clip=Clip(float("inf")), performance=Performance())


def _of_row(addends: Addends, row: int) -> dict[str, Tensor]:
    """The gradient of one row."""
    pick = torch.zeros_like(addends.factors)
    pick[row] = 1
    return {name: c.weighted_sum(pick, _ROWS) for name, c in addends.contributions.items()}


def _engine_distance(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, found: Trace, gradients: list[dict[str, Tensor]]
) -> tuple[float, str]:
    """How far the engine's gradients and norms are from autograd's; a norm that is too small counts like a gradient."""
    addends = _by_engine(objective, params, rows, found)
    worst: tuple[float, str] = (0.0, "")
    for i, gradient in enumerate(gradients):
        worst = max(worst, distance_of(_of_row(addends, i), gradient))
        size = sum(float(t.double().square().sum()) for t in gradient.values()) ** 0.5
        if float(addends.norms[i]) < size * (1 - (1e-3 if objective.autocast is None else _HALF_TOLERANCE)):
            worst = max(worst, (1.0, worst[1] or next(iter(params))))
    return worst


def _refuse_if_spoiled(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, more: Batch, found: Trace
) -> None:
    """Raise if a row's loss or gradient changes when all other rows are spoiled (`spoiled.py`).

    By the engine: autograd adds gradients of a shared weight up over rows, and zero times NaN is NaN.
    """
    entrances = Entrances(more)
    seed_torch(0)
    with torch.enable_grad(), entrances:  # a model may take gradients itself
        objective.losses(params, more)
    tolerance = _same(params)

    def run(others: Others | None) -> tuple[Tensor, Addends]:
        losses: list[Tensor] = []

        def loss(module: nn.Module, batch: Batch) -> Tensor:
            with Entrances(batch, others, entrances):
                losses.append(objective.loss(module, batch))
            return losses[-1]

        spoiled = rows if others is None else others.spoil_batch(rows)
        addends = _by_engine(Objective(objective.module, loss), params, spoiled, found)
        return losses[-1].detach(), addends

    def change(before: Row, keep: int, value: float) -> tuple[float, str] | None:
        """None if the model raises an error, as it may for NaN. Rows may be major or minor where they are merged."""
        smallest = None
        for minor in (False, True):
            with contextlib.suppress(Exception):
                losses, addends = run(Others(_ROWS, keep, value, minor))
                gap = gap_of(before, (losses[keep], _of_row(addends, keep)))
                smallest = gap if smallest is None else min(smallest, gap)
                if gap[0] <= tolerance:
                    break
        return smallest

    losses, addends = run(None)
    for keep in (0, _ROWS - 1):
        before = losses[keep], _of_row(addends, keep)
        # A model that has an error for NaN is shown large numbers; if it has one for these too, nothing can be said.
        gap = change(before, keep, math.nan) or change(before, keep, LARGEST)
        if gap is not None and not gap[0] <= tolerance:
            raise UnsupportedModel(mixing_message(objective, gap[1]))
