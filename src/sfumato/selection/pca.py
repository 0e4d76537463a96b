"""Private principal components as a scikit-learn transformer (Dwork et al. 2014, Analyze Gauss).

The noisy Gram matrix of clipped rows is one answer of the door; eigenvectors are post-processing. Corrected against
common practice: the bound on rows is declared, never measured on them; nothing is centred by a private mean, which
would be a second, unbounded answer; and the noise is that of the exact Gaussian mechanism, not of the classical
formula, which holds for epsilon < 1 only and asks for 1.4 times as much there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from sfumato.erm.parameters import check_types
from sfumato.erm.rows import Array, features, tensor
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy import calibration
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import Adjacency
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.questions import Gram
from sfumato.selection.principal import principal


@dataclass(eq=False, repr=False)
class PrivatePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The main directions of private rows.

    Args:
        n_components: how many.
        epsilon, delta: what this fit may cost. A new ledger account gets them as its budget.
        bound: the declared norm that rows are shortened to, after `mean` is taken off.
        mean: a public number or vector that is taken off every row; None for nothing. Never the mean of these rows.
        adjacency: "replace-one", where the number of rows is public, or "add-remove", which needs `size`.
        size: the declared number of rows; under add-remove it may be approximate.
        ledger: a path, a database URL or a `Ledger` that further fits on the same rows are charged to; None forgets.
        name: the declared name of the private table in that ledger.
        not_private_seed: makes the noise repeatable, and the statement say NOT PRIVATE: for tests only.

    A private row that is not finite contributes nothing, and nobody is told. That there are rows at all is told: as
    scikit-learn wants it, a table without any is refused.

    >>> rows = np.random.default_rng(0).uniform(-1, 1, (5000, 4)) * [1, 0.1, 0.1, 0.1]
    >>> pca = PrivatePCA(1, epsilon=1.0, delta=1e-6, bound=1.0).fit(rows)
    >>> bool(abs(pca.components_[0, 0]) > 0.95), bool(0.99 < pca.epsilon_ <= 1)
    (True, True)
    """

    n_components: int = 1
    _: KW_ONLY
    epsilon: float = 1.0
    delta: float = 1e-6
    bound: float = 1.0
    mean: Any = None
    adjacency: str = "replace-one"
    size: int | None = None
    ledger: Ledger | str | os.PathLike[str] | None = None
    name: str = "table"
    not_private_seed: int | None = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Ask for the noisy Gram matrix of private rows X, once.

        Sets `components_`, `explained_variance_` (mean squares along them, as far as noise shows them), `mean_`,
        `noise_multiplier_`, `epsilon_` (what this fit costs) and `ledger_`, the privacy statement of the account.
        """
        budget = self._check_parameters()
        rows = features(X, "X")
        validate_data(self, X, reset=True, skip_check_array=True)
        width = rows.shape[1]
        if not len(rows):
            raise InvalidArgument("X has 0 sample(s), and there is nothing to learn from: give some rows.")
        if self.n_components > width:
            raise InvalidArgument(f"n_components={self.n_components} must be at most {width}, the columns of X.")
        mean = self._mean(width)
        with self._door(rows, budget) as private:
            if private.account.budget.delta != self.delta:
                raise InvalidArgument(
                    f"delta={self.delta} is not that of the account {self.name!r}, {private.account.budget.delta:g}: "
                    "give the same, since one dataset has one delta."
                )
            noise = calibration.noise_multiplier(
                epsilon=self.epsilon,
                delta=self.delta,
                sampler=private.everyone(),
                steps=1,
                adjacency=private.adjacency,
                replace_factor=Gram.replace_factor,
            )
            try:
                plan = private.plan(Planned(Gram, noise, private.everyone()))
            except BudgetExceeded as reason:
                raise BudgetExceeded(
                    f"The account {self.name!r} has no room for a fit at epsilon={self.epsilon}, delta={self.delta}: "
                    "lower epsilon, or make the account with a larger budget before its first fit, "
                    f"Ledger(...).account({self.name!r}, unit='example', adjacency={self.adjacency!r}, budget=...)."
                ) from reason
            with plan:
                gram = private.ask(Gram(lambda part: part - tensor(mean), self.bound, width))
            self.ledger_, size = private.statement(), private.size
            self.epsilon_ = min(plan.epsilon_after(1), self.epsilon)
        values, vectors = principal(gram, int(self.n_components))
        self.components_: Array = vectors.numpy()
        self.explained_variance_: Array = values.clamp_min(0.0).numpy() / size
        self.mean_, self.noise_multiplier_, self._n_features_out = mean, noise, len(vectors)
        return self

    def transform(self, X: Any) -> Array:
        """Coordinates along the components, row by row and without clipping; a row that is not finite stays so."""
        check_is_fitted(self)
        rows = features(X, "X")
        validate_data(self, X, reset=False, skip_check_array=True)
        with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a private value
            coordinates: Array = (rows - self.mean_) @ self.components_.T
        return coordinates

    def inverse_transform(self, X: Any) -> Array:
        """The nearest rows that have these coordinates."""
        check_is_fitted(self)
        rows: Array = features(X, "X") @ self.components_ + self.mean_
        return rows

    def _check_parameters(self) -> Budget:
        check_types(self)
        if self.n_components < 1:
            raise InvalidArgument(f"n_components={self.n_components} must be at least 1.")
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise InvalidArgument(f"bound={self.bound} must be positive and finite: it is what one row can contribute.")
        if self.adjacency not in tuple(Adjacency):
            raise InvalidArgument(f"adjacency={self.adjacency!r} must be 'add-remove' or 'replace-one'.")
        return Budget(self.epsilon, self.delta)

    def _mean(self, width: int) -> Array:
        mean = np.asarray(0.0 if self.mean is None else self.mean, dtype=np.float64)
        if mean.shape not in ((), (width,)) or not bool(np.isfinite(mean).all()):
            raise InvalidArgument(f"mean must be a public number, or {width} of them, one per column, all finite.")
        return np.broadcast_to(mean, (width,)).copy()

    @contextmanager
    def _door(self, rows: Array, budget: Budget) -> Iterator[Private]:
        """The rows behind the door, under the declared name."""
        ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        try:
            yield Private(
                torch.from_numpy(rows.copy()),
                name=self.name,
                size=self.size,
                ledger=ledger,
                budget=None if self.name in ledger.account_names() else budget,
                adjacency=self.adjacency,
                seed=None if self.not_private_seed is None else NotPrivateSeed(self.not_private_seed),
            )
        finally:
            if ledger is not self.ledger:
                ledger.close()

    def __sklearn_clone__(self) -> Self:
        # A ledger is where things are written down: copies of an estimator share it.
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        same: dict[str, Any] = {k: v if isinstance(v, Ledger) else clone(v, safe=False) for k, v in values}
        return type(self)(**same)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = True
        tags.transformer_tags.preserves_dtype = []
        return tags
