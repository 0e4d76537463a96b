"""Tables as linear models see them: float64 tensors whose rows have norm at most 1.

Private values are never quoted in an error, and what is wrong with single private rows is not announced at all: a row
that is not finite contributes nothing. Only the schema is looked at: types, columns, and the labels where nobody
declared them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.exceptions import DataConversionWarning
from torch import Tensor

from sfumato.data.sources import share_memory
from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]

_MOST_ROWS, _FEWEST_ROWS, _ENTRIES = 512, 64, 2**17  # of a block: more rows than threads, and no larger than a cache


class Rows(NamedTuple):
    """Rows of norm at most 1, the constant column included, and their targets (-1 or 1 for classes)."""

    X: Tensor
    y: Tensor


def check_apart(X: Any, X_public: Any) -> None:
    """Raise if public rows are private ones in the same memory, as they were given: a conversion makes a copy."""
    own, others = (np.asarray(table.data if issparse(table) else table) for table in (X, X_public))  # type: ignore[attr-defined]
    if X_public is X or share_memory(own, others):
        raise InvalidArgument(
            "X_public is X, or a part of it: only what everybody may see is public, so split such rows off, and leave "
            "them out of X."
        )


def features(X: Any, what: str) -> Array:
    """A float64 matrix; errors name the problem and quote no value."""
    array = _array(X.toarray() if issparse(X) else X, what)  # type: ignore[attr-defined]
    if array.dtype.kind == "c":
        raise InvalidArgument(f"Complex data not supported: give {what} as real numbers.")
    try:
        with np.errstate(over="ignore"):  # a warning would tell of a private value: what is too large becomes infinite
            array = array.astype(np.float64, copy=False)
    except (ValueError, OverflowError):  # it quotes the cell; a TypeError quotes a type
        raise InvalidArgument(f"{what} has a cell that is not a number: encode or remove it.") from None
    if array.ndim != 2:
        raise InvalidArgument(f"{what} is {array.ndim}-dimensional: Reshape your data to one row per example.")
    if array.shape[1] == 0:  # in the words of scikit-learn, but without the number of rows, which may be private
        raise InvalidArgument(f"{what} has 0 feature(s) (shape=(, 0)) while a minimum of 1 is required: add columns.")
    return array


def _array(values: Any, what: str) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length: its message counts them
        raise InvalidArgument(f"{what} has rows of unequal length: give each as many numbers as the others.") from None
    return array if _keeps(array, values, str, bytes) else np.array(values, dtype=object)


def _keeps(array: Array, values: Any, *kinds: type) -> bool:
    """Whether numpy, which has one type for all, made this type of values that all are of it, if it is one of these.

    Beside one word all numbers of a list become words, and beside one fraction integers beyond 2^53 become fractions:
    what is one person's would change everybody's.
    """
    if not isinstance(values, list | tuple) or not issubclass(array.dtype.type, kinds):
        return True
    wanted = next(kind for kind in kinds if issubclass(array.dtype.type, kind))
    return all(isinstance(v, wanted) for v in np.array(values, dtype=object).flat)


def column(y: Any, what: str, estimator: object) -> Array:
    """One target per row."""
    if y is None:
        name = type(estimator).__name__
        raise InvalidArgument(f"{name} requires y to be passed, but the target y is None: give {what}.")
    array = _array(y, what)
    if not _keeps(array, y, float, np.floating):
        array = np.array(y, dtype=object)
    if array.ndim == 2 and array.shape[1] == 1:
        warnings.warn(
            "A column-vector y was passed when a 1d array was expected: use y.ravel().",
            DataConversionWarning,
            stacklevel=4,
        )
        array = array.ravel()
    if array.ndim != 1:
        raise InvalidArgument(f"{what} must be a 1d array, one target per row, not {array.ndim}-dimensional.")
    return array


def numbers(y: Array, what: str) -> Array:
    try:
        with np.errstate(over="ignore"):  # a warning would tell of a private target
            return y.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{what} has a target that is not a number: encode or remove it.") from None


def signs(y: Array, classes: Array) -> Array:
    """1 for the second class, -1 for the first, and NaN, which contributes nothing, for anything else."""
    return np.where(y == classes[1], 1.0, np.where(y == classes[0], -1.0, np.nan))


def tensor(array: Array) -> Tensor:
    """The same memory where torch can use it."""
    usable = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if usable else array.copy())


def scores(X: Tensor, w: Tensor) -> Tensor:
    """<w, x> for every row x, by that row alone, however many there are and wherever and however it lies in memory.

    A matrix product may round a row otherwise in another place, and so may sums: of columns, where a row's numbers do
    not lie side by side, and of parts, where there are fewer rows than threads. Products are rounded one by one; they
    are added up in blocks of one shape.
    """
    found, block = torch.empty(len(X), dtype=torch.float64, device=X.device), _block(X)
    for start in range(0, len(X), len(block)):
        part = X[start : start + len(block)]
        torch.mul(part, w, out=block[: len(part)])
        found[start : start + len(block)] = block.sum(1)[: len(part)]
    return found


def _lengths(X: Tensor) -> Tensor:
    """The norm of every row, likewise by that row alone."""
    found, block = torch.empty(len(X), dtype=torch.float64, device=X.device), _block(X)
    for start in range(0, len(X), len(block)):
        part = X[start : start + len(block)]
        block[: len(part)] = part
        found[start : start + len(block)] = torch.linalg.vector_norm(block, dim=1)[: len(part)]
    return found


def _block(X: Tensor) -> Tensor:
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, _ENTRIES // max(1, X.shape[1])))
    return torch.zeros(rows, X.shape[1], dtype=torch.float64, device=X.device)


def unit_rows(X: Array, *, constant: bool) -> Tensor:
    """Every row shortened to norm 1 where it is longer; with a constant, (x, 1) / sqrt(2), whose norm is at most 1.

    Row by row, hence free of charge. A row that is not finite becomes one of NaN.
    """
    rows = tensor(X)
    norm = _lengths(rows)[:, None]  # which side of a kink a row lies on may hang on its last bit
    scale = 1 / (norm * (1 + X.shape[1] * 2.0**-52)).clamp_min(1.0)
    if not constant:
        return torch.mul(rows, scale, out=torch.empty(rows.shape, dtype=torch.float64))  # row by row in memory
    out = torch.empty(len(rows), rows.shape[1] + 1, dtype=torch.float64)
    torch.mul(rows, scale * math.sqrt(0.5), out=out[:, :-1])
    out[:, -1] = math.sqrt(0.5)
    return out
