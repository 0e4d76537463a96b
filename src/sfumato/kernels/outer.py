"""Norms and weighted sums of gradients G_u = sum_r a_r (x) b_r from 16-bit factors, on tensor cores.

Shapes: U units, R rows of a unit, O outputs, I inputs; `a` is (U, R, O), `b` is (U, R, I), G_u is (O, I).

`squared_norms` never writes a Gram matrix and `weighted_sum` never writes a unit's gradient. The first is a bound and
comes out too large, never too small; the second keeps the factors in float32, and never reads a unit whose factor is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.kernels import INTERPRETED

PRODUCT_BLOCK = 128
"""The longest part of an inner product that tensor cores add up before float32 registers take over."""

LANES = 8
"""Numbers in 16 bytes. Rows start at multiples of it, so that every load is a wide one."""

_LANES = tl.constexpr(LANES)
_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bfloat16; in float32 the products are the same
_STEP = 2.0**-23  # tensor cores may cut off where IEEE addition rounds, so an addition errs by twice the usual 2^-24
_DOUBLE = 2.0**-53  # of a float64 addition
_TINY = 2.0**-126  # the least normal float32: a smaller product may be flushed to 0


class Tiles(NamedTuple):
    """What one program holds: a block of the contracted dimension, two sides of its tile, and how it runs."""

    block: int
    high: int
    wide: int
    warps: int
    stages: int


# The large tiles fill the registers with accumulators: of a block or a unit, and the total. To tune, change these.
GRAM_TILES = Tiles(block=PRODUCT_BLOCK, high=128, wide=128, warps=8, stages=3)
SUM_TILES = Tiles(block=64, high=128, wide=128, warps=8, stages=4)

_GROUP = 8  # tiles of outputs whose programs run side by side, sharing the columns of b in the L2 cache
_MOST_PARTIALS = 2**26  # float32 entries of the workspace that weighted_sum may use to keep every processor busy
_MOST_SPLITS = 32
_LONGEST_STRIDE = 2**23  # of rows: so that offsets within a block of rows fit 32 bits
_PROCESSORS = 132  # of an H200; where the device does not say


def error_bound(length: int) -> float:
    """Relative error of an inner product of `length` numbers as `_gram` adds it up, in units of the lengths' product.

    Products are exact in float32. A block is one chain of additions, plus one for the running sum that enters each
    instruction (these take 8 or more terms); then one addition per block. The last factor covers the growth of the sum
    while errors add up, this number's own conversion to float32, and the float64 additions that follow.
    """
    block = min(length, PRODUCT_BLOCK)
    chain = block + triton.cdiv(block, 8) + triton.cdiv(length, PRODUCT_BLOCK)
    return float(chain * _STEP * (1 + 2 * chain * _STEP) * 1.0001)


def least_bound(length: int) -> float:
    """Absolute error of such an inner product: terms that may have vanished, and the bound's own underflow."""
    return 2 * length * _TINY


@triton.jit
def _load(at, mask):
    """Factors for a product, 0 where masked."""
    values = tl.load(at, mask=mask, other=0.0)
    if _WIDEN:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["stride_u", "stride_r", "rows", "width"])
def _lengths_kernel(x, out, stride_u, stride_r, rows, width, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """out[u, r] = |x[u, r]| in float32, rounded up, and never below the normal numbers. Strides and width in lanes."""
    blocks = tl.cdiv(rows, BLOCK_R)
    unit = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    start = x + unit.to(tl.int64) * stride_u * _LANES + (row.to(tl.int64) * stride_r * _LANES)[:, None]
    squares = tl.zeros([BLOCK_R, BLOCK_K], tl.float64)  # float64 costs nothing here: the loads take longer
    for k in range(0, width * _LANES, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        inside = (row < rows)[:, None] & (column < width * _LANES)[None, :]
        values = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float64)
        squares += values * values
    length = tl.sqrt(tl.sum(squares, 1))
    # 2^-22 outweighs both the float64 sum and the conversion, which rounds to the nearest.
    raised = (length * (1 + 2.0**-22) + 2.0**-126).to(tl.float32)
    tl.store(out + unit.to(tl.int64) * rows + row, raised, mask=row < rows)


@triton.jit
def _gram(x, stride_r, rows, width, first, second, one, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inner products (BLOCK, BLOCK) of rows `first` with rows `second` of one unit, in float32. `one` is 1."""
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    at_first = x + (first.to(tl.int64) * stride_r * _LANES)[:, None]
    at_second = x + (second.to(tl.int64) * stride_r * _LANES)[:, None]
    in_first, in_second = (first < rows)[:, None], (second < rows)[:, None]
    for k in range(0, width * _LANES, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        inside = column < width * _LANES
        left = _load(at_first + column, in_first & inside)
        right = _load(at_second + column, in_second & inside)
        # The compiler would fold a plain sum into the product, and make one long chain on tensor cores of all blocks.
        total += one * tl.dot(left, tl.trans(right))
    return total


@triton.jit
def _doubt(lengths, first, second, rows, error, least):
    """What the entries of `_gram` may be off by: error * |x_r| * |x_s| + least."""
    left = tl.load(lengths + first, mask=first < rows, other=0.0)
    right = tl.load(lengths + second, mask=second < rows, other=0.0)
    return (left[:, None] * right[None, :]) * error + least


@triton.jit(do_not_specialize=["a_unit", "a_row", "b_unit", "b_row", "rows", "outputs", "inputs"])
def _norms_kernel(
    a,
    b,
    lengths_a,
    lengths_b,
    out,
    a_unit,
    a_row,
    b_unit,
    b_row,
    rows,
    outputs,
    inputs,
    error_a,
    error_b,
    least_a,
    least_b,
    one,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[u, pair] = the share of rows r in tile i and rows s in tile j >= i in the bound on |G_u|^2.

    One program per (u, pair). With g the computed inner products and d their doubts, an entry of the true product
    is at most g_a g_b + d_a |g_b| + d_b |g_a| + d_a d_b.
    """
    tiles = tl.cdiv(rows, BLOCK)
    pairs = tiles * (tiles + 1) // 2
    unit = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    # Pairs are counted (0,0), (0,1), (1,1), (0,2), ...; the square root is put right where it is off by one.
    j = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
    i = pair - j * (j + 1) // 2
    first, second = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)

    at_a, at_b = a + unit.to(tl.int64) * a_unit * _LANES, b + unit.to(tl.int64) * b_unit * _LANES
    gram_a = _gram(at_a, a_row, rows, outputs, first, second, one, BLOCK, BLOCK_K)
    gram_b = _gram(at_b, b_row, rows, inputs, first, second, one, BLOCK, BLOCK_K)
    off_a = _doubt(lengths_a + unit.to(tl.int64) * rows, first, second, rows, error_a, least_a).to(tl.float64)
    off_b = _doubt(lengths_b + unit.to(tl.int64) * rows, first, second, rows, error_b, least_b).to(tl.float64)
    gram_a, gram_b = gram_a.to(tl.float64), gram_b.to(tl.float64)
    bound = gram_a * gram_b + off_a * (tl.abs(gram_b) + off_b) + off_b * tl.abs(gram_a)
    share = tl.sum(tl.sum(bound, 1), 0)
    tl.store(out + tl.program_id(0), tl.where(i == j, share, 2 * share))  # (s, r) is the same as (r, s)


@triton.jit(
    do_not_specialize=["a_unit", "a_row", "b_unit", "b_row", "rows", "outputs", "inputs", "steps", "steps_each"]
)
def _sum_kernel(
    a,
    b,
    factors,
    kept,
    out,
    a_unit,
    a_row,
    b_unit,
    b_row,
    rows,
    outputs,
    inputs,
    steps,
    steps_each,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[split] = a tile of sum_u factors[u] * sum_r a[u, r] (x) b[u, r], over one split of the steps.

    A step is a block of rows of a unit. Units are no loop of their own, so loads of the next overtake this one's
    products. `kept` tells which factors are not 0.
    """
    wide = inputs * _LANES
    tiles_o, tiles_i = tl.cdiv(outputs * _LANES, BLOCK_O), tl.cdiv(wide, BLOCK_I)
    group = tl.program_id(0) // (GROUP * tiles_i)
    within = tl.program_id(0) % (GROUP * tiles_i)
    high = tl.minimum(tiles_o - group * GROUP, GROUP)  # the last group may be smaller
    at_o = (group * GROUP + within % high) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_i = (within // high) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_o, in_i = (at_o < outputs * _LANES)[None, :], (at_i < wide)[None, :]
    row = tl.arange(0, BLOCK_R)
    to_a = row[:, None] * (a_row * _LANES) + at_o[None, :]
    to_b = row[:, None] * (b_row * _LANES) + at_i[None, :]

    blocks = tl.cdiv(rows, BLOCK_R)
    start = tl.program_id(1) * steps_each
    end = tl.minimum(start + steps_each, steps)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    part = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for step in range(start, end):
        unit = (step // blocks).to(tl.int64)
        block = step % blocks
        # A dropped unit may hold anything, and 0 * NaN is NaN: its rows are not read. The flag is a byte, because the
        # compiler prefetches whatever is wider, and would then start the loads that wait for it a step later.
        left_rows = tl.where(tl.load(kept + unit) != 0, rows - block * BLOCK_R, 0)
        wanted = (row < left_rows)[:, None]
        first = block.to(tl.int64) * BLOCK_R
        left = _load(a + (unit * a_unit + first * a_row) * _LANES + to_a, wanted & in_o)
        right = _load(b + (unit * b_unit + first * b_row) * _LANES + to_b, wanted & in_i)
        part = tl.dot(tl.trans(left), right, part)
        if (block == blocks - 1) | (step == end - 1):
            # The factor meets the products in float32 registers; multiplied into a or b it would be rounded to theirs.
            total += tl.load(factors + unit) * part
            part = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    at_o = at_o.to(tl.int64)[:, None]
    split = out + tl.program_id(1).to(tl.int64) * outputs * _LANES * wide
    tl.store(split + at_o * wide + at_i[None, :], total, mask=(at_o < outputs * _LANES) & in_i)


def aligned(x: Tensor) -> Tensor:
    """x (U, R, K) itself if its rows can be loaded 16 bytes at a time, else a copy, with zero columns up to that.

    The other functions call it on what they are given. Calling it once beforehand saves the second copy: the gradient
    of 50,257 logits, say, is best written into 50,264 columns from the start. Zero columns add nothing to a norm.
    """
    U, R, K = x.shape
    fits = K % LANES == x.stride(0) % LANES == x.stride(1) % LANES == x.data_ptr() % 16 == 0
    if fits and x.stride(2) == 1 and x.stride(1) < _LONGEST_STRIDE:
        return x
    padded = x.new_zeros(U, R, triton.cdiv(K, LANES) * LANES)
    padded[:, :, :K] = x
    return padded


def _check(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"both factors must be bfloat16 or both float16, not {a.dtype} and {b.dtype}")
    if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != b.shape[:2] or a.device != b.device:
        raise ValueError(f"factors must be (U, R, O) and (U, R, I) on one device, not {a.shape} and {b.shape}")


def _strides(x: Tensor) -> tuple[int, int]:
    """Of units and rows, in lanes: the kernels multiply again, which tells the compiler that rows are aligned."""
    return x.stride(0) // LANES, x.stride(1) // LANES


def _lengths(x: Tensor) -> Tensor:
    """|x[u, r]| of aligned rows as (U, R) float32, rounded up."""
    U, R, K = x.shape
    out = torch.empty(U, R, dtype=torch.float32, device=x.device)
    rows, columns = 8, 256
    _lengths_kernel[(U * triton.cdiv(R, rows),)](x, out, *_strides(x), R, K // LANES, rows, columns, num_warps=4)
    return out


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _fitted(size: int, most: int) -> int:
    """The side of a tile for `size` entries: a power of two from 16, the least that tensor cores take, to `most`."""
    return int(min(most, max(16, triton.next_power_of_2(size))))


def gram_tiles(U: int, R: int, processors: int) -> Tiles:
    """Large tiles where they make enough programs to keep every processor busy, else smaller ones."""
    large = triton.cdiv(R, GRAM_TILES.high)
    if U * large * (large + 1) // 2 >= processors:
        return GRAM_TILES
    side = _fitted(R, 64)
    return Tiles(PRODUCT_BLOCK, side, side, 4, 3)


def sum_tiles(R: int, outputs: int, inputs: int) -> Tiles:
    """Large tiles, unless the rows or the matrix are smaller than one."""
    block = _fitted(R, SUM_TILES.block)
    high, wide = _fitted(outputs, SUM_TILES.high), _fitted(inputs, SUM_TILES.wide)
    full = (block, high, wide) == SUM_TILES[:3]
    # Four warps hold at most 64 x 128 entries twice.
    return SUM_TILES if full else Tiles(block, high, wide, 8 if high * wide > 64 * 128 else 4, SUM_TILES.stages)


def splits(tiles: int, steps: int, entries: int, processors: int) -> int:
    """Over how many programs to split the steps of each tile so that the last wave of programs is nearly full.

    A wave takes as long as the steps of one program, and about four steps more to start and to store its tile.
    """
    most = max(1, min(steps, _MOST_SPLITS, _MOST_PARTIALS // entries))
    return min(range(1, most + 1), key=lambda s: triton.cdiv(tiles * s, processors) * (triton.cdiv(steps, s) + 4))


def squared_norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Upper bounds (U,) float64 on |sum_r a_r (x) b_r|^2, sum_r |a_r| and sum_r |a_r||b_r|.

    |G|^2 = sum_{r,s} <a_r, a_s><b_r, b_s>, with the doubt about every inner product added entry by entry. Not finite
    where a unit is not, or where inner products of its rows leave the range of float32.
    """
    _check(a, b)
    U, R, _ = a.shape
    if not a.numel() or not b.numel():
        nothing = torch.zeros(U, dtype=torch.float64, device=a.device)
        return nothing, nothing.clone(), nothing.clone()
    a, b = aligned(a), aligned(b)
    with torch.cuda.device_of(a):
        lengths_a, lengths_b = _lengths(a), _lengths(b)
        long_a = lengths_a.double()
        products = long_a * lengths_b
        if R == 1:
            squared = products.square().sum(1)
        else:
            squared = _pairs(a, b, lengths_a, lengths_b).sum(1)
    return squared, long_a.sum(1), products.sum(1)


def _pairs(a: Tensor, b: Tensor, lengths_a: Tensor, lengths_b: Tensor) -> Tensor:
    """(U, pairs of row tiles) float64, whose sums over the pairs are the bounds on |G_u|^2."""
    U, R, outputs = a.shape
    inputs = b.shape[2]
    tiles = gram_tiles(U, R, _processors(a.device))
    high = triton.cdiv(R, tiles.high)
    shares = torch.empty(U, high * (high + 1) // 2, dtype=torch.float64, device=a.device)
    _norms_kernel[(shares.numel(),)](
        a,
        b,
        lengths_a,
        lengths_b,
        shares,
        *_strides(a),
        *_strides(b),
        R,
        outputs // LANES,
        inputs // LANES,
        error_bound(outputs),
        error_bound(inputs),
        least_bound(outputs),
        least_bound(inputs),
        1.0,
        BLOCK=tiles.high,
        BLOCK_K=tiles.block,
        **_launch(tiles),
    )
    return shares


def _launch(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def weighted_sum(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """sum_u factors[u] * G_u as (O, I) float64. Units whose factor is 0 are never read; NaN in them adds nothing.

    Factors are used as float32, products are added up in float32, and the splits of a tile in float64: the result does
    not depend on timing.
    """
    _check(a, b)
    (U, R, outputs), inputs = a.shape, b.shape[2]
    if not a.numel() or not b.numel():
        return torch.zeros(outputs, inputs, dtype=torch.float64, device=a.device)
    a, b = aligned(a), aligned(b)
    padded, wide = a.shape[2], b.shape[2]
    tiles = sum_tiles(R, padded, wide)
    programs = triton.cdiv(padded, tiles.high) * triton.cdiv(wide, tiles.wide)
    steps = U * triton.cdiv(R, tiles.block)
    parts = splits(programs, steps, padded * wide, _processors(a.device))
    each = triton.cdiv(steps, parts)
    parts = triton.cdiv(steps, each)
    used = factors.to(torch.float32).contiguous()
    out = torch.empty(parts, padded, wide, dtype=torch.float32, device=a.device)
    with torch.cuda.device_of(a):
        _sum_kernel[(programs, parts)](
            a,
            b,
            used,
            (used != 0).to(torch.int8),
            out,
            *_strides(a),
            *_strides(b),
            R,
            padded // LANES,
            wide // LANES,
            steps,
            each,
            BLOCK_R=tiles.block,
            BLOCK_O=tiles.high,
            BLOCK_I=tiles.wide,
            GROUP=_GROUP,
            **_launch(tiles),
        )
    return out[:, :outputs, :inputs].sum(0, dtype=torch.float64)


def squared_norms_slowly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of `squared_norms`: the values that it bounds, from the gradients themselves in float64."""
    a, b = a.double(), b.double()
    lengths_a, lengths_b = a.norm(dim=2), b.norm(dim=2)
    squared = torch.bmm(a.transpose(1, 2), b).square().sum((1, 2))
    return squared, lengths_a.sum(1), (lengths_a * lengths_b).sum(1)


def weighted_sum_slowly(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """The twin of `weighted_sum`, in float64."""
    kept = factors != 0
    scaled = a[kept].double() * factors[kept].double()[:, None, None]
    return scaled.flatten(0, 1).T @ b[kept].double().flatten(0, 1)
