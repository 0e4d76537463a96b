"""Does a generator repeat the public rows that it was trained on? (Paper 002, appendix F shows its nearest neighbours.)

Copies do no harm to privacy, since the rows are public, but a copy is no new example, and diversity is what synthesis
is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.features import Features, pixel_features, public_rows
from sfumato.synthesis.measures import nearest, neighbours_within


@dataclass(frozen=True, kw_only=True, eq=False)
class Memorised:
    """Of each synthetic row, the nearest public one and how near it is; `copies` counts the rows that are too near."""

    by: str  # the name of the features
    neighbours: Tensor  # (N,) which public row is nearest
    distances: Tensor  # (N,) to it
    ratios: Tensor  # (N,) that distance over the one from the public row to its own nearest other
    threshold: float
    within: float  # the share of public rows that would count as copies of other public rows

    @property
    def copies(self) -> Tensor:
        """The numbers of the synthetic rows that are near-copies, the nearest first."""
        found = torch.nonzero(self.ratios <= self.threshold)[:, 0]
        return found[torch.argsort(self.ratios[found])]

    @property
    def share(self) -> float:
        """The share of synthetic rows that are near-copies of public ones."""
        return len(self.copies) / len(self.ratios)

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.3g}% of {len(self.ratios):,} synthetic rows are near-copies of public ones by "
            f"{self.by} (ratio {self.threshold:.3g}); among public rows themselves {100 * self.within:.3g}%"
        )


def memorised(synthetic: Any, public: Any, *, features: Features | None = None, threshold: float = 1 / 3) -> Memorised:
    """The nearest public row of each synthetic one, by pixels unless `features` are given.

    A near-copy is one whose distance to its public row is at most `threshold` times the distance from there to the
    nearest other public row, so that what counts as near is what it is in that part of the data. Rows that the public
    data holds twice count once. Mirrored copies are found if `public` holds the mirrored rows too.

    >>> public = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> print(memorised(public[:1] + 0.01, public))
    100% of 1 synthetic rows are near-copies of public ones by pixels (ratio 0.333); among public rows themselves 0%
    """
    if not 0 < threshold < 1:
        raise InvalidArgument(f"threshold={threshold} must be between 0 and 1: at 1, new draws count as copies.")
    features = features or pixel_features()
    rows, _ = public_rows(public, "public")
    made, _ = public_rows(synthetic, "synthetic")
    theirs = features(rows)
    different, first = _without_duplicates(theirs)
    if len(different) < 3:
        raise InvalidArgument(f"public has {len(different)} different rows: at least 3 are needed to compare with.")
    ours = features(made)
    if ours.shape[1] != theirs.shape[1]:
        raise InvalidArgument(
            f"synthetic rows have {ours.shape[1]} features and public rows {theirs.shape[1]}: give images of the same "
            "size."
        )
    distances, neighbours = nearest(ours.to(different.device), different)
    apart, others = neighbours_within(different, 2)
    return Memorised(
        by=features.name,
        neighbours=first[neighbours],
        distances=distances,
        ratios=distances / apart[neighbours, 0],
        threshold=threshold,
        within=float((_ratios_within(apart, others) <= threshold).double().mean()),
    )


def _ratios_within(apart: Tensor, others: Tensor) -> Tensor:
    """What the ratio of each public row would be, had it been a synthetic one beside all the others."""
    neighbour = others[:, 0]
    itself = torch.arange(len(apart), device=apart.device)
    from_there = torch.where(others[neighbour, 0] == itself, apart[neighbour, 1], apart[neighbour, 0])
    return apart[:, 0] / from_there


def _without_duplicates(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows, and where each comes first."""
    different, which = torch.unique(rows, dim=0, return_inverse=True)
    places = torch.arange(len(rows), device=rows.device)
    first = torch.full((len(different),), len(rows), device=rows.device).scatter_reduce_(0, which, places, "amin")
    return different, first
