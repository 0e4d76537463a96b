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

All that leaves is acceptance, or the name of a module. Neither may tell of anybody's row. So rows are looked at first
that were made up from the types and shapes of the data (`made_up.py`): what changes among them is refused whatever the
data holds. The rows of the data, jittered, say more of a model that passes; where one is not finite, in its loss or its
gradient, others are taken, and where none is, every unit is computed by itself. So it is where rows share chance
(`shared_chance.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sfumato.errors import SfumatoError, UnsupportedModel
from sfumato.gradients.chance import WithoutChance
from sfumato.gradients.compared import (
    Row,
    attempt,
    by_autograd,
    compare,
    doubled,
    gap_of,
    in_float64,
    is_finite,
    mixing_message,
    refuse_changed,
    refuse_resized,
    same_of,
    tolerance_of,
)
from sfumato.gradients.graphs import Graphs
from sfumato.gradients.made_up import TriedOnCpu, made_up_rows
from sfumato.gradients.modes import Trace
from sfumato.gradients.passes import Performance, exact_products, rows_of
from sfumato.gradients.probed_rows import (
    alike_in,
    cut_short,
    extremes_of,
    integers_of,
    jittered,
    joined,
    mixed,
    probe_rows,
    spread_over,
    taken,
)
from sfumato.gradients.shared_chance import shares_chance
from sfumato.gradients.tried import (
    HALF_TOLERANCE,
    ROWS,
    agreeing_trace,
    by_engine,
    distance_of_engine,
    refuse_distant,
    trace_of,
    where_others_matter,
    where_spoiled,
)
from sfumato.objective import Batch, Objective

_MIDDLE = 1  # of them: it has rows before it and after it
_TRIED = 32  # rows among which finite ones are looked for
_LOOKS = 3  # at the engine in bfloat16
_LONGEST = 1e15  # of a gradient: near 1e19 its square is infinite, and the engine leaves its row out


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
        self._begun: set[Any] = set()  # kinds of batches for which made-up rows were looked at
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
            found = _look(objective, params, batch)
            if found is None and known is not None:
                return known
            if found is None:
                _look_at_made_up(objective, params, batch)
                found = replace(trace_of(objective, params, batch, minor=False), alone=True)
            elif _shares_chance(objective, params, batch):
                found = replace(found, alone=True)
        self._traces[signature] = found, alike_in(batch)
        return found

    def check(self, params: Mapping[str, Tensor], batch: Batch) -> None:
        """Find out, before a question is charged; and look again at the 4th, 16th, 64th, ... of them.

        Made-up rows come first: what they show would be shown whatever rows there are, and if there are none, as in a
        batch without rows. A loss may have come to mix rows since, by a term that is switched on after a while, say.
        Then made-up rows are looked at only: no person's row may decide whether a training goes on.
        """
        objective = self._objective()
        assert objective is not None
        signature, empty = self._signature(objective, params, batch), rows_of(batch) == 0
        first = signature not in self._begun
        with _set_apart(params):
            if first and empty:
                _look_at_made_up(objective, params, batch)
            elif first:
                _glance_at_made_up(objective.exactly(), params, batch)
        self._begun.add(signature)
        if not empty:
            self.trace(params, batch)
        self._questions += 1
        power_of_4 = self._questions.bit_count() == 1 and self._questions.bit_length() % 2 == 1
        if self._questions > 1 and power_of_4:
            with _set_apart(params):
                _look_at_made_up(objective, params, batch)
                known, alike = self._traces.get(signature, (None, frozenset()))
                if known is not None and not known.alone and not empty and _shares_chance(objective, params, batch):
                    self._traces[signature] = replace(known, alone=True), alike

    def once(self, function: Any, rows: Batch, check: Callable[[Any, Batch], None]) -> None:
        """check(function, rows), every time; but a frozen dataclass, which cannot change, once for so many rows."""
        kinds = tuple((t.dtype, t.shape) for t in tree_flatten(rows)[0] if isinstance(t, Tensor))
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


@contextlib.contextmanager
def _set_apart(params: Mapping[str, Tensor]) -> Iterator[None]:
    devices = {p.device for p in params.values() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), exact_products(Performance(), recurring=False):
        yield


def _look(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Trace | None:
    """What rows show; None if they show nothing, since they are not finite, or hardly, where the parameters are now.

    NaN is another value than any: a sound model would be refused for one row that overflows. Whether there is one is
    asked after a refusal only, since it is dear.
    """
    try:
        return _investigate(objective, params, batch)
    except UnsupportedModel:
        if _says_something(objective, params, batch):
            raise
    usual, unusual = _parted(objective, params, batch)
    if usual is None:
        return None
    try:
        found = _investigate(objective, params, usual)
    except UnsupportedModel:
        if _says_something(objective, params, usual):
            raise
        return None
    # Those that were left out must not act on the others, which may be what was seen at first.
    if unusual is not None and (worst := where_others_matter(objective, params, usual, unusual, found)) is not None:
        raise UnsupportedModel(mixing_message(objective, worst))
    return found


def _shares_chance(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> bool:
    return shares_chance(partial(objective.losses, params), probe_rows(batch, ROWS, 0))


def _says_something(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> bool:
    """Whether the probed rows are finite."""
    rows = joined(probe_rows(batch, ROWS, 0), probe_rows(batch, ROWS, 1))
    found = attempt(objective.exactly(), params, rows, list(range(2 * ROWS)))
    return bool(found) and all(_is_usual([row]) for row in found)


def _is_usual(found: list[Row]) -> bool:
    return is_finite(found) and all(float(t.double().norm()) < _LONGEST for t in found[0][1].values())


def _parted(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> tuple[Batch | None, Batch | None]:
    """Of some rows those that are finite by themselves, however they are jittered, and the others."""

    def is_usual(row: int) -> bool:
        copies = jittered(taken(batch, torch.full((2 * ROWS,), row)), 0)
        return _is_usual(attempt(objective.exactly(), params, copies, [0]))

    found = {row: is_usual(row) for row in spread_over(batch)[:_TRIED].tolist()}
    parts = ([row for row, usual in found.items() if usual == wanted] for wanted in (True, False))
    usual, unusual = (taken(batch, torch.tensor(rows)) if rows else None for rows in parts)
    return usual, unusual


def _made_up(objective: Objective, params: Mapping[str, Tensor], like: Batch) -> tuple[Batch, Row, Row] | None:
    """Rows that are nobody's, and one of them among some and among others; None if the model is not for any.

    That a model has an error for them, or an infinite loss, says nothing of it: they need never have been there.
    """
    tried = TriedOnCpu(objective, params)
    for rows in made_up_rows(like, 2 * ROWS - 1):
        if tried.fails(rows):
            continue
        found: list[Row] = []
        with contextlib.suppress(SfumatoError):
            for among in _halves(rows):
                found += attempt(objective, params, among, [_MIDDLE])
        if len(found) == 2 and all(is_finite([row]) for row in found):
            return rows, found[0], found[1]
    return None


def _halves(rows: Batch) -> tuple[Batch, Batch]:
    """The first rows, and one of them among the others."""
    others = torch.arange(ROWS, 2 * ROWS - 1)
    return taken(rows, torch.arange(ROWS)), taken(rows, torch.cat([others[:1], torch.tensor([_MIDDLE]), others[1:]]))


def _glance_at_made_up(objective: Objective, params: Mapping[str, Tensor], like: Batch) -> None:
    """Raise if a made-up row changes when other made-up rows do. Nothing else that happens to them is a finding."""
    made_up = _made_up(objective, params, like)
    if made_up is None:
        return
    more, before, after = made_up
    refuse_changed(objective, before, after, same_of(params))
    rows, where = _halves(more)[0], None
    with contextlib.suppress(Exception), WithoutChance():
        found, run, (distance, _) = agreeing_trace(objective, params, more, rows, {_MIDDLE: before[1]})
        if distance <= tolerance_of(params):
            where = where_spoiled(objective, params, rows, more, (found, run), (_MIDDLE,))
    if where is not None:
        raise UnsupportedModel(mixing_message(objective, where))


def _look_at_made_up(objective: Objective, params: Mapping[str, Tensor], like: Batch) -> None:
    """Raise if the model is refused for made-up rows, and in float64, too, or where it wants float32.

    These rows are more alike than others: where rounding decides of one, it may decide of all of them.
    """
    _check_precision(params)
    exactly = objective.exactly()
    try:
        _investigate_made_up(exactly, params, like)
    except SfumatoError:
        if _is_refused_in_float64(exactly, params, like):
            raise


def _is_refused_in_float64(objective: Objective, params: Mapping[str, Tensor], like: Batch) -> bool:
    """Also if it has an error there."""
    with contextlib.suppress(Exception), in_float64(objective, params) as (wide, lent):
        return not _investigate_made_up(wide, lent, doubled(like))
    return True


def _investigate_made_up(objective: Objective, params: Mapping[str, Tensor], like: Batch) -> bool:
    """Whether made-up rows say something of the model; an error if it is refused for what they say."""
    made_up = _made_up(objective, params, like)
    try:
        if made_up is not None:
            return _look(objective, params, made_up[0]) is not None
        *_, zeros = made_up_rows(like, 2 * ROWS - 1)
        by_autograd(objective, params, zeros, [_MIDDLE])  # a loss of another shape, say, is refused for any rows
    except SfumatoError:
        raise
    except Exception:
        return False
    return False


def _check_precision(params: Mapping[str, Tensor]) -> None:
    for name, p in params.items():
        if p.dtype not in (torch.float32, torch.float64):
            # In bfloat16 a sum of a thousand contributions is a multiple of 4 C: one more moves it by that, or not.
            raise UnsupportedModel(
                f"parameter {name!r} is {p.dtype}, in which a sum of bounded contributions is not itself bounded: keep "
                "parameters in float32."
            )


def _investigate(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> Trace:
    _check_precision(params)
    if objective.autocast is not None:
        # Examples are looked for in each other's gradients in full precision, where rounding hides nothing.
        found = _investigate(objective.exactly(), params, batch)
        # A flipped ReLU is much of a narrow network's gradient. What is wrong is wrong for other rows, too.
        for seed in range(_LOOKS):
            rows = probe_rows(batch, ROWS, seed)
            _, gradients = by_autograd(objective, params, rows, list(range(ROWS)))
            _, addends = by_engine(objective, params, rows, found)
            distance, worst = distance_of_engine(objective, params, addends, dict(enumerate(gradients)))
            if distance <= HALF_TOLERANCE:
                return found
        refuse_distant(distance, worst, HALF_TOLERANCE)
        return found
    tolerance = tolerance_of(params)
    rows, others = probe_rows(batch, ROWS, 0), probe_rows(batch, ROWS, 1)
    losses, gradients = by_autograd(objective, params, rows, list(range(ROWS)))
    for keep in (0, ROWS - 1):
        changed = by_autograd(objective, params, mixed(rows, others, keep), [keep])
        compare(objective, keep, (losses, gradients), changed, same_of(params))
    with WithoutChance() as chance:
        more = by_autograd(objective, params, joined(rows, others), [0])
        few = by_autograd(objective, params, rows, [0]) if chance.met else (losses, gradients)
    ends = tuple((losses[0], found[0]) for losses, found in (few, more))
    if not gap_of(*ends)[0] <= tolerance:
        with WithoutChance():
            again = by_autograd(objective, params, rows, [0], seed=1)
        if torch.equal(few[0], again[0]):  # else there is chance that torch does not draw, and nothing can be said
            refuse_resized(objective, params, ends, ((rows, 0), (joined(rows, others), 0)), tolerance)
    _refuse_if_integers_matter(objective, params, rows, batch, tolerance)
    found, run, apart = agreeing_trace(objective, params, batch, rows, dict(enumerate(gradients)))
    refuse_distant(*apart, tolerance)
    where = where_spoiled(objective, params, rows, joined(rows, others), (found, run), (0, ROWS - 1))
    if where is not None:
        raise UnsupportedModel(mixing_message(objective, where))
    return found


def _refuse_if_integers_matter(
    objective: Objective, params: Mapping[str, Tensor], rows: Batch, batch: Batch, tolerance: float
) -> None:
    """Raise if a row is worth something else where others are longer, shorter, or in other classes.

    The rows that were chosen may all have one length, and integers cannot be jittered: so rows are compared with
    themselves among the batch's extremes, and a row that is cut short among others that are and that are not.
    """
    extremes, pairs = _extremes(objective, params, batch)
    if not all(map(is_finite, pairs)) and (rest := _parted(objective, params, batch)[0]) is not None:
        extremes, pairs = _extremes(objective, params, rest)  # behind one that is not finite there may be others
    usable = [i for i, pair in enumerate(pairs) if is_finite(pair)]  # an empty row may be worth 0 / 0
    among = (
        attempt(objective, params, taken(extremes, torch.tensor(usable)), list(range(len(usable)))) if usable else []
    )
    for place, row in enumerate(among):
        i = usable[place]
        places = (taken(extremes, torch.tensor([i, i])), 0), (taken(extremes, torch.tensor(usable)), place)
        refuse_resized(objective, params, (pairs[i][0], row), places, tolerance)
    last = ROWS - 1
    for length in (1, 2) if any(t.shape[1] > 1 for t in integers_of(batch)) else ():
        short = cut_short(rows, batch, length)
        alike, unlike = (attempt(objective, params, b, [last]) for b in (short, mixed(short, rows, last)))
        if unlike and is_finite(alike):
            refuse_changed(objective, alike[0], unlike[0], tolerance)
            break  # else a single token has no loss


def _extremes(objective: Objective, params: Mapping[str, Tensor], batch: Batch) -> tuple[Batch, list[list[Row]]]:
    """Rows that are far apart, and each of them among itself."""
    rows = jittered(taken(batch, extremes_of(batch)), 0)
    twice = [taken(rows, torch.tensor([i, i])) for i in range(rows_of(rows))]
    return rows, [attempt(objective, params, pair, [0]) for pair in twice]
