"""Coordinates in which rows are centred and about equally wide in every direction, as far as public rows can tell.

Rows of a table mostly point the same way: their mean takes up most of their length, and hence of the clip norm, and a
few wide columns most of the rest. Noise is equally wide in all directions, so it is the narrow ones that it buries. A
linear map that public rows decide on is free, and the weights it leads to are linear in the rows as they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PSEUDO_ROWS = 8  # by which the spread of a column is pulled towards that of all columns
_CONSTANT = 0.5  # the length that is left of what all rows have in common; what tells them apart gets the rest of 1
_ROUNDING = 1e-20  # what is below that share of a mean square may be nothing but rounding
_BLOCK, _PADDING = 256, 16  # rows at a time, and what widths are rounded up to


def public_coordinates(X: Tensor, *, constant: bool) -> Tensor:
    """M, whose rows are the new coordinates: a row x of the table, or of the public rows X, becomes M x.

    With a constant column, the last one of X, the public mean is subtracted; without, it is shortened, since a model
    without an intercept cannot tell a shift. Then columns are divided by their spread and the rest is made rounder by
    the inverse fourth root of its covariance; both are public estimates, pulled towards equality where rows are few.
    (The inverse square root would make public rows perfectly round, and, of those few, too much.)

    >>> X = torch.tensor([[0.8, 0.1, 1], [0.9, 0.1, 1], [0.8, 0.2, 1], [0.9, 0.2, 1]]).double() / 2**0.5
    >>> (2 * (X @ public_coordinates(X, constant=True).T)).round().int().tolist()
    [[-1, -1, 1], [1, -1, 1], [-1, 1, 1], [1, 1, 1]]
    """
    x = X[:, :-1] * math.sqrt(2) if constant else X  # the constant column was (x, 1) / sqrt(2)
    n, d = x.shape
    mean = x.mean(0)
    apart = x - mean
    variances = apart.square().sum(0) / max(n - 1, 1)
    if not float(variances.mean()) > _ROUNDING * float(x.square().mean()):  # one row, or the same again and again
        return torch.eye(X.shape[1], dtype=torch.float64)
    pooled = (n * variances + _PSEUDO_ROWS * variances.mean()) / (n + _PSEUDO_ROWS)
    # What never varies in public rows is mostly rare, and not narrow: it is not to be magnified.
    spread = torch.where(variances > _ROUNDING * variances.mean(), pooled, variances.mean()).sqrt()
    covariance = (apart / spread).T @ (apart / spread) / (n - 1)
    share = d / (n + d)
    covariance *= 1 - share
    covariance.diagonal().add_(share / (1 - share) * covariance.diagonal().mean())
    values, vectors = torch.linalg.eigh(covariance)
    B: Tensor = (vectors * values**-0.25) @ vectors.T / spread
    lengths = (apart @ B.T).norm(dim=1)
    typical = float(lengths.median()) or float(lengths.max())
    B *= math.sqrt(1 - _CONSTANT**2) / typical
    if constant:
        M = torch.zeros(d + 1, d + 1, dtype=torch.float64)
        M[:d, :d], M[:d, d], M[d, d] = B, -(B @ mean), _CONSTANT
        return M * math.sqrt(2)
    common = B @ mean
    length = float(common.norm())
    if length > _CONSTANT:
        B -= (1 - _CONSTANT / length) * torch.outer(common / length, (common / length) @ B)
    return B


def moved(X: Tensor, M: Tensor) -> Tensor:
    """X M', to single precision. How a row is computed depends on that row alone, not on how many there are or where.

    A matrix product may round a row otherwise in other company; in blocks of one shape, a multiple of what processors
    compute at a time, it does not.
    """
    n, d = X.shape
    wide, out = (-(-width // _PADDING) * _PADDING for width in (d, len(M)))
    map_ = torch.zeros(wide, out, dtype=torch.float32)
    map_[:d, : len(M)] = M.T
    result, block = torch.empty(n, len(M), dtype=torch.float64), torch.zeros(_BLOCK, wide, dtype=torch.float32)
    for start in range(0, n, _BLOCK):
        part = X[start : start + _BLOCK]
        block[: len(part), :d] = part
        result[start : start + _BLOCK] = (block @ map_)[: len(part), : len(M)]
    return result


def steepest(X: Tensor) -> float:
    """The largest eigenvalue of the second moments of public rows: rather more than that of many rows."""
    return float(torch.linalg.matrix_norm(X, ord=2)) ** 2 / max(1, len(X))
