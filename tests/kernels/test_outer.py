"""The kernels of factored gradients against their twins: bounds that hold and are tight, sums that skip and round well.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1) on tiny shapes.
"""

import pytest
import torch
from torch import Tensor

from sfumato import kernels

CUDA = torch.cuda.is_available()
if not kernels.INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not CUDA and not kernels.INTERPRETED:
    pytest.skip("neither a GPU nor Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from sfumato.kernels import inner, outer  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.bfloat16, torch.float16)
# U, R, O, I: one row, fewer rows than a tile, a tile, two tiles, more; widths on and off the grid of 16 bytes.
SHAPES = ((1, 1, 7, 9), (4, 1, 16, 8), (2, 5, 7, 50), (3, 16, 16, 32), (4, 17, 40, 9), (2, 33, 24, 13), (1, 70, 8, 8))


def rows(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (size * values).to(dtype).to(DEVICE)


def factors_for(U: int) -> Tensor:
    return torch.linspace(0.1, 1.0, U, dtype=torch.float64, device=DEVICE) / 3


def doubt(a: Tensor, b: Tensor) -> Tensor:
    """The most that a bound may exceed the exact squared norm by: once for what is added, once for what is off."""
    wide = [-(-x.shape[2] // outer.LANES) * outer.LANES for x in (a, b)]
    gram_a, gram_b = (x.double() @ x.double().transpose(1, 2) for x in (a, b))
    lengths = (torch.diagonal(g, dim1=1, dim2=2).sqrt() for g in (gram_a, gram_b))
    off_a, off_b = (
        outer.error_bound(k) * x.unsqueeze(1) * x.unsqueeze(2) + outer.least_bound(k)
        for k, x in zip(wide, lengths, strict=True)
    )
    # The rest is for rows beyond the last that share its tile: they are 0, but their products may be off by the least.
    return 2.01 * (off_a * (gram_b.abs() + off_b) + off_b * gram_a.abs()).sum((1, 2)) + 1e-60


def assert_bounds(a: Tensor, b: Tensor) -> Tensor:
    """All three results are float64 upper bounds, and tight; returns the first."""
    found, exact = outer.squared_norms(a, b), outer.squared_norms_slowly(a, b)
    for bound, value in zip(found, exact, strict=True):
        assert bound.dtype == torch.float64
        assert bound.shape == (len(a),)
        assert (bound >= value).all()
    assert (found[0] <= exact[0] + doubt(a, b)).all()
    for bound, value in zip(found[1:], exact[1:], strict=True):
        assert (bound <= value * (1 + 1e-6) + 1e-30).all()
    return found[0]


def assert_sums(a: Tensor, b: Tensor, factors: Tensor) -> None:
    found, exact = outer.weighted_sum(a, b, factors), outer.weighted_sum_slowly(a, b, factors)
    most = outer.weighted_sum_slowly(a.abs(), b.abs(), factors.abs())
    assert found.dtype == torch.float64
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= 1e-5 * most + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_bounded_tightly(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    U, R, O, I = shape  # noqa: E741
    assert_bounds(rows(U, R, O, dtype=dtype), rows(U, R, I, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_agree(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    U, R, O, I = shape  # noqa: E741
    assert_sums(rows(U, R, O, dtype=dtype), rows(U, R, I, dtype=dtype, seed=1), factors_for(U))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_nearly_exact(dtype: torch.dtype) -> None:
    a, b = rows(4, 1, 40, dtype=dtype), rows(4, 1, 50, dtype=dtype, seed=1)
    torch.testing.assert_close(outer.squared_norms(a, b)[0], outer.squared_norms_slowly(a, b)[0], rtol=1e-5, atol=0)


def test_large_tiles_and_several_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "_processors", lambda device: 1)
    assert outer.gram_tiles(1, 150, 1) == outer.GRAM_TILES
    a, b = rows(1, 150, 24, dtype=torch.bfloat16), rows(1, 150, 200, dtype=torch.bfloat16, seed=1)
    assert_bounds(a, b)
    assert_sums(a, b, factors_for(1))


def test_every_pair_of_tiles_counts_once() -> None:
    """Rows with one entry in a column of their own: |G|^2 is the number of rows, and any pair too many would show."""
    R = 130  # three tiles of rows
    alone = torch.eye(R, dtype=torch.bfloat16, device=DEVICE).unsqueeze(0)
    same = torch.ones(1, R, 8, dtype=torch.bfloat16, device=DEVICE)
    assert outer.squared_norms(alone, same)[0].item() == pytest.approx(8 * R, rel=1e-2)
    assert outer.squared_norms(same, same)[0].item() == pytest.approx(64 * R**2, rel=1e-4)


def test_long_rows_are_added_in_blocks() -> None:
    """Long sums of numbers of one sign, which lose most to rounding."""
    a, b = rows(1, 3, 3000, dtype=torch.bfloat16).abs(), rows(1, 3, 700, dtype=torch.bfloat16, seed=1).abs()
    assert_bounds(a, b)
    assert outer.error_bound(50257) < 1e-4 < 50257 * 2.0**-23


@pytest.mark.parametrize("dtype", DTYPES)
def test_cancelling_rows(dtype: torch.dtype) -> None:
    """a_2 = -a_1 with the same b: the gradient is 0, and the bound must be small beside the rows, yet not below 0."""
    a, b = rows(2, 1, 40, dtype=dtype), rows(2, 1, 50, dtype=dtype, seed=1)
    a, b = torch.cat([a, -a] * 4, 1), torch.cat([b, b] * 4, 1)
    bound = assert_bounds(a, b)
    assert (bound <= 1e-3 * outer.squared_norms_slowly(a, b)[2].square()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_aligned_rows(dtype: torch.dtype) -> None:
    a, b = (rows(2, 1, k, dtype=dtype, seed=k).expand(2, 20, k) for k in (40, 50))
    bound = assert_bounds(a, b)
    torch.testing.assert_close(bound, outer.squared_norms_slowly(a, b)[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("sizes", [(1e-20, 1e-20), (1e-38, 1.0), (1e-30, 1e15), (1e15, 1e15), (1e-39, 1e-39)])
def test_huge_and_tiny_rows(sizes: tuple[float, float]) -> None:
    """Inner products that vanish in float32, and norms beyond its range that are bounded all the same."""
    a, b = rows(2, 9, 24, dtype=torch.bfloat16, size=sizes[0]), rows(2, 9, 13, dtype=torch.bfloat16, size=sizes[1])
    assert assert_bounds(a, b).isfinite().all()


def test_tiny_and_huge_rows_in_one_unit() -> None:
    a, b = rows(1, 18, 24, dtype=torch.bfloat16), rows(1, 18, 13, dtype=torch.bfloat16, seed=1)
    sizes = torch.tensor([1e-30, 1.0, 1e12], device=DEVICE).repeat(6)[:, None]
    assert_bounds((a * sizes).bfloat16(), b)
    assert_bounds((a * sizes).bfloat16(), (b * sizes.flip(0)).bfloat16())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, where it is the interpreter
def test_a_unit_that_is_not_finite_spoils_only_itself() -> None:
    a, b = rows(3, 5, 16, dtype=torch.bfloat16), rows(3, 5, 16, dtype=torch.bfloat16, seed=1)
    clean = outer.squared_norms(a, b)[0]
    a[1, 2, 3] = float("nan")
    b[2, 0, 0] = float("inf")
    found = outer.squared_norms(a, b)[0]
    assert found[0] == clean[0]
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize("R", [1, 5, 70, 130])
def test_a_unit_with_factor_zero_adds_nothing(R: int) -> None:
    """Whatever it holds: also NaN, which 0 would not silence."""
    a, b = rows(4, R, 24, dtype=torch.bfloat16), rows(4, R, 13, dtype=torch.bfloat16, seed=1)
    factors = factors_for(4)
    factors[[0, 2]] = 0
    expected = outer.weighted_sum_slowly(a, b, factors)
    clean = outer.weighted_sum(a, b, factors)
    a[0], b[0] = float("nan"), float("inf")
    a[2], b[2] = float("-inf"), float("nan")
    found = outer.weighted_sum(a, b, factors)
    assert torch.equal(found, clean)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(outer.weighted_sum_slowly(a, b, factors), expected)
    assert not outer.weighted_sum(a, b, torch.zeros_like(factors)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_are_not_rounded_to_the_rows_precision(dtype: torch.dtype) -> None:
    a, b = rows(3, 1, 16, dtype=dtype), rows(3, 1, 16, dtype=dtype, seed=1)
    for unit, factor in enumerate((1 / 3, 0.7071, 1e-5)):
        factors = torch.zeros(3, dtype=torch.float64, device=DEVICE)
        factors[unit] = factor
        expected = factor * torch.outer(a[unit, 0].double(), b[unit, 0].double())
        torch.testing.assert_close(outer.weighted_sum(a, b, factors), expected, rtol=1e-6, atol=0)


def test_steps_split_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a unit, and with a last program that has less to do."""
    a, b = rows(3, 200, 24, dtype=torch.bfloat16), rows(3, 200, 13, dtype=torch.bfloat16, seed=1)
    for parts in (1, 5, 12):
        monkeypatch.setattr(outer, "splits", lambda *sizes, parts=parts: parts)
        assert_sums(a, b, factors_for(3))


def test_more_tiles_than_a_group() -> None:
    a, b = rows(1, 3, 1170, dtype=torch.float16), rows(1, 3, 140, dtype=torch.float16, seed=1)
    assert_sums(a, b, factors_for(1))


def test_views_with_any_strides() -> None:
    dtype = torch.bfloat16
    a, b = rows(5, 3, 24, dtype=dtype).transpose(0, 1), rows(3, 24, 5, dtype=dtype, seed=1).transpose(1, 2)
    assert outer.aligned(a) is a
    assert outer.aligned(b) is not b
    sliced = rows(3, 5, 40, dtype=dtype, seed=2)
    for x in (a, b, sliced[:, :, 8:24], sliced[:, :, 3:20], a[:, :1].expand(3, 5, 24)):
        assert_bounds(x, a)
        assert_sums(b, x, factors_for(3))


def test_padding_is_zero_and_done_once() -> None:
    x = rows(2, 3, 13, dtype=torch.float16)
    padded = outer.aligned(x)
    assert padded.shape == (2, 3, 16)
    assert torch.equal(padded[:, :, :13], x)
    assert not padded[:, :, 13:].any()
    assert outer.aligned(padded) is padded


def test_nothing_to_sum() -> None:
    a, b = (torch.zeros(0, 3, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    assert all(x.shape == (0,) for x in outer.squared_norms(a, b))
    found = outer.weighted_sum(a, b, torch.zeros(0, dtype=torch.float64, device=DEVICE))
    assert found.shape == (8, 8)
    assert not found.any()


def test_splits_fill_the_processors() -> None:
    for tiles, steps in ((36, 512), (108, 512), (144, 512), (2358, 512)):
        parts = outer.splits(tiles, steps, 768 * 768, 132)
        whole, waves = -(-steps // parts), -(-tiles * parts // 132)
        assert tiles * steps >= 0.8 * 132 * whole * waves
    assert outer.splits(1, 3, 64, 132) <= 3
    assert outer.splits(36, 512, 2**30, 132) == 1


def test_other_precisions_are_refused() -> None:
    x = torch.zeros(1, 2, 8, device=DEVICE)
    for a, b in ((x, x), (x.half(), x.bfloat16())):
        with pytest.raises(ValueError, match="float16"):
            outer.squared_norms(a, b)
        with pytest.raises(ValueError, match="float16"):
            outer.weighted_sum(a, b, torch.ones(1, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match="one device"):
        outer.squared_norms(x.half(), torch.zeros(1, 3, 8, device=DEVICE, dtype=torch.float16))


def assert_inner(a: Tensor, b: Tensor, matrix: Tensor, count: int) -> Tensor:
    """Within the bound of the exact inner products with the float32 matrix itself; returns what was found."""
    O, I = matrix.shape  # noqa: E741
    parts = inner.halves(matrix, count)
    found, exact = inner.inner(a, b, parts), inner.inner_slowly(a, b, [matrix])
    lengths_a, lengths_b = a[:, :, :O].double().norm(dim=2), b.double().norm(dim=2)
    most = inner.inner_error(a.shape[1], O, I, count) * (lengths_a * lengths_b).sum(1) * matrix.double().norm()
    most = most + inner.inner_least(O, I, count) * (lengths_a * (1 + lengths_b)).sum(1)
    assert found.dtype == torch.float64
    assert found.shape == (len(a),)
    assert ((found - exact).abs() <= most).all()
    return found


def some(U: int, R: int, O: int, I: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    """a, b and a float32 matrix."""
    a, b = (rows(U, R, k, dtype=torch.bfloat16, seed=seed + s) for s, k in enumerate((O, I)))
    return a, b, rows(O, I, dtype=torch.float32, seed=seed + 2)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 50, 130, 70), (2, 100, 17, 200)])
def test_inner_products_are_within_their_bound(shape: tuple[int, int, int, int], count: int) -> None:
    a, b, matrix = some(*shape)
    found, parts = assert_inner(a, b, matrix, count), inner.halves(matrix, count)
    most = inner.inner_slowly(a.abs(), b.abs(), [p.abs() for p in parts])
    assert ((found - inner.inner_slowly(a, b, parts)).abs() <= 1e-6 * most).all()  # of what the parts do hold


def test_inner_products_over_several_groups_of_tiles() -> None:
    """Ten tiles of rows, of which a group takes eight, and two of outputs; tiles that end in the middle of a unit."""
    a, b, matrix = some(5, 250, 140, 24)
    assert inner.inner_tiles(1250, 140) == inner.INNER_TILES
    assert_inner(a, b, matrix, 2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_inner_products_of_aligned_rows(count: int) -> None:
    """Numbers of one sign, none of which ends early, all rows the same: errors add up as far as they ever do."""
    a, b, matrix = some(2, 1, 40, 1000)
    a, b = (x.abs().expand(2, 20, -1) for x in (a, b))
    assert_inner(a, b, matrix.abs(), count)
    flat = torch.full_like(matrix, 1 / 3)
    assert_inner(torch.ones_like(a), torch.full_like(b, 0.7), flat, count)
    assert_inner(torch.ones_like(a), torch.full_like(b, 0.7), flat + 2.0**-10, count)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cancelling_inner_products(count: int) -> None:
    """Within a row, between rows, and where only the smaller halves are left over."""
    a, b, matrix = some(2, 6, 24, 50)
    assert_inner(torch.cat([a, -a], 1), torch.cat([b, b], 1), matrix, count)
    assert_inner(a, torch.cat([b, -b], 2), torch.cat([matrix, matrix], 1), count)
    assert_inner(a, torch.cat([b, b], 2), torch.cat([matrix, -matrix * (1 + 2.0**-12)], 1), count)
    b[:, :, 3], b[:, :, 40], matrix[:, 40] = 1e6, -1e6, matrix[:, 3]  # sums are large on the way
    assert_inner(a, b, matrix, count)
    normal = b[:, :1].double().squeeze(1)  # matrices that annihilate a row but for rounding
    matrix = matrix.double() - (matrix.double() @ normal[0])[:, None] * normal[0] / normal[0].square().sum()
    assert_inner(a[:1, :1], b[:1, :1], matrix.float(), count)


@pytest.mark.parametrize(
    "sizes", [(1e-20, 1e-20, 1e-20), (1.0, 1e-30, 1e-9), (1e-33, 1.0, 1.0), (1e30, 1e30, 1e5), (1e15, 1.0, 1e-42)]
)
def test_huge_and_tiny_inner_products(sizes: tuple[float, float, float]) -> None:
    """Images that vanish in float32, matrices below its normal numbers, and products beyond its range.

    No factors below its normal numbers: Triton 3.6's interpreter does not convert those as they are.
    """
    x, y, z = sizes
    a, b = rows(2, 9, 24, dtype=torch.bfloat16, size=x), rows(2, 9, 13, dtype=torch.bfloat16, seed=1, size=y)
    matrix = rows(24, 13, dtype=torch.float32, seed=2, size=z)
    for count in (2, 3):
        assert assert_inner(a, b, matrix, count).isfinite().all()


def test_tiny_and_huge_rows_in_inner_products() -> None:
    a, b, matrix = some(1, 18, 24, 13)
    sizes = torch.tensor([1e-30, 1.0, 1e12], device=DEVICE).repeat(6)[:, None]
    assert_inner((a * sizes).bfloat16(), b, matrix, 2)
    assert_inner((a * sizes).bfloat16(), (b * sizes.flip(0)).bfloat16(), matrix * sizes[:13, 0], 2)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bound_on_inner_products_holds_where_additions_cut_off(count: int, aligned: bool) -> None:
    """As tensor cores may: every sum loses what is beyond its 24 bits."""
    a, b, matrix = (x.cpu() for x in some(1, 4, 8, 300))
    if aligned:
        a, b, matrix = a.abs(), b.abs(), matrix.abs()
    total = torch.zeros(4, 8, dtype=torch.float64)
    for part in reversed(inner.halves(matrix, count)):
        for x, p in zip(b[0].double().T, part.double().T, strict=True):
            total = total + x[:, None] * p
            size = torch.frexp(total)[1] - 24
            total = torch.ldexp(torch.ldexp(total, -size).trunc(), size)
    found = (total * a[0].double()).sum()
    lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum() * matrix.double().norm()
    off = (found - inner.inner_slowly(a, b, [matrix])[0]).abs()
    assert off <= inner.inner_error(4, 8, 300, count) * lengths
    if aligned and count > 1:
        assert off >= inner.inner_error(4, 8, 300, count) * lengths / 100  # and it is no idle bound


def test_wide_factors_and_any_strides_in_inner_products() -> None:
    a, b, matrix = some(3, 5, 13, 24)
    expected = inner.inner(a, b, inner.halves(matrix, 2))
    wide = outer.aligned(a)
    assert wide.shape[2] == 16
    assert torch.equal(inner.inner(wide, b, inner.halves(matrix, 2)), expected)
    wide = torch.cat([wide, wide.new_full((3, 5, 200), float("nan"))], 2)
    wide[:, :, 13:] = float("nan")  # not even read as numbers
    assert torch.equal(inner.inner(wide, b, inner.halves(matrix, 2)), expected)
    a, b = rows(5, 3, 24, dtype=torch.bfloat16).transpose(0, 1), rows(3, 13, 5, dtype=torch.bfloat16).transpose(1, 2)
    matrix = rows(13, 24, dtype=torch.float32, seed=2).T
    assert_inner(a, b, matrix, 2)
    assert_inner(a[:, :1].expand(3, 5, 24), b, matrix, 3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, where it is the interpreter
def test_a_unit_that_is_not_finite_spoils_no_other_inner_product() -> None:
    a, b, matrix = some(4, 5, 16, 16)  # all in one tile
    parts = inner.halves(matrix, 2)
    clean = inner.inner(a, b, parts)
    a[1, 2, 3] = float("nan")
    b[2, 0, 0] = float("inf")
    found = inner.inner(a, b, parts)
    assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert not found[1:3].isfinite().any()


def test_inner_products_with_nothing() -> None:
    a, b, matrix = some(2, 3, 8, 8)
    parts = inner.halves(matrix, 2)
    assert inner.inner(a[:0], b[:0], parts).shape == (0,)
    assert inner.inner(a[:, :0], b[:, :0], parts).tolist() == [0, 0]
    assert inner.inner(a, b[:, :, :0], [p[:, :0] for p in parts]).tolist() == [0, 0]


def test_parts_that_do_not_fit_are_refused() -> None:
    a, b, matrix = some(2, 3, 8, 9)
    for parts in ([], [matrix], [matrix.bfloat16(), matrix[:7].bfloat16()], [matrix.half()]):
        with pytest.raises(ValueError, match="part"):
            inner.inner(a, b, parts)
    for part in (matrix[:, :8], torch.cat([matrix, matrix])):
        with pytest.raises(ValueError, match="do not fit"):
            inner.inner(a, b, [part.bfloat16()])


def test_halves_leave_what_they_say() -> None:
    spread = torch.linspace(-100, 100, 4000, dtype=torch.float64).exp2().reshape(40, 100)
    edges = torch.tensor(
        [0.0, 1.0, 1 + 2.0**-8 - 2.0**-23, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 2 - 2.0**-8 - 2.0**-23]
    )
    edges = torch.stack([edges, -edges, edges * 2.0**-100, edges * 2.0**127])
    for matrix in (rows(60, 70, dtype=torch.float32), spread.float().to(DEVICE), edges.to(DEVICE)):
        rest, most = matrix.double(), matrix.double().abs()
        left = 1.0
        for k, part in enumerate(inner.halves(matrix, 4), start=1):
            assert part.dtype == torch.bfloat16
            assert k == 1 or (part.double().abs() <= left * most).all()
            rest, left = rest - part.double(), 2.0 ** (1 - 9 * k) if k < 3 else 0.0
            assert (rest.abs() <= left * most).all()


def test_halves_leave_that_much_at_times() -> None:
    matrix = torch.tensor([[1 + 2.0**-8, 1 + 2.0**-8 - 2.0**-17]], device=DEVICE)
    for k in (1, 2):
        rest = matrix.double() - torch.stack(inner.halves(matrix, k)).double().sum(0)
        assert (rest.abs() / matrix).max() >= 0.99 * 2.0 ** (1 - 9 * k)


def test_halves_of_the_least_and_the_greatest() -> None:
    tiny = torch.tensor([[1.1, -3.7, 255.3, 1e4]], device=DEVICE) * 2.0**-140
    assert (tiny.double() - torch.stack(inner.halves(tiny, 3)).double().sum(0)).abs().max() <= 2.0**-134
    assert not torch.stack(inner.halves(torch.full((1, 1), 2.0**128 - 2.0**119), 2)).isfinite().any()
