"""The two operations that private image models are made of, each one operation to whoever overrides functions.

A `TorchFunctionMode` sees `group_norm_act` and `standardised_conv2d` whole, as it does those of `torch.nn.functional`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from sfumato.errors import InvalidArgument
from sfumato.kernels import usable

Pair = int | tuple[int, int]


class Activation(StrEnum):
    """What precedes or follows a normalisation."""

    NONE = "none"
    RELU = "relu"
    SILU = "silu"


def group_norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    after: Activation = Activation.RELU,
    before: Activation = Activation.NONE,
    inner_bias: Tensor | None = None,
) -> Tensor:
    """after(group_norm(before(x + inner_bias))) in x's type, with statistics in float32 at least, also under autocast.

    `inner_bias` has one number per channel, or a row of them per image.
    """
    if has_torch_function((x, weight, bias, inner_bias)):
        relevant = (x, weight, bias, inner_bias)
        result: Tensor = handle_torch_function(
            group_norm_act, relevant, x, groups, weight, bias, eps, after, before, inner_bias
        )
        return result
    if inner_bias is not None and tuple(inner_bias.shape) not in ((x.shape[1],), tuple(x.shape[:2])):
        raise InvalidArgument(  # without the number of images, which may be private
            f"inner_bias has another shape than x wants: give {x.shape[1]} numbers, one per channel, or a row of them "
            "for every image."
        )
    if x.ndim == 4 and usable(x, weight, bias, inner_bias):
        from sfumato.kernels.group_norm import fits

        if fits(x.shape[1], groups, x.shape[2] * x.shape[3]):
            fused: Tensor = _GroupNormAct.apply(x, weight, bias, inner_bias, groups, eps, before, after)  # type: ignore[no-untyped-call]
            return fused
    with full_precision(x):
        wide = at_least_float32(x)
        if inner_bias is not None:
            wide = wide + per_channel(inner_bias, x).to(wide.dtype)
        wide = activate(wide, before)
        w, b = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
        return activate(F.group_norm(wide, groups, w, b, eps), after).to(x.dtype)


class _GroupNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        inner_bias: Tensor | None,
        groups: int,
        eps: float,
        before: Activation,
        after: Activation,
    ) -> Tensor:
        from sfumato.kernels import group_norm

        x = x.contiguous(memory_format=torch.channels_last)
        y, mean, rstd = group_norm.forward(x, groups, weight, bias, eps, before, after, inner_bias)
        ctx.save_for_backward(x, weight, bias, inner_bias, mean, rstd)
        ctx.options = (groups, before, after)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from sfumato.kernels import group_norm

        x, weight, bias, inner_bias, mean, rstd = ctx.saved_tensors
        groups, before, after = ctx.options
        dx, *each = group_norm.backward(x, dy, weight, bias, mean, rstd, groups, before, after, inner_bias)
        pairs = zip((weight, bias, inner_bias), each, strict=True)
        shared = (None if t is None or d is None else (d if t.ndim == 2 else d.sum(0)).to(t.dtype) for t, d in pairs)
        return dx, *shared, None, None, None, None


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """One number per channel of x, or a row of them per image, shaped to be added to it."""
    return values.reshape(*values.shape, *(1 for _ in x.shape[2:]))


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.RELU:
        return F.relu(x)
    return F.silu(x) if activation is Activation.SILU else x


def standardised_weight(weight: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """gain * u per output row, with u = c / sqrt(|c|^2 + eps) and c the row less its mean.

    With eps inside the root, the gradient is s * (g - mean g - u <u, g>), s = gain / sqrt(|c|^2 + eps), everywhere.
    """
    unit, _ = directions(weight, eps)
    scaled = unit if gain is None else unit * gain[:, None, None, None]
    return scaled.to(weight.dtype)


def directions(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """u in the weight's shape, and 1 / sqrt(|c|^2 + eps) for every row, in float32 at least."""
    rows = at_least_float32(weight).flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    inverse = torch.rsqrt(centred.square().sum(1) + eps)
    return (centred * inverse[:, None]).reshape(weight.shape), inverse


def standardised_conv2d(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Convolution by `standardised_weight(weight, gain, eps)`, which is float32 under autocast until it is used."""
    if has_torch_function((x, weight, gain, bias)):
        relevant = (x, weight, gain, bias)
        result: Tensor = handle_torch_function(
            standardised_conv2d, relevant, x, weight, gain, bias, stride, padding, dilation, groups, eps
        )
        return result
    kind, last = autocast_dtype(x), channels_last_here(x) and x.is_contiguous(memory_format=torch.channels_last)
    effective = effective_weight(weight, gain, eps, kind or weight.dtype, last=last)
    x = x if kind is None else x.to(kind)
    x, effective = widened(x, effective, groups)
    return F.conv2d(x, effective, bias, stride, padding, dilation, groups)


def effective_weight(weight: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype, *, last: bool) -> Tensor:
    """`standardised_weight` in this precision, perhaps channels-last."""
    if usable(weight, gain):
        from sfumato.kernels.standardise import fits

        if fits(weight):
            fused: Tensor = _StandardisedWeight.apply(weight, gain, eps, dtype, last)  # type: ignore[no-untyped-call]
            return fused
    effective = standardised_weight(weight, gain, eps)
    return (effective.contiguous(memory_format=torch.channels_last) if last else effective).to(dtype)


class _StandardisedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype, last: bool) -> Tensor:
        from sfumato.kernels import standardise

        ctx.save_for_backward(weight, gain)
        ctx.eps = eps
        return standardise.forward(weight, gain, eps, dtype, channels_last=last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from sfumato.kernels import standardise

        weight, gain = ctx.saved_tensors
        dweight, dgain = standardise.backward(grad, weight, gain, ctx.eps)
        return dweight, None if dgain is None else dgain.to(gain.dtype), None, None, None


def widened(x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """With channels of zeros up to eight: cuDNN's tensor cores take no fewer, and images have three."""
    missing = 8 - x.shape[1]
    if groups != 1 or missing <= 0 or x.dtype != torch.bfloat16 or not channels_last_here(x):
        return x, weight
    padding = [0, 0, 0, 0, 0, missing]
    return tuple(F.pad(t, padding).contiguous(memory_format=torch.channels_last) for t in (x, weight))  # type: ignore[return-value]


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off for x's device."""
    return torch.autocast(x.device.type, enabled=False) if autocast_dtype(x) is not None else nullcontext()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts to on x's device, if it is on."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def channels_last_here(x: Tensor) -> bool:
    """Whether images are to lie channels-last: on GPUs, whose convolutions like it; not under vmap, which cannot."""
    return x.is_cuda and x.ndim == 4 and not torch._C._are_functorch_transforms_active()
