"""The clipped gradient of linear models: against a loop over autograd, between neighbours, and through the door."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from sfumato import Budget, NotPrivateSeed, Planned, Private
from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Loss, Square
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.rows import scores, unit_rows
from sfumato.errors import InvalidArgument
from sfumato.gradients import Units
from tests.erm.sealed import Batch

LOSSES: list[Loss] = [Logistic(), Hinge(), HuberisedHinge(), Square(), Huber(0.5)]


def random_rows(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = 3 * (torch.rand(n, d, dtype=torch.float64, generator=g) - 0.5)
    return X, torch.sign(torch.rand(n, dtype=torch.float64, generator=g) - 0.5)


def exact(question: LinearGradientMean, X: Tensor, y: Tensor, units: Units | None = None) -> Tensor:
    result = question.exact(Batch(X, y, units))  # type: ignore[arg-type]
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_equals_a_loop_over_autograd(loss: Loss) -> None:
    X, y = random_rows(50, 7)
    w, total = torch.linspace(-1, 1, 7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for x, target in zip(X, y, strict=True):
        leaf = w.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.value(leaf @ x, target), leaf)
        total += gradient * min(1.0, 0.4 / max(float(gradient.norm()), 1e-300))
    assert torch.allclose(exact(LinearGradientMean(loss, w, 0.4), X, y), total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mean", [True, False])
def test_records_of_a_unit_are_reduced_before_the_clip(mean: bool) -> None:
    X, y = random_rows(12, 5)
    w = torch.linspace(-1, 1, 5, dtype=torch.float64)
    weights = torch.full((12,), 1 / 4 if mean else 1.0, dtype=torch.float64)
    weights[3] = 0.0  # padding
    gradients = Square().slope(X @ w, y)[:, None] * X * weights[:, None]
    reduced = gradients.reshape(3, 4, 5).sum(1)
    expected = (reduced * (0.7 / reduced.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0)
    got = exact(LinearGradientMean(Square(), w, 0.7), X, y, Units(4, weights))
    assert torch.allclose(got, expected, rtol=1e-12)


D = 6
ADVERSARIES: dict[str, tuple[list[float], float]] = {
    "zeros": ([0.0] * D, 1.0),
    "huge": ([1e150] * D, 1.0),
    "beyond float64": ([1e200] * D, 1.0),
    "huge in one entry": ([1e6] + [0.0] * (D - 1), -1.0),
    "tiny row, huge target": ([1e-170] * D, 1e300),
    "tiny row, large target": ([1e-160] * D, 1e170),
    "nan": ([math.nan] * D, 1.0),
    "one infinite entry": ([math.inf] + [1.0] * (D - 1), 1.0),
    "nan target": ([1.0] * D, math.nan),
    "infinite target": ([1.0] * D, math.inf),
    "ordinary": ([0.3, -0.2, 0.1, 0.5, -0.4, 0.2], -1.0),
}
NOTHING = {"beyond float64", "nan", "one infinite entry", "nan target", "infinite target"}


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("clip", [1.0, 1e-3, 37.0])
def test_neighbours_differ_by_at_most_the_unit(loss: Loss, clip: float) -> None:
    X, y = random_rows(20, D)
    for w in (torch.zeros(D, dtype=torch.float64), torch.linspace(-2, 3, D, dtype=torch.float64)):
        question = LinearGradientMean(loss, w, clip)
        without = exact(question, X, y)
        ends = []
        for name, (row, target) in ADVERSARIES.items():
            new_X, new_y = rows([row], [target])
            more = exact(question, torch.cat([X, new_X]), torch.cat([y, new_y]))
            assert torch.isfinite(more).all(), name
            moved = float((more - without).norm())
            assert moved <= clip * (1 + 1e-12) + 20 * clip * 1e-15, name  # and the rounding of the sum itself
            if name in NOTHING:
                assert moved == 0.0, name
            alone = exact(question, new_X, new_y)
            assert float(alone.norm()) <= clip * (1 + 1e-12), name
            ends.append(more)
        apart = max(float((a - b).norm()) for a in ends for b in ends)
        assert apart <= 2 * clip * (1 + 1e-12) + 20 * clip * 1e-15


def test_the_bound_is_reached() -> None:
    """Else the test above would pass for an answer that is too small by a factor."""
    far = exact(LinearGradientMean(Square(), torch.zeros(3, dtype=torch.float64), 2.0), *rows([[3.0, 0, 0]], [-9.0]))
    assert float(far.norm()) == pytest.approx(2.0, rel=1e-12)


def rows(X: list[list[float]], y: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(X, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_unit_of_several_adversarial_records_stays_within_the_unit(loss: Loss) -> None:
    w, clip = torch.linspace(-2, 3, D, dtype=torch.float64), 0.5
    for row, target in ADVERSARIES.values():
        for other, other_target in ADVERSARIES.values():
            X, y = rows([row, other], [target, other_target])
            got = exact(LinearGradientMean(loss, w, clip), X, y, Units(2, torch.ones(2, dtype=torch.float64)))
            assert torch.isfinite(got).all()
            assert float(got.norm()) <= clip * (1 + 1e-12)


def test_a_row_is_computed_the_same_in_every_batch() -> None:
    """At a kink the last bit of a score decides the slope: it must not depend on who else is in the batch."""
    X, _ = random_rows(301, 33)
    w = torch.linspace(-1, 1, 33, dtype=torch.float64)
    scores = (X * w).sum(1)
    for start, stop in ((0, 1), (3, 10), (100, 301), (17, 18)):
        assert torch.equal((X[start:stop] * w).sum(1), scores[start:stop])
    # All rows exactly at the kink: either all or none of them slope, alone as in company.
    y = 1 / scores
    slopes = Hinge().slope(scores, y)
    for i in range(0, 301, 37):
        alone = exact(LinearGradientMean(Hinge(), w, 1e9), X[i : i + 1], y[i : i + 1])
        assert torch.equal(alone, (slopes[i] * X[i]))


def by_columns(X: Tensor) -> Tensor:
    """The same table as pandas often has it in memory: column by column."""
    return X.T.contiguous().T


def every_second(X: Tensor) -> Tensor:
    return X.repeat_interleave(2, 1)[:, ::2]


def at_the_kink() -> tuple[Tensor, Tensor]:
    """Weights, and a row of score 1 but for rounding, which sums by columns bring to both sides of it."""
    g = torch.Generator().manual_seed(0)
    w = torch.rand(10, dtype=torch.float64, generator=g) - 0.5
    for _ in range(3000):
        row = torch.rand(10, dtype=torch.float64, generator=g) - 0.5
        row = row / (row @ w)
        few, many = ((by_columns(row.repeat(n, 1)) * w).sum(1) < 1 for n in (127, 128))
        if abs(int(few.sum()) - int(many.sum())) > 1:
            break
    return w, row


@pytest.mark.parametrize("laid_out", [torch.clone, by_columns, every_second])
def test_a_row_more_moves_the_sum_by_one_row_however_the_table_lies_in_memory(laid_out: Callable[..., Tensor]) -> None:
    w, row = at_the_kink()
    question = LinearGradientMean(Hinge(), w, 1.0)

    def total(count: int) -> Tensor:
        X = laid_out(row.repeat(count, 1))
        door = Private((X, torch.ones(count, dtype=torch.float64)), name="t", size=64, budget=Budget(1.0, 1e-3))
        return torch.as_tensor(question.exact(door._sample(np.arange(count))))

    sums = [total(count) for count in range(1, 140)]
    assert max(float((b - a).norm()) for a, b in pairwise(sums)) <= 1 + 1e-9
    assert torch.allclose(sums[-1], 139 * sums[0], rtol=1e-9)  # all of them or none


@pytest.mark.parametrize("laid_out", [torch.clone, by_columns, every_second])
@pytest.mark.parametrize("d", [1, 3, 10, 33, 100, 1000, 9000])
def test_scores_and_lengths_are_a_rows_own(laid_out: Callable[..., Tensor], d: int) -> None:
    X, _ = random_rows(150, d)
    w = torch.linspace(-1, 1, d, dtype=torch.float64)
    found = scores(X, w)
    assert torch.allclose(found, X @ w, rtol=1e-10, atol=1e-10)
    for start, stop in ((0, 1), (3, 10), (1, 150), (17, 145)):
        assert torch.equal(scores(laid_out(X[start:stop]), w), found[start:stop])
    units = unit_rows(X.numpy(), constant=False)
    for start, stop in ((0, 1), (1, 150), (17, 145)):
        part = unit_rows(laid_out(X[start:stop]).numpy(), constant=False)
        assert part.is_contiguous()
        assert torch.equal(part, units[start:stop])


class Jumping(Logistic):
    """A loss of one's own, whose slope jumps where a function does that is rounded by place."""

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(len(z)) % 2
        return (z * (1 + places * 2.0**-40) > 1 + 2.0**-41).double()


def test_the_slope_of_a_loss_of_ones_own_is_a_rows_own() -> None:
    w, row = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    question = LinearGradientMean(Jumping(), w, 1.0)
    sums = [float(exact(question, row.repeat(n, 1), torch.ones(n, dtype=torch.float64))) for n in range(1, 9)]
    assert sums in ([0.0] * 8, [float(n) for n in range(1, 9)])


def test_no_row_falls_from_the_clip_to_nothing_by_the_last_bit_of_a_norm() -> None:
    """Squares overflow from a norm of 1.3e154 on, and a norm times a slope from 1.8e308 on."""
    w = torch.zeros(2, dtype=torch.float64)

    def size(norm: float, target: float, units: Units | None = None) -> float:
        X = torch.tensor([[0.6 * norm, 0.8 * norm]], dtype=torch.float64)
        y = torch.tensor([target], dtype=torch.float64)
        return float(exact(LinearGradientMean(Square(), w, 1.0), X, y, units).norm())

    long = [*np.linspace(1e153, 4e153, 121), *np.linspace(1.2e154, 1.5e154, 31)]
    steep = [*np.linspace(0.5e153, 2e153, 121), *np.linspace(0.8e158, 0.95e158, 31)]
    alone = Units(1, torch.ones(1, dtype=torch.float64))
    for found in (
        [size(norm, -0.5) for norm in long],
        [size(norm, -0.5, alone) for norm in long],
        [size(1e150, -target) for target in steep],
    ):
        assert found[0] == pytest.approx(1.0)
        assert found[-1] == 0.0
        assert max(abs(a - b) for a, b in pairwise(found)) < 0.05


def test_shapes_and_constants_are_checked() -> None:
    X, y = random_rows(4, 3)
    w = torch.zeros(3, dtype=torch.float64)
    for question, batch, message in (
        (LinearGradientMean(Logistic(), w, math.inf), Batch(X, y), "clip=inf"),
        (LinearGradientMean(Logistic(), w, 0.0), Batch(X, y), "clip=0.0"),
        (LinearGradientMean(Logistic(), w.float(), 1.0), Batch(X, y), "float64"),
        (LinearGradientMean(Logistic(), w[:2], 1.0), Batch(X, y), "2 entries"),
        (LinearGradientMean(Logistic(), w, 1.0), Batch(X, y[:, None]), "vector y"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            question.check(batch)  # type: ignore[arg-type]


class Centred(Square):
    """A loss that mixes rows: refused, since it is not ours."""

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * (z - y - (z - y).mean())


def test_a_loss_that_mixes_rows_is_refused() -> None:
    X, y = random_rows(64, 3)
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(5.0, 1e-5))
    question = LinearGradientMean(Centred(), torch.ones(3, dtype=torch.float64), 1.0)
    with pytest.raises(InvalidArgument, match="other rows change"):
        private.ask(question, noise=5.0, sampler=private.everyone())


class Careless(Square):
    """A loss that writes to the targets it is given."""

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * (z - y.mul_(0.5))


def test_a_loss_of_somebody_else_gets_copies() -> None:
    X, y = random_rows(600, 3)
    before = y.clone()
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(5.0, 1e-5))
    private.ask(
        LinearGradientMean(Careless(), torch.ones(3, dtype=torch.float64), 1.0), noise=50.0, sampler=private.everyone()
    )
    assert torch.equal(y, before)


# ------------------------------------------------------------------------------------------------ through the door


def test_the_noise_is_the_multiplier_times_the_clip_over_the_declared_batch() -> None:
    X, y = random_rows(200, 40)
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(50.0, 1e-5), seed=NotPrivateSeed(1))
    question = LinearGradientMean(Logistic(), torch.ones(40, dtype=torch.float64), 0.3)
    private.reserve(Planned(LinearGradientMean, 5.0, private.everyone(), 50))
    clean = exact(question, X, y)
    noise = torch.cat([private.ask(question) * 200 - clean for _ in range(50)]).numpy() / (5.0 * 0.3)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], noise.size)
    assert low < (noise**2).sum() < high
    for wrong in (2 / 3, 1.5):
        assert not low < ((wrong * noise) ** 2).sum() < high
    assert abs(noise.mean()) < 5 / math.sqrt(noise.size)


def test_poisson_batches_are_divided_by_the_declared_batch() -> None:
    X = torch.ones(400, 1, dtype=torch.float64)
    private = Private(
        (X, torch.ones(400, dtype=torch.float64)),
        name="t",
        size=800,
        budget=Budget(90.0, 1e-5),
        seed=NotPrivateSeed(2),
    )
    question = LinearGradientMean(Hinge(), torch.zeros(1, dtype=torch.float64), 1.0)  # every row contributes -1
    private.reserve(Planned(LinearGradientMean, 1.0, private.poisson(40), 300))
    answers = np.array([float(private.ask(question)) for _ in range(300)])
    # 400 present rows at rate 40 / 800, divided by 40: the mean is -1/2, as only half of the declared rows are there.
    assert answers.mean() == pytest.approx(-0.5, abs=5 * math.sqrt(400 * 0.05 * 0.95 + 1) / 40 / math.sqrt(300))


def test_no_row_is_announced() -> None:
    X, y = random_rows(100, 3)
    X[7], y[9] = math.nan, math.inf
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(5.0, 1e-5))
    answer = private.ask(
        LinearGradientMean(Square(), torch.zeros(3, dtype=torch.float64), 1.0), noise=20.0, sampler=private.everyone()
    )
    assert torch.isfinite(answer).all()


def test_scores_and_sums_stay_where_the_rows_are() -> None:
    X = torch.zeros(5, 3, dtype=torch.float64, device="meta")
    assert scores(X, X[0]).device == X.device
