"""Seeing every use of a parameter: no hooks, no attributes, no patched modules.

A `TorchFunctionMode` sees every torch function that the model's Python code calls, with the very tensors it is given,
so functional uses (`F.linear(x, embedding.weight)`) and re-used parameters are seen like any other. Three things can
happen to a parameter:

- *derived*: a function of parameters and constants alone (a transpose, a standardised weight, a position embedding).
  Ordinary autograd keeps the way back; the result is tracked like a parameter.
- *use*: a function of a parameter and of data. A rule computes it and taps its backward; without a rule, `vmap` does.
- anything else does not concern a parameter and runs untouched.

Which is which, and which dimension counts the examples, is found out once, by `trace`, from two runs with different
numbers of rows; nothing is guessed from names or positions.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sfumato.errors import UnsupportedModel
from sfumato.gradients.contributions import Contribution, Dense
from sfumato.gradients.factored import Outer
from sfumato.gradients.flow import Flow, tensors_in
from sfumato.gradients.rules import decompositions, fallback, native
from sfumato.gradients.rules.call import Call, Key, Site, function_name
from sfumato.gradients.tape import Layout, Tape

_TRANSPOSES = {torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]


@dataclass
class Tracked:
    """A tensor that depends on parameters alone."""

    tensor: Tensor
    label: str
    leaves: frozenset[str]
    transpose_of: Tracked | None = None


class ParameterMode(TorchFunctionMode):
    """Follows parameters through the model's Python code."""

    def __init__(self, leaves: Mapping[str, Tensor], originals: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.leaves = leaves
        self.tracked = {id(t): Tracked(t, name, frozenset([name])) for name, t in leaves.items()}
        # A module may keep its own reference to a parameter (nn.LSTM does): a stale one stands for the lent one.
        self._stale = {id(originals[name]): t for name, t in leaves.items() if name in originals}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stale and any(id(t) in self._stale for t in tensors_in((args, kwargs))):
            args, kwargs = tree_map(lambda v: self._stale.get(id(v), v), (args, kwargs))
        used = [self.tracked[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self.tracked]
        if not used:
            return self.other(func, args, kwargs)
        decomposition = decompositions.of(func, args)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        return self.seen(func, args, kwargs, used)

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    @abstractmethod
    def seen(self, func: Any, args: Any, kwargs: Any, used: list[Tracked]) -> Any:
        """A function that touches tracked tensors."""

    def derive(self, func: Any, args: Any, kwargs: Any, used: list[Tracked]) -> Any:
        """Run a function of parameters alone under ordinary autograd and track what comes out.

        What the model computes without gradient, as spectral norm does, is a constant.
        """
        out = func(*args, **kwargs)
        label = derived_label(func, used)
        leaves = frozenset().union(*(t.leaves for t in used))
        for tensor in tensors_in((out,)):
            if tensor.requires_grad and id(tensor) not in self.tracked:
                flip = used[0] if used[0].tensor.ndim == 2 and func in _TRANSPOSES else None
                self.tracked[id(tensor)] = Tracked(tensor, label, leaves, flip)
        return out


def derived_label(func: Any, used: list[Tracked]) -> str:
    label = f"{function_name(func)}({', '.join(t.label for t in used)})"
    return label if len(label) < 400 else f"{label[:200]}...#{hash(label)}"


# ------------------------------------------------------------------------------------------------ finding out


@dataclass
class _Seen:
    key: Key
    shapes: list[tuple[int, ...] | None]
    outputs: list[tuple[int, ...] | None]
    used: list[frozenset[str]]
    """The parameters in each of its arguments that has any."""
    moved: bool
    """Whether it was given something that lies where it does because of what rows hold."""

    @property
    def leaves(self) -> frozenset[str]:
        return frozenset().union(*self.used)


class TraceMode(ParameterMode):
    """Records every function that touches a parameter, and follows data by taint from the batch.

    `uses` are functions of parameters alone whose result nevertheless grows with the batch, known from an earlier run:
    a class token expanded over the batch, or a table read at constant positions repeated for every row.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        originals: Mapping[str, Tensor],
        batch: Any,
        uses: frozenset[Key],
        earlier: Flow | None,
    ) -> None:
        super().__init__(leaves, originals)
        self.flow = Flow(batch, earlier)
        self.used: list[_Seen] = []
        self.derived: list[_Seen] = []
        self._uses = uses
        self._alive: list[Tensor] = list(tensors_in((batch,)))  # ids stay unique while tensors live
        self._data = {id(t) for t in self._alive}

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if any(id(t) in self._data for t in tensors_in((args, kwargs))):
            self._taint(out)
        self.flow.note(func, args, kwargs, out)
        return out

    def _taint(self, out: Any) -> None:
        for tensor in tensors_in((out,)):
            self._data.add(id(tensor))
            self._alive.append(tensor)

    def seen(self, func: Any, args: Any, kwargs: Any, used: list[Tracked]) -> Any:
        key = Key.of(func, args, kwargs, {i: t.label for i, t in self.tracked.items()})
        flat, spec = tree_flatten((args, kwargs))
        is_use = key in self._uses or any(id(t) in self._data for t in tensors_in(flat))
        if is_use:
            plain = [v.detach() if isinstance(v, Tensor) and id(v) in self.tracked else v for v in flat]
            plain_args, plain_kwargs = tree_unflatten(plain, spec)
            out = fallback.IN_PLACE.get(func, func)(*plain_args, **plain_kwargs)
            self._taint(out)
        else:
            out = self.derive(func, args, kwargs, used)
        shapes, outputs = _shapes(flat), _shapes(tree_flatten(out)[0])
        call = _Seen(key, shapes, outputs, [t.leaves for t in used], self.flow.moved((args, kwargs)))
        self.flow.note(func, args, kwargs, out)
        (self.used if is_use else self.derived).append(call)
        return out


def _shapes(values: list[Any]) -> list[tuple[int, ...] | None]:
    return [tuple(v.shape) if isinstance(v, Tensor) else None for v in values]


@dataclass(frozen=True)
class Trace:
    """What a model does with its parameters: the sites of use, how often each parameter is used, and how large.

    `positions` counts, for parameters that are only used as factors of outer products, the positions per row (time
    steps, pixels) summed over uses; other parameters are absent from it and always instantiated.
    """

    sites: Mapping[Key, Site]
    uses: Mapping[str, int]
    positions: Mapping[str, int]
    outputs: int
    """Numbers per row that all uses put out together: about half of what a pass holds."""
    merged: bool
    alone: bool = False
    """Whether every unit is computed by itself, since no rows could tell whether it may be computed among others."""


FEW, MANY = 5, 7  # rows of the two runs


def trace(run: Callable[[int, frozenset[Key], Flow | None], TraceMode], *, minor: bool = False) -> Trace:
    """Compare two runs with different numbers of rows; `minor` decides for rows merged with another dimension."""
    few, many = FEW, MANY
    known: frozenset[Key] = frozenset()
    while True:
        modes = [run(few, known, None)]
        modes.append(run(many, known, modes[0].flow))
        for lists in ([m.used for m in modes], [m.derived for m in modes]):
            if [c.key for c in lists[0]] != [c.key for c in lists[1]]:
                raise UnsupportedModel(
                    "The model uses its parameters in an order that depends on the number of examples: make its "
                    "control flow independent of the batch."
                )
        pairs = zip(modes[0].derived, modes[1].derived, strict=True)
        grown = frozenset(a.key for a, b in pairs if a.outputs != b.outputs) - known
        if not grown:
            break
        known |= grown
    first, second = (mode.used for mode in modes)
    sites: dict[Key, Site] = {}
    uses: dict[str, int] = {}
    for a, b in zip(first, second, strict=True):
        if b.moved:
            raise UnsupportedModel(
                f"{a.key.name} in {_modules(a.leaves)} is given rows that were chosen or put in order by what they "
                "hold: leave every row in its place, and weigh by a mask what does not count."
            )
        args = dict(_layouts(a.shapes, b.shapes, few, many, a, minor))
        outputs = dict(_layouts(a.outputs, b.outputs, few, many, a, minor))
        site = Site(args, outputs)
        same = sites.get(a.key, site)
        if same != site:
            raise UnsupportedModel(
                f"{a.key.name} uses {_modules(a.leaves)} with the examples in different dimensions: keep the batch "
                "dimension first."
            )
        sites[a.key] = same.joined(site)
        for leaf in itertools.chain.from_iterable(a.used):  # one argument, one contribution
            uses[leaf] = uses.get(leaf, 0) + 1
    merged = any(
        size not in (few, None)
        for call in first
        for shapes, layouts in ((call.shapes, sites[call.key].arguments), (call.outputs, sites[call.key].outputs))
        for i, layout in layouts.items()
        for size in [(shapes[i] or ())[layout.dim]]
    )
    per_row = sum(math.prod(shape) for call in first for shape in call.outputs if shape) // few
    return Trace(sites, uses, _positions(first, few), per_row, merged)


def _positions(calls: list[_Seen], rows: int) -> dict[str, int]:
    """Positions per row of every parameter that only appears as the matrix of a linear map, convolution or table."""
    positions: dict[str, int] = {}
    other: set[str] = set()
    for call in calls:
        places = [i for i, argument in enumerate(call.key.arguments) if isinstance(argument, str)]
        for place in places:
            label, shape, output = str(call.key.arguments[place]), call.shapes[place], call.outputs[0]
            if label in call.leaves and shape and output and len(shape) >= 2 and call.key.func in native.FACTORED:
                width = native.FACTORED[call.key.func](shape)
                positions[label] = positions.get(label, 0) + math.prod(output) // (rows * width)
            else:
                other |= call.leaves if label not in call.leaves else {label}
    return {name: count for name, count in positions.items() if name not in other}


def _layouts(
    first: list[tuple[int, ...] | None],
    second: list[tuple[int, ...] | None],
    few: int,
    many: int,
    call: _Seen,
    minor: bool,
) -> Iterator[tuple[int, Layout]]:
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        if a is None or b is None or a == b:
            continue
        moving = [d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]
        if len(a) != len(b) or len(moving) != 1 or a[moving[0]] * many != b[moving[0]] * few:
            raise UnsupportedModel(
                f"{call.key.name} in {_modules(call.leaves)} mixes examples: its shapes grow with the batch in a way "
                "that no single example explains; use a layer that treats examples one by one."
            )
        m = a[moving[0]] // few
        yield position, Layout(moving[0], minor=minor and m != 1, known=frozenset([m]))


def _modules(leaves: frozenset[str]) -> str:
    return " and ".join(sorted({repr(module_of(leaf)) for leaf in leaves}))


def module_of(parameter: str) -> str:
    """The module that holds a parameter, by its name: 'encoder.0.weight' -> 'encoder.0'."""
    return parameter.rpartition(".")[0] or parameter


# ------------------------------------------------------------------------------------------------ running


class TapMode(ParameterMode):
    """Runs every use through its rule, and collects per-unit gradients by parameter name."""

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        originals: Mapping[str, Tensor],
        found: Trace,
        *,
        rows: int,
        units: int,
        add: Callable[[str, Contribution], None],
        only_fallback: bool = False,
        several_passes: bool = False,
    ) -> None:
        super().__init__(leaves, originals)
        self._names = {id(t): name for name, t in leaves.items()}
        self._found = found
        self._add_leaf = add
        self._only_fallback = only_fallback
        self._derived: dict[int, list[Contribution]] = {}
        self.tape = Tape(rows, units, self._collect, several_passes=several_passes)

    def _collect(self, parameter: Tensor, contribution: Contribution) -> None:
        tracked = self.tracked[id(parameter)]
        if id(parameter) in self._names:
            self._add_leaf(self._names[id(parameter)], contribution)
        elif tracked.transpose_of is not None and isinstance(contribution, Outer) and not contribution.one_hot:
            source = tracked.transpose_of.tensor
            self._collect(source, Outer(contribution.b, contribution.a, source.shape[0]))
        else:
            self._derived.setdefault(id(parameter), []).append(contribution)

    def seen(self, func: Any, args: Any, kwargs: Any, used: list[Tracked]) -> Any:
        key = Key.of(func, args, kwargs, {id(t.tensor): t.label for t in used})
        site = self._found.sites.get(key)
        if site is None:
            return self.derive(func, args, kwargs, used)
        call = Call(func, args, kwargs, site, self.tape, {id(t.tensor) for t in used})
        rule = native.TABLE.get(func) if not self._only_fallback or func in fallback.WITHOUT else None
        if rule is not None:
            out = rule(call)
            if out is not NotImplemented:
                return out
        try:
            return fallback.by_vmap(call)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            # Without torch's own text, which may quote sizes or values of private rows.
            leaves = frozenset().union(*(t.leaves for t in used))
            raise UnsupportedModel(
                f"{key.name} in {_modules(leaves)} has no rule for per-example gradients and cannot be vmapped: freeze "
                "its parameters or replace the module."
            ) from None

    def finish(self) -> None:
        """After the backward pass: carry contributions of derived tensors back to the parameters themselves."""
        self._carry_back()
        # The mode and its tape know each other; what they hold must not wait for the garbage collector.
        self.tape.close()
        self.tracked.clear()
        self._derived.clear()

    def _carry_back(self) -> None:
        for key, parts in self._derived.items():
            tracked = self.tracked[key]
            rows = parts[0].dense()
            for part in parts[1:]:
                rows = rows + part.dense()
            names = sorted(tracked.leaves)
            gradients = torch.autograd.grad(
                tracked.tensor,
                [self.leaves[name] for name in names],
                rows,
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    self._add_leaf(name, Dense(gradient))
