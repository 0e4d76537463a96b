"""Convolutions in one, two and three dimensions, any stride, padding, dilation and groups.

Per unit, G = sum over rows and positions of dy (x) patch. On a GPU a kernel instantiates that. Elsewhere there are
three exact ways, chosen per layer by cost: instantiate by one grouped convolution (units become groups), instantiate by
patches and a batched product, or keep x and dy, take the norm from Gram matrices of patches and dy, and form the
weighted sum by an ordinary weight gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.contributions import (
    HALF,
    PRODUCT_BLOCK,
    Contribution,
    Dense,
    Ghost,
    Shift,
    batched_product,
    factored_norms,
    gram,
    in_parts,
    rounding,
    shifted_sum,
    summed_in,
    underflow,
)
from sfumato.gradients.rows import Order, Rows
from sfumato.gradients.rules.call import Call, autocast
from sfumato.gradients.tape import Tape
from sfumato.nn.functional import widened


@dataclass(frozen=True)
class Geometry:
    """Everything about a convolution but its tensors."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool], groups: int | None = None) -> Any:
        none = [0] * len(self.kernel)
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.stride, self.padding, self.dilation, False, none, groups or self.groups, mask
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        none = [0] * len(self.kernel)
        x, weight = widened(x, weight, self.groups)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups)

    def patches(self, x: Tensor) -> Tensor:
        """(N, channels * kernel, positions): the receptive field of every output position."""
        if len(self.kernel) == 2:
            return F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        x = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)]) if any(self.padding) else x
        N, C = x.shape[:2]
        out = [
            (n - dil * (k - 1) - 1) // s + 1
            for n, k, s, dil in zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        ]
        steps, strides = x.stride(), x.stride()[2:]
        view = x.as_strided(
            (N, C, *self.kernel, *out),
            (
                *steps[:2],
                *(st * dil for st, dil in zip(strides, self.dilation, strict=True)),
                *(st * s for st, s in zip(strides, self.stride, strict=True)),
            ),
        )
        return view.reshape(N, C * math.prod(self.kernel), math.prod(out))

    def patches_last(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """(N, positions, kernel * channels), from and in channels-last memory."""
        x = x.movedim(1, -1)
        x = F.pad(x, [0, 0, *(p for p in reversed(self.padding) for _ in range(2))]) if any(self.padding) else x
        x = x.contiguous()
        N, C, d = len(x), x.shape[-1], len(self.kernel)
        steps = x.stride()[1 : 1 + d]
        view = x.as_strided(
            (N, *out, *self.kernel, C),
            (
                x.stride(0),
                *(step * s for step, s in zip(steps, self.stride, strict=True)),
                *(step * dil for step, dil in zip(steps, self.dilation, strict=True)),
                1,
            ),
        )
        return view.reshape(N, math.prod(out), math.prod(self.kernel) * C)


def ghost_pays(R: int, outputs: int, inputs: int) -> bool:
    """Late layers, with few positions and many channels; measured on WRN-16-4 and a small ConvNet."""
    return 3 * R * (outputs + inputs) <= 2 * outputs * inputs


class Convolution(Contribution):
    """Gradients of a convolution's weight, kept as its input and the gradient of its output.

    `earlier` are other uses of the same weight with the same shapes (passes at other parameters): they are added to
    each unit's gradient inside one contraction.
    """

    def __init__(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        geometry: Geometry,
        units: int,
        earlier: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.x, self.dy, self.weight, self.geometry, self.units = x, dy, weight, geometry, units
        self.earlier = earlier
        self._shift = Shift(None, None)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype if self.x.dtype == self.dy.dtype else torch.float16

    @property
    def fold(self) -> int:
        return len(self.x) // self.units

    @property
    def sizes(self) -> tuple[int, int, int]:
        """R, O, I of the equivalent outer products."""
        return self.fold * math.prod(self.dy.shape[2:]), self.dy.shape[1], math.prod(self.weight.shape[1:])

    @property
    def by_kernel(self) -> bool:
        g = self.geometry
        if len(g.kernel) != 2 or g.groups != 1 or not kernels.contracts(self.x, self.dy):
            return False
        from sfumato.kernels.convolution import fits

        shape: dict[str, Any] = {"kernel": g.kernel, "stride": g.stride, "padding": g.padding, "dilation": g.dilation}
        return fits([self.x], [self.dy], units=self.units, **shape)

    def has_ghost(self, shift: Shift) -> bool:
        # 16-bit factors are instantiated: a clip factor must not be rounded into them.
        # So is what a kernel instantiates: its rows are then added up in float64.
        simple = self.geometry.groups == 1 and not self.earlier and self.x.dtype not in HALF and not self.by_kernel
        return shift.scale is None and simple

    def ghost_pays(self) -> bool:
        return ghost_pays(*self.sizes)

    @staticmethod
    def joined(parts: Sequence[Convolution]) -> Contribution:
        first = parts[0]
        kind = (first.geometry, first.x.shape, first.x.dtype, first.dy.dtype)
        alike = all((p.geometry, p.x.shape, p.x.dtype, p.dy.dtype) == kind for p in parts)
        if not (alike and first.by_kernel):
            return Contribution.joined(parts)
        rest = [(p.x, p.dy) for p in parts[1:]]
        return Convolution(first.x, first.dy, first.weight, first.geometry, first.units, rest)

    def rows(self) -> Tensor:
        """(U, O, kernel * I): instantiated with channels last, as GPUs want it."""
        g = self.geometry
        if self.by_kernel:
            from sfumato.kernels import convolution as kernel

            parts = [(self.x, self.dy), *self.earlier]
            gradients = kernel.weight_gradients(
                [x for x, _ in parts],
                [dy for _, dy in parts],
                units=self.units,
                kernel=g.kernel,  # type: ignore[arg-type]
                stride=g.stride,  # type: ignore[arg-type]
                padding=g.padding,  # type: ignore[arg-type]
                dilation=g.dilation,  # type: ignore[arg-type]
            )
            return gradients.flatten(2)
        R, outputs, _ = self.sizes
        patches = g.patches_last(self.x, self.dy.shape[2:]).reshape(self.units, R, -1)
        dy = self.dy.movedim(1, -1).reshape(self.units, R, outputs)
        return batched_product(dy.transpose(1, 2), patches)

    @property
    def order(self) -> Order:
        return Order(tuple(self.weight.shape), channels_last=True)

    def in_rows(self) -> bool:
        """Whether `rows` is the way to instantiate."""
        return self.by_kernel or (self.x.is_cuda and self.geometry.groups == 1)

    def instantiated(self) -> Contribution:
        return Rows(self.rows(), self.order) if self.in_rows() else Dense(self.dense(), own=True)

    def dense(self) -> Tensor:
        """The fastest of three ways by size, as measured on a CPU: patches, unit by unit, or units as groups."""
        if self.in_rows():
            return self.order.from_rows(self.rows())
        R, outputs, inputs = self.sizes
        pointwise = math.prod(self.geometry.kernel) == 1
        large = outputs * inputs >= 100_000
        all_x, all_dy = (t.to(summed_in(t.dtype)) for t in (self.x, self.dy))
        if self.geometry.groups == 1 and (pointwise or inputs <= 32 or (outputs * inputs >= 200_000 and R < 128)):
            a, b = self._factors(all_x, all_dy)
            return torch.bmm(a, b.transpose(1, 2)).reshape(self.units, *self.weight.shape)
        if (large and R >= 128) or self.fold > 1:
            gradients = torch.empty(self.units, *self.weight.shape, dtype=all_x.dtype, device=self.x.device)
            weight = self.weight.to(all_x.dtype)
            for unit, (x, dy) in enumerate(
                zip(torch.split(all_x, self.fold), torch.split(all_dy, self.fold), strict=True)
            ):
                gradients[unit] = self.geometry.backward(dy, x, weight, [False, True, False])[1]
            return gradients
        x, dy = (t.reshape(1, -1, *t.shape[2:]) for t in (all_x, all_dy))
        shape = (self.units * outputs, *self.weight.shape[1:])
        weight = torch.empty(shape, dtype=x.dtype, device=x.device)  # only its shape is read
        groups = self.units * self.geometry.groups
        gradient: Tensor = self.geometry.backward(dy, x, weight, [False, True, False], groups)[1]
        return gradient.reshape(self.units, *self.weight.shape)

    def _factors(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dy and patches as (units, O, R) and (units, I, R)."""
        a, b = dy.flatten(2), self.geometry.patches(x)
        if self.fold > 1:
            a, b = (
                t.reshape(self.units, self.fold, *t.shape[1:]).transpose(1, 2).reshape(self.units, t.shape[1], -1)
                for t in (a, b)
            )
        return a, b

    def prepare(self, shift: Shift) -> Tensor:
        """Norms from the Gram matrices of dy and of patches."""
        self._shift = shift
        R, outputs, inputs = self.sizes
        if math.prod(self.x.shape[2:]) <= math.prod(self.dy.shape[2:]):
            patches = self._patch_gram(gram(self._vectors(self.x.flatten(2))))
        else:  # a stride: there are fewer patches than pixels
            patches = gram(self._vectors(self.geometry.patches(self.x)))
        longest, dtype = max(outputs, inputs), self.x.dtype
        error, least = rounding(dtype, longest, product=True), underflow(dtype, longest)
        ghost = Ghost(*factored_norms(gram(self._vectors(self.dy.flatten(2))), patches, error, least))
        ghost = ghost.as_summed((R + 8) * torch.finfo(dtype).eps / 2)
        if shift.origin is None:
            return ghost.squared
        inner = (self._forward_in_chunks(shift.origin) * self.dy).reshape(self.units, -1).double().sum(1)
        return ghost.around(shift.origin, inner, (R, outputs, inputs), error=self._inner_error)

    @property
    def _channels_at_once(self) -> int:
        return max(1, PRODUCT_BLOCK // math.prod(self.geometry.kernel))

    def _forward_in_chunks(self, weight: Tensor) -> Tensor:
        """In chunks of channels, so that no chain of additions outgrows the bound on its rounding."""
        chunks = (torch.split(t, self._channels_at_once, 1) for t in (self.x, weight))
        total: Tensor | None = None
        for x, w in zip(*chunks, strict=True):
            part = self.geometry.forward(x.contiguous(), w.contiguous())
            total = part if total is None else total.add_(part)
        assert total is not None  # a convolution has channels
        return total

    @property
    def _inner_error(self) -> float:
        chunks = math.ceil(self.x.shape[1] / self._channels_at_once)
        # One channel under a large kernel may be longer than a block.
        chain = min(self.sizes[2], self._channels_at_once * math.prod(self.geometry.kernel)) + 8
        return (chain + chunks + 2) * torch.finfo(self.x.dtype).eps / 2

    def _vectors(self, t: Tensor) -> Tensor:
        """(rows, K, positions) -> (units, R, K)."""
        t = t.transpose(1, 2)
        return t if self.fold == 1 else t.reshape(self.units, -1, t.shape[2])

    def _patch_gram(self, pixels: Tensor) -> Tensor:
        """Inner products of patches without making patches: those of pixels, shifted once per tap and added up."""
        d, g = len(self.geometry.kernel), self.geometry
        inside, outside = self.x.shape[2:], self.dy.shape[2:]
        pixels = pixels.reshape(self.units, self.fold, *inside, self.fold, *inside)
        pads = [p for p in reversed(g.padding) for _ in range(2)]
        pixels = F.pad(pixels, [*pads, 0, 0, *pads])
        total: Tensor | None = None
        for tap in itertools.product(*(range(k) for k in g.kernel)):
            window = tuple(
                slice(t * dil, t * dil + s * (n - 1) + 1, s)
                for t, dil, s, n in zip(tap, g.dilation, g.stride, outside, strict=True)
            )
            part = pixels[(slice(None), slice(None), *window, slice(None), *window)]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        assert total.ndim == 2 * d + 3
        return total.reshape(self.units, self.fold * math.prod(outside), -1)

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        total = in_parts(lambda part: self._sum_of(part, factors), self.units, at_once)
        return shifted_sum(total, factors, self._shift)

    def _sum_of(self, part: slice, factors: Tensor) -> Tensor:
        start, stop, _ = part.indices(self.units)
        rows = slice(start * self.fold, stop * self.fold)
        c = factors[part].to(self.dy.dtype).repeat_interleave(self.fold)
        dy = self.dy[rows] * c.reshape(-1, *[1] * (self.dy.ndim - 1))
        total: Tensor = self.geometry.backward(dy, self.x[rows], self.weight, [False, True, False])[1]
        return total

    def drop(self, keep: Tensor) -> None:
        mask = keep.repeat_interleave(self.fold).reshape(-1, *[1] * (self.x.ndim - 1))
        self.x, self.dy = self.x.masked_fill(~mask, 0.0), self.dy.masked_fill(~mask, 0.0)


Report = Callable[[Tensor, Tensor, Tensor | None], None]
"""What is told of a use: x, dy and, if asked for, y."""


class _Convolution(torch.autograd.Function):
    """A convolution that reports (x, dy, y) and returns only dx."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        report: Report,
        keep_output: bool,
    ) -> Tensor:
        y = geometry.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, y if keep_output else None)
        ctx.geometry, ctx.report = geometry, report
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, y = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[1]:
            dx = ctx.geometry.backward(dy, x, weight, [True, False, False])[0]
        ctx.report(x.detach(), dy, None if y is None else y.detach())
        return None, dx, None, None, None, None, None


def apply(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    report: Report,
    *,
    keep_output: bool = False,
) -> Tensor:
    """The convolution, tapped."""
    result: Tensor = _Convolution.apply(tape.tap, x, weight, bias, geometry, report, keep_output)  # type: ignore[no-untyped-call]
    return result


def channels_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the memory order that the kernels read, where they run."""
    if tensors[0].ndim != 4 or not kernels.usable(*tensors):
        return tensors
    return tuple(t.contiguous(memory_format=torch.channels_last) for t in tensors)


def _tuple(value: int | Sequence[int], d: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * d if len(values) == 1 else values


def padded(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> tuple[Tensor, Geometry]:
    """The geometry of a call, with the input padded beforehand where its padding is not symmetric."""
    d = len(kernel)
    dilations = _tuple(dilation, d)
    if padding == "same":
        total = [dil * (k - 1) for k, dil in zip(kernel, dilations, strict=True)]
        if any(t % 2 for t in total):  # even kernels pad one more on the far side
            x = F.pad(x, [n for t in reversed(total) for n in (t // 2, t - t // 2)])
            padding = 0
        else:
            padding = [t // 2 for t in total]
    elif padding == "valid":
        padding = 0
    assert not isinstance(padding, str)
    return x, Geometry(kernel, _tuple(stride, d), _tuple(padding, d), dilations, groups)


def convolution(call: Call) -> Any:
    def bound(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Any:
        layout, tape, d = call.layout_of(input), call.tape, weight.ndim - 2
        if layout is None or layout.dim != 0 or input.ndim != d + 2 or input.shape[0] != tape.rows:
            return NotImplemented
        x, geometry = padded(input, tuple(weight.shape[2:]), stride, padding, dilation, groups)
        b = None if bias is None else bias.detach()
        x, w, b = autocast(x, weight.detach(), b)
        x, w = channels_last(x, w)

        def report(x: Tensor, dy: Tensor, y: Tensor | None) -> None:
            if call.is_tracked(weight):
                tape.add(weight, Convolution(x, dy, w, geometry, tape.units))
            if bias is not None and call.is_tracked(bias):
                places = tuple(range(2, dy.ndim))  # not flattened: images that lie channels-last would be copied
                tape.add(bias, Dense(tape.per_unit(dy.sum(places, dtype=summed_in(dy.dtype)))))

        return apply(tape, x, w, b, geometry, report)

    return bound(*call.args, **call.kwargs)


TABLE = {torch.conv1d: convolution, torch.conv2d: convolution, torch.conv3d: convolution}
