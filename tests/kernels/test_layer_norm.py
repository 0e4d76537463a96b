"""The kernel of layer norm's affine gradients against its twin.

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

from sfumato.kernels import layer_norm  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
# U, R, C: single ones, less than a tile, whole tiles, some more; features on and off the grid.
SHAPES = ((1, 1, 1), (3, 1, 7), (2, 5, 16), (4, 16, 128), (3, 17, 129), (2, 33, 300), (1, 70, 3), (5, 2, 1500))


def case(U: int, R: int, C: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """x, dy, mean, rstd and units, as layer norm saves them."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(U * R, C, generator=generator) for _ in range(2))
    x = (3 * x + 5 * torch.randn(U * R, 1, generator=generator)).to(dtype)
    _, mean, rstd = torch.native_layer_norm(x.float(), [C], None, None, 1e-2)
    return x.to(DEVICE), dy.to(dtype).to(DEVICE), mean.flatten().to(DEVICE), rstd.flatten().to(DEVICE), U


def assert_agrees(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor, units: int) -> None:
    found = layer_norm.affine_gradients(x, dy, mean, rstd, units)
    expected = layer_norm.affine_gradients_slowly(x, dy, mean, rstd, units)
    v, g = (t.double().reshape(units, -1, x.shape[-1]) for t in (x, dy))
    m, s = (t.double().reshape(units, -1, 1) for t in (mean, rstd))
    most = (g * (v - m) * s).abs().sum(1), g.abs().sum(1)
    for value, exact, size in zip(found, expected, most, strict=True):
        assert value.dtype == torch.float32
        assert value.shape == exact.shape == (units, x.shape[-1])
        assert ((value.double() - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_agrees(*case(*shape, dtype))


@pytest.mark.parametrize("R", [64, 65, 200, 257])
def test_agrees_where_rows_are_split(R: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a last program that has less to do, and with programs enough, which split nothing."""
    split = -(-R // layer_norm._rows_each(R, 2 * 2, 16))
    assert split == -(-R // 64)
    assert_agrees(*case(2, R, 130, torch.float32))
    monkeypatch.setattr(layer_norm, "_PROGRAMS", 1)
    assert_agrees(*case(2, R, 130, torch.float32))


def test_splits_fill_the_processors() -> None:
    for programs, R in ((1, 4096), (6, 8192), (48, 1024), (192, 1024)):
        each = layer_norm._rows_each(R, programs, 16)
        assert each % 16 == 0
        assert programs * -(-R // each) >= min(1056, programs * R // 64) // 2
    assert layer_norm._rows_each(1024, 1056, 16) == 1024


@pytest.mark.parametrize("R", [1, 2, 3, 16, 100, 4096])
@pytest.mark.parametrize("C", [1, 3, 64, 768, 5000])
def test_tiles_have_a_size(R: int, C: int) -> None:
    high, wide = layer_norm._tile(R, C)
    assert 1 <= high * wide <= layer_norm._TILE
    assert high < 2 * R
    assert wide < 2 * C
    assert high * wide == layer_norm._TILE or high >= R or wide >= C


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_gradient_of_layer_norm(dtype: torch.dtype) -> None:
    x, dy, mean, rstd, U = case(3, 10, 24, dtype)
    weight, bias = (torch.ones(3, 1, 24, device=DEVICE, requires_grad=True) for _ in range(2))
    y = torch.nn.functional.layer_norm(x.float(), [24], eps=1e-2).reshape(3, 10, 24) * weight + bias
    expected = torch.autograd.grad(y, (weight, bias), dy.float().reshape(3, 10, 24))
    for found, value in zip(layer_norm.affine_gradients(x, dy, mean, rstd, U), expected, strict=True):
        torch.testing.assert_close(found, value.squeeze(1), rtol=1e-4, atol=1e-4)


def test_shapes_strides_and_precisions_mix() -> None:
    x, dy, mean, rstd, U = case(4, 6, 20, torch.float32)
    expected = layer_norm.affine_gradients(x, dy.bfloat16().float(), mean, rstd, U)
    shape = (4, 2, 3, 20)
    turned = x.reshape(shape).transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    statistics = (t.reshape(4, 2, 3, 1) for t in (mean, rstd))
    found = layer_norm.affine_gradients(turned, dy.bfloat16().reshape(shape), *statistics, U)
    for value, other in zip(found, expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, where it is the interpreter
@pytest.mark.parametrize("R", [5, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_that_is_not_finite_spoils_only_itself(dtype: torch.dtype, R: int) -> None:
    x, dy, mean, rstd, U = case(4, R, 20, dtype)
    clean = layer_norm.affine_gradients(x, dy, mean, rstd, U)
    x[R + R - 1, 3] = float("nan")
    dy[2 * R, 7] = float("inf")
    rstd[2 * R + 1] = float("nan")
    dw, db = layer_norm.affine_gradients(x, dy, mean, rstd, U)
    for found, value in zip((dw, db), clean, strict=True):
        assert torch.equal(found[[0, 3]], value[[0, 3]])
    assert dw[1, 3].isnan()
    assert dw[2].isnan().all()
    assert not db[2, 7].isfinite()


def test_nothing_to_sum() -> None:
    for U, R, C in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x, row = torch.zeros(U * R, C, device=DEVICE), torch.zeros(U * R, device=DEVICE)
        for found in layer_norm.affine_gradients(x, x, row, row, U):
            assert found.shape == (U, C)
            assert not found.any()


def test_what_does_not_fit_is_refused() -> None:
    x, dy, mean, rstd, U = case(4, 6, 20, torch.float32)
    for wrong in (
        (x, dy[:-1], mean, rstd, U),
        (x, dy, mean[:-1], rstd, U),
        (x, dy, mean, rstd[:-1], U),
        (x, dy, mean, rstd, 5),
        (x, dy, mean, rstd, 0),
        (x[:-4], dy[:-4], mean, rstd, U),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            layer_norm.affine_gradients(*wrong)
