"""The pass that scales the gradient of a convolution's output and reduces it against the output, against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato import kernels

if not kernels.INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not kernels.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from sfumato.kernels import scale as module
from sfumato.kernels.scale import scaled_and_reduced, scaled_and_reduced_slowly

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
SHAPES = [(1, 1, 1, 1), (3, 16, 4, 4), (2, 5, 3, 7), (4, 20, 1, 9), (2, 33, 5, 5), (1, 100, 2, 3)]
if DEVICE == "cuda":
    SHAPES += [(64, 64, 32, 32), (31, 129, 17, 15), (8, 1000, 7, 7)]

# One product, rounded once; but the interpreter cuts off where it makes bfloat16.
EXACTLY: dict[str, float] = {"rtol": 0, "atol": 0}
TOLERANCE = {torch.float32: EXACTLY, torch.bfloat16: {"rtol": 2.0**-7, "atol": 0} if kernels.INTERPRETED else EXACTLY}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes is not a number."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, float("nan"), **options))
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: empty_like(t, **options).fill_(float("nan")))


def assert_like_the_twin(y: Tensor, dy: Tensor, scale: Tensor) -> None:
    (out, reduced), (slow, true) = scaled_and_reduced(y, dy, scale), scaled_and_reduced_slowly(y, dy, scale)
    assert (out.dtype, out.shape, reduced.dtype, reduced.shape) == (dy.dtype, dy.shape, torch.float32, dy.shape[:2])
    torch.testing.assert_close(out, slow, **TOLERANCE[dy.dtype])
    most = (dy.double() * y.double()).abs().flatten(2).sum(2)
    assert bool(((reduced.double() - true.double()).abs() <= 1e-5 * most).all())


@pytest.mark.parametrize("tile", [8192, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_its_twin(shape: tuple[int, ...], dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tile` of 64 takes several steps over the positions, the last of them not full."""
    monkeypatch.setattr(module, "_TILE", tile)
    assert_like_the_twin(drawn(shape, dtype, 0), drawn(shape, dtype, 1), drawn(shape[1:2], torch.float32, 2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_any_memory_layout(layout: Any) -> None:
    y, dy = (drawn((2, 6, 4, 5), torch.bfloat16, seed).contiguous(memory_format=layout) for seed in (0, 1))
    assert_like_the_twin(y, dy.contiguous(), drawn((12,), torch.float32, 2)[::2])


def test_the_scale_is_not_rounded_to_half() -> None:
    """192 * (1 + 3 * 2^-9) = 193.125 is 193 in bfloat16; with a scale rounded to 1 + 2^-7 it would be 193.5, or 194."""
    dy = torch.full((2, 8, 3, 3), 192.0, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.full((8,), 1 + 3 * 2.0**-9, device=DEVICE)
    out, _ = scaled_and_reduced(dy, dy, scale)
    assert torch.equal(out, torch.full_like(out, 193.0))
    assert torch.equal(dy * scale.bfloat16()[:, None, None], torch.full_like(out, 194.0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, where it is the interpreter
def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    y, dy = drawn((3, 5, 4, 4), torch.float32, 0), drawn((3, 5, 4, 4), torch.float32, 1)
    scale = drawn((5,), torch.float32, 2)
    clean = scaled_and_reduced(y, dy, scale)
    dy[1, 2, 0, 0] = float("nan")
    for found, before in zip(scaled_and_reduced(y, dy, scale), clean, strict=True):
        assert torch.equal(found[[0, 2]], before[[0, 2]])
        assert bool(found[1].isnan().any())
