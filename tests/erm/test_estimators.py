"""scikit-learn's own checks, and its conventions where privacy changes what they mean."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import RegressorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from sfumato import Budget, Ledger
from sfumato.erm import (
    AGDAverageClassifier,
    AGDAverageRegressor,
    AGDClassifier,
    AGDRegressor,
    DPSGDClassifier,
    DPSGDRegressor,
    Hinge,
    Huber,
    MirrorDescentClassifier,
    MirrorDescentRegressor,
    NonPrivateClassifier,
    NonPrivateRegressor,
    ObjectivePerturbationClassifier,
    ObjectivePerturbationRegressor,
    OutputPerturbationClassifier,
    OutputPerturbationRegressor,
    PNSGDClassifier,
    PNSGDRegressor,
    PPSGDClassifier,
    PPSGDRegressor,
    PublicOnlyClassifier,
    PublicOnlyRegressor,
    PublicScaler,
    SgdAdvancedClassifier,
    SgdAdvancedRegressor,
    Square,
)
from sfumato.errors import BudgetExceeded, InvalidArgument, SfumatoError

UNANNOUNCED = "NaN in private rows is not announced: such a row contributes nothing, and nobody is told"
NOISY = "two fits differ, since nobody may repeat the noise; it passes with not_private_seed"
SEEDED: dict[str, Any] = {"max_iter": 3, "not_private_seed": 0}


def expected_failures(estimator: Any) -> dict[str, str]:
    if isinstance(estimator, NonPrivateClassifier | NonPrivateRegressor | PublicScaler):
        return {}
    failures = {"check_estimators_nan_inf": UNANNOUNCED}
    if isinstance(estimator, RegressorMixin):
        failures["check_supervised_y_no_nan"] = UNANNOUNCED
    if getattr(estimator, "not_private_seed", 0) is None:
        for check in ("check_fit_idempotent", "check_supervised_y_2d", "check_classifier_data_not_an_array"):
            failures[check] = NOISY
    return failures


@pytest.mark.thinned(7)
@parametrize_with_checks(
    [
        PPSGDClassifier(**SEEDED),
        PPSGDRegressor(**SEEDED),
        DPSGDClassifier(**SEEDED),
        DPSGDRegressor(**SEEDED),
        PPSGDClassifier(max_iter=2),
        MirrorDescentClassifier(**SEEDED),
        MirrorDescentRegressor(**SEEDED),
        OutputPerturbationClassifier(**SEEDED),
        OutputPerturbationRegressor(max_iter=None, l2=0.1, not_private_seed=0),
        ObjectivePerturbationClassifier(not_private_seed=0),
        ObjectivePerturbationRegressor(not_private_seed=0),
        PNSGDClassifier(not_private_seed=0),
        PNSGDRegressor(not_private_seed=0),
        AGDClassifier(**SEEDED),
        AGDRegressor(**SEEDED),
        AGDAverageClassifier(**SEEDED),
        AGDAverageRegressor(**SEEDED),
        SgdAdvancedClassifier(**SEEDED),
        SgdAdvancedRegressor(**SEEDED),
        PublicOnlyClassifier(),
        PublicOnlyRegressor(),
        NonPrivateClassifier(),
        NonPrivateRegressor(),
        PublicScaler(),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def table(n: int = 300, d: int = 3) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).uniform(-1, 1, (n, d)) / math.sqrt(d)
    return X, X[:, 0] + X[:, 1] > 0


# ------------------------------------------------------------------------------------------------ conventions


def test_sparse_and_dense_rows_give_the_same_model() -> None:
    X, y = table()
    X[np.abs(X) < 0.2] = 0
    models = [
        PPSGDClassifier(**SEEDED).fit(form(X), y, form(X[:20].copy()), y[:20])
        for form in (np.asarray, csr_matrix, csr_array)
    ]
    for model in models[1:]:
        assert np.array_equal(model.coef_, models[0].coef_)
        assert np.array_equal(model.predict(csr_matrix(X)), models[0].predict(X))


def test_data_frames_keep_their_column_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = table()
    frame = pandas.DataFrame(X, columns=["age", "weight", "height"])
    model = PPSGDClassifier(**SEEDED).fit(frame, pandas.Series(y), frame[:20], pandas.Series(y[:20]))
    assert list(model.feature_names_in_) == ["age", "weight", "height"]
    assert np.array_equal(model.coef_, PPSGDClassifier(**SEEDED).fit(X, y, X[:20].copy(), y[:20]).coef_)
    with pytest.raises(ValueError, match="feature names"):
        model.fit(frame, y, frame[["weight", "age", "height"]][:20], y[:20])


def test_coefficients_are_those_of_the_rows_that_were_given() -> None:
    """The constant column and its square root of two are undone; only rows longer than 1 are shortened."""
    X, y = table(2000)
    logistic = LogisticRegression(C=1e6, tol=1e-9).fit(X, y)
    model = NonPrivateClassifier(l2=0.0).fit(X, y)
    assert model.score(X, y) == pytest.approx(logistic.score(X, y), abs=0.005)
    target = X @ [1.0, -2.0, 0.5] + 0.3
    line = NonPrivateRegressor(l2=0.0).fit(X, target)
    oracle = LinearRegression().fit(X, target)
    assert np.allclose(line.coef_, oracle.coef_, atol=1e-4)
    assert line.intercept_ == pytest.approx(oracle.intercept_, abs=1e-4)
    assert np.allclose(line.predict(X), X @ line.coef_ + line.intercept_)
    assert np.allclose(line.predict(1e3 * X), line.predict(X / np.linalg.norm(X, axis=1, keepdims=True)))


def test_probabilities_exist_for_the_logistic_loss_only() -> None:
    X, y = table()
    model = DPSGDClassifier(**SEEDED).fit(X, y)
    chances = model.predict_proba(X)
    assert np.allclose(chances.sum(1), 1)
    assert np.array_equal(chances[:, 1] > 0.5, model.predict(X))
    assert not hasattr(DPSGDClassifier(loss=Hinge()), "predict_proba")


def test_clones_and_pipelines() -> None:
    X, y = table()
    model = PPSGDClassifier(epsilon=0.7, loss=Hinge(), max_iter=3)
    assert clone(model).get_params() == model.get_params()
    pipeline = make_pipeline(PublicScaler(lower=-2.0, upper=2.0), model)
    pipeline.fit(
        X,
        y,
        ppsgdclassifier__X_public=PublicScaler(lower=-2.0, upper=2.0).fit_transform(X[:20]),
        ppsgdclassifier__y_public=y[:20],
    )
    assert pipeline.predict(X).shape == (300,)
    assert len(cross_val_score(model, X, y, cv=2)) == 2


def test_clones_share_their_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = DPSGDClassifier(ledger=ledger, max_iter=2)
        assert clone(model).ledger is ledger


def test_a_fitted_model_can_be_kept(tmp_path: Path) -> None:
    X, y = table()
    model = PPSGDClassifier(max_iter=3, ledger=str(tmp_path / "ledger.db")).fit(X, y, X[:20].copy(), y[:20])
    for kept in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert np.array_equal(kept.predict(X), model.predict(X))
        assert kept.ledger_ == model.ledger_


# ------------------------------------------------------------------------------------------------ labels


def test_two_classes_only_and_a_way_out() -> None:
    X, _ = table()
    y = np.arange(300) % 3
    with pytest.raises(InvalidArgument, match=r"Only binary classification is supported.* a budget of K \* epsilon"):
        PPSGDClassifier(max_iter=2).fit(X, y)
    assert set(OneVsRestClassifier(DPSGDClassifier(max_iter=2)).fit(X, y).predict(X)) <= {0, 1, 2}


def test_three_classes_cost_three_times_epsilon() -> None:
    """As the advice says: with a budget of one fit the second one is refused."""
    X, y = table()[0], np.arange(300) % 3
    for budget, fits in ((1.0, False), (3.0, True)):
        ledger = Ledger.in_memory()
        ledger.account("table", unit="example", adjacency="replace-one", budget=Budget(budget, 1e-6))
        model = OneVsRestClassifier(DPSGDClassifier(max_iter=2, epsilon=1.0, delta=1e-6, ledger=ledger))
        if fits:
            model.fit(X, y)
        else:
            with pytest.raises(BudgetExceeded):
                model.fit(X, y)


def test_errors_count_no_private_rows_and_quote_none() -> None:
    X, y = table()
    with pytest.raises(InvalidArgument, match=r"0 feature\(s\)") as error:
        DPSGDClassifier(max_iter=2).fit(X[:, :0], y)
    assert str(len(X)) not in str(error.value)
    huge = np.array([10**400, *([0] * (len(X) - 1))], dtype=object)
    with pytest.raises(InvalidArgument, match="y has a target that is not a number") as error:
        PPSGDRegressor(max_iter=2).fit(X, huge)
    assert "1000" not in str(error.value)


def test_labels_are_declared_or_public_or_said_to_be_read_off_private_rows() -> None:
    X, y = table()
    words = np.where(y, "yes", "no")
    read = DPSGDClassifier(max_iter=2).fit(X, words)
    assert any("read off the private rows" in warning for warning in read.ledger_.warnings)
    public = DPSGDClassifier(max_iter=2).fit(X, words, X[:20].copy(), words[:20])
    declared = DPSGDClassifier(max_iter=2, classes=["no", "yes"]).fit(X, words)
    for model in (public, declared):
        assert list(model.classes_) == ["no", "yes"]
        assert not any("read off" in warning for warning in model.ledger_.warnings)
    with pytest.raises(InvalidArgument, match=r"y has words as labels and classes has numbers: use one type\."):
        DPSGDClassifier(max_iter=2, classes=[0, 1]).fit(X, words)  # not <U9, which is how long somebody's name is
    with pytest.raises(InvalidArgument, match="only one class"):
        DPSGDClassifier(max_iter=2, classes=["no"]).fit(X, words)


@pytest.mark.parametrize("which", ["X", "y"])
def test_rows_of_unequal_length_are_refused_without_counting_them(which: str) -> None:
    X, y = (
        ([[1.0, 2.0]] * 96 + [[3.0]], [0, 1] * 48 + [0]) if which == "X" else ([[1.0, 2.0]] * 97, [[0]] * 96 + [[1, 2]])
    )
    with pytest.raises(InvalidArgument, match=f"{which} has rows of unequal length") as error:
        DPSGDClassifier(adjacency="add-remove", size=100, classes=(0, 1)).fit(X, y)
    assert "97" not in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.parametrize("missing", [np.nan, np.inf])
def test_rows_that_are_not_finite_or_of_no_class_contribute_nothing(missing: float) -> None:
    X, y = table()
    labels = y.astype(float)
    spoilt, odd, gone = X.copy(), labels.copy(), labels.copy()
    spoilt[5, 1], odd[9] = missing, 7.0
    gone[[5, 9]] = np.nan
    everyone: dict[str, Any] = {**SEEDED, "classes": (0.0, 1.0), "loss": Square(), "batch_size": 300}
    model = DPSGDClassifier(**everyone).fit(spoilt, odd)
    assert np.array_equal(model.coef_, DPSGDClassifier(**everyone).fit(X, gone).coef_)
    assert not np.array_equal(model.coef_, DPSGDClassifier(**everyone).fit(X, labels).coef_)


# ------------------------------------------------------------------------------------------------ privacy


def test_only_the_seed_that_says_so_makes_fits_repeatable() -> None:
    X, y = table()
    with pytest.raises(TypeError, match="random_state"):
        PPSGDClassifier(random_state=0)  # type: ignore[call-arg]
    assert not np.array_equal(DPSGDClassifier(max_iter=3).fit(X, y).coef_, DPSGDClassifier(max_iter=3).fit(X, y).coef_)
    seeded = DPSGDClassifier(**SEEDED).fit(X, y)
    assert np.array_equal(seeded.coef_, DPSGDClassifier(**SEEDED).fit(X, y).coef_)
    assert not seeded.ledger_.private
    assert "NOT PRIVATE" in " ".join(seeded.ledger_.warnings)


def test_the_number_of_rows_must_be_declared_where_it_is_private() -> None:
    X, y = table()
    with pytest.raises(InvalidArgument, match="size is missing"):
        DPSGDClassifier(adjacency="add-remove", max_iter=3).fit(X, y)
    model = DPSGDClassifier(adjacency="add-remove", size=1000, max_iter=3).fit(X, y)
    assert {line.mechanism.sampler.size for line in model.ledger_.asked} == {1000}
    empty = DPSGDClassifier(adjacency="add-remove", size=1000, max_iter=3, classes=(False, True)).fit(X[:0], y[:0])
    assert np.isfinite(empty.coef_).all()


def test_public_rows_join_the_private_ones_in_dp_sgd() -> None:
    X, y = table()
    model = DPSGDClassifier(max_iter=3).fit(X[50:], y[50:], X[:50], y[:50])
    assert {line.mechanism.sampler.size for line in model.ledger_.asked} == {300}
    ours = PPSGDClassifier(max_iter=3).fit(X[50:], y[50:], X[:50], y[:50])
    assert {line.mechanism.sampler.size for line in ours.ledger_.asked} == {250}


def test_errors_quote_no_private_value() -> None:
    X, y = table(20)
    secret = X.astype(object)
    secret[3, 1] = "HIV positive"
    for bad_X, bad_y in ((secret, y), (X[:, 0] + 987654.25, y), (X.astype(complex) + 987654.25, y), (X, y[:-1])):
        with pytest.raises(ValueError) as caught:
            DPSGDClassifier(max_iter=2).fit(bad_X, bad_y)
        assert "HIV" not in str(caught.value)
        assert "987654" not in str(caught.value)
        assert caught.value.__cause__ is None
    with pytest.raises(InvalidArgument, match="not a number") as caught:
        DPSGDRegressor(max_iter=2).fit(X, ["HIV positive"] * 20)
    assert "HIV" not in str(caught.value)


def test_what_is_not_private_says_so_and_public_rows_alone_cost_nothing() -> None:
    X, y = table()
    model = NonPrivateClassifier().fit(X, y)
    assert model.ledger_.startswith("NOT PRIVATE")
    assert math.isinf(model.epsilon_)
    free = PublicOnlyClassifier().fit(X, y, X[:40].copy(), y[:40])
    assert free.epsilon_ == 0
    other = PublicOnlyClassifier().fit(-X, ~y, X[:40], y[:40])
    assert np.array_equal(free.coef_, other.coef_)
    assert free.score(X, y) > 0.9


def test_losses_of_the_other_kind_are_refused() -> None:
    X, y = table()
    with pytest.raises(InvalidArgument, match="for regression"):
        PPSGDClassifier(loss=Huber()).fit(X, y)
    with pytest.raises(InvalidArgument, match="for classification"):
        PPSGDRegressor(loss=Hinge()).fit(X, X[:, 0])


def test_public_rows_must_be_complete() -> None:
    X, y = table()
    with pytest.raises(InvalidArgument, match="go together"):
        PPSGDClassifier(max_iter=2).fit(X, y, X_public=X[:5])
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        PPSGDClassifier(max_iter=2).fit(X, y, X[:5], y[:4])
    with pytest.raises(ValueError, match="X_public contains NaN"):
        PPSGDClassifier(max_iter=2).fit(X, y, np.full((2, 3), np.nan), [0, 1])
    with pytest.raises(InvalidArgument, match="X_public has 2 columns and X has 3"):
        PPSGDClassifier(max_iter=2).fit(X, y, X[:5, :2], y[:5])


@pytest.mark.parametrize("huge", [1e308, -1e308, np.inf])
def test_one_huge_private_target_is_not_warned_of(huge: float) -> None:
    X, _ = table()
    y = np.clip(X[:, 0], 0, 0.1)
    y[3] = huge
    PPSGDRegressor(max_iter=2, target_range=(0, 0.1)).fit(X, y)  # warnings are errors here


@pytest.mark.parametrize("form", [np.asarray, np.float32, csr_matrix, "frame", "list"])
def test_private_rows_are_not_public(form: Any) -> None:
    """Whatever they are kept in: a conversion copies them, and so hides that they are the same."""
    X, y = table()
    if form == "frame":
        form = pytest.importorskip("pandas").DataFrame
    rows = X.tolist() if form == "list" else form(X)
    with pytest.raises(InvalidArgument, match="X_public is X"):
        PPSGDClassifier(max_iter=2).fit(rows, y, rows, y)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_some_of_the_private_rows_are_not_public(kind: Any) -> None:
    X, y = table()
    rows = (10 * X).astype(kind)
    for part in (slice(5), slice(3, None, 7), slice(None, None, -1)):
        with pytest.raises(InvalidArgument, match="or a part of it"):
            PPSGDClassifier(max_iter=2).fit(rows, y, rows[part], y[part])
    PPSGDClassifier(max_iter=2).fit(rows[::2], y[::2], rows[1::2], y[1::2])  # apart, in one memory


@pytest.mark.parametrize("estimator", [PPSGDClassifier, AGDAverageClassifier, MirrorDescentClassifier])
def test_a_public_label_that_is_no_class_is_named_before_anything_is_charged(estimator: Any, tmp_path: Path) -> None:
    X, y = table()
    names = np.where(y > 0, "yes", "no")
    for classes, wrong in ((["Yes", "no"], "yes"), (["no", "yes"], "Bob")):
        public = names[:20].copy()
        public[3] = wrong
        model = estimator(classes=classes, ledger=tmp_path / "ledger.db", name="t")
        with pytest.raises(InvalidArgument, match=f"y_public has the label '{wrong}'"):
            model.fit(X[20:], names[20:], X_public=X[:20], y_public=public)
    assert Ledger(tmp_path / "ledger.db").account_names() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": "1"}, "epsilon='1' must be a number"),
        ({"epsilon": None}, "epsilon=None must be a number"),
        ({"epsilon": True}, "epsilon=True must be a number"),
        ({"delta": "1e-6"}, "delta='1e-6' must be a number"),
        ({"l2": "a"}, "l2='a' must be a number"),
        ({"learning_rate": "auto"}, "learning_rate='auto' must be a number, or None"),
        ({"max_iter": "10"}, "max_iter='10' must be a whole number, or None"),
        ({"max_iter": 2.5}, "max_iter=2.5 must be a whole number, or None"),
        ({"name": 3}, "name=3 must be a string"),
        ({"ledger": 3}, "ledger=3 must be a Ledger, or a string, or a path, or None"),
        ({"fit_intercept": "no"}, "fit_intercept='no' must be True or False"),
        ({"not_private_seed": "a"}, "not_private_seed='a' must be a whole number, or None"),
    ],
)
def test_parameters_of_a_wrong_type_are_named(options: dict[str, Any], said: str) -> None:
    X, y = table()
    with pytest.raises(InvalidArgument, match=said):
        PPSGDClassifier(**options).fit(X, y)


def test_numbers_of_numpy_are_numbers() -> None:
    X, y = table()
    PPSGDClassifier(epsilon=np.float32(2), max_iter=np.int64(3), fit_intercept=np.True_).fit(X, y)


def test_a_declared_target_range_takes_care_of_the_scale() -> None:
    X, y = table(2000)
    numbers = 300 + 50 * X[:, 0] + y
    options: dict[str, Any] = {"epsilon": 5.0, "not_private_seed": 1}
    ours = PPSGDRegressor(target_range=(200, 400), **options)
    ours.fit(X[40:], numbers[40:], X_public=X[:40], y_public=numbers[:40])
    by_hand = PPSGDRegressor(**options)
    scaled = (numbers - 300) / 100
    by_hand.fit(X[40:], scaled[40:], X_public=X[:40], y_public=scaled[:40])
    np.testing.assert_allclose(ours.predict(X), 300 + 100 * by_hand.predict(X), rtol=1e-9)
    assert ours.score(X, numbers) > 0.5
    with pytest.warns(UserWarning, match="y_public lies up to .* declare target_range"):
        PPSGDRegressor(max_iter=2).fit(X[40:], numbers[40:], X_public=X[:40], y_public=numbers[:40])
    for wrong in ((400, 200), (0, math.inf)):
        with pytest.raises(InvalidArgument, match="target_range"):
            PPSGDRegressor(target_range=wrong).fit(X, numbers)


def test_what_an_account_cannot_pay_for_is_said_in_terms_of_a_fit(tmp_path: Path) -> None:
    X, y = table()
    model = DPSGDClassifier(epsilon=0.5, ledger=tmp_path / "ledger.db", name="clinic", max_iter=5)
    model.fit(X, y)
    again = clone(model)
    with pytest.raises(BudgetExceeded, match=r"'clinic' has no room for a fit at epsilon=0.5.*larger budget"):
        again.fit(X, y)
    with pytest.raises(NotFittedError):
        again.predict(X)


def test_a_ledger_in_a_file_goes_where_its_model_goes(tmp_path: Path) -> None:
    X, y = table()
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = DPSGDClassifier(ledger=ledger, name="clinic", max_iter=5).fit(X, y)
        loaded = pickle.loads(pickle.dumps(model))
    assert loaded.ledger.account_names() == ["clinic"]
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    with pytest.raises(SfumatoError, match="in memory cannot be copied or pickled"):
        pickle.dumps(DPSGDClassifier(ledger=Ledger.in_memory()))


def test_a_table_read_backwards_is_the_same_table() -> None:
    """torch takes no array whose rows lie in memory the wrong way round."""
    X, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    backwards = np.ascontiguousarray(X[::-1])[::-1]
    options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "classes": [0, 1], "not_private_seed": 3}
    one, other = (DPSGDClassifier(**options).fit(table, y).coef_ for table in (X, backwards))
    assert (one == other).all()
