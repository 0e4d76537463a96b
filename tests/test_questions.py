"""Sensitivities of questions by neighbours: D, D with one unit more, D with one unit exchanged, whatever it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Gradient
from sfumato.objective import Objective
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, DiscreteGaussian, DiscreteLaplace, Gaussian
from sfumato.private import Private
from sfumato.questions import (
    Exact,
    GradientMean,
    GradientSum,
    Gram,
    Histogram,
    Joint,
    NoisyArgmin,
    NoisyMean,
    Question,
    Sample,
)

EXACT = 1 + 1e-9
WIDTH = 4
BUDGET = Budget(1.0, 1e-6)


def row_values() -> dict[str, Tensor]:
    one = torch.eye(WIDTH, dtype=torch.float64)
    rows = {
        "zero": torch.zeros(WIDTH),
        "inside": torch.tensor([0.3, -0.2, 0.1, 0.4]),
        "on the bound": one[0],
        "far": 1e6 * one[1],
        "opposite": -1e6 * one[1],
        "huge": torch.full((WIDTH,), 1e30),
        "overflows": torch.full((WIDTH,), 1e300, dtype=torch.float64),
        "tiny": torch.full((WIDTH,), 1e-310, dtype=torch.float64),
        "nan": torch.tensor([0.3, math.nan, 0.1, 0.4]),
        "inf": torch.tensor([math.inf, 0.1, 0.1, 0.4]),
        "-inf": torch.tensor([-math.inf, 0.1, 0.1, 0.4]),
        "all bad": torch.full((WIDTH,), math.nan),
    }
    return {name: row.double() for name, row in rows.items()}


ROWS = row_values()


def to_bin(rows: Tensor) -> Tensor:
    """Bins -2 to 5 of which 0 to 2 exist."""
    return torch.nan_to_num(rows[:, 0] * 3, nan=-1, posinf=5, neginf=-2).clamp(-2, 5).long()


def same(rows: Tensor) -> Tensor:
    return rows


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1)


OBJECTIVE = Objective(Linear(), lambda module, x: module(x))
PARAMS = OBJECTIVE.parameters()
QUESTIONS: dict[str, Callable[[], Question]] = {
    "NoisyMean": lambda: NoisyMean(same, 0.5, width=WIDTH),
    "Gram": lambda: Gram(same, 1.5, width=WIDTH),
    "Histogram": lambda: Histogram(to_bin, 3),
    "Histogram of two": lambda: Histogram(to_bin, 3, cap_per_unit=2),
    "NoisyArgmin": lambda: NoisyArgmin(same, WIDTH, 0.8),
    "GradientSum": lambda: GradientSum(PARAMS, Clip(0.6)),
    "GradientMean around an origin": lambda: GradientMean(
        PARAMS, Clip(0.6, origin=Gradient({"weight": torch.ones(WIDTH, dtype=torch.float64)}))
    ),
    "Joint": lambda: Joint(
        (
            NoisyMean(same, 0.5, width=WIDTH),
            Gram(same, 2.0, width=WIDTH),
            Histogram(to_bin, 3),
            GradientSum(PARAMS, Clip(9.0)),
        )
    ),
}


def exact(question: Question, rows: Tensor, users: list[int] | None = None, reduction: Any = "mean") -> Exact:
    private = Private(
        rows,
        name="rows",
        size=100,
        objective=OBJECTIVE,
        budget=BUDGET,
        unit="example" if users is None else "user",
        users=None if users is None else np.asarray(users),
        reduction=reduction,
        records_per_user=3,
    )
    return question.exact(private._sample(np.arange(private._present)))


def gap(a: Exact, b: Exact, norm: int = 2) -> float:
    pairs = [(a[k], b[k]) for k in a] if isinstance(a, dict) and isinstance(b, dict) else [(a, b)]
    flat = torch.cat([(x.double() - y.double()).reshape(-1) for x, y in pairs])  # type: ignore[union-attr]
    assert torch.isfinite(flat).all()
    return float(flat.abs().sum() if norm == 1 else flat.norm())


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_example_moves_the_answer_by_at_most_the_unit(name: str) -> None:
    question = QUESTIONS[name]()
    norm = 1 if question.discrete else 2
    rest = torch.stack([ROWS["inside"], -ROWS["inside"], ROWS["on the bound"]])
    before = exact(question, rest)
    after = {k: exact(question, torch.cat([rest[:1], row[None], rest[1:]])) for k, row in ROWS.items()}
    added = {k: gap(v, before, norm) / question.unit for k, v in after.items()}
    assert max(added.values()) <= EXACT, added
    replaced = max(gap(a, b, norm) for a, b in itertools.combinations(after.values(), 2)) / question.unit
    assert replaced <= question.replace_factor * EXACT
    # Else the bound says nothing: some row uses it up. (With four parts no row of ours uses up all of them at once, and
    # a cap of two is for users.)
    assert max(added.values()) >= (0.2 if name in ("Joint", "Histogram of two") else 0.99)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_user_moves_the_answer_by_at_most_the_unit(name: str, reduction: str) -> None:
    """With up to five records, of which three count."""
    question = QUESTIONS[name]()
    norm = 1 if question.discrete else 2
    names = list(ROWS)
    users = [[names[i % 12], names[(5 * i + 1) % 12], names[(7 * i + 4) % 12]][: 1 + i % 3] for i in range(36)]
    users += [[n] * 5 for n in ("on the bound", "far", "huge", "inside")]
    rest, ids = torch.stack([ROWS["inside"], -ROWS["inside"], ROWS["on the bound"]]), [7, 9, 7]
    before = exact(question, rest, ids, reduction)
    after = [
        exact(question, torch.cat([torch.stack([ROWS[n] for n in records]), rest]), [8] * len(records) + ids, reduction)
        for records in users
    ]
    assert max(gap(v, before, norm) for v in after) <= question.unit * EXACT
    largest = max(gap(a, b, norm) for a, b in itertools.combinations(after, 2))
    assert largest <= question.unit * question.replace_factor * EXACT


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_data_at_all_is_answered_with_zeros(name: str) -> None:
    question = QUESTIONS[name]()
    nothing = exact(question, torch.zeros(0, WIDTH, dtype=torch.float64))
    one = exact(question, ROWS["inside"][None])
    assert gap(nothing, one) <= question.unit * EXACT
    tensors = nothing.values() if isinstance(nothing, dict) else [nothing]
    assert all(not t.any() for t in tensors)


@pytest.mark.parametrize("name", ["NoisyMean", "Gram"])
def test_rows_that_are_not_finite_count_zero(name: str) -> None:
    question = QUESTIONS[name]()
    rest = torch.stack([ROWS["inside"], ROWS["on the bound"]])
    bad = torch.stack([ROWS["nan"], ROWS["all bad"]])
    assert gap(exact(question, rest), exact(question, torch.cat([bad, rest]))) == 0


def test_values_outside_the_bins_count_nowhere() -> None:
    def given(rows: Tensor) -> Tensor:
        return rows[:, 0].long()

    rows = torch.tensor([-5.0, -1, 0, 1, 2, 3, 99, 1])[:, None].double()
    assert exact(Histogram(given, 3), rows).tolist() == [1, 2, 1]  # type: ignore[union-attr]


def test_of_a_users_records_the_first_ones_count() -> None:
    def given(rows: Tensor) -> Tensor:
        return rows[:, 0].long()

    rows = torch.tensor([9.0, 0, 1, 1])[:, None].double()  # the first is in no bin and uses up nothing
    assert exact(Histogram(given, 3), rows, [4, 4, 4, 5]).tolist() == [1, 1, 0]  # type: ignore[union-attr]
    two = Histogram(given, 3, cap_per_unit=2)
    assert exact(two, rows, [4, 4, 4, 5]).tolist() == [1, 2, 0]  # type: ignore[union-attr]


def test_booleans_are_bins() -> None:
    rows = torch.tensor([[0.1], [0.9], [0.8]]).double()
    counted = exact(Histogram(lambda r: r[:, 0] > 0.5, 2), rows)
    assert counted.tolist() == [1, 2]  # type: ignore[union-attr]


def test_replacing_a_row_of_a_gram_matrix_moves_it_by_sqrt_two() -> None:
    """By brute force over random pairs: the claim is reached, never exceeded, and 1.4 would be too small."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3000, 3, generator=generator, dtype=torch.float64)
    y[:100] -= (y[:100] * x[:100]).sum(1, keepdim=True) * x[:100] / x[:100].square().sum(1, keepdim=True)  # orthogonal
    x, y = (
        t / t.norm(dim=1, keepdim=True) * torch.rand(3000, 1, generator=generator).double().pow(0.1) for t in (x, y)
    )
    x[:100], y[:100] = (t[:100] / t[:100].norm(dim=1, keepdim=True) for t in (x, y))
    moved = (torch.einsum("ni,nj->nij", x, x) - torch.einsum("ni,nj->nij", y, y)).flatten(1).norm(dim=1).max()
    assert 1.41 < float(moved) <= Gram.replace_factor * EXACT
    assert Gram.replace_factor == math.sqrt(2)
    # For users the matrices are sums of such products: positive semidefinite, so their inner product is not negative.
    x, y = (t.reshape(500, 6, 3) / t.reshape(500, 6, 3).flatten(1).norm(dim=1)[:, None, None] for t in (x, y))
    users = (x.transpose(1, 2) @ x - y.transpose(1, 2) @ y).flatten(1).norm(dim=1).max()
    assert float(users) <= Gram.replace_factor * EXACT


def test_every_other_question_claims_a_factor_of_two() -> None:
    """Clipped sums and L1 counts of two opposite units: nothing smaller would be sound."""
    for question in (GradientSum, GradientMean, NoisyMean, Histogram, NoisyArgmin, Joint):
        assert question.replace_factor == 2.0


# ------------------------------------------------------------------------------------------------ row maps


def centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(0)


def standardised(rows: Tensor) -> Tensor:
    return rows / rows.std(0, correction=0).clamp_min(1e-3)


def ranked(rows: Tensor) -> Tensor:
    return rows[:, 0].argsort().argsort()[:, None].double().expand(-1, WIDTH)


def divided(rows: Tensor) -> Tensor:
    return rows / len(rows)


def nearest(rows: Tensor) -> Tensor:
    """The nearest of two public points after centring: one row more moved 1997 of 2001 counts elsewhere."""
    return (centred(rows)[:, 0] > 0.01).long()


def door(rows: Tensor, **options: Any) -> Private:
    return Private(rows, name="rows", size=100, objective=OBJECTIVE, budget=BUDGET, **options)


@pytest.mark.parametrize("row_map", [centred, standardised, ranked, divided])
@pytest.mark.parametrize("kind", ["NoisyMean", "Gram", "NoisyArgmin"])
def test_a_map_that_mixes_rows_is_refused_and_costs_nothing(row_map: Callable[[Tensor], Tensor], kind: str) -> None:
    questions = {
        "NoisyMean": lambda: NoisyMean(row_map, 1.0, width=WIDTH),
        "Gram": lambda: Gram(row_map, 1.0, width=WIDTH),
        "NoisyArgmin": lambda: NoisyArgmin(row_map, WIDTH, 1.0),
    }
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match=r"row_map gives a row another value .*each row alone"):
        private.ask(questions[kind](), noise=100.0, sampler=private.everyone())
    assert private.account.epsilon_spent() == 0


def test_counts_after_centring_are_refused() -> None:
    private = door(torch.linspace(-1, 1, 30 * WIDTH, dtype=torch.float64).reshape(30, WIDTH))
    with pytest.raises(InvalidArgument, match="each row alone"):
        private.ask(Histogram(nearest, 2), noise=100.0, sampler=private.everyone())


def test_a_random_map_is_refused() -> None:
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    question = NoisyMean(lambda rows: nn.functional.dropout(rows), 1.0, width=WIDTH)
    with pytest.raises(InvalidArgument, match="each row alone"):
        private.ask(question, noise=100.0, sampler=private.everyone())


WRONG: dict[str, Question] = {
    "width of a mean": NoisyMean(same, 1.0, width=WIDTH + 1),
    "width of a matrix": Gram(same, 1.0, width=WIDTH - 1),
    "number of candidates": NoisyArgmin(same, WIDTH + 1, 1.0),
    "bins that are not integers": Histogram(lambda r: r[:, 0], 3),
    "several bins per row": Histogram(lambda r: r.long(), 3),
    "one value for all": NoisyMean(lambda r: r.sum(), 1.0),
    "no tensor": NoisyMean(lambda r: 3, 1.0),  # type: ignore[arg-type,return-value]
    "complex": NoisyMean(lambda r: r[:, 0].to(torch.complex64), 1.0),
    "a part of a joint question": Joint((NoisyMean(same, 1.0, width=WIDTH), NoisyMean(same, 1.0, width=9))),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_map_returns_is_checked_before_it_is_charged(name: str) -> None:
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match="row_map") as caught:
        private.ask(WRONG[name], noise=100.0, sampler=private.everyone())
    assert "\n" not in str(caught.value)
    assert private.account.epsilon_spent() == 0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_bounds_must_bound(bound: float) -> None:
    private = door(torch.rand(3, WIDTH, dtype=torch.float64))
    for make in (
        lambda: NoisyMean(same, bound),
        lambda: Gram(same, bound, 3),
        lambda: NoisyArgmin(same, 3, bound),
        lambda: private.ask(GradientSum(PARAMS, Clip(bound)), noise=100.0, sampler=private.everyone()),
    ):
        with pytest.raises(InvalidArgument, match=r"bound=|clip norm="):
            make()
    assert private.account.epsilon_spent() == 0


def test_senseless_questions() -> None:
    for make, message in (
        (lambda: Histogram(to_bin, 0), "bins=0"),
        (lambda: Histogram(to_bin, 3, cap_per_unit=0), "cap_per_unit=0"),
        (lambda: NoisyArgmin(same, 1, 1.0), "candidates=1"),
        (lambda: Joint((NoisyMean(same, 1.0),)), "at least two"),
        (lambda: Joint((NoisyMean(same, 1.0), 3)), "int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=message):
            make()


def test_an_objective_takes_a_loss_of_module_and_batch() -> None:
    for loss in (torch.nn.CrossEntropyLoss(), torch.nn.MSELoss(reduction="none"), "cross_entropy"):
        with pytest.raises(
            InvalidArgument, match=rf"loss={type(loss).__name__} must be a function loss\(module, batch\)"
        ):
            Objective(torch.nn.Linear(3, 2), loss)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ gradients


class Loose(Clip):
    """Could bound less than it is charged for."""


TOO_FEW = {"weight": torch.zeros(WIDTH - 1, dtype=torch.float64)}
WRONG_GRADIENTS: dict[str, tuple[Callable[[], Question], str]] = {
    "params of another model": (lambda: GradientSum({"w": torch.zeros(1)}, Clip(1.0)), "params"),
    "params of another shape": (lambda: GradientSum(TOO_FEW, Clip(1.0)), "params"),
    "offsets without names": (lambda: GradientSum(PARAMS, Clip(1.0), offsets=[{}]), "offsets"),
    "offsets of another shape": (lambda: GradientSum(PARAMS, Clip(1.0), offsets=[TOO_FEW]), "offsets"),
    "too few offsets": (lambda: GradientSum(PARAMS, Clip(1.0), views=2, offsets=[PARAMS]), "offsets has 1"),
    "no views": (lambda: GradientSum(PARAMS, Clip(1.0), views=0), "views=0"),
    "origin of another shape": (lambda: GradientSum(PARAMS, Clip(1.0, origin=Gradient(TOO_FEW))), "origin"),
    "scale of another model": (
        lambda: GradientSum(PARAMS, Clip(1.0, scale=Gradient({"w": torch.zeros(1)}))),
        "scale",
    ),
    "unbounded": (lambda: GradientSum(PARAMS, Clip(math.inf)), "clip norm=inf"),
    "smaller than numbers are exact": (lambda: GradientSum(PARAMS, Clip(1e-160)), "clip norm=1e-160 is below"),
    "a number for a clip": (lambda: GradientSum(PARAMS, 1.5), r"give Clip\(1\.5\)"),  # type: ignore[arg-type]
    "no clip": (lambda: GradientSum(PARAMS, None), "clip=NoneType must be a Clip"),  # type: ignore[arg-type]
    "a clip of one's own": (lambda: GradientSum(PARAMS, Loose(1.0)), "clip=Loose must be a Clip itself"),
    "params without names": (
        lambda: GradientSum((p for p in PARAMS.values()), Clip(1.0)),  # type: ignore[arg-type]
        r"params=generator must be .* objective\.parameters\(\)",
    ),
    "rows lost": (lambda: GradientSum(PARAMS, Clip(1.0), augment=lambda r: r[1:]), "augment"),
    "rows doubled": (lambda: GradientSum(PARAMS, Clip(1.0), augment=lambda r: torch.cat([r, r])), "augment"),
    "mixed up": (
        lambda: GradientSum(PARAMS, Clip(1.0), views=2, augment=lambda r: (r + r[torch.randperm(len(r))]) / 2),
        "MixUp",
    ),
    "cut and mixed": (
        lambda: GradientSum(PARAMS, Clip(1.0), augment=lambda r: torch.cat([r[:, :2], r.roll(1, 0)[:, 2:]], 1)),
        "MixUp",
    ),
    "centred": (lambda: GradientSum(PARAMS, Clip(1.0), augment=centred), "MixUp"),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_wrong_gradient_questions_cost_nothing(name: str) -> None:
    make, message = WRONG_GRADIENTS[name]
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match=message) as caught:
        private.ask(make(), noise=100.0, sampler=private.everyone())
    assert "\n" not in str(caught.value)
    assert private.account.epsilon_spent() == 0


def test_augmentation_row_by_row_is_accepted_and_leaves_the_generator_alone() -> None:
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    torch.manual_seed(3)
    expected = torch.rand(5)
    for augment in (
        lambda r: r + 0.1 * torch.randn_like(r),
        lambda r: r * (torch.rand(len(r), 1) > 0.5),
        lambda r: r.flip(1),
        lambda r: r + torch.from_numpy(np.random.normal(size=(len(r), 1))),  # noqa: NPY002 - which can be seeded
    ):
        torch.manual_seed(3)
        GradientSum(PARAMS, Clip(1.0), augment=augment).check(
            private._sample(np.arange(3), shown=private._rows_to_check_with())
        )
        assert torch.equal(torch.rand(5), expected)


def test_an_origin_needs_the_mean_of_a_users_records() -> None:
    question = QUESTIONS["GradientMean around an origin"]()
    private = door(torch.rand(6, WIDTH, dtype=torch.float64), unit="user", users=[0, 0, 1, 1, 2, 2], reduction="sum")
    with pytest.raises(InvalidArgument, match="reduction='mean'"):
        private.ask(question, noise=100.0, sampler=private.everyone())


# ------------------------------------------------------------------------------------------------ laws


def test_plain_numbers_stand_for_the_fitting_noise() -> None:
    assert Histogram.law(2.0) == DiscreteLaplace(2.0)
    for question in (GradientSum, NoisyMean, Gram, NoisyArgmin, Joint):
        assert question.law(2.0) == Gaussian(2.0)


@pytest.mark.parametrize("noise", [DiscreteLaplace(40.0), DiscreteGaussian(40.0)])
def test_counts_take_discrete_noise_only(noise: Any) -> None:
    private = door(torch.rand(30, WIDTH, dtype=torch.float64))
    assert private.ask(Histogram(to_bin, 3), noise=noise, sampler=private.everyone()).dtype == torch.int64
    spent = private.account.epsilon_spent()
    with pytest.raises(InvalidArgument, match="does not fit NoisyMean"):
        private.ask(NoisyMean(same, 1.0, width=WIDTH), noise=noise, sampler=private.everyone())
    with pytest.raises(InvalidArgument, match="does not fit Histogram"):
        private.ask(Histogram(to_bin, 3), noise=Gaussian(40.0), sampler=private.everyone())
    assert private.account.epsilon_spent() == spent


def test_a_joint_question_is_its_parts_with_more_noise() -> None:
    """Parts of very different units get noise in their own units: sqrt(m) times what they would get alone."""
    rows = torch.rand(30, WIDTH, dtype=torch.float64)
    parts = (NoisyMean(same, 1e-3, width=WIDTH), Gram(same, 10.0, width=WIDTH), GradientSum(PARAMS, Clip(2.0)))
    joint = Joint(parts)
    assert joint.unit == math.sqrt(3)
    scaled = exact(joint, rows)
    assert isinstance(scaled, dict)
    mean, matrix, gradient = joint.release(scaled, 5.0)
    assert torch.allclose(mean, exact(parts[0], rows) / 5.0)  # type: ignore[operator]
    assert torch.allclose(matrix, exact(parts[1], rows))  # type: ignore[arg-type]
    assert torch.allclose(gradient["weight"], exact(parts[2], rows)["weight"])  # type: ignore[index]
    lopsided = {k: v + torch.randn_like(v) for k, v in scaled.items()}
    noisy_matrix = joint.release(lopsided, 5.0)[1]
    assert torch.equal(noisy_matrix, noisy_matrix.T)


def test_joint_questions_nest_and_many_parts_keep_apart() -> None:
    rows = torch.rand(5, WIDTH, dtype=torch.float64)
    parts = tuple(NoisyMean(lambda r, k=k: r * k, 100.0, width=WIDTH) for k in range(1, 13))
    nested = Joint((parts[0], Joint(parts)))
    answers = nested.release(exact(nested, rows), 1.0)
    for k, answer in enumerate(answers[1], 1):
        assert torch.allclose(answer, k * rows.sum(0))


class Biased(Question):
    """A question of one's own, whose unit is not a bound."""

    @property
    def unit(self) -> float:
        return math.inf

    def exact(self, sample: Sample) -> Exact:
        raise AssertionError("must not be asked")

    def release(self, noisy: Any, expected: float) -> Any:
        return noisy


def test_an_unbounded_question_of_ones_own_is_refused() -> None:
    private = door(torch.rand(3, WIDTH, dtype=torch.float64))
    for question in (Biased(), Joint((Biased(), NoisyMean(same, 1.0, width=WIDTH)))):
        with pytest.raises(InvalidArgument, match="inf must be positive and finite"):
            private.ask(question, noise=100.0, sampler=private.everyone())
    assert private.account.epsilon_spent() == 0


def test_replace_factor_reaches_the_ledger() -> None:
    private = Private(
        torch.rand(30, WIDTH),
        name="rows",
        adjacency=Adjacency.REPLACE_ONE,
        budget=Budget(1.0, 1e-6),
        objective=OBJECTIVE,
    )
    for cls, factor in ((Gram, math.sqrt(2)), (NoisyMean, 2.0), (Joint, 2.0)):
        assert private._mechanism((cls, 50.0, private.everyone(), 1)).replace_factor == factor  # type: ignore[arg-type]
