"""The convolution kernel against patches and einsum, and its table of configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato.kernels import INSTALLED, INTERPRETED

if not INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from sfumato.kernels import convolution
from sfumato.kernels.configurations import TUNED, Configuration, configuration
from sfumato.kernels.convolution import fits, weight_gradients, weight_gradients_slowly

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# inputs, outputs, kernel, stride, padding, dilation, fold, parts
CASES = [
    (3, 16, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
    (3, 8, (5, 5), (2, 2), (2, 2), (1, 1), 3, 1),
    (5, 24, (5, 5), (1, 1), (2, 2), (2, 2), 1, 3),
    (5, 8, (2, 3), (1, 2), (0, 1), (1, 1), 3, 3),
    (16, 16, (1, 1), (1, 1), (0, 0), (1, 1), 3, 1),
    (16, 16, (1, 1), (2, 2), (0, 0), (1, 1), 1, 3),
    (16, 24, (3, 3), (1, 1), (1, 1), (1, 1), 3, 1),
    (16, 8, (3, 3), (2, 2), (1, 1), (1, 1), 1, 3),
    (20, 24, (3, 3), (1, 2), (2, 1), (2, 1), 1, 1),
    (20, 8, (2, 3), (2, 1), (1, 2), (1, 2), 3, 3),
    (16, 16, (5, 5), (2, 2), (2, 2), (1, 1), 1, 1),
    (20, 16, (3, 2), (1, 1), (0, 2), (2, 2), 1, 1),
]


def example(case: tuple[Any, ...], dtype: torch.dtype, units: int = 2) -> dict[str, Any]:
    inputs, outputs, kernel, stride, padding, dilation, fold, parts = case
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    H, W = 7, 9
    HO, WO = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip((H, W), kernel, stride, padding, dilation, strict=True)
    )
    # Either layout is taken.
    layout = torch.channels_last if fold == 1 else torch.contiguous_format
    x = [drawn(units * fold, inputs, H, W).contiguous(memory_format=layout) for _ in range(parts)]
    dy = [drawn(units * fold, outputs, HO, WO).contiguous(memory_format=layout) for _ in range(parts)]
    geometry = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return {"x": x, "dy": dy, "units": units} | geometry


def exact(call: dict[str, Any]) -> Tensor:
    return weight_gradients_slowly(**call | {name: [t.double() for t in call[name]] for name in ("x", "dy")})


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes is not a number."""

    def full(*shape: int, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", full)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_twin(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    call = example(case, dtype)
    assert fits(**call)
    found, true = weight_gradients(**call), exact(call)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))


def test_the_twin_agrees_with_autograd() -> None:
    case = (3, 8, (3, 2), (2, 1), (1, 0), (1, 2), 3, 1)
    call = example(case, torch.float64)
    for unit in range(2):
        rows = slice(3 * unit, 3 * unit + 3)
        weight = torch.zeros(8, 3, 3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
        y = torch.conv2d(call["x"][0][rows], weight, None, case[3], case[4], case[5])
        (expected,) = torch.autograd.grad(y, weight, call["dy"][0][rows])
        torch.testing.assert_close(weight_gradients_slowly(**call)[unit], expected.permute(0, 2, 3, 1))


def test_float16() -> None:
    call = example(CASES[6], torch.float16)
    torch.testing.assert_close(weight_gradients(**call).double(), exact(call), rtol=1e-5, atol=1e-4)


def test_parts_at_odd_addresses() -> None:
    """A part may be a slice that begins anywhere; the alignment that the loads may count on is then smaller."""
    call = example((5, 8, (2, 3), (1, 1), (0, 0), (1, 1), 1, 2), torch.bfloat16, units=3)
    whole = call | {"units": 2}
    for name in ("x", "dy"):
        whole[name] = [t.contiguous(memory_format=torch.channels_last)[1:] for t in call[name]]
    assert convolution._alignment([*whole["x"], *whole["dy"]]) < 16
    torch.testing.assert_close(weight_gradients(**whole).double(), exact(call)[1:], rtol=1e-5, atol=1e-4)


def test_no_units() -> None:
    call = example(CASES[6], torch.float32, units=0)
    assert weight_gradients(**call).shape == (0, 24, 3, 3, 16)


def test_the_number_of_units_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Poisson batch has another size each step; only the grid and the tensors may know."""
    seen: list[list[Any]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: seen.append([[a for a in args if not isinstance(a, Tensor)], options])

    monkeypatch.setattr(convolution, "_by_taps", Recorder())
    for units in (2, 3, 16):
        weight_gradients(**example(CASES[7], torch.bfloat16, units))
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "change",
    [
        {"x": [torch.zeros(2, 16, 9)], "dy": [torch.zeros(2, 16, 9)]},
        {"dy": [torch.zeros(6, 24, 7, 9, dtype=torch.bfloat16)]},
        {"dy": [torch.zeros(6, 24, 6, 9)]},
        {"units": 4},
    ],
    ids=["1-d", "two dtypes", "another geometry", "uneven units"],
)
def test_what_does_not_fit(change: dict[str, Any]) -> None:
    assert not fits(**example(CASES[6], torch.float32) | change)


def test_a_unit_too_large_does_not_fit() -> None:
    x, dy = (torch.zeros(1, 1, 1, 1).expand(1, channels, 2**15, 2**15) for channels in (2, 1))
    one = (1, 1)
    assert not fits([x], [dy], units=1, kernel=one, stride=one, padding=(0, 0), dilation=one)
    assert fits([x[:, :1]], [dy], units=1, kernel=one, stride=one, padding=(0, 0), dilation=one)


def test_configurations_stay_within_the_machine() -> None:
    """A Hopper multiprocessor has 227 KiB of shared memory and 255 registers a thread."""
    sizes = (1, 3, 15, 16, 20, 64, 96, 129, 192, 512, 1000)
    kernels = [(1, 1), (3, 3), (5, 5), (7, 7), (2, 3), (11, 1)]
    some = [(i, o, k, (1, 1)) for i in sizes for o in sizes for k in kernels]
    for key in (*TUNED, *some):
        for dtype in (torch.bfloat16, torch.float32):
            for positions in (1, 50, 10_000):
                c = configuration(*key, dtype, positions)
                assert min(c.block_out, c.block_in, c.block_positions) >= 16
                assert all(n & (n - 1) == 0 for n in (c.block_out, c.block_in, c.block_positions, c.warps))
                assert c.taps == 1 or (c.taps == key[2][1] == 3 and key[0] >= 16)
                assert c.shared_bytes(4 if dtype == torch.float32 else 2) <= 200 * 1024
                assert c.accumulators() <= (96 if key not in TUNED or dtype == torch.float32 else 192)


def test_the_tuned_configuration_is_found() -> None:
    assert configuration(64, 64, (3, 3), (1, 1), torch.bfloat16, 4096) == Configuration(64, 64, 64, 3, 4, 4)
    assert configuration(64, 64, (3, 3), (1, 1), torch.float32, 4096).block_positions == 32
    assert configuration(64, 64, (3, 3), (1, 1), torch.bfloat16, 20).block_positions == 32
