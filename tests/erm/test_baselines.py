"""The baselines: what their proofs need is refused or enforced, neighbours stay within the claim, noise has its law."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm
from torch import Tensor

from sfumato import Budget, Ledger, NotPrivateSeed, Planned, Private
from sfumato.erm import (
    AGDAverageClassifier,
    AGDClassifier,
    DPSGDClassifier,
    Hinge,
    Huber,
    HuberisedHinge,
    Logistic,
    OutputPerturbationClassifier,
    OutputPerturbationRegressor,
    PNSGDClassifier,
    PNSGDRegressor,
    PublicOnlyClassifier,
    SgdAdvancedClassifier,
    Square,
)
from sfumato.erm.agd import BestStep
from sfumato.erm.losses import Loss
from sfumato.erm.output_perturbation import DescentWeights, Minimiser
from sfumato.erm.pnsgd import OnePass, slope_of_numbers
from sfumato.erm.sealed import SealedLinear
from sfumato.erm.sgd_advanced import historical_noise
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy.mechanisms import Adjacency
from tests.erm.sealed import (
    Batch,
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

# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (OutputPerturbationClassifier(loss=Hinge()), "use HuberisedHinge"),
        (PNSGDClassifier(loss=Hinge()), "use HuberisedHinge"),
        (OutputPerturbationClassifier(loss=Square()), "give a projection radius"),
        (OutputPerturbationRegressor(loss=Square()), "use Huber, or give a projection radius"),
        (PNSGDRegressor(loss=Square()), "give a projection radius"),
        (OutputPerturbationClassifier(learning_rate=8.1), r"learning_rate=8.1 .* = 8 for Logistic"),
        (OutputPerturbationClassifier(learning_rate=7.9, l2=0.1), r"learning_rate=7.9 .* = 5.714"),
        (OutputPerturbationClassifier(loss=HuberisedHinge(0.1), learning_rate=0.5), r"learning_rate=0.5"),
        (PNSGDClassifier(learning_rate=8.1), r"learning_rate=8.1"),
        (PNSGDClassifier(learning_rate=0.0), r"learning_rate=0.0"),
        (OutputPerturbationClassifier(max_iter=None), "l2=0.0 must be at least"),
        (OutputPerturbationClassifier(max_iter=None, l2=0.1, loss=Square(), radius=1.0), "inside a ball only"),
        (OutputPerturbationClassifier(max_iter=0), "max_iter=0"),
        (OutputPerturbationClassifier(adjacency="add-remove", size=300), "use 'replace-one'"),
        (PNSGDClassifier(adjacency="add-remove", size=300), "use 'replace-one'"),
        (PNSGDClassifier(radius=math.inf), "radius=inf"),
        (PNSGDRegressor(target_bound=0.0), "target_bound=0.0"),
        (AGDClassifier(loss_bound=math.inf), "loss_bound=inf"),
        (AGDClassifier(growth=0.0), "growth=0.0"),
        (AGDClassifier(max_iter=0), "max_iter=0"),
        (SgdAdvancedClassifier(accounting="rdp"), "accounting='rdp'"),
        (SgdAdvancedClassifier(adjacency="add-remove", size=300), "not that of the historical formula"),
    ],
    ids=str,
)
def test_what_is_not_covered_by_a_proof_is_refused_before_the_door_opens(estimator: Any, message: str) -> None:
    assert_refused_before_the_door_opens(estimator, message)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (DescentWeights(loss=Logistic(), width=D, L=1.0, n=40, eta=8.1, T=3), "learning_rate=8.1"),
        (DescentWeights(loss=Hinge(), width=D, L=1.0, n=40, eta=0.1, T=3), "use HuberisedHinge"),
        (Minimiser(loss=Hinge(), width=D, L=1.0, n=40, l2=0.1), "use HuberisedHinge"),
        (OnePass(loss=Logistic(), width=D, L=1.0, eta=8.1, n_pub=3, n=40, z=20.0), "learning_rate=8.1"),
        (OnePass(loss=Square(), width=D, L=1.0, eta=0.1, n_pub=3, n=40, z=20.0), "give a projection radius"),
        (OnePass(loss=Logistic(), width=D, L=1.0, eta=0.1, n_pub=3, n=40, z=10.0), "is not what the proof of OnePass"),
        (OnePass(loss=Logistic(), width=D, L=1.0, eta=0.1, n_pub=3, n=41, z=20.0), "n=41 of OnePass must be"),
        (OnePass(loss=Logistic(), width=D, L=1.0, eta=0.1, n_pub=40, n=40, z=20.0), "n_pub=40"),
        (DescentWeights(loss=Logistic(), width=D, L=1.0, n=20, eta=0.1, T=3), "n=20 of DescentWeights must be"),
        (Minimiser(loss=HuberisedHinge(), width=D, L=1.0, n=40, l2=0.1, target_bound=3.0), "target_bound=3.0"),
    ],
    ids=str,
)
def test_the_questions_themselves_refuse_what_is_not_covered(question: SealedLinear, message: str) -> None:
    rows = neighbours(0)[0]
    private = Private(rows, name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    with pytest.raises(InvalidArgument, match=message):
        private.ask(question, noise=20.0, sampler=private.everyone())
    assert not private.statement().asked


# ------------------------------------------------------------------------------------------------ sensitivity

SMOOTH: list[tuple[Loss, float | None]] = [
    (Logistic(), None),
    (HuberisedHinge(0.2), None),
    (Huber(0.5), None),
    (Square(), 0.7),
]


def furthest(question: SealedLinear) -> float:
    """The largest distance between neighbours, over three tables, in units of what is claimed for replace-one."""
    most = 0.0
    for seed in range(3):
        ends = [ran(question, *rows) for rows in neighbours(seed)]
        assert all(bool(torch.isfinite(end).all()) for end in ends)
        most = max(most, *(float((a - b).norm()) for a in ends for b in ends))
    return most / (question.replace_factor * question.unit)


def constants(loss: Loss, radius: float | None) -> dict[str, Any]:
    L = loss.lipschitz if radius is None else loss.lipschitz_within(radius, 1.0)
    return {"loss": loss, "width": D, "L": L, "radius": radius}


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize(("loss", "radius"), SMOOTH, ids=str)
def test_neighbours_of_descent_stay_within_the_claim(loss: Loss, radius: float | None, l2: float) -> None:
    assert loss.smoothness is not None
    for share in (0.3, 1.0):
        eta = share * 2 / (loss.smoothness + l2)
        question = DescentWeights(**constants(loss, radius), l2=l2, n=N, eta=eta, T=12)
        assert furthest(question) <= 1 + 1e-9


def test_the_claim_for_descent_has_no_slack_and_is_reached() -> None:
    question = DescentWeights(**constants(HuberisedHinge(), None), n=1000, eta=0.5, T=50)
    assert question.replace_factor * question.unit == pytest.approx(2 * 0.5 * 1 * 50 / 1000, rel=1e-5)
    short = DescentWeights(**constants(HuberisedHinge(), None), n=N, eta=0.5, T=12)
    assert furthest(short) > 0.999
    strong = DescentWeights(**constants(HuberisedHinge(), None), l2=0.2, n=1000, eta=0.5, T=500)
    assert strong.replace_factor * strong.unit == pytest.approx(2 / (0.2 * 1000), rel=1e-5)


def test_the_hinge_would_break_the_claim() -> None:
    """Item 27: why it is refused. A row that is exchanged tips others over their kink, step after step."""
    X = torch.eye(1, dtype=torch.float64).repeat(1000, 1)
    y = torch.ones(1000, dtype=torch.float64)
    question = DescentWeights(loss=HuberisedHinge(1e-9), width=1, L=1.0, n=1000, eta=0.5, T=50)
    other = y.clone()
    other[0] = -1.0
    moved = float((ran(question, X, y) - ran(question, X, other)).norm())
    assert moved > 3 * 2 * 0.5 * 50 / 1000


@pytest.mark.parametrize("loss", [Logistic(), HuberisedHinge(0.2), Huber(0.5)], ids=str)
def test_neighbours_of_the_minimiser_stay_within_the_claim(loss: Loss) -> None:
    for l2 in (0.003, 0.1):
        question = Minimiser(**constants(loss, None), l2=l2, n=N)
        assert furthest(question) <= 1 + 1e-9
        for rows in neighbours(0)[:3]:
            assert float(question._gradient(ran(question, *rows), question._within(*rows)).norm()) <= question.tau


def test_the_claim_for_the_minimiser_has_no_slack_and_is_reached() -> None:
    question = Minimiser(**constants(HuberisedHinge(0.2), None), l2=0.1, n=N)
    assert question.replace_factor * question.unit == pytest.approx(2 / (0.1 * N), rel=2e-3)
    assert furthest(question) > 0.95


def test_where_newton_fails_the_minimiser_is_found_all_the_same() -> None:
    rows = neighbours(0)[0]
    failing, fine = (Minimiser(**constants(loss, None), l2=0.1, n=N) for loss in (Bent(), Logistic()))
    w = ran(failing, *rows)
    assert float(failing._gradient(w, failing._within(*rows)).norm()) <= failing.tau
    assert float((w - ran(fine, *rows)).norm()) <= 2 * failing.tau / 0.1


def test_what_cannot_be_minimised_gives_the_answer_without_rows() -> None:
    question = Minimiser(**constants(Stuck(), None), l2=0.1, n=N)
    assert torch.equal(ran(question, *neighbours(0)[0]), torch.zeros(D, dtype=torch.float64))


@pytest.mark.parametrize("n_pub", [0, 7])
@pytest.mark.parametrize(("loss", "radius"), SMOOTH, ids=str)
def test_one_pass_moves_neighbours_by_at_most_one_gradient_step(loss: Loss, radius: float | None, n_pub: int) -> None:
    """What the proof of PNSGD needs of the map: with the same noise the ends are at most 2 eta L apart."""
    assert loss.smoothness is not None
    eta = 2 / loss.smoothness
    question = OnePass(**constants(loss, radius), eta=eta, n_pub=n_pub, n=N, z=3.0)
    assert question.unit * math.sqrt(n_pub + 1) == pytest.approx(eta * question.L, rel=1e-5)
    assert furthest(question) <= math.sqrt(n_pub + 1) * (1 + 1e-9)
    if isinstance(loss, HuberisedHinge):
        assert furthest(question) > 0.99 * math.sqrt(n_pub + 1)


# ------------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("options", [{"max_iter": 7, "learning_rate": 2.0}, {"max_iter": None, "l2": 0.05}], ids=str)
def test_output_perturbation_adds_the_analytic_gaussian_noise(options: dict[str, Any]) -> None:
    X, y = table(500, 40)
    shared: dict[str, Any] = {"loss": Logistic(), "width": 40, "L": 1.0, "n": 500}
    if options["max_iter"] is None:
        Delta = 2 / (0.05 * 500)
        question: SealedLinear = Minimiser(**shared, l2=0.05)
    else:
        Delta = 2 * 2.0 * 1.0 * 7 / 500
        question = DescentWeights(**shared, eta=2.0, T=7)
    clean = ran(question, torch.from_numpy(X), torch.from_numpy(2.0 * y - 1)).numpy()
    fits = [
        OutputPerturbationClassifier(epsilon=2.0, fit_intercept=False, not_private_seed=s, **options).fit(X, y)
        for s in range(30)
    ]
    noise = np.concatenate([model.coef_[0] - clean for model in fits])
    assert_std(noise, Delta / mu_of(2.0, 1e-6))
    assert all(1.99 < model.epsilon_ <= 2.0 for model in fits)
    assert [line.answers for line in fits[0].ledger_.asked] == [1]


def test_the_projection_also_follows_the_noise() -> None:
    X, y = table()
    model = OutputPerturbationClassifier(epsilon=0.1, radius=0.5, fit_intercept=False).fit(X, y)
    assert np.linalg.norm(model.coef_) == pytest.approx(0.5)


@pytest.mark.parametrize("n_pub", [0, 24])
def test_pnsgd_draws_fresh_noise_for_every_row(n_pub: int) -> None:
    """Rows of zeros have no gradient: what is left is the sum of all noise."""
    rows, eta = 50 + n_pub, 0.1
    X, y = np.zeros((rows, 40)), np.arange(rows) % 2
    fits = [
        PNSGDClassifier(epsilon=2.0, learning_rate=eta, fit_intercept=False, not_private_seed=s, classes=(0, 1)).fit(
            X[n_pub:], y[n_pub:], *((X[:n_pub], y[:n_pub]) if n_pub else (None, None))
        )
        for s in range(30)
    ]
    sigma = 2 * 1.0 / (mu_of(2.0, 1e-6) * math.sqrt(n_pub + 1))
    assert_std(np.concatenate([model.coef_[0] for model in fits]), eta * sigma * math.sqrt(rows))
    assert all(1.99 < model.epsilon_ <= 2.0 for model in fits)


def test_the_charge_of_pnsgd_is_tight_for_a_single_private_row() -> None:
    """With one private row and idle public ones the two ends are two Gaussians, as far apart as is charged for."""
    n_pub, eta, z = 24, 0.1, 3.0
    X = torch.zeros(n_pub + 1, 6, dtype=torch.float64)
    X[0, 0] = 1.0
    question = OnePass(loss=HuberisedHinge(), width=6, L=1.0, eta=eta, n_pub=n_pub, n=n_pub + 1, z=z)
    ends = []
    for label in (-1.0, 1.0):
        y = torch.full((n_pub + 1,), label, dtype=torch.float64)
        budget, seed = Budget(900.0, 1e-5), NotPrivateSeed(0)  # the same noise twice: the distance is exact
        private = Private((X, y), name="t", adjacency="replace-one", budget=budget, seed=seed)
        private.reserve(Planned(question, z, private.everyone(), 200))
        ends.append(torch.stack([private.ask(question) for _ in range(200)]).numpy())
    assert np.allclose(ends[1] - ends[0], [2 * eta, 0, 0, 0, 0, 0])
    assert_std((ends[0] + ends[1]) / 2, 2 * eta / (question.replace_factor / z))


def test_the_noise_inside_is_not_on_the_grid_of_answers_and_the_last_one_is() -> None:
    """Item 2a: on a grid of 2^-20 it could be recognised from outside."""
    drawn: list[Tensor] = []

    class Seen(OnePass):
        def run(self, sample: Any, noisy: Callable[[Any], Any]) -> Any:
            def kept(exact: Any) -> Any:
                drawn.append(noisy(exact))
                return drawn[-1]

            return super().run(sample, kept)

    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    question = Seen(loss=Logistic(), width=D, L=1.0, eta=0.1, n_pub=3, n=40, z=20.0)
    private.ask(question, noise=20.0, sampler=private.everyone())
    grid = 2.0 ** (math.floor(math.log2(20.0 * question.unit)) - 20)
    inner, last = (noise / grid for noise in drawn)
    assert float((last - last.round()).abs().max()) == 0
    assert float((inner - inner.round()).abs().mean()) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(("loss", "radius"), SMOOTH, ids=str)
def test_a_step_of_one_pass_rounds_by_less_than_is_counted(loss: Loss, radius: float | None) -> None:
    """Against the same steps, from the same points, in fractions."""
    assert loss.smoothness is not None
    g = torch.Generator().manual_seed(0)
    X, y = 2 * torch.rand(200, D, dtype=torch.float64, generator=g) - 1, torch.ones(200, dtype=torch.float64)
    question = OnePass(**constants(loss, radius), eta=1 / loss.smoothness, l2=0.1, n_pub=9, n=200, z=3.0)
    rows = question._within(X, y)
    w = torch.linspace(-0.3, 0.3, D, dtype=torch.float64) * (radius or 50.0)
    worst = 0.0
    for x, target in zip(rows.X, rows.y, strict=True):
        z = 0.1 * torch.randn(D, dtype=torch.float64, generator=g)
        moved_w = w.clone()
        question._move(moved_w.numpy(), x.numpy(), float(target))
        stepped = question._projected(moved_w + z)
        exact = [Fraction(v) for v in w.tolist()]
        score = sum((Fraction(a) * b for a, b in zip(x.tolist(), exact, strict=True)), Fraction(0))
        true_slope = Fraction(_slope_of(loss, float(score), float(score - Fraction(float(score))), float(target)))
        true_slope = min(Fraction(question.L), max(-Fraction(question.L), true_slope))
        moved = [
            v * (1 - Fraction(question.eta) * Fraction(0.1))
            - Fraction(question.eta) * true_slope * Fraction(a)
            + Fraction(b)
            for v, a, b in zip(exact, x.tolist(), z.tolist(), strict=True)
        ]
        length = math.sqrt(float(sum(v * v for v in moved)))
        shrunk = Fraction(min(1.0, (radius or math.inf) / length))
        off = [float(Fraction(a) - b * shrunk) for a, b in zip(stepped.tolist(), moved, strict=True)]
        worst = max(worst, math.hypot(*off))
        w = stepped
    assert 0 < worst < question.error < 1e-9


@pytest.mark.parametrize("loss", [Logistic(), HuberisedHinge(0.2), Square(), Huber(0.5), Stuck()], ids=str)
def test_slopes_of_single_numbers_are_those_of_tensors(loss: Loss) -> None:
    slope = slope_of_numbers(loss)
    for z in [*np.linspace(-3, 3, 61), -1e3, -40.0, 40.0, 1e3]:
        for y in (-1.0, 1.0):
            alike = float(loss.slope(torch.tensor(z, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)))
            assert slope(float(z), y) == pytest.approx(alike, rel=4e-16, abs=1e-300, nan_ok=True)


def _slope_of(loss: Loss, z: float, more: float, y: float) -> float:
    """The slope at z + more, by its derivative where float64 has no room for the sum."""
    at, target = torch.tensor([z], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    return float(loss.slope(at, target)) + more * float(loss.curvature(at, target))


def test_what_rounding_costs_pnsgd_is_next_to_nothing_and_refused_where_it_is_not() -> None:
    large = OnePass(loss=Logistic(), width=100, L=1.0, eta=0.1, n_pub=2000, n=10**6, z=8.0)
    assert 1 < large.unit * math.sqrt(2001) / 0.1 < 1.01
    few = OnePass(loss=Logistic(), width=D, L=1.0, eta=0.1, n_pub=39, n=40, z=1e13)
    assert few.unit > 1.1 * few._without_error
    private = Private(neighbours(0)[0], name="t", adjacency="replace-one", budget=Budget(1.0, 1e-6))
    with pytest.raises(InvalidArgument, match="round too much in float64"):
        private.ask(few, noise=1e13, sampler=private.everyone())


def test_one_pass_is_sgd_with_public_rows_last() -> None:
    X, y = (torch.from_numpy(a) for a in (table(30)[0], 2.0 * table(30)[1] - 1))
    question = OnePass(loss=Logistic(), width=D, L=1.0, l2=0.1, eta=1.5, n_pub=4, n=30, z=3.0)

    def sgd(order: list[int]) -> Tensor:
        w = torch.zeros(D, dtype=torch.float64, requires_grad=True)
        for i in order:
            (g,) = torch.autograd.grad(Logistic().value(X[i] @ w, y[i]) + 0.05 * w @ w, w)
            w = (w - 1.5 * g).detach().requires_grad_()
        return w.detach()

    # Public rows are the last four steps, in their order, whatever happened before: undo them one by one.
    from sfumato.erm.pnsgd import _order

    order = [int(i) for i in _order(26, 30)]
    assert order[-4:] == [26, 27, 28, 29]
    assert sorted(order) == list(range(30))
    assert torch.allclose(ran(question, X, y), sgd(order), atol=1e-12)


# ------------------------------------------------------------------------------------------------ DP-AGD


def best_step(loss: Loss = Hinge(), bound: float = 2.0, K: int = 4) -> BestStep:  # noqa: B008
    start, direction = torch.linspace(-3, 3, 2 * D, dtype=torch.float64).reshape(2, D)
    lengths, zeros = torch.linspace(0, 2, K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
    return BestStep(loss=loss, start=start, direction=direction, lengths=lengths, penalty=zeros, bound=bound)


@pytest.mark.parametrize("loss", [Logistic(), Hinge(), Square()], ids=str)
def test_losses_of_neighbours_stay_within_the_unit(loss: Loss) -> None:
    question = best_step(loss)
    ends = [question.exact(Batch(*rows)) for rows in neighbours(0)]  # type: ignore[arg-type]
    apart = max(float((a - b).norm()) for a in ends for b in ends)  # type: ignore[operator]
    assert apart <= question.replace_factor * question.unit
    X, y = neighbours(0)[0]
    without = question.exact(Batch(X[1:], y[1:]))  # type: ignore[arg-type]
    assert all(float((end - without).norm()) <= question.unit for end in ends)  # type: ignore[operator]


def test_the_step_search_adds_up_the_losses_of_its_candidates() -> None:
    """Row by row, over more rows than are taken at a time; what is not finite is left out."""
    question = best_step(Hinge(), K=3)
    g = torch.Generator().manual_seed(0)
    X = 2 * torch.rand(19000, D, dtype=torch.float64, generator=g) - 1
    y = torch.where(X[:, 0] > 0, 1.0, -1.0).double()
    points = question.start - question.lengths[:, None] * question.direction
    losses = torch.stack([Hinge().value(X @ point, y).clamp(0, 2.0) for point in points], 1)
    assert 0.2 < float((losses < 2.0).double().mean()) < 0.9
    assert torch.allclose(question.exact(Batch(X, y)), losses.sum(0), rtol=1e-12)  # type: ignore[arg-type]
    X[5, 1], X[6, 2], y[7] = math.nan, math.inf, math.nan
    losses[5:8] = 0.0
    assert torch.allclose(question.exact(Batch(X, y)), losses.sum(0), rtol=1e-12)  # type: ignore[arg-type]


def test_the_unit_of_the_step_search_is_reached() -> None:
    start, zeros = torch.full((1,), -9.0, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    away = BestStep(loss=Hinge(), start=start, direction=start, lengths=zeros, penalty=zeros, bound=2.0)
    one, y = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    moved = away.exact(Batch(one, y)) - away.exact(Batch(one, -y))  # type: ignore[arg-type,operator]
    assert float(moved.norm()) == pytest.approx(2.0 * math.sqrt(4), rel=1e-8)


def test_the_step_search_errs_as_often_as_its_noise_says() -> None:
    rows, z, bound = 400, 5.0, 2.0
    X, y = torch.ones(rows, 1, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    private = Private((X, y), name="t", adjacency="replace-one", budget=Budget(900.0, 1e-5), seed=NotPrivateSeed(0))
    private.reserve(Planned(BestStep, z, private.everyone(), 1500))
    gap = 0.05  # of the mean losses; the penalty makes the second candidate's advantage that small
    question = BestStep(
        loss=Hinge(),
        start=torch.zeros(1, dtype=torch.float64),
        direction=-torch.ones(1, dtype=torch.float64),
        lengths=torch.tensor([0.0, 0.5], dtype=torch.float64),
        penalty=torch.tensor([0.0, 0.5 - gap], dtype=torch.float64),
        bound=bound,
    )
    right = np.mean([private.ask(question) for _ in range(1500)])
    claimed, error = [norm.cdf(gap * rows / (z * s * bound * math.sqrt(2) * math.sqrt(2))) for s in (1.0, 0.8)], 0.01
    assert abs(right - claimed[0]) < 4 * error < abs(right - claimed[1])


def spent(model: Any, replaced: bool) -> tuple[float, dict[str, int]]:
    """epsilon of what the ledger says was asked, by dp-accounting's own Rényi accountant, and how often what."""
    accountant = RdpAccountant(list(np.linspace(1.5, 400, 800)), NeighboringRelation.ADD_OR_REMOVE_ONE)
    counts: dict[str, int] = {}
    for line in model.ledger_.asked:
        factor = line.mechanism.replace_factor if replaced else 1.0
        accountant.compose(GaussianDpEvent(line.mechanism.noise.scale / factor), line.answers)
        counts[line.mechanism.question] = counts.get(line.mechanism.question, 0) + line.answers
    return float(accountant.get_epsilon(model.delta)), counts


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_agd_charges_gradients_and_searches_and_stays_within_the_budget(adjacency: str) -> None:
    X, y = table(2000)
    size = None if adjacency == "replace-one" else 2000
    model = AGDClassifier(epsilon=1.0, max_iter=12, adjacency=adjacency, size=size, not_private_seed=0).fit(X, y)
    cost, counts = spent(model, adjacency == "replace-one")
    assert 0.85 < cost <= 1.0 == model.epsilon_
    assert counts["LinearGradientMean"] >= model.n_iter_
    assert counts["BestStep"] >= model.n_iter_ - 1
    assert model.score(X, y) > 0.8


def test_agd_reserves_answers_together_and_gives_back_what_it_did_not_ask() -> None:
    X, y = table(2000)
    ledger = Ledger(None)
    model = AGDClassifier(epsilon=1.0, max_iter=40, ledger=ledger, not_private_seed=0).fit(X, y)
    cost, counts = spent(model, True)
    assert 0.9 < cost <= 1.0
    assert sum(counts.values()) > 3 * len(model.ledger_.asked)
    with pytest.raises(BudgetExceeded):
        model.fit(X, y)


def test_agd_uses_up_an_account_that_covers_less_than_its_budget() -> None:
    X, y = table(2000)
    ledger, small = Ledger(None), Budget(0.5, 1e-6)
    rows = torch.from_numpy(X), torch.from_numpy(2.0 * y - 1)
    one_order = AGDClassifier(epsilon=1.0)._filter(2000, None)
    private = Private(rows, name="table", ledger=ledger, budget=small, adjacency="replace-one", filter=one_order)
    model = AGDClassifier(epsilon=1.0, max_iter=40, ledger=ledger, not_private_seed=0).fit(X, y)
    assert 3 <= model.n_iter_ < 20
    assert 0 <= private.account.left() < 0.05


def test_agd_buys_better_gradients_where_none_leads_down() -> None:
    X, y = table(2000)
    flat = np.zeros_like(X)  # no gradient but noise, and every step that is penalised leads up
    model = AGDClassifier(epsilon=1.0, max_iter=20, l2=20.0, fit_intercept=False, not_private_seed=1).fit(flat, y)
    cost, counts = spent(model, True)
    assert cost <= 1.0
    assert counts["LinearGradientMean"] > model.n_iter_, "no gradient was measured again"
    scales = [a.mechanism.noise.scale for a in model.ledger_.asked if a.mechanism.question == "LinearGradientMean"]
    # The k-th measurement again costs gamma (1 + gamma)^k of the first share: its noise is that much larger.
    assert max(scales) / scales[0] == pytest.approx(1 / math.sqrt(0.1), rel=1e-6)


def test_agd_ends_where_a_shared_account_does() -> None:
    X, y = table(2000)
    ledger = Ledger(None)
    ledger.account("table", unit="example", adjacency=Adjacency.REPLACE_ONE, budget=Budget(0.6, 1e-6))
    model = AGDClassifier(epsilon=1.0, max_iter=12, ledger=ledger).fit(X, y)
    assert spent(model, True)[0] <= 0.6
    assert model.n_iter_ < 12
    with pytest.raises(BudgetExceeded):
        AGDClassifier(epsilon=1.0, max_iter=1, ledger=ledger).fit(X, y)


def test_agd_keeps_its_own_budget_where_the_account_has_more() -> None:
    X, y = table(2000)
    ledger = Ledger(None)
    ledger.account("table", unit="example", adjacency=Adjacency.REPLACE_ONE, budget=Budget(5.0, 1e-6))
    model = AGDClassifier(epsilon=0.5, max_iter=12, ledger=ledger).fit(X, y)
    assert 0.4 < spent(model, True)[0] <= 0.5


def test_agd_average_is_the_mean_of_two_models() -> None:
    X, y = table(600)
    private, public = (X[50:], y[50:]), (X[:50], y[:50])
    options: dict[str, Any] = {"max_iter": 4, "not_private_seed": 3}
    agd, average = (kind(**options).fit(*private, *public) for kind in (AGDClassifier, AGDAverageClassifier))
    alone = PublicOnlyClassifier().fit(*private, *public)
    assert np.allclose(average.coef_, (agd.coef_ + alone.coef_) / 2)
    assert np.allclose(average.intercept_, (agd.intercept_ + alone.intercept_) / 2)
    assert average.epsilon_ == agd.epsilon_
    assert np.array_equal(
        AGDAverageClassifier(**options).fit(*private).coef_, AGDClassifier(**options).fit(*private).coef_
    )


# ------------------------------------------------------------------------------------------------ SgdAdv


@pytest.mark.parametrize(("epsilon", "q", "T"), [(0.1, 0.01, 500), (0.5, 0.01, 500), (1.0, 0.002, 20000)])
def test_the_historical_noise_composes_to_epsilon_and_delta(epsilon: float, q: float, T: int) -> None:
    """Forwards, from the noise to the budget, as the theorems are written."""
    delta = 1e-6
    sigma = historical_noise(Budget(epsilon, delta), q, T)
    delta0 = delta / 2 / (T * q)
    eps0 = 2 * math.sqrt(2 * math.log(1.25 / delta0)) / sigma
    assert eps0 <= 1
    step = 2 * q * eps0
    total = math.sqrt(2 * T * math.log(2 / delta)) * step + T * step * (math.exp(step) - 1)
    assert total == pytest.approx(epsilon, rel=1e-9)
    assert total <= epsilon * (1 + 1e-12)


def test_the_historical_formula_is_refused_where_it_does_not_hold() -> None:
    with pytest.raises(UnsupportedAccounting, match="eps0 > 1"):
        historical_noise(Budget(0.5, 1e-6), 0.01, 4)
    X, y = table()
    with pytest.raises(UnsupportedAccounting, match="eps0 > 1"):
        SgdAdvancedClassifier(epsilon=3.0, max_iter=2, batch_size=10).fit(X, y)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_ledger_is_charged_what_the_historical_noise_costs_in_truth(sampling: str) -> None:
    X, y = table(1000)
    model = SgdAdvancedClassifier(epsilon=1.0, max_iter=50, batch_size=50, sampling=sampling).fit(X, y)
    (line,) = model.ledger_.asked
    assert line.mechanism.noise.scale == historical_noise(Budget(1.0, 1e-6), 0.05, 50)
    assert line.answers == model.n_iter_ == 50
    assert 0 < model.epsilon_ < 0.5, "strong composition was loose"
    assert model.ledger_.epsilon <= 1.0


def test_modern_sgd_is_dp_sgd() -> None:
    X, y = table(400)
    options: dict[str, Any] = {"max_iter": 10, "not_private_seed": 5, "l2": 0.01}
    ours = SgdAdvancedClassifier(accounting="modern", **options).fit(X, y, X[:20].copy(), y[:20])
    plain = DPSGDClassifier(**options).fit(X, y, X[:20].copy(), y[:20])
    assert np.array_equal(ours.coef_, plain.coef_)
    assert ours.epsilon_ == plain.epsilon_


# ------------------------------------------------------------------------------------------------ sealed


@pytest.mark.parametrize("make", [OutputPerturbationClassifier, PNSGDClassifier])
def test_public_rows_join_and_bad_rows_contribute_nothing(make: Callable[..., Any]) -> None:
    X, y = table(100)
    spoilt, gone = X.copy(), X.copy()
    spoilt[5], gone[5] = np.nan, 0.0
    options: dict[str, Any] = {"not_private_seed": 0, "fit_intercept": False}
    models = [make(**options).fit(rows, y, X[:10].copy(), y[:10]) for rows in (spoilt, gone, X)]
    assert np.array_equal(models[0].coef_, models[1].coef_)
    assert not np.array_equal(models[0].coef_, models[2].coef_)
    assert {line.mechanism.sampler.size for line in models[0].ledger_.asked} == {110}


@pytest.mark.parametrize("make", [OutputPerturbationRegressor, PNSGDRegressor])
def test_targets_are_cut_to_their_declared_bound(make: Callable[..., Any]) -> None:
    X, _ = table(100)
    y = 3 * X[:, 0]
    options: dict[str, Any] = {"not_private_seed": 0, "loss": Square(), "radius": 1.0, "target_bound": 0.5}
    cut = make(**options).fit(X, np.clip(y, -0.5, 0.5))
    assert np.array_equal(make(**options).fit(X, y).coef_, cut.coef_)


@pytest.mark.parametrize(
    "model",
    [
        OutputPerturbationClassifier(epsilon=2.0, max_iter=None, l2=0.02),
        PNSGDClassifier(epsilon=4.0, radius=3.0),
        AGDClassifier(epsilon=1.0, max_iter=10),
        AGDAverageClassifier(epsilon=1.0, max_iter=10),
        SgdAdvancedClassifier(epsilon=2.0, accounting="modern", max_iter=50, learning_rate=4.0),
    ],
    ids=str,
)
def test_all_of_them_learn_something(model: Any) -> None:
    X, y = table(5000)
    rows = (X[200:], y[200:], X[:200], y[:200])
    scores = [model.set_params(not_private_seed=s).fit(*rows).score(X, y) for s in (0, 1, 2)]
    assert np.mean(scores) > 0.75
