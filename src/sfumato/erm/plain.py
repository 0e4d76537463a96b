"""The two ends of every comparison: what public rows alone can do, and what no privacy at all could do."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch

from sfumato.erm.base import Classifier, Learned, LinearModel, Regressor
from sfumato.erm.losses import Loss
from sfumato.erm.minimise import minimise
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument

_LEAST_L2 = 1e-6  # where none is asked for, so that there is a minimiser


@dataclass(kw_only=True, eq=False, repr=False)
class _Exact(LinearModel):
    """mean loss + l2 / 2 |w|^2, minimised to `tol`. `ledger_` is a sentence, since no ledger is involved."""

    tol: float = 1e-8

    def fit(self, X: Any, y: Any, X_public: Any = None, y_public: Any = None) -> Self:
        self._check_parameters()
        loss = self._loss()
        rows, public = self._rows(X, y, X_public, y_public)
        if not len(rows.y):
            raise InvalidArgument("X has 0 sample(s), and there is nothing to learn from: give some rows.")
        self._keep(self._minimise(rows, public, loss))
        return self

    @abstractmethod
    def _minimise(self, rows: Rows, public: Rows | None, loss: Loss) -> Learned: ...

    def _minimum(self, rows: Rows, loss: Loss, epsilon: float) -> Learned:
        zero = torch.zeros(rows.X.shape[1], dtype=torch.float64)
        found = minimise(loss, rows, strength=max(self.l2, _LEAST_L2), centre=zero, tolerance=self.tol)
        return Learned(found.w, found.steps, epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class _PublicOnly(_Exact):
    def _minimise(self, rows: Rows, public: Rows | None, loss: Loss) -> Learned:
        self.ledger_ = "No private row was looked at; without declared or public classes, the private labels name them."
        if public is None:
            return Learned(torch.zeros(rows.X.shape[1], dtype=torch.float64), 0, 0.0)
        return self._minimum(public, loss, 0.0)


@dataclass(kw_only=True, eq=False, repr=False)
class _NonPrivate(_Exact):
    _poor_score = False

    def _minimise(self, rows: Rows, public: Rows | None, loss: Loss) -> Learned:
        self.ledger_ = "NOT PRIVATE: the model was fitted to the rows as they are, and may reveal any of them."
        if public is not None:
            rows = Rows(torch.cat([rows.X, public.X]), torch.cat([rows.y, public.y]))
        if not bool(torch.isfinite(rows.X).all() & torch.isfinite(rows.y).all()):
            raise InvalidArgument("X or y has values that are NaN or infinity: clean or impute them.")
        return self._minimum(rows, loss, math.inf)


@dataclass(kw_only=True, eq=False, repr=False)
class PublicOnlyClassifier(Classifier, _PublicOnly):
    """A linear classifier fitted to the public rows alone; without any, it says the first class. Costs nothing."""


@dataclass(kw_only=True, eq=False, repr=False)
class PublicOnlyRegressor(Regressor, _PublicOnly):
    """A linear regression on the public rows alone; without any, it says 0. Costs nothing."""


@dataclass(kw_only=True, eq=False, repr=False)
class NonPrivateClassifier(Classifier, _NonPrivate):
    """NOT PRIVATE: a linear classifier fitted to all rows as they are, to compare with.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (100, 2))
    >>> print(NonPrivateClassifier().fit(X, X[:, 0] > 0).ledger_)
    NOT PRIVATE: the model was fitted to the rows as they are, and may reveal any of them.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class NonPrivateRegressor(Regressor, _NonPrivate):
    """NOT PRIVATE: a linear regression on all rows as they are, to compare with."""
