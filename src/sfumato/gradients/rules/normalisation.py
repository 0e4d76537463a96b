"""Layer, group, instance and RMS normalisation, and plain elementwise scale and shift by a vector.

y = xhat * w + b, so per row dw = sum over positions of dy * xhat and db = sum of dy. xhat is not stored: group norm
gets dw from the two sums that its backward needs anyway, sum dy*x and sum dy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.contributions import Dense, summed_in
from sfumato.gradients.rules.call import Call
from sfumato.nn.functional import Activation, activate, group_norm_act, per_channel

_aten = torch.ops.aten
Report = Callable[[Tensor, Tensor], None]


class _LayerNorm(torch.autograd.Function):
    """Reports what it normalised, (x - mean) * rstd, as its parts, with dy."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tensor,
        x: Tensor,
        shape: list[int],
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        report: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.shape, ctx.report = shape, report
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, mean, rstd = ctx.saved_tensors
        ctx.report(x, dy, mean, rstd)
        dx = None
        if ctx.needs_input_grad[1]:
            mask = [True, False, False]
            dx = _aten.native_layer_norm_backward(dy.contiguous(), x, ctx.shape, mean, rstd, weight, None, mask)[0]
        return None, dx, None, None, None, None, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tap: Tensor, x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float, report: Report
    ) -> Tensor:
        N, C = x.shape[:2]
        ctx.sizes = (N, C, math.prod(x.shape[2:]), groups)
        x = x.contiguous()
        y, mean, rstd = _aten.native_group_norm(x, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.report = report
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, mean, rstd = ctx.saved_tensors
        N, C, _, groups = ctx.sizes
        dy = dy.contiguous()
        db = dy.reshape(N, C, -1).sum(2)
        dyx = (dy * x).reshape(N, C, -1).sum(2).reshape(N, groups, -1)
        dw = (dyx - db.reshape(N, groups, -1) * mean.reshape(N, groups, 1)) * rstd.reshape(N, groups, 1)
        ctx.report(dw.reshape(N, C), db)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = _aten.native_group_norm_backward(dy, x, mean, rstd, weight, *ctx.sizes, [True, False, False])[0]
        return None, dx, None, None, None, None, None


class _GroupNormByKernel(torch.autograd.Function):
    """With its activation, in channels-last memory; the affine gradients of every row are by-products."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tensor,
        x: Tensor,
        groups: int,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        before: Activation,
        after: Activation,
        inner_bias: Tensor | None,
        report: Report,
    ) -> Tensor:
        from sfumato.kernels import group_norm as kernel

        x = x.contiguous(memory_format=torch.channels_last)
        y, mean, rstd = kernel.forward(x, groups, weight, bias, eps, before, after, inner_bias)
        ctx.save_for_backward(x, weight, bias, inner_bias, mean, rstd)
        ctx.options, ctx.report = (groups, before, after), report
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from sfumato.kernels import group_norm as kernel

        x, weight, bias, inner_bias, mean, rstd = ctx.saved_tensors
        groups, before, after = ctx.options
        dx, *affine = kernel.backward(x, grads[0], weight, bias, mean, rstd, groups, before, after, inner_bias)
        ctx.report(*affine)
        return None, dx, *(None for _ in range(8))


class _Scale(torch.autograd.Function):
    """x * w for a vector (or block) w over the last dimensions."""

    @staticmethod
    def forward(ctx: Any, tap: Tensor, x: Tensor, weight: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.report = report
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        ctx.report(dy * x)
        return None, dy * weight if ctx.needs_input_grad[1] else None, None, None


class _Shift(torch.autograd.Function):
    """x + b for a vector (or block) b over the last dimensions."""

    @staticmethod
    def forward(ctx: Any, tap: Tensor, x: Tensor, bias: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        ctx.report = report
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.report(grads[0])
        return None, grads[0], None, None


def layer_norm(call: Call) -> Any:
    def bound(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        layout = call.layout_of(input)
        features = len(normalized_shape)
        if layout is None or weight is None or layout.dim >= input.ndim - features:
            return NotImplemented
        tape = call.tape

        def report(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor) -> None:
            if features == 1 and layout.dim == 0 and not layout.minor and kernels.contracts(x, dy):
                from sfumato.kernels.layer_norm import affine_gradients

                sums = affine_gradients(x, dy, mean, rstd, tape.units)
            else:
                scaled = (x - mean) * rstd * dy
                rows = [_sum_positions(layout.rows_first(t, tape.rows), features) for t in (scaled, dy)]
                sums = tape.per_unit(rows[0]), tape.per_unit(rows[1])
            for parameter, value in zip((weight, bias), sums, strict=True):
                if parameter is not None and call.is_tracked(parameter):
                    tape.add(parameter, Dense(value))

        b = None if bias is None else bias.detach()
        x = input.to(summed_in(input.dtype))
        return _LayerNorm.apply(tape.tap, x, list(normalized_shape), weight.detach(), b, eps, report)  # type: ignore[no-untyped-call]

    return bound(*call.args, **call.kwargs)


def group_norm(call: Call) -> Any:
    def bound(
        input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Any:
        none = Activation.NONE
        return _group_norm(call, input.to(summed_in(input.dtype)), num_groups, weight, bias, eps, none, none, None)

    return bound(*call.args, **call.kwargs)


def group_norm_with_activation(call: Call) -> Any:
    def bound(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        after: Activation,
        before: Activation,
        inner_bias: Tensor | None,
    ) -> Any:
        return _group_norm(call, x, groups, weight, bias, eps, before, after, inner_bias)

    return bound(*call.args, **call.kwargs)


def _group_norm(
    call: Call,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    before: Activation,
    after: Activation,
    inner_bias: Tensor | None,
) -> Any:
    layout, tape = call.layout_of(call.args[0] if call.args else call.kwargs["input"]), call.tape
    if layout is None or layout.dim != 0 or x.shape[0] != tape.rows or weight is None:
        return NotImplemented
    if inner_bias is not None and inner_bias.requires_grad and not call.is_tracked(inner_bias):
        return NotImplemented  # it is made of rows, whose gradient goes on through it

    def report(dw: Tensor, db: Tensor, da: Tensor | None = None) -> None:
        for parameter, value in ((weight, dw), (bias, db), (inner_bias, da)):
            if parameter is not None and value is not None and call.is_tracked(parameter):
                tape.add_rows(parameter, value)

    w, b, a = (None if t is None else t.detach() for t in (weight, bias, inner_bias))
    if x.ndim == 4 and kernels.usable(x, w, b, a) and _fits(x, groups):
        return _GroupNormByKernel.apply(tape.tap, x, groups, w, b, eps, before, after, a, report)  # type: ignore[no-untyped-call]
    wide = x.to(weight.dtype)
    if inner_bias is not None and a is not None:
        wide = _Shift.apply(tape.tap, wide, per_channel(a, x).to(wide.dtype), _per_channel_rows(call, inner_bias))  # type: ignore[no-untyped-call]
    y = _GroupNorm.apply(tape.tap, activate(wide, before), groups, w, b, eps, report)  # type: ignore[no-untyped-call]
    return activate(y, after).to(x.dtype)


def _per_channel_rows(call: Call, bias: Tensor) -> Callable[[Tensor], None]:
    def report(dx: Tensor) -> None:
        if call.is_tracked(bias):
            call.tape.add_rows(bias, dx.reshape(*dx.shape[:2], -1).sum(2))

    return report


def _fits(x: Tensor, groups: int) -> bool:
    from sfumato.kernels.group_norm import fits

    return fits(x.shape[1], groups, x.shape[2] * x.shape[3])


def instance_norm(call: Call) -> Any:
    def bound(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if not use_input_stats:
            return NotImplemented
        # Each channel is a group of its own. Running statistics of private rows are not kept.
        as_group = Call(call.func, (input, input.shape[1], weight, bias, eps), {}, call.site, call.tape, call.tracked)
        return group_norm(as_group)

    return bound(*call.args, **call.kwargs)


def rms_norm(call: Call) -> Any:
    def bound(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        layout = call.layout_of(input)
        if layout is None or weight is None or layout.dim >= input.ndim - len(normalized_shape):
            return NotImplemented
        x = input.to(summed_in(input.dtype))
        return _scaled(call, F.rms_norm(x, list(normalized_shape), None, eps), weight, input)

    return bound(*call.args, **call.kwargs)


def _scaled(call: Call, x: Tensor, weight: Tensor, laid_out: Tensor) -> Any:
    layout = call.layout_of(laid_out)
    if layout is None:
        return NotImplemented
    tape = call.tape

    def report(scaled: Tensor) -> None:
        tape.add_rows(weight, _sum_positions(layout.rows_first(scaled, tape.rows), weight.ndim))

    return _Scale.apply(tape.tap, x, weight.detach(), report)  # type: ignore[no-untyped-call]


def _sum_positions(rows_first: Tensor, features: int) -> Tensor:
    """Sum (rows, positions..., features...) over positions."""
    shape = rows_first.shape[rows_first.ndim - features :]
    return rows_first.reshape(rows_first.shape[0], -1, *shape).sum(1)


def _over_last_dims(call: Call) -> tuple[Tensor, Tensor] | None:
    """The data and the parameter of a binary function, if the parameter lies along the data's last dimensions."""
    if call.kwargs or len(call.args) != 2:
        return None
    x, w = call.args
    if call.is_tracked(x):
        x, w = w, x
    if not isinstance(x, Tensor) or not isinstance(w, Tensor) or call.is_tracked(x) or not call.is_tracked(w):
        return None
    layout = call.layout_of(x)
    fits = layout is not None and layout.dim < x.ndim - w.ndim and x.shape[x.ndim - w.ndim :] == w.shape
    return (x, w) if fits and w.ndim and x.dtype == w.dtype else None


def scale(call: Call) -> Any:
    pair = _over_last_dims(call)
    return NotImplemented if pair is None else _scaled(call, pair[0], pair[1], pair[0])


def shift(call: Call) -> Any:
    pair = _over_last_dims(call)
    if pair is None:
        return NotImplemented
    x, bias = pair
    layout, tape = call.layout_of(x), call.tape
    assert layout is not None

    def report(dy: Tensor) -> None:
        tape.add_rows(bias, _sum_positions(layout.rows_first(dy, tape.rows), bias.ndim))

    return _Shift.apply(tape.tap, x, bias.detach(), report)  # type: ignore[no-untyped-call]


TABLE: Mapping[Any, Callable[[Call], Any]] = {
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.rms_norm: rms_norm,
    group_norm_act: group_norm_with_activation,
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul), scale),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add), shift),
}
