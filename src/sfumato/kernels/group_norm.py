"""Group normalisation with an activation before or after it, of images whose channels lie together in memory.

y = after(xhat * w + b) with xhat = (v - mean) * rstd over each image's groups of channels, and v = before(x + a). One
program takes one image: it reads x once if the image fits its registers, twice if not. Its backward gives the gradients
of w, b and a for every image: of the first two they are sums that it needs anyway. a, the inner bias, may be missing;
each image may have its own.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sfumato.errors import InvalidArgument

_MOST_CHANNELS = 4096

# Elements of a tile and warps, by channels, tuned on an H200 for 16-bit elements and 32, 16 and 8 pixels square.
_FORWARD = {16: (16384, 8), 64: (65536, 16), 128: (16384, 4), 256: (16384, 4)}
_BACKWARD = {16: (8192, 4), 64: (32768, 8), 128: (16384, 4), 256: (16384, 4)}
_OTHERWISE = (8192, 4)


def fits(channels: int, groups: int, positions: int) -> bool:
    """Whether the kernels take such images: powers of two, since groups are folded by reshaping a register."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (channels, groups)) and groups <= channels <= _MOST_CHANNELS
    return powers and 0 < channels * positions < 2**31  # within an image, offsets have 32 bits


def forward(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    before: str,
    after: str,
    inner_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean and 1/deviation of every image and group, in float32.

    `x` has the shape (N, C, H, W) and is laid out channels-last if it is not yet; so is the output, in x's type.
    `before` and `after` are "none", "relu" or "silu". `inner_bias` has the shape (C,), or (N, C) with any row stride.
    """
    N, C, H, W = x.shape
    if N == 0 or not fits(C, groups, H * W):
        return forward_slowly(x, groups, weight, bias, eps, before, after, inner_bias)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean = torch.empty(N, groups, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    affine = _affine(weight, bias, inner_bias, x)
    rows, warps = _tile(_FORWARD, C, H * W, x)
    with torch.cuda.device_of(x):
        _forward_kernel[(N,)](
            x, y, *affine, mean, rstd, eps, H * W, C, groups, rows, str(before), str(after), num_warps=warps
        )
    return y, mean, rstd


def backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    before: str,
    after: str,
    inner_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of x, like x, and of weight, bias and inner bias: one row per image, (N, C) in float32."""
    N, C, H, W = x.shape
    if N == 0 or not fits(C, groups, H * W):
        return backward_slowly(x, dy, weight, bias, mean, rstd, groups, before, after, inner_bias)
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    dw = torch.empty(N, C, device=x.device, dtype=torch.float32)
    db = torch.empty_like(dw)
    da = None if inner_bias is None else torch.empty_like(dw)
    affine = _affine(weight, bias, inner_bias, x)
    rows, warps = _tile(_BACKWARD, C, H * W, x)
    with torch.cuda.device_of(x):
        _backward_kernel[(N,)](
            *(x, dy, dx, *affine, mean, rstd, dw, db, db if da is None else da),
            *(H * W, C, groups, rows, str(before), str(after), da is not None),
            num_warps=warps,
        )
    return dx, dw, db, da


def _affine(
    weight: Tensor | None, bias: Tensor | None, inner_bias: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """All three, and how far one image's inner bias lies from the next one's: 0 where all share one."""
    N, C = x.shape[:2]

    def given(t: Tensor | None, value: float) -> Tensor:
        if t is not None and t.shape != (C,):  # the kernel would read past its end
            raise InvalidArgument(
                f"weight, bias or inner bias has another shape than x wants: give one number per channel, {C} of them; "
                "for the inner bias also a row of them for every image."
            )
        return torch.full((C,), value, device=x.device) if t is None else t.contiguous()

    if inner_bias is None or inner_bias.shape != (N, C):
        return given(weight, 1.0), given(bias, 0.0), given(inner_bias, 0.0), 0
    rows = inner_bias if inner_bias.stride(1) == 1 else inner_bias.contiguous()  # columns of a wider tensor stay there
    return given(weight, 1.0), given(bias, 0.0), rows, rows.stride(0)


def _tile(table: Mapping[int, tuple[int, int]], channels: int, positions: int, x: Tensor) -> tuple[int, int]:
    """Positions of a tile, a power of two, and warps; wider elements fill registers sooner."""
    elements, warps = table.get(channels, _OTHERWISE)
    most = max(1, elements * 2 // max(2, x.element_size()) // channels)
    return min(triton.next_power_of_2(positions), most), warps


# --------------------------------------------------------------------------------------------- slow twins


def forward_slowly(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    before: str,
    after: str,
    inner_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` computes, in plain PyTorch; statistics in float64 if x is."""
    N, C, H, W = x.shape
    wide = _activate(_scaled(x.to(torch.promote_types(x.dtype, torch.float32)), None, inner_bias), before)
    grouped = wide.reshape(N, groups, C // groups * H * W)
    mean = grouped.mean(2)
    rstd = torch.rsqrt((grouped - mean[:, :, None]).square().mean(2) + eps)
    y = _activate(_scaled(_xhat(wide, mean, rstd), weight, bias), after)
    return y.to(x.dtype).contiguous(memory_format=torch.channels_last), mean, rstd


def backward_slowly(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    before: str,
    after: str,
    inner_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `backward` computes, in plain PyTorch."""
    N, C, H, W = x.shape
    wide = _scaled(x.to(mean.dtype), None, inner_bias)
    xhat = _xhat(_activate(wide, before), mean, rstd)
    du = _unactivate(_scaled(xhat, weight, bias), dy.to(mean.dtype), after)
    dw, db = (du * xhat).sum((2, 3)), du.sum((2, 3))
    dxhat = _scaled(du, weight, None).reshape(N, groups, C // groups * H * W)
    flat = xhat.reshape_as(dxhat)
    along = (dxhat * flat).mean(2, keepdim=True)
    dv = (dxhat - dxhat.mean(2, keepdim=True) - flat * along) * rstd[:, :, None]
    dx = _unactivate(wide, dv.reshape(x.shape), before)
    da = None if inner_bias is None else dx.sum((2, 3))
    return dx.to(x.dtype).contiguous(memory_format=torch.channels_last), dw, db, da


def _xhat(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    N, C, H, W = x.shape
    groups = mean.shape[1]
    grouped = x.reshape(N, groups, C // groups * H * W)
    return ((grouped - mean[:, :, None]) * rstd[:, :, None]).reshape(x.shape)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight.to(x.dtype)[:, None, None]
    return x if bias is None else x + bias.to(x.dtype)[..., None, None]


def _activate(u: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu(u)
    return F.silu(u) if activation == "silu" else u


def _unactivate(u: Tensor, dy: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.where(u <= 0, 0.0, dy)
    if activation == "silu":
        s = torch.sigmoid(u)
        return dy * s * (1 + u * (1 - s))
    return dy


# --------------------------------------------------------------------------------------------- kernels
# Pointers point at one image of HW positions with C channels each; a tile is R positions, a power of two.


@triton.jit
def _group_sums(of_channel, C: tl.constexpr, G: tl.constexpr):
    D: tl.constexpr = C // G
    return tl.sum(tl.reshape(of_channel, [G, D]), 1)


@triton.jit
def _to_channels(of_group, C: tl.constexpr, G: tl.constexpr):
    D: tl.constexpr = C // G
    return tl.reshape(tl.broadcast_to(of_group[:, None], [G, D]), [C])


@triton.jit
def _load(ptr, position, channel, HW: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    at = position[:, None] * C + channel[None, :]
    if HW % R == 0:
        tile = tl.load(ptr + at)
    else:
        tile = tl.load(ptr + at, mask=(position < HW)[:, None], other=0.0)
    return tile


@triton.jit
def _store(ptr, value, position, channel, HW: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    at = position[:, None] * C + channel[None, :]
    if HW % R == 0:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=(position < HW)[:, None])


@triton.jit
def _activated(u, ACT: tl.constexpr):
    if ACT == "relu":
        u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch does; the default makes NaN 0
    elif ACT == "silu":
        u = u / (1.0 + tl.exp(-u))
    return u


@triton.jit
def _unactivated(u, dy, ACT: tl.constexpr):
    """The gradient of u, from that of what the activation made of it."""
    if ACT == "relu":
        dy = tl.where(u <= 0, 0.0, dy)
    elif ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-u))
        dy = dy * s * (1.0 + u * (1.0 - s))
    return dy


@triton.jit
def _within(value, position, HW: tl.constexpr, R: tl.constexpr):
    """Zero past the image."""
    if HW % R != 0:
        value = tl.where((position < HW)[:, None], value, 0.0)
    return value


@triton.jit
def _before(tile, inner, BEFORE: tl.constexpr):
    """v, which is normalised."""
    return _activated(tile.to(tl.float32) + inner[None, :], BEFORE)


@triton.jit
def _shifted(tile, inner, shift, position, HW: tl.constexpr, R: tl.constexpr, BEFORE: tl.constexpr):
    return _within(_before(tile, inner, BEFORE) - shift[None, :], position, HW, R)


@triton.jit
def _output(tile, inner, mean, scale, bias, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    v = _before(tile, inner, BEFORE)
    return _activated((v - mean[None, :]) * scale[None, :] + bias[None, :], AFTER)


@triton.jit
def _normalised(tile, inner, mean, rstd, BEFORE: tl.constexpr):
    return (_before(tile, inner, BEFORE) - mean[None, :]) * rstd[None, :]


@triton.jit
def _inner_gradient(xhat, dy_tile, weight, bias, AFTER: tl.constexpr):
    """The gradient of what the last activation is applied to."""
    return _unactivated(xhat * weight[None, :] + bias[None, :], dy_tile.to(tl.float32), AFTER)


@triton.jit
def _outer_gradient(
    tile, dy_tile, inner, mean, rstd, weight, bias, level, along, BEFORE: tl.constexpr, AFTER: tl.constexpr
):
    """That of x: rstd * (du w - mean of du w - xhat * mean of du w xhat), the means over the group."""
    xhat = _normalised(tile, inner, mean, rstd, BEFORE)
    du = _inner_gradient(xhat, dy_tile, weight, bias, AFTER)
    dv = (du * weight[None, :] - level[None, :] - xhat * along[None, :]) * rstd[None, :]
    return _unactivated(tile.to(tl.float32) + inner[None, :], dv, BEFORE)


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    inner_ptr,
    inner_stride,
    mean_ptr,
    rstd_ptr,
    eps,
    HW: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    x_ptr += n * (HW * C)
    y_ptr += n * (HW * C)
    inner_ptr += n * inner_stride
    COUNT: tl.constexpr = HW * (C // G)
    group = tl.arange(0, G)
    channel = tl.arange(0, C)
    row = tl.arange(0, R)

    # E v^2 - (E v)^2 cancels unless v is about as small as its deviation: v is less its group's mean at the first
    # position.
    inner = tl.load(inner_ptr + channel).to(tl.float32)
    first = _group_sums(_activated(tl.load(x_ptr + channel).to(tl.float32) + inner, BEFORE), C, G) / (C // G)
    shift = _to_channels(first, C, G)
    sums = tl.zeros([C], tl.float32)
    squares = tl.zeros([C], tl.float32)
    if R >= HW:
        tile = _load(x_ptr, row, channel, HW, C, R)
        v = _shifted(tile, inner, shift, row, HW, R, BEFORE)
        sums = tl.sum(v, 0)
        squares = tl.sum(v * v, 0)
    else:
        for start in range(0, HW, R):
            tile = _load(x_ptr, start + row, channel, HW, C, R)
            v = _shifted(tile, inner, shift, start + row, HW, R, BEFORE)
            sums += tl.sum(v, 0)
            squares += tl.sum(v * v, 0)
    offset = _group_sums(sums, C, G) / COUNT
    var = tl.maximum(_group_sums(squares, C, G) / COUNT - offset * offset, 0.0)
    group_mean = first + offset
    group_rstd = 1.0 / tl.sqrt(var + eps)
    tl.store(mean_ptr + n * G + group, group_mean)
    tl.store(rstd_ptr + n * G + group, group_rstd)

    mean = _to_channels(group_mean, C, G)
    scale = _to_channels(group_rstd, C, G) * tl.load(weight_ptr + channel).to(tl.float32)
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    if R >= HW:
        _store(y_ptr, _output(tile, inner, mean, scale, bias, BEFORE, AFTER), row, channel, HW, C, R)
    else:
        for start in range(0, HW, R):
            again = _load(x_ptr, start + row, channel, HW, C, R)
            _store(y_ptr, _output(again, inner, mean, scale, bias, BEFORE, AFTER), start + row, channel, HW, C, R)


@triton.jit
def _backward_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    weight_ptr,
    bias_ptr,
    inner_ptr,
    inner_stride,
    mean_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    da_ptr,
    HW: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    INNER: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    x_ptr += n * (HW * C)
    dy_ptr += n * (HW * C)
    dx_ptr += n * (HW * C)
    inner_ptr += n * inner_stride
    COUNT: tl.constexpr = HW * (C // G)
    group = tl.arange(0, G)
    channel = tl.arange(0, C)
    row = tl.arange(0, R)
    mean = _to_channels(tl.load(mean_ptr + n * G + group), C, G)
    rstd = _to_channels(tl.load(rstd_ptr + n * G + group), C, G)
    weight = tl.load(weight_ptr + channel).to(tl.float32)
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    inner = tl.load(inner_ptr + channel).to(tl.float32)

    # Positions past the image load dy = 0, so they add nothing.
    dw = tl.zeros([C], tl.float32)
    db = tl.zeros([C], tl.float32)
    if R >= HW:
        tile = _load(x_ptr, row, channel, HW, C, R)
        dy_tile = _load(dy_ptr, row, channel, HW, C, R)
        xhat = _normalised(tile, inner, mean, rstd, BEFORE)
        du = _inner_gradient(xhat, dy_tile, weight, bias, AFTER)
        dw = tl.sum(du * xhat, 0)
        db = tl.sum(du, 0)
    else:
        for start in range(0, HW, R):
            tile = _load(x_ptr, start + row, channel, HW, C, R)
            dy_tile = _load(dy_ptr, start + row, channel, HW, C, R)
            xhat = _normalised(tile, inner, mean, rstd, BEFORE)
            du = _inner_gradient(xhat, dy_tile, weight, bias, AFTER)
            dw += tl.sum(du * xhat, 0)
            db += tl.sum(du, 0)
    tl.store(dw_ptr + n * C + channel, dw)
    tl.store(db_ptr + n * C + channel, db)

    along = _to_channels(_group_sums(dw * weight, C, G) / COUNT, C, G)
    level = _to_channels(_group_sums(db * weight, C, G) / COUNT, C, G)
    da = tl.zeros([C], tl.float32)
    if R >= HW:
        dx = _outer_gradient(tile, dy_tile, inner, mean, rstd, weight, bias, level, along, BEFORE, AFTER)
        _store(dx_ptr, dx, row, channel, HW, C, R)
        if INNER:
            da = tl.sum(_within(dx, row, HW, R), 0)
    else:
        for start in range(0, HW, R):
            tile = _load(x_ptr, start + row, channel, HW, C, R)
            dy_tile = _load(dy_ptr, start + row, channel, HW, C, R)
            dx = _outer_gradient(tile, dy_tile, inner, mean, rstd, weight, bias, level, along, BEFORE, AFTER)
            _store(dx_ptr, dx, start + row, channel, HW, C, R)
            if INNER:
                da += tl.sum(_within(dx, start + row, HW, R), 0)
    if INNER:
        tl.store(da_ptr + n * C + channel, da)
