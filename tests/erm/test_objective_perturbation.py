"""Objective perturbation: its density between neighbours, its conditions, noise and solver, and what it charges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from sfumato import Budget, Ledger, NotPrivateSeed, Planned, Private
from sfumato.erm import (
    Hinge,
    Huber,
    HuberisedHinge,
    Logistic,
    NonPrivateClassifier,
    NonPrivateRegressor,
    ObjectivePerturbationClassifier,
    ObjectivePerturbationRegressor,
    Square,
)
from sfumato.erm.losses import Loss
from sfumato.erm.objective_perturbation import ApproximateMinimum, largest_shift, least_l2
from sfumato.erm.output_perturbation import Minimiser
from sfumato.erm.pnsgd import OnePass
from sfumato.erm.rows import Rows
from sfumato.erm.sealed import SealedLinear, summed, summing_error
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.filters import SumFilter
from sfumato.privacy.mechanisms import Adjacency, Gaussian, SealedGaussian
from sfumato.questions import Exact, GradientMean, Sample, Sealed
from tests.erm.sealed import (
    Bent,
    D,
    N,
    Stuck,
    assert_refused_before_the_door_opens,
    assert_std,
    mu_of,
    neighbours,
    ran,
    table,
)
from tests.privacy.test_accounting import gaussian_delta

Array = npt.NDArray[np.float64]
LOSSES: list[Loss] = [Logistic(), HuberisedHinge(0.2), Huber(0.5)]


def question(loss: Loss, kind: type[ApproximateMinimum] = ApproximateMinimum, **changes: Any) -> ApproximateMinimum:
    fields: dict[str, Any] = {"loss": loss, "width": D, "L": loss.lipschitz, "n": N, "epsilon": 1.0, "delta": 1e-6}
    fields["l2"] = changes["l2"] if "l2" in changes else least_l2(loss, fields["n"], 1.0, 0.5)
    return kind(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (ObjectivePerturbationClassifier(loss=Hinge()), "is not smooth, .* use HuberisedHinge"),
        (ObjectivePerturbationClassifier(loss=Square()), "Lipschitz"),
        (ObjectivePerturbationClassifier(loss=Square(), radius=1.0), "not Lipschitz outside of a ball"),
        (ObjectivePerturbationRegressor(loss=Square(), radius=1.0), "Huber for numbers"),
        (ObjectivePerturbationRegressor(loss=Square()), "Lipschitz"),
        (ObjectivePerturbationClassifier(l2=1e-5), "l2=1e-05 must be at least 0.001285 for Logistic"),
        (ObjectivePerturbationClassifier(l2=2e-6, epsilon=0.1), "l2=2e-06 must be at least"),
        (ObjectivePerturbationClassifier(l2=1e-9, epsilon=100.0), "l2=1e-09 must be at least 1e-06"),
        (ObjectivePerturbationClassifier(adjacency="add-remove", size=300), "use 'replace-one'"),
    ],
    ids=str,
)
def test_what_is_not_covered_by_the_proof_is_refused_before_the_door_opens(estimator: Any, message: str) -> None:
    assert_refused_before_the_door_opens(estimator, message)


@pytest.mark.parametrize(
    ("asked", "noise", "message"),
    [
        (question(Hinge(), l2=1.0), None, "use HuberisedHinge"),
        (question(Square(), L=4.0, l2=1.0, radius=1.0), None, "not Lipschitz outside of a ball"),
        (question(Logistic(), l2=1e-4), None, "l2=0.0001 must be at least"),
        (question(Logistic()), 100.0, "noise=100.0 does not say what ApproximateMinimum costs"),
        (question(Logistic()), Gaussian(100.0), r"noise=Gaussian\(scale=100.0\) does not say what ApproximateMinimum"),
        (question(Logistic(), target_bound=2.0, l2=1.0), None, "target_bound=2.0 must be at most 1 for Logistic"),
        (question(HuberisedHinge(1e-9), l2=1e-4, epsilon=90.0), None, "too hard to minimise"),
        (question(Logistic(), n=5000, l2=1.0), None, "n=5000 of ApproximateMinimum must be the number of units, 40"),
        (question(Logistic(), n=5, l2=1.0), None, "n=5 of ApproximateMinimum must be the number of units, 40"),
    ],
    ids=str,
)
def test_the_question_itself_refuses_what_is_not_covered(asked: ApproximateMinimum, noise: Any, message: str) -> None:
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    with pytest.raises(InvalidArgument, match=message):
        private.plan(Planned(asked, noise or asked.charged, private.everyone()))
    assert not private.statement().asked


CHEAP = SealedGaussian(1e-9, epsilon=1e-6, delta=0.0, adjacency=Adjacency.REPLACE_ONE)


@pytest.mark.parametrize("filter", [None, SumFilter()], ids=str)
def test_nobody_else_says_what_it_costs(filter: Any) -> None:
    """Item 3a: a law of one's own, that of other numbers, and that of the class alone."""
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6), filter=filter)
    asked, everyone = question(Logistic()), private.everyone()
    others = [
        CHEAP,
        replace(asked.charged, scale=asked.charged.scale * 0.99),
        replace(asked.charged, scale=asked.charged.scale * 2),
        replace(asked.charged, epsilon=0.9),
        replace(asked.charged, delta=1e-7),
        question(Logistic(), l2=1.0).charged,
    ]
    for law in others:
        with pytest.raises(InvalidArgument, match="is not what the proof of ApproximateMinimum is about"):
            private.plan(Planned(asked, law, everyone))
        with pytest.raises(InvalidArgument, match="is not what the proof of ApproximateMinimum is about"):
            private.reserve(Planned(asked, law, everyone))
        with pytest.raises(InvalidArgument, match="is not what the proof of ApproximateMinimum is about"):
            private.ask(asked, noise=law, sampler=everyone)
    with pytest.raises(InvalidArgument, match="ApproximateMinimum is a class"):
        private.plan(Planned(ApproximateMinimum, asked.charged, everyone))
    assert not private.statement().asked
    assert private.account.left() == 1.0


@pytest.mark.parametrize("changes", [{"l2": 1e-3, "epsilon": 100.0}, {"l2": 1.0}, {"epsilon": 0.9, "l2": 1.0}], ids=str)
def test_what_was_planned_for_other_numbers_is_not_answered(changes: dict[str, Any]) -> None:
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    planned = question(Logistic())
    private.plan(Planned(planned, planned.charged, private.everyone()))
    with pytest.raises(InvalidArgument, match="is not what the proof of ApproximateMinimum is about"):
        private.ask(question(Logistic(), **changes))
    assert private.statement().asked[0].answers == 0
    private.ask(question(Logistic()))


class Unproven(Sealed):
    replace_factor: ClassVar[float] = 0.0
    unit = 1.0  # type: ignore[assignment]

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        raise AssertionError


class Renamed(Unproven):
    @classmethod
    def kind(cls) -> str:
        return "GradientMean"


def test_without_a_bound_and_without_a_proof_there_is_no_answer() -> None:
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    for asked, message in ((Unproven(), "does not say what it costs"), (Unproven, "is a class")):
        with pytest.raises(InvalidArgument, match=message):
            private.plan(Planned(asked, CHEAP, private.everyone()))
    private.plan(Planned(GradientMean, 100.0, private.everyone()))
    with pytest.raises(InvalidArgument, match="does not say what it costs"):
        private.ask(Renamed())


def test_other_questions_cannot_be_charged_by_a_statement_of_their_own() -> None:
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    with pytest.raises(InvalidArgument, match="GradientMean has none: use Gaussian"):
        private.plan(Planned(GradientMean, CHEAP, private.everyone()))


@pytest.mark.parametrize(
    "asked",
    [question(Logistic(), n=N // 2, l2=1.0), Minimiser(loss=Logistic(), width=D, L=1.0, n=N // 2, l2=0.1)],
    ids=lambda q: q.kind(),
)
@pytest.mark.parametrize("filter", [None, SumFilter()], ids=str)
def test_people_with_several_rows_are_refused_before_anything_is_charged(asked: SealedLinear, filter: Any) -> None:
    """Also where each has one row: the proof would hold, but who is protected is not what it is about."""
    for who in (np.arange(N) // 2, np.arange(N)):
        asked = replace(asked, n=len(set(who)))
        law = asked.charged or Gaussian(50.0)
        options: dict[str, Any] = {"unit": "user", "users": who, "adjacency": "replace-one", "filter": filter}
        private = Private(neighbours(0)[0], name="t", budget=Budget(1.0, 1e-6), **options)
        with pytest.raises(InvalidArgument, match="unit='user' is not covered by the proof"):
            private.ask(asked, noise=law, sampler=private.everyone())
        with pytest.raises(InvalidArgument, match="unit='user' is not covered by the proof"):
            private.plan(Planned(asked, law, private.everyone()))
        assert not private.statement().asked
        assert private.account.left() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_whose_rounding_no_proof_counts_are_refused_before_anything_is_charged(dtype: torch.dtype) -> None:
    X, y = neighbours(0)[0]
    private = Private((X.to(dtype), y.to(dtype)), name="t", budget=Budget(1.0, 1e-6), adjacency="replace-one")
    one_pass = OnePass(loss=Logistic(), width=D, L=1.0, n=N, eta=0.5, n_pub=0, z=50.0)
    for asked in (one_pass, Minimiser(loss=Logistic(), width=D, L=1.0, n=N, l2=0.1)):
        with pytest.raises(InvalidArgument, match="float64"):
            private.ask(asked, noise=50.0, sampler=private.everyone())
    assert private.account.left() == 1.0


# ---------------------------------------------------------------------------------------------- the proof, step by step


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_curvatures_are_derivatives_of_slopes_and_within_the_claim_for_all_targets_that_are_let_in(loss: Loss) -> None:
    """Item 3b: targets of classifiers may lie between -1 and 1; beyond, their losses are more curved than they say."""
    z = torch.linspace(-7, 7, 401, dtype=torch.float64, requires_grad=True)
    for target in (-1.0, -0.4, 0.3, 1.0):
        y = torch.full_like(z, target)
        (derivative,) = torch.autograd.grad(loss.slope(z, y).sum(), z)
        assert torch.allclose(loss.curvature(z, y), derivative, atol=1e-12)
        assert loss.smoothness is not None
        assert float(derivative.max()) <= loss.smoothness * (1 + 1e-12)
    if not loss.regression:
        (derivative,) = torch.autograd.grad(loss.slope(z, torch.full_like(z, 3.0)).sum(), z)
        assert float(derivative.max()) > 8 * loss.smoothness, "why larger targets are refused"


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_linear_term_and_the_minimiser_determine_each_other(loss: Loss) -> None:
    """Step (1): what is minimised has a gradient of zero, so b can be read off w; and another b gives another w."""
    asked = question(loss)
    rows = asked._within(*neighbours(0)[0])
    g = torch.Generator().manual_seed(0)
    found = []
    for size in (0.1, 3.0, 40.0):
        b = size * torch.randn(D, dtype=torch.float64, generator=g)
        w = asked._solved(rows, b)
        leaf = w.clone().requires_grad_()
        total = loss.value(rows.X @ leaf, rows.y).sum() + asked.n * asked.l2 / 2 * leaf @ leaf
        (gradient,) = torch.autograd.grad(total, leaf)
        assert torch.allclose(-gradient, b, rtol=0, atol=asked.gamma)
        found.append((b, w))
    for b, w in found:
        for other_b, other_w in found:
            assert asked.Lambda * (w - other_w).norm() <= (b - other_b).norm() * (1 + 1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_exchanging_a_row_changes_density_and_linear_term_within_the_claim(loss: Loss) -> None:
    """Steps (2) and (3): determinants of autograd's Jacobian, and b(w), at the same w for many neighbours."""
    asked = question(loss)
    assert loss.smoothness is not None
    kappa = math.log1p(loss.smoothness / asked.Lambda)
    assert kappa == pytest.approx(0.5)
    zero, first = torch.zeros(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)[0]
    most_dets, most_moved = 0.0, 0.0
    for w in (zero, 0.9 * first, torch.linspace(-0.3, 0.4, D, dtype=torch.float64)):
        for seed in range(3):
            dets, terms = [], []
            for X, y in neighbours(seed):
                rows = asked._within(X, y)
                jacobian = torch.autograd.functional.jacobian(partial(asked._gradient, rows=rows, b=zero), w)
                dets.append(float(torch.logdet(jacobian)))
                terms.append(asked._gradient(w, rows, zero))
            most_dets = max(most_dets, max(dets) - min(dets))
            most_moved = max(most_moved, *(float((a - b).norm()) for a in terms for b in terms))
    assert 0.999 * kappa < most_dets <= kappa * (1 + 1e-9), "the claim is reached"
    assert most_moved <= 2 * asked.unit
    if not isinstance(loss, Logistic):  # whose slope nears its bound only for large scores
        assert most_moved > 1.99 * asked.L


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 4.0])
def test_no_angle_between_the_two_rows_is_worse_than_none(epsilon: float) -> None:
    """Step (3): both corners at once, by integration, where the theorem's condition is met, just and amply."""
    limit = -math.sqrt(2) + math.sqrt(2 + 2 * epsilon)
    u, step = np.linspace(0, 9, 900, retstep=True)
    half = np.exp(-(u**2) / 2) * math.sqrt(2 / math.pi) * step
    half[0] /= 2
    weights = half[:, None] * half[None, :]
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    for m in (limit, 0.5 * limit):
        claimed = 2 * gaussian_delta(m, epsilon)
        for angle in np.linspace(0, math.pi / 4, 7):
            c, s = m * math.cos(angle), m * math.sin(angle)
            loss = np.maximum((c * u + c * c / 2)[:, None], (s * u + s * s / 2)[None, :])
            got = float((weights * np.maximum(0, -np.expm1(epsilon - loss))).sum())
            assert got <= claimed * (1 + 1e-4) + 1e-12
            if angle == 0:
                assert got == pytest.approx(claimed, rel=1e-3, abs=1e-12)


# One weight, rows x = 1 or 0: the density of the minimiser in closed form, hence the true delta by integration.
Row = tuple[float, float]
W = np.sinh(np.linspace(-14, 14, 100_001))


def density(loss: Loss, rows: list[Row], Lambda: float, sigma: float, w: Array = W) -> Array:
    b, slope_of_b = Lambda * w, np.full_like(w, Lambda)
    for x, y in rows:
        z, target = torch.from_numpy(x * w), torch.full((len(w),), y, dtype=torch.float64)
        b = b + x * loss.slope(z, target).numpy()
        slope_of_b = slope_of_b + x * x * loss.curvature(z, target).numpy()
    values: Array = np.exp(-0.5 * (b / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)) * slope_of_b
    return values


def true_delta(loss: Loss, rows: list[Row], others: list[Row], Lambda: float, sigma: float, epsilon: float) -> float:
    p, q = density(loss, rows, Lambda, sigma), density(loss, others, Lambda, sigma)
    assert np.trapezoid(p, W) == pytest.approx(1, abs=1e-3)
    both = [np.trapezoid(np.maximum(a - math.exp(epsilon) * c, 0), W) for a, c in ((p, q), (q, p))]
    return float(max(both))


PAIRS: list[tuple[Loss, list[Row], list[Row]]] = [
    (HuberisedHinge(0.5), [(1.0, 1.0)], [(1.0, -1.0)]),
    (HuberisedHinge(0.5), [(1.0, 1.0)] * 3, [(1.0, 1.0)] * 2 + [(1.0, -1.0)]),
    (Logistic(), [(1.0, 1.0)], [(1.0, -1.0)]),
    (Huber(1.0), [(1.0, 0.0)], [(0.0, 0.0)]),
    (Huber(1.0), [(1.0, 0.0)] + [(1.0, 4.0)] * 20, [(1.0, 2.0)] + [(1.0, 4.0)] * 20),
]


@pytest.mark.parametrize(("loss", "rows", "others"), PAIRS, ids=range(len(PAIRS)))
@pytest.mark.parametrize("floors", [1, 10, 400])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_true_delta_is_within_what_is_charged(
    loss: Loss, rows: list[Row], others: list[Row], floors: int, epsilon: float
) -> None:
    delta = 1e-3
    l2 = floors * least_l2(loss, len(rows), epsilon, 0.5)
    asked = question(loss, n=len(rows), l2=l2, epsilon=epsilon, delta=delta, width=1)
    sigma = asked.charged.scale * asked.L
    assert true_delta(loss, rows, others, asked.Lambda, sigma, epsilon) <= delta


def test_half_the_noise_or_too_little_regularisation_would_break_the_promise() -> None:
    epsilon, delta = 1.0, 1e-3
    loss, rows, others = PAIRS[0]
    asked = question(loss, n=1, l2=200.0, epsilon=epsilon, delta=delta, width=1)
    sigma = asked.charged.scale * asked.L
    right = true_delta(loss, rows, others, 200.0, sigma, epsilon)
    assert 0.4 * delta < right <= delta, "nearly nothing is given away: one sign of the two"
    assert true_delta(loss, rows, others, 200.0, 0.9 * sigma, epsilon) > delta
    assert true_delta(loss, rows, others, 200.0, 0.5 * sigma, epsilon) > 30 * delta

    loss, rows, others = PAIRS[3]
    floor = least_l2(loss, 1, epsilon, 0.5)
    asked = question(loss, n=1, l2=floor, epsilon=epsilon, delta=delta, width=1)
    sigma = asked.charged.scale * asked.L
    assert true_delta(loss, rows, others, floor, sigma, epsilon) <= delta
    # Below beta / (exp(epsilon) - 1) the determinants alone differ by more than epsilon, whatever the noise.
    assert true_delta(loss, rows, others, floor / 4, sigma, epsilon) > 10 * delta
    assert true_delta(loss, rows, others, floor / 4, 5 * sigma, epsilon) > 2 * delta


# ------------------------------------------------------------------------------------------------ constants


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-6), (8.0, 1e-4)])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_noise_is_the_least_that_the_theorem_allows(epsilon: float, delta: float, loss: Loss) -> None:
    for share in (0.5, 0.05):
        l2 = least_l2(loss, N, epsilon, share)
        asked = question(loss, l2=l2, epsilon=epsilon, delta=delta)
        assert loss.smoothness is not None
        assert math.log(1 + loss.smoothness / (N * l2)) == pytest.approx(share * epsilon)
        left = 0.99

        def excess(m: float, left: float = left, share: float = share) -> float:
            return 2 * gaussian_delta(m, epsilon * (left - share)) - left * delta

        m = brentq(excess, 1e-4, 50.0)
        assert epsilon * (left - share) >= m * m / 2 + math.sqrt(2) * m
        assert asked.charged.scale == pytest.approx(2 / m, rel=1e-6)
        assert (asked.charged.epsilon, asked.charged.delta) == (epsilon, delta)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-5, 1e-6), (0.1, 1e-9), (1.0, 1e-6), (20.0, 1e-3)])
def test_no_more_noise_than_the_classical_constants_and_the_condition_of_the_theorem_holds(
    epsilon: float, delta: float
) -> None:
    """Kifer et al. give kappa half of epsilon and sigma = zeta sqrt(8 log(2 / delta) + 4 epsilon) / epsilon."""
    m = largest_shift(epsilon / 2, delta, objective=True)
    assert epsilon / 2 >= (m * m / 2 + math.sqrt(2) * m) * (1 - 1e-12)
    if epsilon > 1e-3:
        classical = epsilon / math.sqrt(8 * math.log(2 / delta) + 4 * epsilon)
        assert 1.0 < m / classical < 1.5
        assert largest_shift(epsilon, delta, objective=False) == pytest.approx(mu_of(epsilon, delta), rel=1e-6)


def test_the_output_noise_hides_how_the_minimum_was_missed() -> None:
    asked = question(Logistic())
    assert asked.output_noise == pytest.approx(2 * asked.gamma / asked.Lambda / mu_of(0.01, 1e-8), rel=1e-4)
    inner = question(Logistic(), n=1, width=1000, l2=1.0)
    for one in (asked, inner):
        drawn = math.sqrt(one.width) * one.charged.scale * one.L * 2.0**-46  # half a step of 2^-45 in every entry of b
        assert one.gamma >= 2 * one.rounding + drawn
    assert asked.output_noise < 1e-3 * asked.charged.scale * asked.L / (N + asked.Lambda), "next to nothing"


# ------------------------------------------------------------------------------------------------ noise and solver


class Coarse(ApproximateMinimum):
    """A solver that may stop far away, so that the noise on the weights can be seen."""

    gamma = 0.4  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [ApproximateMinimum, Coarse])
def test_both_noises_have_the_charged_law(kind: type[ApproximateMinimum]) -> None:
    """Rows of zeros pull nowhere: w = -b / Lambda, and AMP's noise on top."""
    asked = question(Logistic(), kind, width=150, n=50, l2=1.0)
    rows = torch.zeros(50, 150, dtype=torch.float64), torch.ones(50, dtype=torch.float64)
    answers = []
    for seed in range(8):
        private = Private(rows, name="t", adjacency="replace-one", budget=Budget(2.0, 1e-6), seed=NotPrivateSeed(seed))
        private.plan(Planned(asked, asked.charged, private.everyone()))
        answers.append(private.ask(asked).numpy())
    variance = (asked.charged.scale * asked.L / asked.Lambda) ** 2
    if isinstance(asked, Coarse):
        assert asked.output_noise**2 > 2 * variance
        variance += asked.output_noise**2
    assert_std(np.concatenate(answers), math.sqrt(variance))


@pytest.mark.parametrize("loss", [*LOSSES, Bent()], ids=str)
@pytest.mark.parametrize("shape", [(N, D), (8, 30), (600, 4)])
def test_the_gradient_is_as_small_as_is_promised(loss: Loss, shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.rand(*shape, dtype=torch.float64, generator=g) - 0.5
    y = torch.sign(X[:, 0])
    asked = question(loss, n=shape[0], width=shape[1], l2=least_l2(loss, shape[0], 1.0, 0.5))
    assert asked.gamma < 1e-7 * asked.L
    for size in (0.0, 10.0, 30.0):
        b = size * torch.randn(shape[1], dtype=torch.float64, generator=g)
        rows = asked._within(X, y)
        assert true_gradient(asked, asked._solved(rows, b), rows, b) <= asked.gamma


def true_gradient(asked: ApproximateMinimum, w: Tensor, rows: Rows, b: Tensor) -> float:
    """Scores and sums in fractions; slopes by their derivative where float64 has no room for a score."""
    weights = [Fraction(v) for v in w.tolist()]
    total = [Fraction(asked.Lambda) * v + Fraction(a) for v, a in zip(weights, b.tolist(), strict=True)]
    inner = [[Fraction(v) for v in row] for row in rows.X.tolist()]
    scores = [sum((a * v for a, v in zip(row, weights, strict=True)), Fraction(0)) for row in inner]
    z = torch.tensor([float(score) for score in scores], dtype=torch.float64)
    more = torch.tensor([float(score - Fraction(float(score))) for score in scores], dtype=torch.float64)
    slopes, curves = asked.loss.slope(z, rows.y), Logistic().curvature(z, rows.y)
    if not isinstance(asked.loss, Bent):
        curves = asked.loss.curvature(z, rows.y)
    for row, slope, change in zip(inner, slopes.tolist(), (curves * more).tolist(), strict=True):
        s = Fraction(slope) + Fraction(change)
        total = [t + s * a for t, a in zip(total, row, strict=True)]
    return math.sqrt(float(sum(t * t for t in total)))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_computed_gradient_is_off_by_less_than_is_counted_for_sorted_rows_too(loss: Loss) -> None:
    """Item 2b: equal rows, first those of one class, then those of the other, is where plain sums lose most."""
    n = 4000
    X = torch.tensor([[0.1, 0.7]], dtype=torch.float64).repeat(n, 1)
    y = torch.ones(n, dtype=torch.float64)
    y[n // 2 :] = -1.0
    asked = question(loss, n=n, width=2, l2=least_l2(loss, n, 1.0, 0.05))
    for w in (torch.zeros(2, dtype=torch.float64), torch.tensor([0.6, -0.8], dtype=torch.float64) * asked.reach):
        rows, b = asked._within(X, y), torch.tensor([3.0, -8.0], dtype=torch.float64)
        computed = asked._gradient(w, rows, b)
        off = true_gradient(asked, w, rows, b - computed)
        assert off <= asked.rounding


def test_scores_that_cancel_are_counted() -> None:
    """A long w across the rows: each slope is off by its score's rounding, all of them the same way."""
    n = 1000
    asked = question(Logistic(), n=n, width=2, l2=least_l2(Logistic(), n, 100.0, 0.05), epsilon=100.0)
    rows = asked._within(
        torch.tensor([[0.6, 0.7]], dtype=torch.float64).repeat(n, 1), torch.ones(n, dtype=torch.float64)
    )
    b, off = torch.zeros(2, dtype=torch.float64), []
    for share in np.linspace(0.5, 1.0, 9):
        w = torch.tensor([0.7, -0.6], dtype=torch.float64) * share * asked.reach
        off.append(true_gradient(asked, w, rows, -asked._gradient(w, rows, b)))
    assert max(off) <= asked.rounding
    assert max(off) > 2 * summing_error(n) * n, "more than sums alone would explain"


def test_sums_of_sorted_rows_are_within_their_bound_and_plain_ones_are_not() -> None:
    n = 200_000
    X = torch.full((n, 2), 0.1, dtype=torch.float64)
    slopes = torch.full((n,), 0.7, dtype=torch.float64)
    slopes[n // 2 :] = -0.3
    exact = Fraction(0.1) * (n // 2) * (Fraction(0.7) + Fraction(-0.3))

    def off(total: Tensor) -> float:
        return abs(float(Fraction(float(total[0])) - exact))

    bound = summing_error(n) * 0.05 * n
    assert off(summed(X, slopes)) <= bound
    assert off((X * slopes[:, None]).cumsum(0)[-1]) > 100 * bound
    for few in (1, 31, 32, 33, 97):
        assert torch.allclose(summed(X[:few], slopes[:few]), X[:few].T @ slopes[:few], rtol=1e-14)


class Lower(Logistic):
    """The same slopes, and values below zero, which at zero are next to none."""

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return super().value(z, y) - math.log(2) + 1e-9


def test_values_below_zero_hide_no_minimum() -> None:
    """J(w) <= J(0) bounds w only where no loss is below zero; others are reached all the same, if less exactly."""
    n = 20_000
    X = torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(n, 1)
    rows, b = Rows(X, torch.ones(n, dtype=torch.float64)), torch.zeros(2, dtype=torch.float64)
    lower, usual = (question(loss, n=n, width=2, l2=1e-3, epsilon=20.0) for loss in (Lower(), Logistic()))
    w = usual._solved(rows, b)
    naive = 2 * usual._longest_b / usual.Lambda + math.sqrt(2 * float(Lower().value(b, b).max()) / 1e-3)
    assert naive < float(w.norm()) < usual.reach < lower.reach
    assert torch.allclose(lower._solved(rows, b), w, atol=1e-8)
    assert lower.gamma > usual.gamma


class Endless(ApproximateMinimum):
    """Looks at its gradient but never likes it, as where float64 cannot get there."""

    looked: ClassVar[int] = 0

    def _is_solution(self, w: Tensor, rows: Rows, b: Tensor) -> bool:
        type(self).looked += 1
        return False


@pytest.mark.parametrize(("loss", "kind"), [(Stuck(), ApproximateMinimum), (Logistic(), Endless)], ids=str)
def test_what_is_not_solved_ends_after_a_public_number_of_steps_and_does_not_leave(
    loss: Loss, kind: type[ApproximateMinimum]
) -> None:
    X, y = neighbours(0)[0]
    asked = question(loss, kind, l2=0.1)
    b = torch.linspace(-3, 9, D, dtype=torch.float64)
    Endless.looked = 0
    assert torch.equal(asked._solved(asked._within(X, y), b), -b / asked.Lambda)
    assert Endless.looked in (0, asked.steps + 1)
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    private.plan(Planned(asked, asked.charged, private.everyone()))
    assert bool(torch.isfinite(private.ask(asked)).all())
    assert private.statement().asked[0].answers == 1, "it is charged all the same"


def test_descent_alone_gets_there_within_its_steps() -> None:
    for loss in LOSSES:
        asked = question(loss, l2=least_l2(loss, N, 1.0, 0.05))
        rows = asked._within(*neighbours(0)[0])
        b = asked._sigma * torch.linspace(-2, 2, D, dtype=torch.float64)
        far = torch.full((D,), asked.reach / math.sqrt(D), dtype=torch.float64)
        assert asked._is_solution(asked._descended(far, rows, b), rows, b)


# ------------------------------------------------------------------------------------------------ the grid, an attack


def test_nobody_can_see_which_neighbour_has_drawn_a_possible_linear_term() -> None:
    """Item 2a. Whoever knows both tables computes the b of either from the weights, and looks which lies on a grid.

    Ten features belong to the target alone. On the door's grid of 2^-20 the guess was always right; epsilon=1 allows
    73 %, and float64's own steps are below the noise on the weights.
    """
    n, K, trials = 50, 10, 60
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (n, K + 2))
    X[:, :K] = 0.0
    with_target = X.copy()
    with_target[0] = 0.0
    with_target[0, :K] = rng.uniform(0.5, 1, K) / math.sqrt(K)
    y = np.where(X[:, K] > 0, 1.0, -1.0)
    y[0] = 1.0
    tables = [(torch.from_numpy(rows), torch.from_numpy(y)) for rows in (X, with_target)]
    asked = question(Logistic(), n=n, width=K + 2, l2=least_l2(Logistic(), n, 1.0, 0.05))
    std = asked.charged.scale * asked.unit
    right = dict.fromkeys((20, 45), 0)
    for trial in range(trials):
        private = Private(tables[trial % 2], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
        private.plan(Planned(asked, asked.charged, private.everyone()))
        w = private.ask(asked)
        for bits in right:
            grid = math.ldexp(1.0, math.frexp(std)[1] - 1 - bits)
            off = []
            for table_ in tables:
                b = -asked._gradient(w, asked._within(*table_), torch.zeros_like(w))[:K] / grid
                off.append(float(((b - b.round()) ** 2).sum()))
            right[bits] += (off[1] < off[0]) == (trial % 2 == 1)
    assert all(0.2 * trials < count < 0.85 * trials for count in right.values()), right


def test_far_less_noise_and_regularisation_give_the_minimiser_without_privacy() -> None:
    X, y = table(3000)
    model = ObjectivePerturbationClassifier(epsilon=400.0, not_private_seed=0).fit(X, y)
    clean = NonPrivateClassifier(l2=model.l2_).fit(X, y)
    less = ObjectivePerturbationClassifier(epsilon=4.0, l2=0.01, not_private_seed=0).fit(X, y)
    same = NonPrivateClassifier(l2=0.01).fit(X, y)
    assert model.l2_ == 1e-6
    assert less.l2_ == 0.01
    assert np.mean(model.predict(X) != clean.predict(X)) < 0.01
    assert np.allclose(less.coef_, same.coef_, atol=0.3 * np.abs(same.coef_).max())
    line = ObjectivePerturbationRegressor(epsilon=400.0, l2=0.01, not_private_seed=0).fit(X, X[:, 0])
    assert np.allclose(line.coef_, NonPrivateRegressor(loss=Huber(), l2=0.01).fit(X, X[:, 0]).coef_, atol=2e-2)


def test_without_noise_it_is_the_regularised_minimiser() -> None:
    X, y = neighbours(0)[0]
    asked = question(Logistic(), l2=0.1)
    model = NonPrivateClassifier(l2=0.1, fit_intercept=False).fit(X.numpy(), y.numpy() > 0)
    assert np.allclose(ran(asked, X, y).numpy(), model.coef_[0], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"loss": HuberisedHinge()}], ids=str)
def test_it_learns(options: dict[str, Any]) -> None:
    X, y = table(5000)
    model = ObjectivePerturbationClassifier(**options)
    scores = [model.set_params(not_private_seed=s).fit(X[200:], y[200:], X[:200], y[:200]).score(X, y) for s in (0, 1)]
    assert np.mean(scores) > 0.85


# ------------------------------------------------------------------------------------------------ the ledger


class Watched(ApproximateMinimum):
    """Looks at the ledger from inside the door."""

    look: Callable[[], None]

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        type(self).look()
        return super().run(sample, noisy)


def test_the_ledger_is_charged_before_the_rows_are_looked_at() -> None:
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    asked = question(Logistic(), Watched)
    counted: list[int] = []
    Watched.look = staticmethod(lambda: counted.append(private.statement().asked[0].answers))
    dearer = question(Logistic(), Watched, epsilon=1.1)
    with pytest.raises(BudgetExceeded):
        private.plan(Planned(dearer, dearer.charged, private.everyone()))
    assert not private.statement().asked
    private.plan(Planned(asked, asked.charged, private.everyone()))
    assert not counted
    assert isinstance(private.ask(asked), Tensor)
    assert counted == [1]
    with pytest.raises(BudgetExceeded):
        private.ask(asked)
    assert counted == [1]


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 3.0])
def test_the_ledger_says_what_accounting_says(epsilon: float) -> None:
    X, y = table()
    model = ObjectivePerturbationClassifier(epsilon=epsilon).fit(X, y)
    (line,) = model.ledger_.asked
    assert line.answers == line.mechanism.times == 1
    law = line.mechanism.noise
    assert isinstance(law, SealedGaussian)
    assert (law.epsilon, law.delta) == (pytest.approx(epsilon), 1e-6)
    cost = accounting.epsilon([line.mechanism], delta=1e-6, adjacency=Adjacency.REPLACE_ONE)
    assert model.epsilon_ == model.ledger_.epsilon == cost.epsilon
    assert epsilon * (1 - 1e-6) < cost.epsilon <= epsilon
    assert cost.accountant.startswith("PLD")
    assert "by its own proof under replace-one" in line.note
    assert model.ledger_.private
    assert "under replace-one" in model.ledger_.to_text()


def test_a_second_fit_on_the_same_account_is_refused_and_the_advice_is_true() -> None:
    X, y = table()
    ledger = Ledger(None)
    ObjectivePerturbationClassifier(ledger=ledger).fit(X, y)
    with pytest.raises(UnsupportedAccounting, match="declare it in the first plan of its account"):
        ObjectivePerturbationClassifier(ledger=ledger, epsilon=0.1).fit(X, y)
    ObjectivePerturbationClassifier(ledger=ledger, name="another", epsilon=0.1).fit(X, y)
    with pytest.raises(UnsupportedAccounting, match="whose delta must be at least 1e-12"):
        ObjectivePerturbationClassifier(delta=1e-13).fit(X, y)
    assert ObjectivePerturbationClassifier(delta=1e-12).fit(X, y).epsilon_ <= 1.0


# ------------------------------------------------------------------------------------------------ what the proofs cover


def sealed(kind: str) -> Sealed:
    common: dict[str, Any] = {"loss": Logistic(), "width": 2, "L": 1.0}
    if kind == "OnePass":
        return OnePass(**common, eta=0.1, n_pub=10, n=100, z=5.0)
    return Minimiser(**common, l2=0.05, n=100)


@pytest.mark.parametrize("kind", ["OnePass", "Minimiser"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("sampler", ["everyone", "poisson", "fixed"])
def test_a_sealed_method_is_asked_of_all_rows_and_for_the_exchange_of_one(
    kind: str, adjacency: str, sampler: str
) -> None:
    """OnePass of 150 of 1000 rows had 2.4 times the stated mu; DescentWeights under add-remove moved 17 units."""
    if (adjacency, sampler) == ("add-remove", "fixed"):
        pytest.skip("refused by the sampler itself")
    rows = torch.linspace(-0.5, 0.5, 100, dtype=torch.float64).repeat(2, 1).T
    private = Private((rows, rows[:, 0].sign()), name="t", size=100, adjacency=adjacency, budget=Budget(5.0, 1e-5))
    chosen = {"everyone": private.everyone, "poisson": lambda: private.poisson(30), "fixed": lambda: private.fixed(30)}
    if (adjacency, sampler) == ("replace-one", "everyone"):
        assert private.ask(sealed(kind), noise=5.0, sampler=private.everyone()).shape == (2,)
        return
    with pytest.raises(InvalidArgument, match="proven for the exchange of one of all rows"):
        private.ask(sealed(kind), noise=5.0, sampler=chosen[sampler]())
    assert private.statement().epsilon == 0


class Unrounded(Sealed):
    inside = 1

    @property
    def unit(self) -> float:
        return 1.0

    def run(self, sample: Any, noisy: Any) -> Any:
        return noisy(torch.zeros(3, dtype=torch.float64))


def test_noise_that_leaves_is_rounded() -> None:
    private = Private(torch.zeros(9, 1), name="t", adjacency="replace-one", budget=Budget(5.0, 1e-5))
    with pytest.raises(InvalidArgument, match="inside=1"):
        private.ask(Unrounded(), noise=4.0, sampler=private.everyone())
    assert private.statement().epsilon == 0
