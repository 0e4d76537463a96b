"""Preprocessing that does not leak: ranges are declared, or come from public rows; then everything is row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from sfumato.erm.rows import Array, features
from sfumato.errors import InvalidArgument


@dataclass(kw_only=True, eq=False, repr=False)
class PublicScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns from [lower, upper] to [-1, 1], cut there; then rows to norm 1.

    `fit` looks at the shape of its rows and at no value, so that in a pipeline nothing is learned from private rows,
    by mistake or otherwise: the least and the largest value of a column are two people's values. Declare ranges from
    what the columns mean, or take those of public rows with `PublicScaler.from_public`.

    Args:
        lower, upper: a number, or one per column.
        unit_norm: scale every row to norm 1, as linear models want them; rows of zeros stay.

    >>> PublicScaler(lower=[0, 0], upper=[100, 1], unit_norm=False).fit_transform([[50, 1], [250, 0]])
    array([[ 0.,  1.],
           [ 1., -1.]])
    """

    lower: Any = -1.0
    upper: Any = 1.0
    unit_norm: bool = True

    @classmethod
    def from_public(cls, X_public: Any, *, margin: float = 0.0, unit_norm: bool = True) -> Self:
        """The ranges of public rows, widened by `margin` times their width; a constant column gets width 1.

        >>> PublicScaler.from_public([[0.0, 3.0], [4.0, 3.0]]).upper
        array([4., 4.])
        """
        rows: Array = features(check_array(X_public, accept_sparse="csr", input_name="X_public"), "X_public")
        if not margin >= 0:
            raise InvalidArgument(f"margin={margin} must be at least 0: it widens the public ranges.")
        low, high = rows.min(0), rows.max(0)
        high = np.where(high > low, high, low + 1)
        wider = margin * (high - low)
        return cls(lower=low - wider, upper=high + wider, unit_norm=unit_norm)

    def fit(self, X: Any, y: Any = None) -> Self:
        """Checks columns; no value is looked at."""
        rows = features(X, "X")
        if not len(rows):
            raise InvalidArgument("X has 0 sample(s): give at least one row.")
        validate_data(self, X, reset=True, skip_check_array=True)
        low, high = self._ranges()
        for name, value in (("lower", low), ("upper", high)):
            if value.ndim and value.shape != (rows.shape[1],):
                raise InvalidArgument(f"{name} has shape {value.shape} and a row has {rows.shape[1]} columns.")
        self.scale_ = 2 / (high - low)
        return self

    def transform(self, X: Any) -> Array:
        """Row by row; a row that is not finite stays so, and contributes nothing to a private fit."""
        check_is_fitted(self)
        rows = features(X, "X")
        validate_data(self, X, reset=False, skip_check_array=True)
        low, high = self._ranges()
        with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a private value
            scaled: Array = np.clip((rows - low) / (high - low), 0.0, 1.0) * 2 - 1
            if self.unit_norm:
                norm = np.linalg.norm(scaled, axis=1, keepdims=True)
                scaled = scaled / np.where(norm == 0, 1.0, norm)
        return scaled

    def _ranges(self) -> tuple[Array, Array]:
        low, high = (np.asarray(value, dtype=np.float64) for value in (self.lower, self.upper))
        if not bool(np.all(np.isfinite(low) & np.isfinite(high) & (low < high))):
            raise InvalidArgument("lower must be below upper, and both finite, in every column: check the ranges.")
        return low, high

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = []
        return tags
