"""The made-up regression of paper 003's figure 1, whose geometry is not that of a ball.

A row has 40 of its first p/5 columns and 80 of the other 4p/5 at 0.05, drawn without replacement, and zeros elsewhere;
its target is <theta, x> and a little noise, for one theta ~ N(0, I). So no norm depends on p. The first columns are
busier than the others, and all rows have the same sum over each of the two groups, which makes two steep directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

Array = npt.NDArray[Any]

_ENTRY, _BUSY, _IDLE, _NOISE = 0.05, 40, 80, 0.1  # the noise has variance 0.01


def two_densities(rng: np.random.Generator, sizes: list[int], p: int) -> tuple[list[Array], list[Array]]:
    """Rows and targets of parts of these sizes, all of one theta.

    >>> (X,), (y,) = two_densities(np.random.default_rng(0), [3], 500)
    >>> X.shape, y.shape, np.round(X.sum(1), 6)
    ((3, 500), (3,), array([6., 6., 6.]))
    """
    theta = _gaussian(rng, p)
    rows = [_rows(rng, n, p) for n in sizes]
    return rows, [X @ theta + _NOISE * _gaussian(rng, len(X)) for X in rows]


def _rows(rng: np.random.Generator, n: int, p: int) -> Array:
    X = np.zeros((n, p))
    np.put_along_axis(X, _subsets(rng, n, p // 5, _BUSY), _ENTRY, 1)
    np.put_along_axis(X, p // 5 + _subsets(rng, n, p - p // 5, _IDLE), _ENTRY, 1)
    return X


def _subsets(rng: np.random.Generator, n: int, of: int, size: int) -> Array:
    """n uniform subsets of range(of), one per row (Floyd's algorithm): a number that is taken already becomes j."""
    chosen = np.empty((n, size), dtype=np.int64)
    for i, j in enumerate(range(of - size, of)):
        number = rng.integers(0, j + 1, n)
        taken = (chosen[:, :i] == number[:, None]).any(1)
        chosen[:, i] = np.where(taken, j, number)
    return chosen


def _gaussian(rng: np.random.Generator, n: int) -> Array:
    """From uniform numbers: noise that protects somebody comes from another place."""
    drawn: Array = ndtri(rng.random(n) + 2.0**-54)
    return drawn
