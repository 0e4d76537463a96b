"""Norms and weighted sums of instantiated gradients, one pass over memory each.

Shapes: U units, each with a gradient of O rows of F numbers (a filter each), in float32. A row may be mapped before its
norm is taken: through the transposed Jacobian of weight standardisation, around an origin, and scaled:

    m = s_o (g - mean(g) - u_o <g, u_o>)   or   m = g;       v = scale * (m - origin).

A norm bounds what a unit adds to a private sum, so it must not come out too small: it is an upper bound on the value
that exact arithmetic on the stored numbers gives. Sums over at most a block are in float32, everything beyond in
float64, which needs no bound beside float32's.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.kernels.configurations import power_of_two

ROUNDING = 2.0**-24
"""The relative error of one float32 operation."""

TINY = torch.finfo(torch.float32).tiny
"""The least normal float32: the absolute error of an operation whose result is too small for the format."""

CHAIN = 16 + 10
"""Additions that any one number of a block passes through in a float32 sum over the block.

A block has at most 16 numbers per thread (`_warps`), added up one after the other; at most 16 warps of 32 threads are
then joined by a tree of 9. NumPy, which is the interpreter, adds 16 in each of 8 lanes, and joins those by a tree of 9.
One more is for the rounding of the terms. Then a sum is wrong by at most CHAIN * ROUNDING * (sum of absolute values).
"""

INFLATION = (CHAIN + 6) * ROUNDING
"""Relative error of a float32 sum of v^2 over a block, where v is one difference and one product of stored numbers.

Either is rounded once, so it is wrong by ROUNDING relative to its own result: stored numbers bring no error that could
be large beside a small difference. Squaring doubles that and rounds again; all terms are positive, so the sum adds
CHAIN * ROUNDING relative to itself. What is left is for second order.
"""

DOUBT = 1.01 * ROUNDING
"""The error of a standardised row beside that, in the units that `_standardised` counts; a percent for second order."""

BLOCK = 4096
"""Numbers in a program's tile. Standardised rows need their mean first: they are read at once up to LONGEST."""

LONGEST = 8192

TOGETHER = 8
"""Units that a weighted sum reads at once."""


@triton.jit(do_not_specialize=["units"])
def _plain(
    rows, origin, scale, out, units, size,
    HAS_ORIGIN: tl.constexpr, HAS_SCALE: tl.constexpr, INFLATION: tl.constexpr, LEAST: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """|scale * (g - origin)|^2 over one block of `size` numbers, inflated, for a few units."""
    blocks = tl.cdiv(size, BLOCK)
    u = tl.program_id(0) // blocks * UNITS + tl.arange(0, UNITS)
    p = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = (u < units)[:, None] & (p < size)[None, :]
    v = tl.load(rows + u.to(tl.int64)[:, None] * size + p[None, :], mask=mask, other=0.0)
    if HAS_ORIGIN:
        v -= tl.load(origin + p, mask=p < size, other=0.0)[None, :]
    if HAS_SCALE:
        v *= tl.load(scale + p, mask=p < size, other=0.0)[None, :]
    squared = tl.sum(v * v, axis=1).to(tl.float64)
    to = out + u.to(tl.int64) * blocks + tl.program_id(0) % blocks
    tl.store(to, squared + squared * INFLATION + LEAST, mask=u < units)


@triton.jit(do_not_specialize=["count"])
def _standardised(
    rows, directions, scales, origin, scale, lengths, out, along, count,
    OUT: tl.constexpr, F: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_SCALE: tl.constexpr,
    DOUBT: tl.constexpr, CHAIN: tl.constexpr, INFLATION: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An upper bound on |v|^2, and <g, u_o>, for a few whole rows.

    |v| is wrong by roundings relative to itself, and by more where the mean or the projection cancel most of g. With
    e = ROUNDING, c = CHAIN and D the scale as a diagonal matrix, as lengths of vectors over the row, v / s is wrong by
        (c + 1) e |g| |D 1| / sqrt(F)   from summing and rounding the mean
        (c + 1) e |g| |u| |D u|         from summing and rounding <g, u>
        3 e |g| (1 + |u|^2) max |D|     from each number less the mean, less its part along u (or that part), times s
    and every operation may lose up to TINY where numbers are too small.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = row % OUT
    live = (row < count)[:, None]
    total = tl.zeros([ROWS], tl.float64)
    inner = tl.zeros([ROWS], tl.float64)
    square = tl.zeros([ROWS], tl.float64)
    for start in tl.static_range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)[None, :]
        g = tl.load(rows + row.to(tl.int64)[:, None] * F + f, mask=live & (f < F), other=0.0)
        u = tl.load(directions + o[:, None] * F + f, mask=live & (f < F), other=0.0)
        total += tl.sum(g, axis=1).to(tl.float64)
        inner += tl.sum(g * u, axis=1).to(tl.float64)
        square += tl.sum(g * g, axis=1).to(tl.float64)
    mean = (total / F).to(tl.float32)
    a = inner.to(tl.float32)
    s = tl.load(scales + o)
    squared = tl.zeros([ROWS], tl.float64)
    for start in tl.static_range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)[None, :]
        mask = live & (f < F)
        at = o[:, None] * F + f
        if F > BLOCK:  # otherwise they are still there
            g = tl.load(rows + row.to(tl.int64)[:, None] * F + f, mask=mask, other=0.0)
            u = tl.load(directions + at, mask=mask, other=0.0)
        v = s[:, None] * (g - mean[:, None] - u * a[:, None])
        if HAS_ORIGIN:
            v -= tl.load(origin + at, mask=mask, other=0.0)
        if HAS_SCALE:
            v *= tl.load(scale + at, mask=mask, other=0.0)
        v = tl.where(mask, v, 0.0)
        squared += tl.sum(v * v, axis=1).to(tl.float64)
    size = tl.abs(s).to(tl.float64)
    length = tl.load(lengths + o).to(tl.float64)
    sums = 1 + length * length
    single = 1 + length * length
    if HAS_SCALE:
        sums = tl.load(lengths + OUT + o).to(tl.float64) + length * tl.load(lengths + 2 * OUT + o).to(tl.float64)
        single *= tl.load(lengths + 3 * OUT + o).to(tl.float64)
    bound = tl.sqrt(squared + squared * INFLATION + LEAST)
    bound += DOUBT * size * ((CHAIN + 1) * sums + 3 * single) * tl.sqrt(square + square * INFLATION + LEAST)
    bound += 4 * LEAST * (1 + size) * (1 + single) * (1 + length)
    tl.store(out + row, bound * bound, mask=row < count)
    tl.store(along + row, a, mask=row < count)


@triton.jit(do_not_specialize=["units", "steps"])
def _weighted(rows, factors, out, units, steps, size, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """sum_u factors[u] * rows[u] over one block of columns and `steps` times UNITS units."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.program_id(1) * steps * UNITS
    end = start + steps * UNITS
    total = tl.zeros([BLOCK], tl.float64)
    while start < end:  # the interpreter cannot count to a number it is given
        u = start + tl.arange(0, UNITS)
        factor = tl.load(factors + u, mask=u < units, other=0.0)
        # Not loaded, rather than multiplied by zero: a unit without weight may hold NaN.
        mask = (factor != 0.0)[:, None] & (p < size)[None, :]
        g = tl.load(rows + u.to(tl.int64)[:, None] * size + p[None, :], mask=mask, other=0.0)
        total += tl.sum(g.to(tl.float64) * factor[:, None], axis=0)
        start += UNITS
    tl.store(out + tl.program_id(1).to(tl.int64) * size + p, total, mask=p < size)


def squared_norms(
    rows: Tensor,
    *,
    origin: Tensor | None = None,
    scale: Tensor | None = None,
    standardised: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Upper bounds (U,) float64 on sum_o |v_o|^2, above by a few 1e-6; and <g, u_o>, (U, O), for standardised rows.

    rows (U, O, F); origin and scale (O, F); standardised: directions u (O, F) and scales s (O,); all float32. A unit
    with a number that is not finite, or whose square is not, has a bound that is not finite.
    """
    if standardised is not None:
        return _standardised_norms(rows, origin, scale, *standardised)
    U, size = len(rows), rows.shape[1] * rows.shape[2]
    block = min(BLOCK, power_of_two(size))
    units, blocks = BLOCK // block, triton.cdiv(size, block)
    out = torch.empty(U, blocks, dtype=torch.float64, device=rows.device)
    with torch.cuda.device_of(rows):
        _plain[(triton.cdiv(U, units) * blocks,)](
            rows.contiguous(), *_given(rows, origin, scale), out, U, size,
            origin is not None, scale is not None, INFLATION, 2 * block * TINY,
            units, block, num_warps=_warps(units * block),
        )  # fmt: skip
    return out.sum(1), None


def _standardised_norms(
    rows: Tensor, origin: Tensor | None, scale: Tensor | None, directions: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    U, outputs, F = rows.shape
    block = min(LONGEST, power_of_two(F))
    several = max(1, min(16, BLOCK // 2 // block))
    warps = _warps(block) if several == 1 else 4
    out = torch.empty(U, outputs, dtype=torch.float64, device=rows.device)
    along = torch.empty(U, outputs, dtype=torch.float32, device=rows.device)
    lengths = torch.linalg.vector_norm(directions, dim=1)
    if scale is not None:
        even = torch.linalg.vector_norm(scale, dim=1) / F**0.5
        slanted = torch.linalg.vector_norm(scale * directions, dim=1)
        lengths = torch.stack([lengths, even, slanted, scale.abs().amax(1)])
    with torch.cuda.device_of(rows):
        _standardised[(triton.cdiv(U * outputs, several),)](
            rows.contiguous(), directions.contiguous(), scales.contiguous(),
            *_given(rows, origin, scale), lengths,
            out, along, U * outputs, outputs, F, origin is not None, scale is not None,
            DOUBT, CHAIN, INFLATION, 2 * F * TINY, several, block, num_warps=warps,
        )  # fmt: skip
    return out.sum(1), along


def weighted_sum(rows: Tensor, factors: Tensor) -> Tensor:
    """sum_u factors[u] * rows[u] in float64, of rows (U, ...) float32 and factors (U,) float64.

    A row whose factor is exactly 0 is never read, so it adds nothing, whatever it holds. The order of additions depends
    on the shape alone.
    """
    U, size = len(rows), math.prod(rows.shape[1:])
    block = min(512, power_of_two(size))
    blocks = triton.cdiv(size, block)
    # Enough programs to keep a large GPU reading: where there are few columns, the units are split as well.
    splits = max(1, min(1024 // max(1, blocks), triton.cdiv(U, 64)))
    steps = triton.cdiv(U, splits * TOGETHER)
    out = torch.empty(splits, size, dtype=torch.float64, device=rows.device)
    if size:
        with torch.cuda.device_of(rows):
            _weighted[blocks, splits](
                rows.contiguous(), factors.double().contiguous(), out, U, steps, size, TOGETHER, block, num_warps=4
            )
    return out.sum(0).reshape(rows.shape[1:])


def _warps(tile: int) -> int:
    """The fewest threads of which none holds more than 16 numbers of a tile; CHAIN counts on no more."""
    return max(1, min(16, tile // 512))


def _given(rows: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Contiguous tensors to point at; `rows` stands in for one that is not given and never read."""
    return [rows if t is None else t.contiguous() for t in tensors]


def squared_norms_slowly(
    rows: Tensor,
    *,
    origin: Tensor | None = None,
    scale: Tensor | None = None,
    standardised: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The twin of `squared_norms`, in float64, without inflation."""
    v, along = rows.double(), None
    if standardised is not None:
        u, s = (t.double() for t in standardised)
        along = (v * u).sum(2)
        v = s[:, None] * (v - v.mean(2, keepdim=True) - u * along[:, :, None])
    if origin is not None:
        v = v - origin.double()
    if scale is not None:
        v = v * scale.double()
    return v.square().sum((1, 2)), along


def weighted_sum_slowly(rows: Tensor, factors: Tensor) -> Tensor:
    """The twin of `weighted_sum`."""
    live = factors != 0
    total: Tensor = torch.tensordot(factors[live].double(), rows[live].double(), 1)
    return total
