"""The exact solver against scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import LinearSVC
from torch import Tensor

from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Loss, Square
from sfumato.erm.minimise import mean_gradient, minimise
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument

SHAPES = [(26, 60), (200, 5)]


def problem(n: int, d: int, seed: int = 0) -> tuple[Rows, Tensor]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = np.sign(X[:, 0] + 0.5 * rng.uniform(-1, 1, n))
    return Rows(torch.from_numpy(X), torch.from_numpy(y)), torch.from_numpy(rng.uniform(-1, 1, d))


def value(loss: Loss, rows: Rows, w: Tensor, strength: float, centre: Tensor) -> float:
    return float(loss.value(rows.X @ w, rows.y).mean() + strength / 2 * (w - centre).square().sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strength", [0.2, 1e-3])
@pytest.mark.parametrize("loss", [Logistic(), HuberisedHinge(), Square(), Huber(0.3)], ids=str)
def test_smooth_losses_agree_with_scipy(loss: Loss, shape: tuple[int, int], strength: float) -> None:
    rows, centre = problem(*shape)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = torch.from_numpy(flat)
        slope = mean_gradient(loss, w, rows) + strength * (w - centre)
        return value(loss, rows, w, strength, centre), slope.numpy()

    found = minimise(loss, rows, strength=strength, centre=centre)
    options = {"maxiter": 5000, "ftol": 0, "gtol": 1e-9}
    other = minimize(objective, np.zeros(shape[1]), jac=True, method="L-BFGS-B", options=options)
    assert found.gap <= 1e-10
    assert value(loss, rows, found.w, strength, centre) <= other.fun + 1e-10
    # Strong convexity turns distances of values into distances of weights.
    assert np.linalg.norm(found.w.numpy() - other.x) <= np.sqrt(2 * 1e-9 / strength)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strength", [0.2, 1e-2])
def test_the_hinge_agrees_with_its_dual_solved_by_scipy(shape: tuple[int, int], strength: float) -> None:
    rows, centre = problem(*shape)
    X, y, c = rows.X.numpy(), rows.y.numpy(), centre.numpy()
    n, signed = len(y), X * y[:, None]

    def dual(a: np.ndarray) -> tuple[float, np.ndarray]:
        pulled = signed.T @ a
        return -a @ (1 - signed @ c) + pulled @ pulled / (2 * strength), -(1 - signed @ c) + signed @ pulled / strength

    options = {"maxiter": 20000, "maxfun": 100000, "ftol": 0, "gtol": 1e-10}
    other = minimize(dual, np.zeros(n), jac=True, bounds=[(0, 1 / n)] * n, method="L-BFGS-B", options=options)
    found = minimise(Hinge(), rows, strength=strength, centre=centre)
    assert value(Hinge(), rows, found.w, strength, centre) == pytest.approx(-other.fun, abs=1e-7)
    assert np.allclose(found.w.numpy(), c + signed.T @ other.x / strength, atol=np.sqrt(2 * 2e-7 / strength))
    assert found.gap <= 1e-10


def test_the_hinge_agrees_with_scikit_learn() -> None:
    rows, _ = problem(120, 4)
    C = 0.05
    svc = LinearSVC(loss="hinge", C=C, fit_intercept=False, tol=1e-9, max_iter=200000)
    svc.fit(rows.X.numpy(), rows.y.numpy())
    zero = torch.zeros(4, dtype=torch.float64)
    found = minimise(Hinge(), rows, strength=1 / (C * 120), centre=zero)
    assert np.allclose(found.w.numpy(), svc.coef_[0], atol=1e-5)


def test_logistic_and_square_agree_with_scikit_learn() -> None:
    rows, _ = problem(150, 6)
    zero = torch.zeros(6, dtype=torch.float64)
    logistic = LogisticRegression(C=1 / (150 * 0.02), fit_intercept=False, tol=1e-10).fit(rows.X.numpy(), rows.y)
    ridge = Ridge(alpha=150 * 0.02 / 2, fit_intercept=False).fit(rows.X.numpy(), rows.y)  # (z - y)^2 has no half
    assert np.allclose(minimise(Logistic(), rows, strength=0.02, centre=zero).w, logistic.coef_[0], atol=1e-6)
    assert np.allclose(minimise(Square(), rows, strength=0.02, centre=zero).w, ridge.coef_, atol=1e-8)


def test_a_strong_pull_leaves_the_centre_and_a_weak_one_fits_the_rows() -> None:
    rows, centre = problem(200, 5)
    assert torch.allclose(minimise(Hinge(), rows, strength=1e6, centre=centre).w, centre, atol=1e-5)
    weak = minimise(Square(), rows, strength=1e-9, centre=centre).w
    assert np.allclose(weak, np.linalg.lstsq(rows.X.numpy(), rows.y.numpy())[0], atol=1e-6)


def test_what_cannot_be_solved_says_so() -> None:
    rows, centre = problem(200, 5)
    with pytest.raises(InvalidArgument, match="strength=0"):
        minimise(Square(), rows, strength=0.0, centre=centre)
    with pytest.warns(ConvergenceWarning, match="instead of 1.0e-30"):
        minimise(Logistic(), rows, strength=0.1, centre=centre, tolerance=1e-30)
