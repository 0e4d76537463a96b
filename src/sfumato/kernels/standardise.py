"""The weight of a standardised convolution and its gradient, one program per row: gain * c / sqrt(|c|^2 + eps), c = w
less its mean. Where batches are small, the thirty operations that this is in plain PyTorch are most of a step.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LONGEST = 16384  # numbers of a row, which a program holds in its registers


def fits(weight: Tensor) -> bool:
    """Whether the kernels take such a weight, (outputs, inputs, height, width)."""
    return weight.ndim == 4 and weight.dtype == torch.float32 and 0 < weight[0].numel() <= _LONGEST


def forward(weight: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype, *, channels_last: bool) -> Tensor:
    """The standardised weight in this precision and layout."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=layout)
    (weight, of_weight), (out, of_out) = _laid_out(weight), _laid_out(out)
    with torch.cuda.device_of(weight):
        _forward_kernel[(len(weight),)](
            *(weight, _given(gain, weight), out, eps, *_sizes(weight)),
            *(gain is not None, of_weight, of_out, _block(weight)),
            num_warps=_warps(weight),
        )
    return out


def backward(grad: Tensor, weight: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight, laid out as it is, and gain, in float32."""
    (weight, of_weight), (grad, of_grad) = _laid_out(weight), _laid_out(grad)
    dweight = torch.empty_like(weight)
    dgain = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(weight):
        _backward_kernel[(len(weight),)](
            *(weight, _given(gain, weight), grad, dweight, dgain, eps, *_sizes(weight)),
            *(gain is not None, of_weight, of_grad, _block(weight)),
            num_warps=_warps(weight),
        )
    return dweight, None if gain is None else dgain


def _laid_out(t: Tensor) -> tuple[Tensor, bool]:
    """In one of two layouts, and whether its channels lie last."""
    if t.is_contiguous():
        return t, False
    return (t, True) if t.is_contiguous(memory_format=torch.channels_last) else (t.contiguous(), False)


def _sizes(weight: Tensor) -> tuple[int, int]:
    """Input channels, and taps."""
    return weight.shape[1], weight.shape[2] * weight.shape[3]


def _block(weight: Tensor) -> int:
    block: int = triton.next_power_of_2(weight[0].numel())
    return block


def _warps(weight: Tensor) -> int:
    return min(16, max(1, _block(weight) // 512))


def _given(gain: Tensor | None, weight: Tensor) -> Tensor:
    return weight if gain is None else gain.contiguous()  # a pointer that is not followed, where there is none


# --------------------------------------------------------------------------------------------- slow twins


def forward_slowly(
    weight: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype, *, channels_last: bool
) -> Tensor:
    unit, _ = _unit(weight, eps)
    scaled = (unit if gain is None else unit * gain[:, None, None, None]).to(dtype)
    return scaled.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def backward_slowly(grad: Tensor, weight: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    unit, inverse = _unit(weight, eps)
    g = grad.to(unit.dtype)
    along = (g * unit).sum((1, 2, 3))
    across = g - g.mean((1, 2, 3), keepdim=True) - unit * along[:, None, None, None]
    return across * (inverse if gain is None else inverse * gain)[:, None, None, None], None if gain is None else along


def _unit(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    inverse = torch.rsqrt(centred.square().sum((1, 2, 3)) + eps)
    return centred * inverse[:, None, None, None], inverse


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _places(row, f, channels, taps, LAST: tl.constexpr):
    """Where the numbers of a row lie that are numbered as if channels lay first."""
    start = row * (channels * taps)
    return start + ((f % taps) * channels + f // taps if LAST else f)


@triton.jit
def _directions(weight_ptr, row, f, channels, taps, eps, LAST: tl.constexpr):
    """u = c / sqrt(|c|^2 + eps), and that inverse."""
    inside = f < channels * taps
    w = tl.load(weight_ptr + _places(row, f, channels, taps, LAST), mask=inside, other=0.0)
    c = tl.where(inside, w - tl.sum(w, 0) / (channels * taps), 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(c * c, 0) + eps)
    return c * inverse, inverse


@triton.jit
def _forward_kernel(
    weight_ptr,
    gain_ptr,
    out_ptr,
    eps,
    channels,
    taps,
    GAIN: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    OUT_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    u, _ = _directions(weight_ptr, row, f, channels, taps, eps, WEIGHT_LAST)
    if GAIN:
        u = u * tl.load(gain_ptr + row).to(tl.float32)
    tl.store(
        out_ptr + _places(row, f, channels, taps, OUT_LAST), u.to(out_ptr.dtype.element_ty), mask=f < channels * taps
    )


@triton.jit
def _backward_kernel(
    weight_ptr,
    gain_ptr,
    grad_ptr,
    dweight_ptr,
    dgain_ptr,
    eps,
    channels,
    taps,
    GAIN: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    GRAD_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    inside = f < channels * taps
    u, scale = _directions(weight_ptr, row, f, channels, taps, eps, WEIGHT_LAST)
    g = tl.load(grad_ptr + _places(row, f, channels, taps, GRAD_LAST), mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(g * u, 0)
    if GAIN:
        scale = scale * tl.load(gain_ptr + row).to(tl.float32)
    dw = scale * (g - tl.sum(g, 0) / (channels * taps) - u * along)
    tl.store(dweight_ptr + _places(row, f, channels, taps, WEIGHT_LAST), dw, mask=inside)
    tl.store(dgain_ptr + row, along)
