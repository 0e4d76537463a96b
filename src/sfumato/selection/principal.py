"""Principal directions of a sum of squares."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument


def principal(gram: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """The p largest eigenvalues of a symmetric matrix and their eigenvectors, as rows, each with a positive peak."""
    if not isinstance(p, int) or not 1 <= p <= len(gram):
        raise InvalidArgument(f"components={p} must be a whole number from 1 to {len(gram)}, the width of a row.")
    values, vectors = torch.linalg.eigh(gram.double())
    values, vectors = values.flip(0)[:p], vectors.T.flip(0)[:p]
    peaks = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return values, vectors * torch.where(peaks < 0, -1.0, 1.0)
