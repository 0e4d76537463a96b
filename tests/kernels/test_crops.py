"""The crop kernel against its twin, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfumato import kernels
from sfumato.augment import Augmentation, crop_slowly

if not kernels.INSTALLED:
    pytest.skip("needs Triton", allow_module_level=True)
if not kernels.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from sfumato.kernels import crops

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"


def images(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "pad", "side"), [((5, 3, 8, 8), 4, 0), ((4, 1, 5, 7), 3, 4), ((3, 3, 6, 4), 0, 3)])
@pytest.mark.parametrize("block", [4096, 32])
def test_like_its_twin(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    pad: int,
    side: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crops, "_BLOCK", block)
    x = images(dtype, *shape)
    N, _, H, W = shape
    torch.manual_seed(1)
    top, left, mirror, row, column = (
        torch.randint(0, n, (N,), device=DEVICE) for n in (2 * pad + 1, 2 * pad + 1, 2, H, W)
    )
    hole = (row, column) if side else None
    expected = crop_slowly(x, top, left, mirror, hole, pad, side)
    wider = torch.zeros(N, shape[1], H + 2, 2 * W, dtype=dtype, device=DEVICE)[:, :, 1:-1, ::2].copy_(x)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(77))
    for given in (x, x.contiguous(memory_format=torch.channels_last), wider):
        views = crops.crop(given, top, left, mirror, hole, pad, side)
        assert views.dtype == dtype
        assert views.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(views, expected, rtol=0, atol=0)


def test_the_augmentation_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And draws the same whether it does or not."""
    x = images(torch.uint8, 6, 3, 8, 8)
    augmentation = Augmentation(pad=2, cutout=4)
    found = []
    for use in (kernels.Use.INTERPRETER, kernels.Use.NEVER):
        torch.manual_seed(3)
        with kernels.using(use):
            found.append(augmentation(x))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    monkeypatch.setattr(crops, "_crop_kernel", None)
    with kernels.using(kernels.Use.INTERPRETER), pytest.raises(TypeError):
        augmentation(x)
