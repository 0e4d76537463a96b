"""Whole fits of linear models, and of principal components, under attack: one row exchanged for another.

All other rows are zeros, so that nothing hides the one; it points along an axis or against it. The adjacency is
replace-one, under which the proofs of most of these methods are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sfumato.audit.canary import distinguish
from sfumato.audit.verdict import CONFIDENCE, Verdict

ROWS, WIDTH, PUBLIC = 12, 3, 6
EPSILON, DELTA = 5.0, 1e-5  # of which 100 fits, were all guesses right, would prove more

Made = Callable[[], Any]
"""A new estimator with `fit`."""


def table(present: bool) -> tuple[Any, Any]:
    """Rows and labels; the last row is the one that is exchanged."""
    X = np.zeros((ROWS, WIDTH))
    X[-1, 0] = 1.0 if present else -1.0
    return X, np.arange(ROWS) % 2


def public_table() -> tuple[Any, Any]:
    """A few public rows that have nothing to do with the private ones."""
    X = np.zeros((PUBLIC, WIDTH))
    X[:, 1] = np.linspace(-1, 1, PUBLIC)
    return X, np.arange(PUBLIC) % 2


def fitted(
    made: Made,
    *,
    name: str,
    gaussian: bool,
    epsilon: float = EPSILON,
    trials: int = 100,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """What the weights of a classifier that claims (epsilon, DELTA) prove about the row.

    `gaussian` says that its noise, and hence its trade-off, is that of a Gaussian mechanism.
    """
    X_public, y_public = public_table()

    def release(present: bool) -> Any:
        X, y = table(present)
        return made().fit(X, y, X_public, y_public).coef_

    return distinguish(
        release,
        name=name,
        audit="canary, whole fit",
        epsilon=epsilon,
        delta=DELTA,
        gaussian=gaussian,
        trials=trials,
        confidence=confidence,
    )


def components(made: Made, *, name: str, trials: int = 100, confidence: float = CONFIDENCE) -> Verdict:
    """The same of principal components: all of them, with their variances, are the noisy Gram matrix."""

    def release(present: bool) -> Any:
        X = np.zeros((ROWS, WIDTH))
        X[-1, 0 if present else 1] = 1.0
        model = made().fit(X)
        return (model.components_.T * model.explained_variance_) @ model.components_

    return distinguish(
        release,
        name=name,
        audit="canary, whole fit",
        epsilon=EPSILON,
        delta=DELTA,
        gaussian=True,
        trials=trials,
        confidence=confidence,
    )
