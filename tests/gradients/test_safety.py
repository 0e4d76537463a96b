"""The safety factor of norms: how wrong float32 sums can be, measured, against the bound that inflates them.

A norm that comes out too small lets a contribution through that is too large. So every norm in float32 is inflated by
a bound on its own rounding. Here the bound is confronted with the worst data known: long runs of equal positive numbers
(rounded the same way each time), a one followed by numbers that vanish beside it, sorted and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sfumato.gradients import contributions, factored
from sfumato.gradients.contributions import Dense, Shift, gram, rounding, squared_norms
from sfumato.gradients.factored import Outer

UNIT = 2.0**-24  # half the spacing of float32 at one: the error of a single rounding
LENGTHS = (1, 7, 32, 100, 255, 256, 257, 384, 512, 1000, 4097)
ROWS = 16


def equal(length: int) -> Tensor:
    return (1 + torch.rand(ROWS, 1)).expand(ROWS, length).contiguous()


def vanishing(length: int) -> Tensor:
    """Added to the first number one by one, the others are rounded away, all of them."""
    rows = torch.full((ROWS, length), 2.0**-12 * 0.999)
    rows[:, 0] = 1.0
    return rows


def vanishing_blockwise(length: int) -> Tensor:
    rows = vanishing(length)
    rows[:, :: contributions._BLOCK] = 1.0
    return rows


DATA: dict[str, Callable[[int], Tensor]] = {
    "equal": equal,
    "vanishing": vanishing,
    "vanishing in every block": vanishing_blockwise,
    "uniform": lambda n: torch.rand(ROWS, n),
    "normal": lambda n: torch.randn(ROWS, n),
    "rising": lambda n: torch.rand(ROWS, n).sort(1).values,
    "falling": lambda n: torch.rand(ROWS, n).sort(1, descending=True).values,
    "wide": lambda n: torch.randn(ROWS, n) * 10 ** (6 * torch.rand(ROWS, n) - 3),
}


def layouts(rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers, near each other, far apart, and as every second of a longer row."""
    yield "contiguous", rows
    yield "transposed", rows.T.contiguous().T
    yield "every second", rows.repeat_interleave(2, 1)[:, ::2]
    yield "backwards in memory", rows.flip(0).flip(0)


def measured_norms() -> Iterator[tuple[str, float, float]]:
    """A squared norm is inflated by 1 + 2 * rounding; divided out again, what is left is the raw error."""
    for length in LENGTHS:
        torch.manual_seed(length)
        for kind, make in DATA.items():
            for layout, rows in layouts(make(length)):
                true = rows.double().square().sum(1)
                bound = 2 * rounding(torch.float32, length)
                error = float(((squared_norms(rows) / (1 + bound) - true).abs() / true).max())
                yield f"{kind} {length} {layout}", error, bound


def measured_products() -> Iterator[tuple[str, float, float]]:
    """Errors of Gram matrices relative to the product of lengths, for batches of several shapes."""
    for length in LENGTHS:
        torch.manual_seed(length)
        for kind, make in DATA.items():
            for layout, rows in layouts(make(length)):
                for units in (1, 2, 4):
                    x = rows.reshape(units, ROWS // units, length)
                    true = torch.bmm(x.double(), x.double().transpose(1, 2))
                    lengths = x.double().norm(dim=2)
                    relative = (gram(x) - true).abs() / (lengths.unsqueeze(1) * lengths.unsqueeze(2))
                    bound = rounding(torch.float32, length, product=True)
                    yield f"{kind} {length} {layout} {units}", float(relative.max()), bound


@pytest.mark.parametrize("measured", [measured_norms, measured_products], ids=["norms", "products"])
def test_the_bound_holds_and_is_not_idle(measured: Callable[[], Iterator[tuple[str, float, float]]]) -> None:
    failures, closest = [], 0.0
    for what, error, bound in measured():
        closest = max(closest, error / bound)
        if not error <= bound:
            failures.append(f"{what}: {error / UNIT:.1f} units, bound {bound / UNIT:.1f}")
    assert not failures, failures
    assert closest >= 1e-3, "a bound a thousand times too large clips useful gradients away"


def excess(make: Callable[[], tuple[contributions.Contribution, Tensor]]) -> float:
    """How far the largest addend lies above the clip norm, with the factor computed as the engine does."""
    contribution, vectors = make()
    slack = 1 + 8 * torch.finfo(torch.float32).eps
    norms = contribution.prepare(Shift(None, None)).sqrt() * slack
    factors = torch.where(torch.isfinite(norms), 1.0 / norms, 0.0).float().double()
    return float((factors * vectors.norm(dim=1)).max()) - 1


def cancelling() -> tuple[contributions.Contribution, Tensor]:
    """Two positions that nearly cancel: the gradient is far shorter than its factors, which errors are relative to."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 1, 40).expand(64, 2, 40), torch.randn(64, 1, 300)
    b = torch.cat([b, -b * (1 + 1e-3)], 1) * 1e3
    return Outer(a, b, 40), torch.bmm(a.double().transpose(1, 2), b.double()).flatten(1)


def instantiated() -> tuple[contributions.Contribution, Tensor]:
    rows = vanishing_blockwise(4096) * 1e3
    return Dense(rows), rows.double()


CASES = [cancelling, instantiated]


def test_without_the_inflation_contributions_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the same norms, not inflated. At least one of the cases must then break the guarantee."""
    assert max(map(excess, CASES)) <= 1e-6
    for module in (contributions, factored):
        monkeypatch.setattr(module, "rounding", lambda *_, **__: 0.0)
    assert max(map(excess, CASES)) > 1e-6


def up_and_down(length: int, top: float) -> Tensor:
    """Its running sum climbs to `top` by steps that are each rounded up, and comes down by steps that are exact."""
    step = np.float32(top / (length // 2))
    steps, reached = [step], step
    for _ in range(length // 2 - 1):
        above = np.float32(reached + step)
        steps.append(np.float32(float(above) - float(reached) - 0.49 * float(np.spacing(above))))
        reached = np.float32(reached + steps[-1])
    down = np.float32(2.0 ** np.round(np.log2(step)))
    left = float(np.sum(np.array(steps, dtype=np.float64))) - 1.0
    return torch.from_numpy(np.array([*steps, *[-down] * int(left / float(down))], dtype=np.float32))


def test_adding_up_a_word_read_often_lets_nothing_through() -> None:
    """What is released is the rounded sum over a unit's positions, which may be longer than the exact one."""
    b = 4 * up_and_down(1024, 5.0)[None, :, None]
    read = Outer(torch.zeros(b.shape[:2], dtype=torch.long), b, 2)
    norms = read.prepare(Shift(None, None)).sqrt() * (1 + 8 * torch.finfo(torch.float32).eps)
    addend = read.weighted_sum((1.0 / norms).float().double(), at_once=1)
    assert float(addend.double().norm()) <= 1 + 1e-6


def test_float64_needs_and_gets_almost_no_inflation() -> None:
    """Whoever trains in float64 loses nothing: the bound follows the precision."""
    for length in LENGTHS:
        assert rounding(torch.float64, length, product=True) < 1e-12
        # Half precision is summed in float32, by tensor cores that may cut off instead of rounding.
        assert rounding(torch.bfloat16, length) == 2 * rounding(torch.float32, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False])
def test_a_shift_is_rounded_to_no_less_than_it_has_and_changes_only_what_is_its_own(
    dtype: torch.dtype, own: bool
) -> None:
    gradients = torch.randn(3, 5).to(dtype)
    shift, before = Shift(torch.randn(5), torch.rand(5)), gradients.clone()
    found = shift.applied(gradients, own=own)
    assert shift.origin is not None
    assert shift.scale is not None
    expected = (before - shift.origin) * shift.scale
    assert found.dtype == expected.dtype != torch.bfloat16
    assert torch.equal(found, expected)
    in_place = own and dtype != torch.bfloat16
    assert (found is gradients) == in_place
    assert torch.equal(gradients, expected if in_place else before)
    assert Shift(None, None).applied(gradients, own=own) is gradients
