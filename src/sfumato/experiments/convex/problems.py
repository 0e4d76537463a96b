"""The rows of one repeat: drawn by the number of the repeat alone, so that all methods see the same ones.

All of them are benchmark data that everybody has, or made up; the private ones are private for the experiment's sake.
Scaling looks at no private row: ranges are declared with the table, or are those of the public rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from sfumato.data import tabular
from sfumato.data.tabular import TabularData
from sfumato.erm import PublicScaler
from sfumato.experiments.convex.regression_data import two_densities
from sfumato.experiments.convex.settings import Data

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Rows of norm at most 1. Targets are -1 and 1 for classes, else numbers, scaled by a declared range."""

    X: Array
    y: Array
    X_public: Array
    y_public: Array
    X_test: Array
    y_test: Array
    classification: bool
    error_unit: float = 1.0  # errors are told in multiples of it

    @property
    def sizes(self) -> dict[str, int]:
        return {"private": len(self.y), "public": len(self.y_public), "test": len(self.y_test)}

    def score(self, predicted: Array) -> float:
        """Accuracy, or the mean squared error."""
        if self.classification:
            return float(np.mean(predicted == self.y_test))
        return float(np.mean((predicted - self.y_test) ** 2)) / self.error_unit**2


@lru_cache(maxsize=2)
def problem(data: Data, repeat: int) -> Problem:
    """The rows of a repeat."""
    if data.name in _TABLES:
        return _from_table(_table(data.name), data, repeat)
    return _SYNTHETIC[data.name](data, np.random.default_rng(repeat))


@lru_cache(maxsize=1)
def _table(name: str) -> TabularData:
    return _TABLES[name]()


def check_there(data: Data) -> None:
    """Raise, in one sentence that says where to get it, if the data set is not there."""
    if data.name in _TABLES:
        _table(data.name)


_TABLES: dict[str, Callable[[], TabularData]] = {
    "adult-a": tabular.adult_a,
    "ipums-br": tabular.ipums_br,
    "ipums-us": tabular.ipums_us,
    "magic04": tabular.magic04,
    "mini-boo-ne": tabular.mini_boo_ne,
    "skin": tabular.skin,
    "cadata": tabular.cadata,
    "stability": tabular.stability,
}


def _from_table(table: TabularData, data: Data, repeat: int) -> Problem:
    """As paper 001 has it: 80 percent are for training, of which a thousandth is public; the rest is for testing."""
    order = np.random.default_rng(repeat).permutation(len(table.y))
    train = int(data.train * len(order))
    public = max(1, int(data.public * train))
    parts = (order[public:train], order[:public], order[train:])
    scaler = _scaler(table, data, table.X[parts[1]])
    rows = [scaler.fit(table.X[part]).transform(table.X[part]) for part in parts]
    targets, unit = [table.y[part] for part in parts], 1.0
    if table.y_range is not None:
        low, high = table.y_range
        targets = [2 * (y - low) / (high - low) - 1 for y in targets]
        targets[:2] = [y.clip(-1, 1) for y in targets[:2]]
        # The paper's errors are those of targets that span [-1, 1] exactly; a test may look at them all.
        unit = float(np.ptp(table.y)) / (high - low)
    return _problem(rows, targets, classification=table.classification, error_unit=unit)


def _problem(rows: list[Array], targets: list[Array], *, classification: bool, error_unit: float = 1.0) -> Problem:
    """From the private, the public and the test part."""
    return Problem(
        X=rows[0],
        y=targets[0],
        X_public=rows[1],
        y_public=targets[1],
        X_test=rows[2],
        y_test=targets[2],
        classification=classification,
        error_unit=error_unit,
    )


def _scaler(table: TabularData, data: Data, X_public: Array) -> PublicScaler:
    """Columns from their range to [lower_end, 1], rows to norm 1."""
    if data.ranges == "public" or table.lower is None or table.upper is None:
        ranges = PublicScaler.from_public(X_public, margin=data.margin)
        low, high = np.asarray(ranges.lower), np.asarray(ranges.upper)
    else:
        low, high = table.lower, table.upper
    # The scaler maps to [-1, 1]: a range that begins lower leaves the true lower end at lower_end.
    return PublicScaler(lower=high - 2 * (high - low) / (1 - data.lower_end), upper=high)


def _gaussian_classes(data: Data, rng: np.random.Generator) -> Problem:
    """Two classes, as many of each in the mean, around mu and -mu, with unit variance in every direction."""
    sizes = [data.private_rows or 0, data.public_rows or 0, data.test_rows or 0]
    n, p = sum(sizes), data.dimension or 0
    mu = gaussian(rng, p)
    mu *= (1.0 if data.separation is None else data.separation) / np.linalg.norm(mu)
    y = np.where(rng.random(n) < 0.5, 1, -1)
    X = gaussian(rng, n, p) + y[:, None] * mu
    scaled = PublicScaler(lower=-4.0, upper=4.0).fit_transform(X)  # four standard deviations, declared
    ends = np.cumsum(sizes)[:2]
    return _problem(np.split(scaled, ends), np.split(y, ends), classification=True)


def gaussian(rng: np.random.Generator, *shape: int) -> Array:
    """Made-up rows, from uniform numbers: noise that protects somebody comes from another place."""
    drawn: Array = ndtri(rng.random(shape) + 2.0**-54)
    return drawn


def _two_densities(data: Data, rng: np.random.Generator) -> Problem:
    """Paper 003 tells the loss on the private rows themselves, so those are the test rows, too."""
    rows, targets = two_densities(rng, [data.private_rows or 0, data.public_rows or 0], data.dimension or 0)
    return _problem([*rows, rows[0]], [*targets, targets[0]], classification=False)


_SYNTHETIC: dict[str, Callable[[Data, np.random.Generator], Problem]] = {
    "gaussian-classes": _gaussian_classes,
    "two-densities": _two_densities,
}
