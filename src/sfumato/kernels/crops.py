"""Random windows of reflect-padded images, mirrored and with a hole, as one kernel; its twin is in `sfumato.augment`.

The padded image is never made: indices past an edge are reflected as they are read.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def crop(
    images: Tensor, top: Tensor, left: Tensor, mirror: Tensor, hole: tuple[Tensor, Tensor] | None, pad: int, side: int
) -> Tensor:
    """Image n's window from (top, left) of its padded self, in channels-last memory whatever the images' strides.

    It is mirrored where `mirror` is not zero. `hole`: the centres of squares of this side that are made grey.
    """
    N, C, H, W = images.shape
    out = torch.empty_like(images, memory_format=torch.channels_last)
    row, column = (top, left) if hole is None else hole
    grey = 0.5 if images.is_floating_point() else 127
    block = min(_BLOCK, triton.next_power_of_2(C * H * W))
    with torch.cuda.device_of(images):
        _crop_kernel[(N, triton.cdiv(C * H * W, block))](
            images,
            out,
            top,
            left,
            mirror,
            row,
            column,
            *images.stride(),
            C,
            H,
            W,
            pad,
            0 if hole is None else side,
            grey,
            block,
            num_warps=4,
        )
    return out


@triton.jit
def _reflected(i, size: tl.constexpr):
    i = tl.where(i < 0, -i, i)
    return tl.where(i >= size, 2 * (size - 1) - i, i)


@triton.jit
def _crop_kernel(
    image_ptr,
    out_ptr,
    top_ptr,
    left_ptr,
    mirror_ptr,
    hole_row_ptr,
    hole_column_ptr,
    stride_n,
    stride_c,
    stride_h,
    stride_w,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PAD: tl.constexpr,
    SIDE: tl.constexpr,
    GREY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < C * H * W
    c = element % C
    h = (element // C) // W
    w = (element // C) % W
    top = tl.load(top_ptr + n).to(tl.int32)
    left = tl.load(left_ptr + n).to(tl.int32)
    mirror = tl.load(mirror_ptr + n) != 0
    from_h = _reflected(top + h - PAD, H)
    from_w = _reflected(left + tl.where(mirror, W - 1 - w, w) - PAD, W)
    at = n * stride_n + c * stride_c + from_h * stride_h + from_w * stride_w
    value = tl.load(image_ptr + at, mask=inside, other=0)
    if SIDE > 0:
        from_top = h - tl.load(hole_row_ptr + n).to(tl.int32) + SIDE // 2
        from_left = w - tl.load(hole_column_ptr + n).to(tl.int32) + SIDE // 2
        in_hole = (from_top >= 0) & (from_top < SIDE) & (from_left >= 0) & (from_left < SIDE)
        value = tl.where(in_hole, GREY, value.to(tl.float32))  # which holds every pixel exactly
    tl.store(out_ptr + n * (C * H * W) + element, value.to(out_ptr.dtype.element_ty), mask=inside)
