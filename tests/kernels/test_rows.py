"""Norms never below the exact value and hardly above it; weighted sums that a unit without weight cannot touch."""

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

from sfumato.kernels import rows as module
from sfumato.kernels.rows import squared_norms, squared_norms_slowly, weighted_sum, weighted_sum_slowly

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ORDINARY = [(7, 3, 5), (3, 10, 256), (2, 2, 2304), (70, 2, 27), (2, 1, 9000), (5, 1, 1)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def directions(outputs: int, F: int) -> tuple[Tensor, Tensor]:
    """Centred unit vectors, as standardised weights are, and scales."""
    w = drawn(outputs, F, seed=1)
    w = w - w.mean(1, keepdim=True)
    return w / w.norm(dim=1, keepdim=True).clamp_min(1e-6), 0.5 + drawn(outputs, seed=2).abs()


def options(shape: tuple[int, int, int], *names: str) -> dict[str, Any]:
    _, outputs, F = shape
    every: dict[str, Any] = {
        "origin": drawn(outputs, F, seed=3),
        "scale": 0.5 + drawn(outputs, F, seed=4).abs(),
        "standardised": directions(outputs, F),
    }
    return {name: every[name] for name in names}


COMBINATIONS = [(), ("origin",), ("scale",), ("origin", "scale")]
COMBINATIONS += [(*names, "standardised") for names in COMBINATIONS]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes is not a number."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, float("nan"), **options))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("shape", ORDINARY, ids=str)
def test_norms_of_ordinary_rows_are_close_and_never_below(shape: tuple[int, int, int], names: tuple[str, ...]) -> None:
    g, given = drawn(*shape), options(shape, *names)
    bound, along = squared_norms(g, **given)
    exact, exact_along = squared_norms_slowly(g, **given)
    assert bound.dtype == torch.float64
    assert (bound >= exact).all()
    if shape[2] > 5:  # of shorter rows, the mean and one direction take away what is most of the row
        assert (bound.sqrt() <= exact.sqrt() * (1 + 1e-5)).all()
    if exact_along is None:
        assert along is None
    else:
        assert along is not None
        torch.testing.assert_close(along.double(), exact_along, rtol=1e-5, atol=1e-5)


def test_the_inflation_is_small_for_rows_as_they_come() -> None:
    shape = (4, 2, 2304)
    g, given = drawn(*shape), options(shape, "standardised")
    bound, exact = squared_norms(g, **given)[0], squared_norms_slowly(g, **given)[0]
    assert (bound.sqrt() <= exact.sqrt() * (1 + 5e-6)).all()


def adversarial(name: str, shape: tuple[int, int, int]) -> Tensor:
    u, _ = directions(*shape[1:])
    noise = 10.0 ** torch.linspace(-8, -1, shape[0], device=DEVICE)[:, None, None] * drawn(*shape)
    level = 1 + drawn(shape[0], shape[1], 1, seed=5).abs()
    rows: dict[str, Tensor] = {
        "parallel to u": level * u + noise / shape[2] ** 0.5,
        "constant": level + noise,
        "both": 30 * level * u + level + noise,
        "huge": 1e17 * drawn(*shape),
        "tiny": 1e-22 * drawn(*shape),
        "subnormal": 1e-40 * drawn(*shape),
        "wide": drawn(*shape) * 10 ** (6 * drawn(*shape, seed=6).sigmoid() - 3),
        "one and crumbs": torch.cat([level, 2.0**-12 * torch.ones(*shape[:2], shape[2] - 1, device=DEVICE)], 2),
    }
    return rows[name].contiguous()


ADVERSARIAL = ["parallel to u", "constant", "both", "huge", "tiny", "subnormal", "wide", "one and crumbs"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("names", [COMBINATIONS[0], *COMBINATIONS[3:]], ids="+".join)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_norms_of_adversarial_rows_are_never_below(name: str, names: tuple[str, ...]) -> None:
    for shape in ((24, 2, 40), (6, 1, 2304)):
        g, given = adversarial(name, shape), options(shape, *names)
        bound = squared_norms(g, **given)[0]
        assert (bound >= squared_norms_slowly(g, **given)[0]).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_an_origin_at_the_row_itself(scaled: bool) -> None:
    """The difference vanishes; nothing is left of the row to round."""
    shape = (3, 2, 300)
    g = drawn(*shape)
    given = options(shape, *(["scale"] if scaled else [])) | {"origin": g[0].clone()}
    bound, exact = squared_norms(g, **given)[0], squared_norms_slowly(g, **given)[0]
    assert (bound >= exact).all()
    assert exact[0] == 0
    assert bound[0] < 1e-30
    nearly = g + 1e-7 * drawn(*shape, seed=9)
    bound, exact = squared_norms(nearly, **given)[0], squared_norms_slowly(nearly, **given)[0]
    assert (bound >= exact).all()
    assert (bound.sqrt() <= exact.sqrt() * (1 + 1e-5)).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_an_origin_at_the_mapped_row(scaled: bool) -> None:
    shape = (24, 2, 300)
    g = drawn(*shape)
    given = options(shape, "standardised", *(["scale"] if scaled else []))
    u, s = (t.double() for t in given["standardised"])
    first = g[:1].double()
    mapped = s[:, None] * (first - first.mean(2, keepdim=True) - u * (first * u).sum(2, keepdim=True))
    given["origin"] = mapped[0].float()
    g = g[:1] + 1e-7 * drawn(*shape, seed=9)
    bound, exact = squared_norms(g, **given)[0], squared_norms_slowly(g, **given)[0]
    assert (bound >= exact).all()
    assert (bound <= 1e-8 * g.double().square().sum((1, 2))).all()


@pytest.mark.parametrize("names", [("standardised",), ("scale", "standardised")], ids="+".join)
@pytest.mark.parametrize("name", ["parallel to u", "both"])
def test_without_the_bound_on_cancellation_norms_would_come_out_too_small(
    name: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a lot: a tenth of such a squared norm is lost, or more."""
    shape = (24, 2, 40)
    g, given = adversarial(name, shape), options(shape, *names)
    monkeypatch.setattr(module, "DOUBT", 0.0)
    assert (squared_norms(g, **given)[0] < 0.9 * squared_norms_slowly(g, **given)[0]).any()


def test_without_the_inflation_norms_would_come_out_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    g = drawn(24, 2, 300)
    monkeypatch.setattr(module, "INFLATION", 0.0)
    assert (squared_norms(g)[0] < squared_norms_slowly(g)[0]).any()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # NumPy's, in the interpreter
@pytest.mark.parametrize("names", [(), ("origin", "scale", "standardised")], ids="+".join)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_rows_that_are_not_finite_have_no_finite_norm(value: float, names: tuple[str, ...]) -> None:
    shape = (3, 2, 40)
    g = drawn(*shape)
    clean = squared_norms(g, **options(shape, *names))[0]
    g[1, 0, 7] = value
    bound = squared_norms(g, **options(shape, *names))[0]
    assert not bound[1].isfinite()
    assert torch.equal(bound[[0, 2]], clean[[0, 2]])


def test_no_thread_adds_a_longer_chain_than_counted() -> None:
    """CHAIN: numbers per thread, a tree over threads, and one for the terms."""
    for tile in (1 << k for k in range(14)):
        warps = module._warps(tile)
        per_thread = max(1, tile // (32 * warps))
        assert per_thread + (32 * warps).bit_length() - 1 + 1 <= module.CHAIN


@pytest.mark.parametrize("shape", [(1, 3), (5, 16), (70, 27), (100, 4, 30), (9, 2, 600), (130, 1)], ids=str)
def test_weighted_sums(shape: tuple[int, ...]) -> None:
    g, factors = drawn(*shape), drawn(shape[0], seed=1).double()
    found = weighted_sum(g, factors)
    assert found.dtype == torch.float64
    assert found.shape == shape[1:]
    torch.testing.assert_close(found, weighted_sum_slowly(g, factors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_unit_without_weight_adds_nothing(value: float) -> None:
    """Multiplying by zero would not do: the sum of everybody would be lost to one unit."""
    g, factors = drawn(100, 40), drawn(100, seed=1).double()
    factors[[3, 64, 99]] = 0.0
    clean = weighted_sum(g, factors)
    g[[3, 64, 99]] = value
    assert torch.equal(weighted_sum(g, factors), clean)
    factors[3] = 1e-300  # a weight, however small, is a weight
    assert not weighted_sum(g, factors).isfinite().any()


def test_small_addends_are_not_lost_beside_large_ones() -> None:
    g = torch.ones(100, 5, device=DEVICE)
    g[0] = 2.0**40
    found = weighted_sum(g, torch.ones(100, dtype=torch.float64, device=DEVICE))
    assert torch.equal(found, torch.full_like(found, 2.0**40 + 99))


def test_no_units() -> None:
    assert torch.equal(weighted_sum(drawn(0, 3, 4), drawn(0).double()), torch.zeros(3, 4, device=DEVICE).double())
    assert squared_norms(drawn(0, 3, 4))[0].shape == (0,)
    assert squared_norms(drawn(0, 3, 4), standardised=directions(3, 4))[0].shape == (0,)
