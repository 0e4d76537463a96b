"""Inner products <G_u, P> of gradients G_u = sum_r a_r (x) b_r from 16-bit factors with a matrix, on tensor cores.

Shapes as in `outer.py`. `inner` never writes the image of the matrix, and `inner_error` bounds what it is off by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.kernels.outer import (
    _DOUBLE,
    _GROUP,
    _LANES,
    _STEP,
    _TINY,
    LANES,
    Tiles,
    _check,
    _fitted,
    _launch,
    _load,
    _strides,
    aligned,
)

INNER_TILES = Tiles(block=64, high=128, wide=128, warps=8, stages=3)


def halves(matrix: Tensor, count: int) -> list[Tensor]:
    """`count` bfloat16 matrices, the largest first, that add up to a float32 matrix but for a small remainder.

    bfloat16 keeps 8 bits, so an entry of size 2^e leaves at most 2^(e-8): half a place. That most is itself a bfloat16;
    what is below it is smaller than 2^(e-8) and leaves at most 2^(e-17), and so on. After k parts the remainder is at
    most 2^(1-9k) of the entry, and after three it is 0, since float32 ends at 2^(e-23). Every part after the first is
    as small as the remainder that it rounds. Each remainder is exact in float32.

    Numbers whose parts lie below the least normal float32 leave up to 2^-134 more. Those from 2^128 - 2^119, which
    round to infinity, do not survive: their parts are infinite and NaN.
    """
    parts, rest = [], matrix
    for _ in range(count):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return parts


def inner_error(R: int, outputs: int, inputs: int, parts: int) -> float:
    """What `inner` is off by, with that many `halves` of P, in units of (sum_r |a_r||b_r|) * |P|.

    With S_ro = sum_i |b_ri P_oi|, the image sum_i b_ri P_oi in the accumulator is off by
        2^(1-9k) S_ro                 for the remainder after k < 3 parts
        chain * 2^-23 * 1.02 * S_ro   for the additions: `inputs` terms, and one for the running sum that enters each
                                      instruction (these take 8 or more terms), for every part
    where 1.02 stands for all parts: those after the first are added up first, while sums are at most 2^-8 + 2^-17 of
    S_ro, then the first, while they are at most 1 + 2^-7 + 2^-16 of it. Its product with a_ro has 32 bits and is exact
    in float64, where R * O of them are added up. Sum_ro |a_ro| S_ro is at most (sum_r |a_r||b_r|) * |P|. The last
    factors cover the growth of the sums while errors add up. What is too small for float32 comes on top:
    `inner_least`.
    """
    chain = inputs + triton.cdiv(inputs, 8)
    image = chain * _STEP * 1.02 * (1 + 2 * chain * _STEP) + (2.0 ** (1 - 9 * parts) if parts < 3 else 0.0)
    return float((image + R * outputs * _DOUBLE) * (1 + image) * 1.0001)


def inner_least(outputs: int, inputs: int, parts: int) -> float:
    """What `inner` is off by beside `inner_error` where numbers are too small, times sum_r |a_r| (1 + |b_r|).

    A term or a sum may vanish below 2^-126 at each of the additions, under every |a_ro|, of which |a_r| sqrt(O) is the
    most; and entries of P may lack 2^-134, under |a_r||b_r|.
    """
    return float(3 * parts * inputs * outputs**0.5 * _TINY)


@triton.jit(
    do_not_specialize=["a_unit", "a_row", "b_unit", "b_row", "count", "rows", "lanes", "outputs", "inputs", "parts"]
)
def _inner_kernel(
    a,
    b,
    matrices,
    out,
    a_unit,
    a_row,
    b_unit,
    b_row,
    count,
    rows,
    lanes,
    outputs,
    inputs,
    parts,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[tile, u * R + r] = sum over one tile of outputs o of a[u, r, o] * sum_{p, i} matrices[p, o, i] * b[u, r, i].

    One program per (tile of rows of all units, tile of outputs). Rows never mix, so a tile may hold rows of several
    units, and units of few rows fill their tiles as well. `count` rows are in all, of which `rows` make a unit; a has
    `lanes` lanes, the matrices have `outputs` rows and `inputs` lanes.
    """
    wide = inputs * _LANES
    tiles_r, tiles_o = tl.cdiv(count, BLOCK_R), tl.cdiv(outputs, BLOCK_O)
    # A group of row tiles goes through all tiles of outputs together: each of them shares the others' loads in L2.
    group = tl.program_id(0) // (GROUP * tiles_o)
    within = tl.program_id(0) % (GROUP * tiles_o)
    high = tl.minimum(tiles_r - group * GROUP, GROUP)  # the last group may be smaller
    tile_o = within // high
    row = (group * GROUP + within % high) * BLOCK_R + tl.arange(0, BLOCK_R)
    at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    unit, r = (row // rows).to(tl.int64), (row % rows).to(tl.int64)
    in_row = (row < count)[:, None]
    to_b = b + ((unit * b_unit + r * b_row) * _LANES)[:, None]
    to_p = matrices + (at_o.to(tl.int64) * inputs * _LANES)[:, None]
    in_p = (at_o < outputs)[:, None]

    # Blocks of all parts are one loop, so that the loads of a part overtake the products of the one before.
    blocks = tl.cdiv(wide, BLOCK_I)
    total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for step in range(parts * blocks):
        column = ((step % blocks) * BLOCK_I + tl.arange(0, BLOCK_I))[None, :]
        part = (step // blocks).to(tl.int64) * outputs * inputs * _LANES
        left = _load(to_b + column, in_row & (column < wide))
        right = _load(to_p + part + column, in_p & (column < wide))
        total = tl.dot(left, tl.trans(right), total)

    to_a = a + ((unit * a_unit + r * a_row) * _LANES)[:, None] + at_o[None, :]
    outer = tl.load(to_a, mask=in_row & (at_o < lanes * _LANES)[None, :], other=0.0)
    # The mask by lanes leaves wide loads; this one is for columns that a has and the matrices have not.
    outer = tl.where((at_o < outputs)[None, :], outer, 0.0)
    share = tl.sum(total.to(tl.float64) * outer.to(tl.float32).to(tl.float64), 1)
    tl.store(out + tile_o.to(tl.int64) * count + row, share, mask=row < count)


def inner_tiles(count: int, outputs: int) -> Tiles:
    """Large tiles, unless all rows or the outputs are fewer than one has. Rows are `high`, outputs `wide`."""
    high, wide = _fitted(count, INNER_TILES.high), _fitted(outputs, INNER_TILES.wide)
    if (high, wide) == INNER_TILES[1:3]:
        return INNER_TILES
    return Tiles(INNER_TILES.block, high, wide, 4, INNER_TILES.stages)


def inner(a: Tensor, b: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """<G_u, P> for every unit as (U,) float64, where P is the sum of `parts`, (O, I) each: `halves` of a matrix.

    `a` may have more columns than P has rows: they are ignored. Off by at most `inner_error` and `inner_least`, which
    count on parts that come largest first: they are added up last. The order of additions depends on shapes alone. Not
    finite where a unit is not, or where its image under P leaves the range of float32; other units stay as they are.
    """
    _check(a, b)
    if not parts:
        raise ValueError("there must be at least one part")
    (U, R, _), (outputs, inputs) = a.shape, parts[0].shape
    if any(p.shape != (outputs, inputs) or p.dtype != b.dtype or p.device != b.device for p in parts):
        raise ValueError("all parts must be of one shape, and of the factors' precision and device")
    if b.shape[2] != inputs or a.shape[2] < outputs:
        raise ValueError(f"parts {(outputs, inputs)} do not fit factors {tuple(a.shape)} and {tuple(b.shape)}")
    if not U * R * outputs * inputs:
        return torch.zeros(U, dtype=torch.float64, device=a.device)
    a, b = aligned(a), aligned(b)
    wide = b.shape[2]
    stack = b.new_empty(len(parts), outputs, wide)
    stack[:, :, inputs:] = 0
    for place, part in zip(stack, reversed(parts), strict=True):
        place[:, :inputs] = part
    tiles = inner_tiles(U * R, outputs)
    high = triton.cdiv(outputs, tiles.wide)
    # Two programs share a processor's 2^16 registers: one reduces while the other multiplies. Compiled for sm_90, the
    # loop fits without spilling; some of the reduction's numbers spill.
    most = {"maxnreg": 128} if tiles == INNER_TILES else {}
    shares = torch.empty(high, U, R, dtype=torch.float64, device=a.device)
    with torch.cuda.device_of(a):
        _inner_kernel[(triton.cdiv(U * R, tiles.high) * high,)](
            a,
            b,
            stack,
            shares,
            *_strides(a),
            *_strides(b),
            U * R,
            R,
            a.shape[2] // LANES,
            outputs,
            wide // LANES,
            len(parts),
            BLOCK_R=tiles.high,
            BLOCK_O=tiles.wide,
            BLOCK_I=tiles.block,
            GROUP=_GROUP,
            **_launch(tiles),
            **most,
        )
    return shares.sum((0, 2))


def inner_slowly(a: Tensor, b: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The twin of `inner`, in float64."""
    matrix = torch.stack([p.double() for p in parts]).sum(0)
    return ((b.double() @ matrix.T) * a[:, :, : len(matrix)].double()).sum((1, 2))
