"""The kernels of standardised weights against their twins, and those against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato import kernels
from sfumato.nn.functional import standardised_weight

if not kernels.INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not kernels.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from sfumato.kernels.standardise import backward, backward_slowly, fits, forward, forward_slowly

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
SHAPES = [(1, 1, 1, 1), (5, 3, 3, 3), (2, 8, 1, 1), (3, 1, 2, 5), (4, 33, 3, 2), (2, 300, 3, 3)]
if DEVICE == "cuda":
    SHAPES += [(256, 256, 3, 3), (64, 16384, 1, 1), (1000, 7, 5, 5)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes is not a number."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: empty_like(t, **options).fill_(float("nan")))


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("with_gain", [True, False])
@pytest.mark.parametrize("of_weight", LAYOUTS, ids=str)
@pytest.mark.parametrize("of_other", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_the_twins_in_any_layout(shape: Any, of_weight: Any, of_other: Any, with_gain: bool) -> None:
    weight, gain = drawn(shape, 0) + 2, drawn(shape[:1], 1) if with_gain else None
    grad, eps = drawn(shape, 2), 1e-2
    wide, wide_gain = weight.double(), None if gain is None else gain.double()
    weight, grad = weight.contiguous(memory_format=of_weight), grad.contiguous(memory_format=of_other)
    out = forward(weight, gain, eps, torch.float32, channels_last=of_other is torch.channels_last)
    assert out.is_contiguous(memory_format=of_other)
    exact = forward_slowly(wide, wide_gain, eps, torch.float64, channels_last=False)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    dweight, dgain = backward(grad, weight, gain, eps)
    assert dweight.stride() == weight.stride()
    of_wide, of_gain = backward_slowly(grad.double(), wide, wide_gain, eps)
    torch.testing.assert_close(dweight.double(), of_wide, rtol=1e-4, atol=1e-4 * float(of_wide.abs().max()) + 1e-7)
    assert (dgain is None) == (gain is None)
    if dgain is not None and of_gain is not None:
        torch.testing.assert_close(dgain.double(), of_gain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-12, 1e-4, 3.0])
@pytest.mark.parametrize("with_gain", [True, False])
def test_the_twins_are_what_autograd_says(eps: float, with_gain: bool) -> None:
    weight = drawn((5, 3, 2, 2), 0).double().requires_grad_()
    gain = drawn((5,), 1).double().requires_grad_() if with_gain else None
    grad = drawn((5, 3, 2, 2), 2).double()
    leaves = [t for t in (weight, gain) if t is not None]
    plain = standardised_weight(weight, gain, eps)
    torch.testing.assert_close(forward_slowly(weight, gain, eps, torch.float64, channels_last=True), plain)
    found = [t for t in backward_slowly(grad, weight, gain, eps) if t is not None]
    for ours, theirs in zip(found, torch.autograd.grad(plain, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16])
def test_rounds_once_to_half_and_takes_gradients_in_half(grad_type: torch.dtype) -> None:
    weight, gain, grad = drawn((4, 6, 3, 3), 0), drawn((4,), 1), drawn((4, 6, 3, 3), 2).to(grad_type)
    out = forward(weight, gain, 1e-4, torch.bfloat16, channels_last=True)
    exact = forward_slowly(weight, gain, 1e-4, torch.float32, channels_last=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=2.0**-7, atol=1e-6)  # the interpreter cuts off
    for ours, slow in zip(backward(grad, weight, gain, 1e-4), backward_slowly(grad, weight, gain, 1e-4), strict=True):
        assert ours is not None
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, slow, rtol=1e-4, atol=1e-5)


def test_views_of_other_strides_are_read_right() -> None:
    weight, gain = drawn((4, 6, 3, 3), 0).transpose(0, 1)[:, :, ::2], drawn((12,), 1)[::2]
    assert not weight.is_contiguous()
    ours = forward(weight, gain, 1e-4, torch.float32, channels_last=False)
    torch.testing.assert_close(ours, forward_slowly(weight, gain, 1e-4, torch.float32, channels_last=False))


def test_a_constant_row_is_no_direction() -> None:
    weight = torch.full((2, 3, 2, 2), 7.0, device=DEVICE)
    assert not forward(weight, None, 1e-4, torch.float32, channels_last=False).any()
    dweight, _ = backward(drawn((2, 3, 2, 2), 0), weight, None, 1e-4)
    assert bool(dweight.isfinite().all())


def test_what_does_not_fit_is_left_to_others() -> None:
    assert fits(torch.zeros(2, 16384, 1, 1))
    assert not fits(torch.zeros(2, 16385, 1, 1))
    assert not fits(torch.zeros(2, 3, 1, 1, dtype=torch.bfloat16))
    assert not fits(torch.zeros(2, 3, 1))
    assert not fits(torch.zeros(2, 0, 1, 1))
