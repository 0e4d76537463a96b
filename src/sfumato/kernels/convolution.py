"""Per-unit weight gradients of a 2-d convolution, as an implicit matrix product: no patches are ever written.

    out[u, o, i, j, c] = sum over rows n of unit u, positions (h, w), of
                         dy[n, o, h, w] * x[n, c, h * stride + i * dilation - padding, w * stride + ...]

Shapes: N rows, units of N / units consecutive rows each (the fold), CO outputs, CI inputs, kernel (kh, kw).
Everything lies channels last, so that a position's channels are next to each other, in x, in dy and in the result.

Several parts are several pairs (x, dy) whose rows belong to the same units and whose gradients add up, such as the
passes of a batch at several weights. They are added inside one contraction, so that the result is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sfumato.kernels import INTERPRETED
from sfumato.kernels.configurations import FLAT_BELOW, LEAST, Pair, configuration

ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _operand(base, part, offset, ELEMENT: tl.constexpr, PARTS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a unit's numbers begin: `base` is the only part itself, or a table of the parts' addresses."""
    if PARTS == 1:
        start = base
    else:
        # An address out of memory says nothing of its alignment, and without that every load is of one number.
        start = tl.multiple_of(tl.load(base + part).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
    return start + offset


@triton.jit
def _below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """index < SIZE; a constant, which the compiler drops from the loads, where blocks fit exactly."""
    if SIZE % BLOCK == 0:
        inside = tl.full(index.shape, True, tl.int1)
    else:
        inside = index < SIZE
    return inside


@triton.jit
def _within(index, SIZE: tl.constexpr, PADDING: tl.constexpr):
    """Whether a coordinate of x is inside the image; without padding it always is."""
    if PADDING == 0:
        inside = tl.full(index.shape, True, tl.int1)
    else:
        inside = (index >= 0) & (index < SIZE)
    return inside


@triton.jit
def _accumulate(dy, x, sums, WIDEN: tl.constexpr):
    """sums + dy' x. WIDEN is for the interpreter, which cannot multiply bfloat16; the products are the same."""
    if WIDEN:
        dy = dy.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(tl.trans(dy), x, sums, input_precision="tf32x3" if x.dtype == tl.float32 else None)


@triton.jit
def _by_taps(
    x_base, dy_base, out,
    ELEMENT: tl.constexpr, PARTS: tl.constexpr, ALIGNMENT: tl.constexpr, WIDEN: tl.constexpr, FOLD: tl.constexpr,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """One program per (unit, group of taps, tile of outputs, tile of inputs), a unit's programs side by side.

    They run at the same time, so the unit's x and dy come from memory once and from the cache afterwards. The taps of
    a group lie beside each other in a kernel row and share every load of dy.
    """
    TILES_OUT: tl.constexpr = (CO + BLOCK_OUT - 1) // BLOCK_OUT
    TILES_IN: tl.constexpr = (CI + BLOCK_IN - 1) // BLOCK_IN
    TILES: tl.constexpr = TILES_OUT * TILES_IN * (KH * KW // TAPS)
    POSITIONS: tl.constexpr = FOLD * HO * WO
    BLOCKS: tl.constexpr = (POSITIONS + BLOCK - 1) // BLOCK

    program = tl.program_id(0)
    unit = (program // TILES).to(tl.int64)
    tile = program % TILES
    tap = tile // (TILES_OUT * TILES_IN) * TAPS
    o = (tile // TILES_IN) % TILES_OUT * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    c = tile % TILES_IN * BLOCK_IN + tl.arange(0, BLOCK_IN)
    o_inside, c_inside = _below(o, CO, BLOCK_OUT), _below(c, CI, BLOCK_IN)
    i = tap // KW
    j = tap % KW

    first = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    if TAPS == 3:
        second = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        third = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for step in range(PARTS * BLOCKS):
        x = _operand(x_base, step // BLOCKS, unit * (FOLD * H * W * CI), ELEMENT, PARTS, ALIGNMENT)
        dy = _operand(dy_base, step // BLOCKS, unit * (POSITIONS * CO), ELEMENT, PARTS, ALIGNMENT)
        p = (step if PARTS == 1 else step % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        p_inside = _below(p, POSITIONS, BLOCK)
        a = tl.load(dy + (p * CO)[:, None] + o[None, :], mask=p_inside[:, None] & o_inside[None, :], other=0.0)

        row = p // (HO * WO)
        h = (p // WO) % HO * SH + i * DH - PH
        w = p % WO * SW + j * DW - PW
        place = ((row * H + h) * W + w) * CI
        inside = p_inside & _within(h, H, PH)
        mask = (inside & _within(w, W, PW))[:, None] & c_inside[None, :]
        b = tl.load(x + place[:, None] + c[None, :], mask=mask, other=0.0)
        first = _accumulate(a, b, first, WIDEN)
        if TAPS == 3:
            mask = (inside & _within(w + DW, W, PW))[:, None] & c_inside[None, :]
            b = tl.load(x + (place + DW * CI)[:, None] + c[None, :], mask=mask, other=0.0)
            second = _accumulate(a, b, second, WIDEN)
            mask = (inside & _within(w + 2 * DW, W, PW))[:, None] & c_inside[None, :]
            b = tl.load(x + (place + 2 * DW * CI)[:, None] + c[None, :], mask=mask, other=0.0)
            third = _accumulate(a, b, third, WIDEN)

    to = out + unit * (CO * KH * KW * CI) + (o[:, None] * (KH * KW) + tap) * CI + c[None, :]
    mask = o_inside[:, None] & c_inside[None, :]
    tl.store(to, first, mask=mask)
    if TAPS == 3:
        tl.store(to + CI, second, mask=mask)
        tl.store(to + 2 * CI, third, mask=mask)


@triton.jit
def _flat(
    x_base, dy_base, out,
    ELEMENT: tl.constexpr, PARTS: tl.constexpr, ALIGNMENT: tl.constexpr, WIDEN: tl.constexpr, FOLD: tl.constexpr,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The same for few input channels: one side of the product runs over taps and channels together, as out does."""
    SIZE: tl.constexpr = KH * KW * CI
    TILES_OUT: tl.constexpr = (CO + BLOCK_OUT - 1) // BLOCK_OUT
    TILES_IN: tl.constexpr = (SIZE + BLOCK_IN - 1) // BLOCK_IN
    POSITIONS: tl.constexpr = FOLD * HO * WO
    BLOCKS: tl.constexpr = (POSITIONS + BLOCK - 1) // BLOCK

    program = tl.program_id(0)
    unit = (program // (TILES_OUT * TILES_IN)).to(tl.int64)
    o = (program // TILES_IN) % TILES_OUT * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    f = program % TILES_IN * BLOCK_IN + tl.arange(0, BLOCK_IN)
    o_inside, f_inside = _below(o, CO, BLOCK_OUT), _below(f, SIZE, BLOCK_IN)
    i = f // (KW * CI)
    j = (f // CI) % KW
    c = f % CI

    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for step in range(PARTS * BLOCKS):
        x = _operand(x_base, step // BLOCKS, unit * (FOLD * H * W * CI), ELEMENT, PARTS, ALIGNMENT)
        dy = _operand(dy_base, step // BLOCKS, unit * (POSITIONS * CO), ELEMENT, PARTS, ALIGNMENT)
        p = (step if PARTS == 1 else step % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        p_inside = _below(p, POSITIONS, BLOCK)
        a = tl.load(dy + (p * CO)[:, None] + o[None, :], mask=p_inside[:, None] & o_inside[None, :], other=0.0)

        row = p // (HO * WO)
        h = ((p // WO) % HO * SH - PH)[:, None] + (i * DH)[None, :]
        w = (p % WO * SW - PW)[:, None] + (j * DW)[None, :]
        mask = p_inside[:, None] & f_inside[None, :] & _within(h, H, PH) & _within(w, W, PW)
        b = tl.load(x + ((row[:, None] * H + h) * W + w) * CI + c[None, :], mask=mask, other=0.0)
        sums = _accumulate(a, b, sums, WIDEN)
    to = out + unit * (CO * SIZE) + o[:, None] * SIZE + f[None, :]
    tl.store(to, sums, mask=o_inside[:, None] & f_inside[None, :])


def fits(
    x: Sequence[Tensor], dy: Sequence[Tensor], *, units: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Whether the kernel takes these: 2-d, groups 1, one of three dtypes, parts of one shape.

    Offsets inside a unit are 32-bit integers, so a unit of 2^31 numbers is too large; so is a grid of 2^31 programs.
    """
    shapes = {(a.shape, a.dtype, b.shape, b.dtype) for a, b in zip(x, dy, strict=True)}
    if len(shapes) != 1 or x[0].ndim != 4 or x[0].dtype not in ELEMENTS or x[0].dtype != dy[0].dtype:
        return False
    (N, CI, *inside), (rows, CO, *outside) = x[0].shape, dy[0].shape
    expected = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(inside, kernel, stride, padding, dilation, strict=True)
    ]
    if rows != N or outside != expected or (units and N % units):
        return False
    size = kernel[0] * kernel[1] * CI
    largest = max(CO * size * units, x[0].numel(), dy[0].numel()) // max(1, units)
    return largest < 2**31 and units * triton.cdiv(CO, LEAST) * size < 2**31


def weight_gradients(
    x: Sequence[Tensor], dy: Sequence[Tensor], *, units: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The gradients above, (units, CO, kh, kw, CI) in float32, of parts x[k] (N, CI, H, W) and dy[k] (N, CO, HO, WO).

    Accumulated in float32. A product of float32 factors is three of TF32, about as exact as float32's own.
    Nothing that is compiled depends on the number of units, which a Poisson batch draws anew each step.
    """
    N, CI, H, W = x[0].shape
    CO, HO, WO = dy[0].shape[1:]
    out = torch.empty(units, CO, *kernel, CI, dtype=torch.float32, device=x[0].device)
    if units == 0:
        return out
    x, dy = ([t.contiguous(memory_format=torch.channels_last) for t in ts] for ts in (x, dy))
    fold = N // units
    c = configuration(CI, CO, kernel, stride, x[0].dtype, fold * HO * WO)
    flat = CI < FLAT_BELOW
    columns = triton.cdiv(kernel[0] * kernel[1] * CI, c.block_in) if flat else triton.cdiv(CI, c.block_in)
    groups = 1 if flat else kernel[0] * kernel[1] // c.taps
    grid = (units * triton.cdiv(CO, c.block_out) * columns * groups,)
    # A load whose address is loaded has half the stages: the pipeline runs ahead for the address, then for the numbers.
    stages = c.stages if len(x) == 1 else 2 * c.stages - 1
    with torch.cuda.device_of(out):
        (_flat if flat else _by_taps)[grid](
            _addresses(x), _addresses(dy), out,
            ELEMENTS[x[0].dtype], len(x), _alignment([*x, *dy]), INTERPRETED, fold,
            CI, H, W, CO, HO, WO, *kernel, *stride, *padding, *dilation,
            c.block_out, c.block_in, c.block_positions, c.taps,
            num_warps=c.warps, num_stages=stages,
        )  # fmt: skip
    return out


@triton.jit
def _write_addresses(table_ptr, p0, p1, p2, p3, p4, p5, p6, p7):
    tl.store(table_ptr + 0, p0.to(tl.int64))
    tl.store(table_ptr + 1, p1.to(tl.int64))
    tl.store(table_ptr + 2, p2.to(tl.int64))
    tl.store(table_ptr + 3, p3.to(tl.int64))
    tl.store(table_ptr + 4, p4.to(tl.int64))
    tl.store(table_ptr + 5, p5.to(tl.int64))
    tl.store(table_ptr + 6, p6.to(tl.int64))
    tl.store(table_ptr + 7, p7.to(tl.int64))


def _addresses(parts: Sequence[Tensor]) -> Tensor:
    """The only part itself, or a table of where the parts lie.

    Written by a kernel: a copy from the host would wait for the GPU, and could not be replayed in a CUDA graph.
    """
    if len(parts) == 1:
        return parts[0]
    if INTERPRETED:  # which cannot turn a pointer into a number
        return torch.tensor([t.data_ptr() for t in parts])
    width = 8
    rounded = -(-len(parts) // width) * width
    table = torch.empty(rounded, dtype=torch.int64, device=parts[0].device)
    whole = [*parts, *[parts[-1]] * (rounded - len(parts))]
    for start in range(0, rounded, width):
        _write_addresses[(1,)](table[start:], *whole[start : start + width])
    return table


def _alignment(tensors: Sequence[Tensor]) -> int:
    """Bytes that divide every address: 16, the widest load, or what a single number needs."""
    return 16 if all(t.data_ptr() % 16 == 0 for t in tensors) else tensors[0].element_size()


def weight_gradients_slowly(
    x: Sequence[Tensor], dy: Sequence[Tensor], *, units: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The twin of `weight_gradients`, from patches; in float64 if that is given, else in float32."""
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    CI, CO = x[0].shape[1], dy[0].shape[1]
    out = torch.zeros(units, CO, CI, *kernel, dtype=dtype, device=x[0].device)
    for a, b in zip(x, dy, strict=True):
        patches = F.unfold(a.to(dtype), kernel, dilation, padding, stride)
        patches, b = (t.to(dtype).reshape(units, len(a) // units, t.shape[1], -1) for t in (patches, b))
        out += torch.einsum("ufor,ufkr->uok", b, patches).reshape(out.shape)
    return out.permute(0, 1, 3, 4, 2).contiguous()
