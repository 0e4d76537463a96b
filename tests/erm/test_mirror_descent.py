"""Exact mirror descent: its map against closed forms and autograd, its limits, its noise, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from sfumato import Objective, Public
from sfumato.algorithms.exact_mirror import ExactMirror
from sfumato.data.samplers import Poisson
from sfumato.erm import (
    DPSGDClassifier,
    DPSGDRegressor,
    Hinge,
    Huber,
    HuberisedHinge,
    Logistic,
    MirrorDescentClassifier,
    MirrorDescentRegressor,
    NonPrivateClassifier,
    NonPrivateRegressor,
    Square,
    mirror_descent,
)
from sfumato.erm.budgets import planned_noise
from sfumato.erm.losses import Loss
from sfumato.erm.minimise import minimise
from sfumato.erm.mirror_descent import LinearMap, chosen_strength
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.regression_data import two_densities
from sfumato.gradients import Gradient
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency

LOSSES: list[Loss] = [Logistic(), HuberisedHinge(), HuberisedHinge(0.05), Square(), Huber(), Huber(0.1)]
SHAPES = [(40, 6), (6, 40), (9, 9)]


def made_up(n: int, p: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, p, dtype=torch.float64, generator=generator) * torch.logspace(0, -1, p, dtype=torch.float64)
    X = X / X.norm(dim=1, keepdim=True)
    return Rows(X, torch.where(X[:, 0] + 0.3 * torch.randn(n, generator=generator) > 0, 1.0, -1.0).double())


def vector(p: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(p, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_autograd(loss: Loss, rows: Rows, strength: float, w: Tensor) -> tuple[Tensor, Tensor]:
    def psi(w: Tensor) -> Tensor:
        return loss.value(rows.X @ w, rows.y).mean() + strength / 2 * w.dot(w)

    leaf = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(psi(leaf), leaf)
    return gradient, torch.autograd.functional.hessian(psi, w)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------ the map


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", [Logistic(), Square()])
def test_gradient_and_curvature_are_those_of_autograd(loss: Loss, shape: tuple[int, int]) -> None:
    rows, w, v = made_up(*shape), vector(shape[1], 1), vector(shape[1], 2)
    gradient, hessian = by_autograd(loss, rows, 0.03, w)
    psi = LinearMap(loss, rows, 0.03)
    assert torch.allclose(psi.gradient(w), gradient, atol=1e-12)
    assert torch.allclose(psi.hessian(w)(v), hessian @ v, atol=1e-12)
    assert torch.allclose(psi.solve(w, v, tolerance=1e-9), torch.linalg.solve(hessian, v), rtol=1e-9, atol=1e-9)
    assert psi.least_curvature(w) == pytest.approx(float(torch.linalg.eigvalsh(hessian)[0]), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_step_ends_where_the_papers_equation_holds(loss: Loss, shape: tuple[int, int]) -> None:
    """Also long ones, and where the curvature jumps."""
    rows = made_up(*shape)
    for strength in (1e-4, 0.1):
        psi = LinearMap(loss, rows, strength)
        w = psi.minimum()
        assert psi.gradient(w).norm() < 1e-7
        for seed, scale in enumerate((1e-3, 0.1, 1.0)):
            by = vector(shape[1], seed, scale)
            there = psi.moved(w, by, 1e-8)
            assert (psi.gradient(there) - psi.gradient(w) - by).norm() <= 2e-8 * by.norm()
            w = there


def test_the_start_is_the_minimum_that_others_find() -> None:
    rows, strength = made_up(60, 5), 0.02
    for loss in LOSSES:
        other = minimise(loss, rows, strength=strength, centre=torch.zeros(5, dtype=torch.float64), tolerance=1e-14)
        assert torch.allclose(LinearMap(loss, rows, strength).minimum(), other.w, atol=1e-5), loss
    ridge = Ridge(alpha=60 * strength / 2, fit_intercept=False).fit(rows.X.numpy(), rows.y.numpy())
    assert np.allclose(LinearMap(Square(), rows, strength).minimum().numpy(), ridge.coef_)


def test_large_and_sparse_rows_go_other_ways_to_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients, sparse products and Lanczos iterations, against factorisations and eigenvalues."""
    for shape in ((80, 30), (30, 80)):
        rows, w, by = made_up(*shape), vector(shape[1], 1), vector(shape[1], 2, 0.1)
        rows = Rows(rows.X * (rows.X.abs() > rows.X.abs().quantile(0.95)), rows.y)
        found = {}
        for small in (1000, 3):
            monkeypatch.setattr(mirror_descent, "_SMALL", small)
            maps = [LinearMap(loss, rows, 1e-3) for loss in (Logistic(), Square())]
            found[small] = [(psi.moved(w, by, 1e-10), psi.least_curvature(w)) for psi in maps]
        for (moved, least), (same, nearly) in zip(found[1000], found[3], strict=True):
            assert torch.allclose(moved, same, atol=1e-6)
            assert least == pytest.approx(nearly, rel=2e-3)
            assert least >= 1e-3 * (1 - 1e-9)


def test_the_algorithm_for_networks_takes_the_same_step() -> None:
    """`ExactMirror` differentiates the public loss of a module; here is the same loss in closed form."""
    rows, strength, eta, g = made_up(30, 6), 0.05, 0.7, vector(6, 3)
    objective = Objective(
        nn.Linear(6, 1, bias=False).double(), lambda m, xy: Logistic().value(m(xy[:, :6])[:, 0], xy[:, 6])
    )
    theta = {"weight": vector(6, 4)[None, :]}
    public = Public(torch.cat([rows.X, rows.y[:, None]], 1), objective=objective)
    method = ExactMirror(step_size=eta, strength=strength, tolerance=1e-9)
    u, _ = method.step(None, theta, public, lambda question: Gradient({"weight": g[None, :]}))
    there = LinearMap(Logistic(), rows, strength).moved(theta["weight"][0], -eta * strength * g, 1e-9)
    assert torch.allclose(theta["weight"][0] - eta * u["weight"][0], there, atol=1e-7)


def test_public_rows_choose_the_strength() -> None:
    rows = made_up(200, 8)
    line = Rows(rows.X, rows.X @ vector(8, 5))
    noise = Rows(rows.X, vector(200, 6))
    assert chosen_strength(Square(), line, 0.25) == 0.25e-3
    assert chosen_strength(Square(), noise, 0.25) >= 0.25
    assert chosen_strength(Square(), Rows(rows.X[:1], rows.y[:1]), 0.25) == 2.5
    # The first rows are noise and the others fit a line: all of them have a say, not the first ones only.
    mixed = Rows(rows.X, torch.cat([noise.y[:25], 100 * line.y[25:]]))
    assert chosen_strength(Square(), mixed, 0.25) <= 0.25e-2


# ------------------------------------------------------------------------------------------------ the method

SEEDED: dict[str, Any] = {"not_private_seed": 0, "fit_intercept": False, "max_iter": 3}
STEPS: dict[str, Any] = {"batch_size": 40, "learning_rate": 0.5, "clip": 1.0, "average": 0.5}


def table(n: int = 400, p: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows = made_up(n, p, seed)
    return rows.X.numpy(), (rows.X @ vector(p, 9, 0.5)).numpy()


def test_without_public_rows_it_is_dp_sgd() -> None:
    X, y = table()
    ours = MirrorDescentRegressor(**SEEDED, **STEPS, l2=0.1, radius=2.0, mirror="euclidean").fit(X, y)
    same = DPSGDRegressor(**SEEDED, **STEPS, l2=0.1, radius=2.0).fit(X, y)
    assert np.array_equal(ours.coef_, same.coef_)
    assert ours.epsilon_ == same.epsilon_
    classifiers = [kind(**SEEDED, **STEPS).fit(X, y > 0) for kind in (MirrorDescentClassifier, DPSGDClassifier)]
    assert np.array_equal(classifiers[0].coef_, classifiers[1].coef_)


def test_on_a_round_public_loss_it_is_dp_sgd_from_a_warm_start() -> None:
    """Appendix E: if the Hessian is a multiple of the identity, both behave the same, for the same learning rate."""
    X, y = table()
    round_, targets = np.eye(5) * 0.3, np.arange(5) / 10
    fits = [MirrorDescentRegressor(**SEEDED, mirror=m).fit(X, y, round_, targets) for m in ("public", "euclidean")]
    assert np.allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9)
    cold = MirrorDescentRegressor(**SEEDED).fit(X, y)
    assert not np.allclose(fits[1].coef_, cold.coef_, rtol=0.1)
    bent = [
        MirrorDescentRegressor(**SEEDED, mirror=m).fit(X, y, X[:50].copy(), y[:50]) for m in ("public", "euclidean")
    ]
    assert not np.allclose(bent[0].coef_, bent[1].coef_, rtol=0.1)


@pytest.mark.parametrize("public", [4, 50])
def test_a_step_is_the_inverse_of_the_public_curvature_times_the_gradient(public: int) -> None:
    """Two tables and the same noise: the weights differ by eta alpha H^-1 (g' - g), with clipped means g and g'."""
    X, y = table(p=6)
    other, eta, clip, l2, strength = np.clip(y + 0.4, -1, 1), 0.8, 0.3, 0.02, 0.05
    options: dict[str, Any] = {**SEEDED, "max_iter": 1, "learning_rate": eta, "clip": clip, "l2": l2}
    models = [
        MirrorDescentRegressor(**options, strength=strength, batch_size=400).fit(
            X, targets, X[:public].copy(), y[:public]
        )
        for targets in (y, other)
    ]
    P = X[:public]
    H = 2 * P.T @ P / public + (l2 + strength * 2 * np.mean(P**2)) * np.eye(6)
    alpha = np.linalg.eigvalsh(H)[0]
    start = np.linalg.solve(H, 2 * P.T @ y[:public] / public)

    def mean_gradient(targets: np.ndarray) -> np.ndarray:
        each = 2 * (X @ start - targets)[:, None] * X
        norms = np.linalg.norm(each, axis=1, keepdims=True)
        assert (norms > clip).any()
        clipped: np.ndarray = (each * np.minimum(1, clip / norms)).mean(0)
        return clipped

    expected = -eta * alpha * np.linalg.solve(H, mean_gradient(other) - mean_gradient(y))
    assert np.allclose(models[1].coef_ - models[0].coef_, expected, rtol=1e-6, atol=1e-9)


def test_noise_is_small_where_the_public_loss_is_steep() -> None:
    """No row says anything, so a step is eta alpha H^-1 noise: H undoes it, in flat and steep directions alike."""
    p, n, eta, clip = 2000, 100, 3.0, 0.2
    public, quiet = np.zeros((2 * p, p)), np.full((n, p), np.nan)
    lengths = np.where(np.arange(p) < p // 2, 1.0, 0.1)
    public[np.arange(2 * p), np.arange(2 * p) % p] = np.tile(lengths, 2)
    model = MirrorDescentRegressor(
        strength=1e-6, fit_intercept=False, learning_rate=eta, clip=clip, max_iter=1, batch_size=20, not_private_seed=1
    ).fit(quiet, np.zeros(n), public, np.zeros(2 * p))
    step = eta * (0.1 / lengths) ** 2  # alpha / h_i
    noise = model.coef_ / step
    sampler = Poisson(size=n, batch_size=20)
    std = planned_noise(Budget(1.0, 1e-6), sampler, 1, Adjacency.REPLACE_ONE) * clip / 20
    for part in (noise[: p // 2], noise[p // 2 :]):
        ratio = float(np.std(part)) / std
        assert ratio == pytest.approx(1.0, abs=5 / math.sqrt(p))  # five standard errors; 2/3 and 3/2 are far outside
    assert np.std(model.coef_[: p // 2]) < 0.012 * np.std(model.coef_[p // 2 :])


def test_all_answers_are_planned_and_public_rows_stay_outside() -> None:
    X, y = table()
    model = MirrorDescentRegressor(epsilon=0.5, max_iter=7, batch_size=40).fit(X[50:], y[50:], X[:50], y[:50])
    (line,) = model.ledger_.asked
    assert line.mechanism.times == 7
    assert line.mechanism.sampler.size == 350
    assert model.ledger_.accountant.startswith("PLD")
    assert 0.49 < model.epsilon_ <= 0.5
    assert model.n_iter_ == 7


def test_a_clean_answer_is_found() -> None:
    """With so large a budget that there is hardly any noise, it ends at the minimum on the private rows."""
    X, y = table(2000)
    options: dict[str, Any] = {"epsilon": 500.0, "batch_size": 2000, "max_iter": 150, "not_private_seed": 0}
    model = MirrorDescentRegressor(**options, clip=4.0, learning_rate=5.0, strength=0.01).fit(
        X, y, X[:20].copy(), -y[:20]
    )
    oracle = NonPrivateRegressor(l2=0.0).fit(X, y)
    assert np.allclose(model.coef_, oracle.coef_, atol=0.03)
    names, wrong = np.where(y > 0, "yes", "no"), np.where(y > 0, "no", "yes")
    classifier = MirrorDescentClassifier(**options, clip=1.0, l2=0.05, learning_rate=20.0, strength=0.01)
    classifier.fit(X, names, X[:20].copy(), wrong[:20])
    assert np.allclose(classifier.coef_, NonPrivateClassifier(l2=0.05).fit(X, names).coef_, atol=0.03)
    assert classifier.score(X, names) > 0.8


def test_what_it_cannot_do_is_refused() -> None:
    X, y = table()
    for options, said in (
        ({"mirror": "private"}, "mirror='private' must be"),
        ({"strength": 0.0}, "strength=0.0 must be positive"),
        ({"radius": 1.0}, "Euclidean projection"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            MirrorDescentRegressor(**options).fit(X, y)
    with pytest.raises(InvalidArgument, match="not smooth, which MirrorDescentClassifier needs: use HuberisedHinge"):
        MirrorDescentClassifier(loss=Hinge()).fit(X, y > 0)


# ------------------------------------------------------------------------------------------------ figure 1


def test_the_rows_of_figure_1_are_as_the_paper_says() -> None:
    n, p = 3000, 500
    (X, P), (y, v) = two_densities(np.random.default_rng(0), [n, 750], p)
    busy = X > 0
    assert set(np.unique(X)) == {0.0, 0.05}
    assert set(busy[:, :100].sum(1)) == {40}
    assert set(busy[:, 100:].sum(1)) == {80}
    # Every column is as likely as the others of its group; 5.5 standard errors, over 500 columns.
    assert np.abs(busy[:, :100].mean(0) - 0.4).max() < 5.5 * math.sqrt(0.4 * 0.6 / n)
    assert np.abs(busy[:, 100:].mean(0) - 0.2).max() < 5.5 * math.sqrt(0.2 * 0.8 / n)
    theta = np.linalg.lstsq(np.vstack([X, P]), np.concatenate([y, v]), rcond=None)[0]  # one theta for both parts
    assert np.mean((X @ theta - y) ** 2) == pytest.approx(0.01 * (1 - (p - 1) / (n + 750)), rel=0.1)
    assert np.mean((P @ theta - v) ** 2) == pytest.approx(0.01 * (1 - (p - 1) / (n + 750)), rel=0.2)
    assert np.std(theta) == pytest.approx(1.0, abs=0.2)


def test_the_first_point_of_figure_1() -> None:
    """At p = 500 a few plain steps hardly leave the public minimum, and as many mirror steps find most of the rest."""
    p = 500
    (X, P), (y, v) = two_densities(np.random.default_rng(1), [10_000, 750], p)
    options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add-remove", "size": 10_000}
    options |= {"max_iter": 10, "batch_size": 10_000, "clip": 0.1, "fit_intercept": False, "strength": 1e-3}
    warm = MirrorDescentRegressor(**options, mirror="euclidean", learning_rate=p / 20).fit(X, y, P, v)
    ours = MirrorDescentRegressor(**options, learning_rate=6e4).fit(X, y, P, v)
    assert np.mean((ours.predict(X) - y) ** 2) < 0.015
    assert 0.021 < np.mean((warm.predict(X) - y) ** 2) < 0.029
    assert ours.epsilon_ == warm.epsilon_ <= 1.0
