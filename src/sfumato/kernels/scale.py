"""One pass over the gradient of a convolution's output: scale its channels, and reduce it against the output.

For K passes at K standardised weights: sum_k J_k' g_k = P sum_k s_k g_k - sum_k s_k <g_k, u_k> u_k, P centring rows.
s_k goes into dy, so that one contraction adds all passes up, and gain_k <g_k, u_k> is the sum over positions of dy * y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 8192  # numbers per step


@triton.jit
def _scale(
    y_ptr,
    dy_ptr,
    out_ptr,
    scale_ptr,
    reduced_ptr,
    HW: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BC)
    inside = channels < C
    scale = tl.load(scale_ptr + channels, mask=inside, other=0.0)
    total = tl.zeros([BC], tl.float32)
    for start in range(0, HW, BH):
        positions = start + tl.arange(0, BH)
        place = n * HW * C + positions[:, None] * C + channels[None, :]
        mask = (positions < HW)[:, None] & inside[None, :]
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(dy * y, 0)
        tl.store(out_ptr + place, (dy * scale[None, :]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(reduced_ptr + n * C + channels, total, mask=inside)


def scaled_and_reduced(y: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dy * scale, channel by channel, in dy's precision; and sum over positions of dy * y, (N, C) in float32."""
    y, dy = (t.contiguous(memory_format=torch.channels_last) for t in (y, dy))
    N, C, H, W = dy.shape
    out = torch.empty_like(dy)
    reduced = torch.empty(N, C, dtype=torch.float32, device=dy.device)
    block = triton.next_power_of_2(C)
    height = max(1, min(triton.next_power_of_2(H * W), _TILE // block))
    _scale[(N,)](y, dy, out, scale.float().contiguous(), reduced, H * W, C, height, block, num_warps=4)
    return out, reduced


def scaled_and_reduced_slowly(y: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    product = dy.float() * y.float()
    return (dy.float() * scale[:, None, None]).to(dy.dtype), product.flatten(2).sum(2)
