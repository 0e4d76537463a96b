"""Gradients of layer norm's weight and bias for every unit, in one pass over its input and its output's gradient.

Shapes: U units, R rows of a unit, C features. Only reading x and dy costs time, so both sums share the pass,
and nothing of the size of x is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.kernels.configurations import power_of_two

_TILE = 2048  # numbers of x, and of dy, that a program reads at once: 16 of each per thread
_COLUMNS = 128  # of a tile, where there are rows enough: a row of a tile is then read as whole lines of memory
_PROGRAMS = 1056  # eight for each of an H200's 132 processors: enough loads in flight to keep its memory busy
_LEAST_TILES = 4  # of rows that a split is worth: each split writes, and has read again, a row of its own


@triton.jit(do_not_specialize=["rows", "rows_each", "units"])
def _affine(
    x, dy, mean, rstd, out, units, rows, rows_each, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """out[split, 0, u] = sum_r dy * (x - mean) * rstd and out[split, 1, u] = sum_r dy over one split of the rows.

    One program per (unit, block of features, split).
    """
    blocks = tl.cdiv(C, BLOCK_C)
    unit = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (column < C)[None, :]
    start = tl.program_id(1) * rows_each
    end = tl.minimum(start + rows_each, rows)
    # Every place of the tile has a sum of its own: no threads wait for others in the loop, and chains are short.
    dw = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(start, end, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        row = unit * rows + r
        to = (row * C)[:, None] + column[None, :]
        mask = (r < end)[:, None] & inside
        g = tl.load(dy + to, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + to, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(mean + row, mask=r < end, other=0.0)
        s = tl.load(rstd + row, mask=r < end, other=0.0)
        dw += g * ((v - m[:, None]) * s[:, None])
        db += g
    to = out + (tl.program_id(1).to(tl.int64) * 2 * units + unit) * C + column
    tl.store(to, tl.sum(dw, 0), mask=column < C)
    tl.store(to + units.to(tl.int64) * C, tl.sum(db, 0), mask=column < C)


def _tile(R: int, C: int) -> tuple[int, int]:
    """Rows and columns of a tile: powers of two, at most _TILE numbers."""
    rows = min(_TILE // _COLUMNS, power_of_two(R))
    columns = min(_TILE // rows, power_of_two(C))
    return min(_TILE // columns, power_of_two(R)), columns


def _rows_each(R: int, programs: int, block: int) -> int:
    """Rows of a unit that one program takes, in whole tiles: all of them, if there are programs enough without."""
    wanted = triton.cdiv(_PROGRAMS, programs)
    tiles = max(triton.cdiv(triton.cdiv(R, block), wanted), _LEAST_TILES)
    return int(tiles * block)


def affine_gradients(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """dw[u, c] = sum_r dy * (x - mean) * rstd and db[u, c] = sum_r dy, (units, C) float32 each.

    x and dy (..., C), float32 or 16 bits, whose rows in order are R of the first unit, R of the second, and so on; mean
    and rstd one number for every row, in any shape. Sums are in float32; their order depends on the shape alone.
    """
    C = x.shape[-1]
    count = mean.numel()
    if x.shape != dy.shape or rstd.numel() != count or x.numel() != count * C or (count % units if units else count):
        sizes = tuple(x.shape), tuple(dy.shape), count, rstd.numel(), units
        raise ValueError(f"x, dy, mean, rstd and units do not fit each other: {sizes}")
    if not x.numel():
        return x.new_zeros(units, C, dtype=torch.float32), x.new_zeros(units, C, dtype=torch.float32)
    R = count // units
    high, wide = _tile(R, C)
    programs = units * triton.cdiv(C, wide)
    each = _rows_each(R, programs, high)
    splits = triton.cdiv(R, each)
    out = torch.empty(splits, 2, units, C, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _affine[programs, splits](
            x.contiguous(), dy.contiguous(), mean.float().contiguous(), rstd.float().contiguous(), out,
            units, R, each, C, high, wide, num_warps=max(1, min(4, high * wide // 512)),
        )  # fmt: skip
    dw, db = out[0] if splits == 1 else out.sum(0)
    return dw, db


def affine_gradients_slowly(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """The twin of `affine_gradients`, in float64 until the end."""
    C = x.shape[-1]
    shape = (units, mean.numel() // max(1, units))
    v, g = (t.double().reshape(*shape, C) for t in (x, dy))
    m, s = (t.double().reshape(*shape, 1) for t in (mean, rstd))
    return (g * ((v - m) * s)).sum(1).float(), g.sum(1).float()
