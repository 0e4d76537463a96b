"""One micro-batch: forward, backward, per-unit contributions, norms and clip factors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato import kernels
from sfumato.errors import InvalidArgument, UnsupportedModel
from sfumato.gradients.clip import Clip, fading, largest_norm
from sfumato.gradients.contributions import HALF, SMALL, Contribution, Dense, Shift, combined
from sfumato.gradients.modes import TapMode, Trace, module_of
from sfumato.gradients.rows import Bundle, Bundled, Order, Rows
from sfumato.objective import Batch, Objective

Augment = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Knobs that change time and memory, and nothing else (`tests/gradients/test_knobs.py`).

    `micro_batch`: units per pass, and rows of a row map at most, None to choose; on a GPU from the memory that is free,
    and 1 computes everybody alone. `ghost`: force or forbid norms from factors. `only_fallback`: use vmap for every
    parameter, the slow twin of the rules. `kernels`: use Triton's where they can run; without, PyTorch alone does the
    contractions. `cuda_graph`: record micro-batches and replay them, None where Python is seen to hold the GPU up.
    `instantiated_bytes` and `activation_bytes`: memory for per-unit gradients, and for what a pass keeps, on a CPU.
    `load_rows`: rows of a dataset loaded at a time, while those before are computed with.
    """

    micro_batch: int | None = None
    ghost: bool | None = None
    only_fallback: bool = False
    kernels: bool = True
    cuda_graph: bool | None = None
    instantiated_bytes: int = 96 << 20
    activation_bytes: int = 32 << 20
    load_rows: int = 256

    def __post_init__(self) -> None:
        whole = isinstance(self.micro_batch, int) and self.micro_batch >= 1
        if self.micro_batch is not None and not whole:
            raise InvalidArgument(f"micro_batch={self.micro_batch} must be a whole number of at least 1, or None.")


def rows_of(batch: Batch) -> int:
    """The number of rows of a batch, which all its tensors must share."""
    sizes = {len(t) if t.ndim else -1 for t in tree_flatten(batch)[0] if isinstance(t, Tensor)}
    if len(sizes) != 1 or -1 in sizes:
        raise InvalidArgument(
            "The batch has tensors with different numbers of rows: every tensor of it needs the examples in its first "
            "dimension."
        )
    return sizes.pop()


def check_losses(losses: Tensor, rows: int) -> None:
    """One value per example. What shape it has is not said: it may be what the rows hold."""
    if losses.shape != (rows,):
        raise InvalidArgument(
            f"loss returned a tensor of {losses.ndim} dimension(s) that is not one value per example: use "
            "reduction='none', and reduce what belongs to one example."
        )


@dataclass
class Addends:
    """Per-unit contributions of one micro-batch with their clip factors: all that is left is to sum."""

    contributions: dict[str, Contribution]
    norms: Tensor
    factors: Tensor

    def sums(self, at_once: int) -> Iterator[tuple[str, Tensor]]:
        """The weighted sums, parameter by parameter; each contribution is let go once it is summed."""
        for name in list(self.contributions):
            yield name, self.contributions.pop(name).weighted_sum(self.factors, at_once)


_ONE_AT_A_TIME = threading.RLock()
_backends: Any = torch.backends
_PRECISIONS = (
    _backends.cuda.matmul,
    _backends.cudnn.conv,
    _backends.cudnn.rnn,
    _backends.mkldnn.matmul,
    _backends.mkldnn.conv,
    _backends.mkldnn.rnn,
)


@contextmanager
def exact_products(performance: Performance, *, recurring: bool) -> Iterator[None]:
    """Matrix products in full float32: under TF32 the bounds on rounding would not hold. Kernels as they are wanted.

    A caller's autocast ends here (an objective has its own). Where shapes recur, as those of whole micro-batches on a
    GPU do, cuDNN may try its algorithms out. All of this is set for the process, so one thread at a time computes.
    """
    off = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    with _ONE_AT_A_TIME, off[0], off[1], _set_precisely(performance, recurring):
        yield


@contextmanager
def _set_precisely(performance: Performance, recurring: bool) -> Iterator[None]:
    before = [place.fp32_precision for place in _PRECISIONS]
    benchmark = torch.backends.cudnn.benchmark
    for place in _PRECISIONS:
        place.fp32_precision = "ieee"
    torch.backends.cudnn.benchmark = recurring
    try:
        with kernels.contractions(performance.kernels):
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        for place, precision in zip(_PRECISIONS, before, strict=True):
            place.fp32_precision = precision


def per_unit(
    objective: Objective,
    params: Mapping[str, Tensor],
    batch: Batch,
    found: Trace,
    *,
    count: int,
    clip: Clip,
    origin: Mapping[str, Tensor] | None = None,
    scale: Mapping[str, Tensor] | None = None,
    present: Tensor | None = None,
    views: int = 1,
    augment: Augment | None = None,
    offsets: Sequence[Mapping[str, Tensor]] | None = None,
    weights: Tensor | None = None,
    performance: Performance,
) -> Addends:
    """One micro-batch of `count` units: forward, backward, norms, factors. Units that are not `present` add nothing.

    `origin` and `scale` are the clip's, as the inputs of a recording: its own may be an earlier step's.
    """
    passes = 1 if offsets is None else views
    shifts = {
        name: Shift(None if origin is None else origin[name], None if scale is None else scale[name]) for name in params
    }
    collected = _Collected(params, shifts, found, performance, passes=passes, half=objective.autocast is not None)
    if offsets is None:
        batch = tree_map(lambda t: t.repeat_interleave(views, 0) if isinstance(t, Tensor) else t, batch)
        weights = None if weights is None else weights.repeat_interleave(views, 0)
        _pass(objective, params, _augmented(augment, batch), found, collected, count, weights, 1 / views, performance)
    else:
        for offset in offsets:
            moved = {name: p + offset[name] for name, p in params.items()}
            _pass(
                objective, moved, _augmented(augment, batch), found, collected, count, weights, 1 / views, performance
            )
    contributions, squared = collected.finish(count)
    norms = squared.sqrt()
    working = min((p.dtype for p in params.values()), key=lambda d: torch.finfo(d).bits)
    finite = norms <= largest_norm(working)
    # Factors are rounded to the gradients' precision: a slack of 8 units in the last place absorbs that. They are so
    # from here on, since the origin is taken off as often as they add up to.
    slack = 1 + 8 * torch.finfo(working).eps
    factors = torch.where(finite, clip.factors(norms * slack) * fading(norms, working), 0.0)
    factors = factors.to(working).double()
    factors = torch.where(torch.isfinite(factors), factors, 0.0)
    # Next to zero there are few digits to round to.
    factors = torch.where(factors < torch.finfo(working).tiny, 0.0, factors)
    if present is not None:
        factors = torch.where(present, factors, 0.0)
    readers = [c for c in contributions.values() if not c.skips_zeros]
    if readers and (norms.is_cuda or not bool(finite.all())):  # looking at the norms would make a GPU wait
        for contribution in readers:
            contribution.drop(finite)
    return Addends(contributions, norms, factors)


def _augmented(augment: Augment | None, batch: Batch) -> Batch:
    if augment is None:
        return batch
    rows = rows_of(batch)
    batch = augment(batch)
    if rows_of(batch) != rows:
        raise InvalidArgument("augment returned another number of rows than it was given: it must map row to row.")
    return batch


def _pass(
    objective: Objective,
    params: Mapping[str, Tensor],
    batch: Batch,
    found: Trace,
    collected: _Collected,
    units: int,
    weights: Tensor | None,
    weight: float,
    performance: Performance,
) -> None:
    """One forward and backward pass; every use of a parameter reports to `collected`."""
    rows = rows_of(batch)
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    originals = dict(objective.module.named_parameters())
    mode = TapMode(
        leaves,
        originals,
        found,
        rows=rows,
        units=units,
        add=collected.add,
        only_fallback=performance.only_fallback,
        several_passes=collected.passes > 1,
    )
    lent = [*params.values(), *objective.frozen()]
    before = [p._version for p in lent]
    with torch.enable_grad(), mode:
        losses = objective.losses(leaves, batch)
    if losses.shape != (rows,):  # the probe saw another shape; no numbers here, the sampled batch is private
        raise UnsupportedModel("loss does not always return one value per example: make its shape that of the batch.")
    scale = torch.full((rows,), weight, dtype=losses.dtype, device=losses.device)
    reached = [False]
    if losses.requires_grad:
        scale = scale if weights is None else scale * weights.to(scale)
        reached = mode.tape.differentiate(losses, scale, list(leaves.values()))
    if unseen := [name for name, was in zip(leaves, reached, strict=False) if was]:
        raise UnsupportedModel(
            f"Module {module_of(unseen[0])!r} uses {unseen[0]!r} in a way that is not seen: make its control flow "
            "independent of the data."
        )
    if before != [p._version for p in lent]:  # the probe, which lends copies, did not see that
        raise UnsupportedModel(
            "The model writes to its parameters for some rows, so that they now hold traces of private data: discard "
            "them, and switch that off."
        )
    mode.finish()


class _Collected:
    """Contributions by parameter. A parameter with one use is finished at once, while its gradients are in cache."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        shifts: Mapping[str, Shift],
        found: Trace,
        performance: Performance,
        *,
        passes: int,
        half: bool,
    ) -> None:
        self._params, self._shifts, self._performance, self._half = params, shifts, performance, half
        self.passes = passes
        self._once = {name for name, uses in found.uses.items() if uses * passes == 1}
        self._parts: dict[str, list[Contribution]] = {name: [] for name in params}
        self._done: dict[str, Contribution] = {}
        self._small: dict[str, Tensor] = {}
        self._squared: list[Tensor] = []

    def add(self, name: str, contribution: Contribution) -> None:
        self._check_precision(name, contribution)
        parts = self._parts[name]
        parts.append(contribution)
        if name in self._once:
            self._finish(name, parts)
        elif len(parts) > 1 and all(isinstance(p, Dense) for p in parts):
            parts[:] = [Dense(parts[0].dense() + parts[1].dense())]  # do not hold one per use

    def _check_precision(self, name: str, contribution: Contribution) -> None:
        """Factors may be 16-bit where the objective says so; they are added up in float32. Nothing else may be."""
        dtype = contribution.made_of if isinstance(contribution, Rows) else contribution.dtype
        declared = self._half and dtype in HALF and not isinstance(contribution, Dense)
        if dtype != self._params[name].dtype and not declared:
            raise UnsupportedModel(
                f"Module {module_of(name)!r} computes in {dtype}, which is not declared: take torch.autocast out of "
                "the model and the loss, and give Objective(..., autocast=torch.bfloat16)."
            )

    def _finish(self, name: str, parts: list[Contribution]) -> None:
        if name in self._done:  # norms have been taken: what comes later would be added without a bound
            raise UnsupportedModel(
                f"Module {module_of(name)!r} uses {name!r} more often than when it was probed: make its control flow "
                "independent of the data, and of how often it was called."
            )
        shift = self._shifts[name]
        whole = combined(parts, shift, ghost=self._performance.ghost)
        parts.clear()  # else its factors would live as long as this
        self._done[name] = whole
        if isinstance(whole, Dense) and kernels.contracts(whole.gradients):
            gradients = whole.gradients
            if gradients[0].numel() <= SMALL:
                self._small[name] = gradients  # a GPU is asked once for all of these
                return
            order = Order(tuple(gradients.shape[1:]), channels_last=False)
            # Rows take what they get for their own, but a kernel, which has these, leaves them as they are.
            whole = self._done[name] = Rows(gradients.reshape(*gradients.shape[:2], -1).contiguous(), order)
        self._squared.append(whole.prepare(shift))

    def finish(self, units: int) -> tuple[dict[str, Contribution], Tensor]:
        for name, p in self._params.items():
            if name not in self._done:
                # A parameter that no loss depends on has gradient zero, which an origin shifts like any other.
                nothing = Dense(torch.zeros(units, *p.shape, dtype=p.dtype, device=p.device))
                self._finish(name, self._parts[name] or [nothing])
        if self._small:
            bundle = Bundle(list(self._small.values()), [self._shifts[name] for name in self._small])
            self._squared.append(bundle.prepare())
            for place, (name, gradients) in enumerate(self._small.items()):
                self._done[name] = Bundled(bundle, place, gradients)
            self._small.clear()
        return self._done, torch.stack(self._squared).sum(0)
