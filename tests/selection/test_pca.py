"""PrivatePCA: scikit-learn's conventions, the planted subspace, the limit without noise, and what a row can change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.decomposition import TruncatedSVD
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from sfumato import Budget, Ledger
from sfumato.erm import DPSGDClassifier
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy.mechanisms import Adjacency
from sfumato.selection import PrivatePCA


@pytest.mark.thinned(3)
@parametrize_with_checks([PrivatePCA(not_private_seed=0), PrivatePCA(1, epsilon=0.5, bound=3.0, not_private_seed=1)])
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def planted(n: int = 4000, d: int = 12, p: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows near a p-dimensional subspace, and an orthonormal basis of it."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, p)))[0].T
    rows = rng.standard_normal((n, p)) @ basis + 0.1 * rng.standard_normal((n, d))
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True)), basis


def captured(a: np.ndarray, b: np.ndarray) -> float:
    """How much of the subspace spanned by the rows of b lies in that of a: 1 if all."""
    return float(np.square(a @ b.T).sum() / len(b))


def fitted(rows: np.ndarray, p: int = 3, **options: Any) -> PrivatePCA:
    return PrivatePCA(p, **({"bound": 1.0, "delta": 1e-6, "not_private_seed": 0} | options)).fit(rows)


def test_more_epsilon_recovers_more_of_a_planted_subspace() -> None:
    rows, basis = planted()
    found = [
        np.mean([captured(fitted(rows, epsilon=e, not_private_seed=s).components_, basis) for s in range(8)])
        for e in (0.01, 0.1, 1.0, 10.0)
    ]
    assert found == sorted(found)
    assert found[0] < 0.6  # at this epsilon noise is all there is: a random subspace captures p / d = 0.25
    assert found[-1] > 0.98


def test_without_noise_it_is_the_uncentred_pca_of_scikit_learn() -> None:
    rows = planted()[0] * np.linspace(1.0, 0.3, 12) + 0.1  # directions of their own length, and a mean that matters
    ours = fitted(rows, epsilon=400.0, delta=1e-5, bound=2.0)
    theirs = TruncatedSVD(3, algorithm="arpack", random_state=0).fit(rows)
    assert captured(ours.components_, theirs.components_) == pytest.approx(1, abs=1e-3)
    assert ours.explained_variance_ == pytest.approx(np.square(theirs.singular_values_) / len(rows), rel=0.01)
    signs = np.sign((ours.components_ * theirs.components_).sum(1))
    assert ours.transform(rows) == pytest.approx(theirs.transform(rows) * signs, abs=0.02)
    near = ours.inverse_transform(ours.transform(rows))
    assert near == pytest.approx(theirs.inverse_transform(theirs.transform(rows)), abs=0.02)


def test_only_a_public_mean_is_taken_off() -> None:
    rows, basis = planted()
    shifted = rows + 5.0
    assert captured(fitted(shifted, epsilon=100.0, bound=1.0, mean=5.0).components_, basis) > 0.98
    # Without it the shift is the first direction: a private mean is never taken off by itself.
    alone = fitted(shifted, 1, epsilon=100.0, bound=30.0)
    assert abs(alone.components_[0] @ np.full(12, 12**-0.5)) > 0.99
    assert (alone.mean_ == 0).all()


@pytest.mark.parametrize(("adjacency", "factor"), [("add-remove", 1.0), ("replace-one", math.sqrt(2))])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_noise_is_that_of_the_analytic_gaussian(adjacency: str, factor: float, epsilon: float) -> None:
    """delta(epsilon) of a Gaussian whose mean moves by 1 / s (Balle and Wang 2018), in closed form."""
    rows, _ = planted(200)
    pca = fitted(rows, epsilon=epsilon, delta=1e-5, adjacency=adjacency, size=200)
    mu = factor / pca.noise_multiplier_
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=0.005)
    assert delta <= 1e-5
    assert epsilon * 0.999 < pca.epsilon_ <= epsilon
    if (epsilon, adjacency) == (0.5, "add-remove"):
        assert pca.noise_multiplier_ == pytest.approx(7.03, abs=0.01)


def test_one_row_moves_the_answer_no_further_than_its_bound() -> None:
    """The same noise on both sides, so that their difference is that of the exact answers."""
    rows, _ = planted(50, d=5)

    def gram(table: np.ndarray) -> np.ndarray:
        pca = fitted(table, 5, epsilon=1.0, bound=0.7, adjacency="add-remove", size=50)
        # All eigenvectors give the matrix back; negative eigenvalues, which noise makes, are shown as zero.
        return pca.components_.T @ np.diag(pca.explained_variance_ * 50) @ pca.components_

    big = fitted(np.tile(rows, (200, 1)), 5, epsilon=1.0, bound=0.7, adjacency="add-remove", size=50)
    assert (big.explained_variance_ > 0).all()
    base = np.tile(rows, (200, 1))
    for row in (np.full(5, 1e9), np.eye(5)[0], np.full(5, np.nan), np.array([0.1, 0, 0, 0, np.inf])):
        moved = np.linalg.norm(gram(np.vstack([base, row])) - gram(base))
        assert moved <= 0.49 * (1 + 1e-6)
        assert moved > 0.48 or not np.isfinite(row).all()


def test_rows_that_are_not_finite_contribute_nothing() -> None:
    rows, _ = planted(300)
    bad = np.full((1, 12), np.nan)
    a, b = (
        fitted(rows, adjacency="add-remove", size=300),
        fitted(np.vstack([rows, bad]), adjacency="add-remove", size=300),
    )
    assert np.array_equal(a.components_, b.components_)


def test_fits_share_a_ledger_and_are_refused_when_it_is_spent(tmp_path: Path) -> None:
    rows, _ = planted(300)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.account("table", unit="example", adjacency=Adjacency.REPLACE_ONE, budget=Budget(4.0, 1e-6))
    one = PrivatePCA(2, epsilon=1.0, delta=1e-6, ledger=ledger).fit(rows)
    assert one.ledger_.private
    assert one.ledger_.epsilon == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(BudgetExceeded, match=r"has no room for a fit at epsilon=3\.9"):
        PrivatePCA(2, epsilon=3.9, delta=1e-6, ledger=ledger).fit(rows)
    statement = ledger.account("table").statement()
    assert [(line.mechanism.question, line.answers) for line in statement.asked] == [("Gram", 1)]


def test_it_stands_in_a_pipeline() -> None:
    rows, basis = planted(2000)
    labels = rows @ basis[0] > 0
    model = make_pipeline(PrivatePCA(3, epsilon=4.0), DPSGDClassifier(epsilon=4.0, max_iter=30)).fit(rows, labels)
    assert model.score(rows, labels) > 0.85
    assert list(model[:-1].get_feature_names_out()) == ["privatepca0", "privatepca1", "privatepca2"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_components": 0}, "n_components=0 must be at least 1"),
        ({"n_components": 13}, "n_components=13 must be at most 12"),
        ({"bound": math.inf}, "bound=inf must be positive and finite"),
        ({"bound": "median"}, "bound='median' must be a number"),
        ({"mean": [1.0, 2.0]}, "mean must be a public number, or 12 of them"),
        ({"adjacency": "both"}, "adjacency='both' must be"),
        ({"adjacency": "add-remove"}, "size is missing"),
    ],
)
def test_wrong_parameters_are_told_in_one_sentence(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        PrivatePCA(**options).fit(planted(20)[0])


def test_one_account_has_one_delta() -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (300, 3))
    ledger = Ledger(None)
    ledger.account("table", unit="example", adjacency="replace-one", budget=Budget(5.0, 3e-3))
    with pytest.raises(InvalidArgument, match="delta=1e-09 is not that of the account"):
        PrivatePCA(1, epsilon=1.0, delta=1e-9, ledger=ledger).fit(rows)
    assert PrivatePCA(1, epsilon=1.0, delta=3e-3, ledger=ledger).fit(rows).epsilon_ == pytest.approx(1.0, abs=0.02)
