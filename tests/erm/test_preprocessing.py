"""Scaling that cannot learn from private rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.preprocessing import MinMaxScaler, normalize

from sfumato.erm import PublicScaler
from sfumato.errors import InvalidArgument

PUBLIC = np.array([[0.0, 10.0, 5.0], [2.0, 30.0, 5.0], [1.0, 20.0, 5.0]])
INSIDE = np.array([[0.5, 11.0, 5.5], [2.0, 30.0, 5.0]])


def test_on_public_rows_it_is_min_max_scaling_and_then_unit_rows() -> None:
    oracle = MinMaxScaler((-1, 1)).fit(PUBLIC[:, :2]).transform(INSIDE[:, :2])
    scaler = PublicScaler.from_public(PUBLIC[:, :2], unit_norm=False)
    assert np.allclose(scaler.fit(INSIDE[:, :2]).transform(INSIDE[:, :2]), oracle)
    scaler = PublicScaler.from_public(PUBLIC[:, :2])
    assert np.allclose(scaler.fit_transform(INSIDE[:, :2]), normalize(oracle))


@given(arrays(np.float64, (4, 3), elements=st.floats(-1e6, 1e6)))
def test_no_value_of_the_rows_it_is_fitted_to_changes_anything(private: np.ndarray) -> None:
    """A private minimum or maximum cannot get in: the same rows come out the same, whatever `fit` was given."""
    fitted = PublicScaler.from_public(PUBLIC).fit(private)
    other = PublicScaler.from_public(PUBLIC).fit(-1e3 * private + 17)
    assert np.array_equal(fitted.transform(INSIDE), other.transform(INSIDE))
    assert {k: np.asarray(v).tolist() for k, v in vars(fitted).items()} == {
        k: np.asarray(v).tolist() for k, v in vars(other).items()
    }


def test_one_row_does_not_change_another() -> None:
    scaler = PublicScaler.from_public(PUBLIC).fit(INSIDE)
    outlier = np.vstack([INSIDE, [[1e9, -1e9, np.nan]]])
    assert np.array_equal(scaler.transform(outlier)[:2], scaler.transform(INSIDE))


def test_values_outside_the_ranges_are_cut_and_rows_have_norm_one() -> None:
    scaler = PublicScaler(lower=[0, 0, 0], upper=[1, 1, 1], unit_norm=False).fit(INSIDE)
    assert scaler.transform([[5.0, -5.0, 0.5]]).tolist() == [[1.0, -1.0, 0.0]]
    rows = PublicScaler(lower=0.0, upper=1.0).fit_transform(np.random.default_rng(0).uniform(-3, 3, (50, 3)))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1)
    assert PublicScaler(lower=0.0, upper=1.0).fit_transform([[0.5, 0.5]]).tolist() == [[0.0, 0.0]]


def test_a_constant_public_column_and_a_margin() -> None:
    assert PublicScaler.from_public(PUBLIC).upper.tolist() == [2.0, 30.0, 6.0]
    wide = PublicScaler.from_public(PUBLIC, margin=0.5)
    assert wide.lower.tolist() == [-1.0, 0.0, 4.5]
    with pytest.raises(InvalidArgument, match="margin=-1"):
        PublicScaler.from_public(PUBLIC, margin=-1)


def test_public_rows_must_be_complete_and_private_ones_need_not() -> None:
    with pytest.raises(ValueError, match="X_public contains NaN"):
        PublicScaler.from_public([[np.nan, 1.0]])
    scaled = PublicScaler.from_public(PUBLIC).fit_transform([[np.nan, 20.0, 5.0], [1.0, 20.0, 5.0]])
    assert np.isnan(scaled[0]).any()
    assert np.isfinite(scaled[1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower": 1.0, "upper": 1.0}, "below upper"),
        ({"lower": -np.inf}, "finite"),
        ({"lower": [0.0, 0.0]}, r"lower has shape \(2,\)"),
    ],
)
def test_ranges_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PublicScaler(**options).fit(PUBLIC)


def test_clones_and_sparse_rows() -> None:
    scaler = PublicScaler.from_public(PUBLIC)
    assert np.array_equal(clone(scaler).fit(INSIDE).transform(csr_array(INSIDE)), scaler.fit(INSIDE).transform(INSIDE))
