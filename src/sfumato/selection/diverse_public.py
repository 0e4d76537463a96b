"""DiversePublic (paper 004, Algorithm 1): uncertain public rows of many kinds, the most typical of each kind.

It looks at public rows and a released model alone, so it costs nothing.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.public import Public
from sfumato.selection.principal import principal
from sfumato.selection.released import Released
from sfumato.selection.strategy import Ask, Uncertainty, candidates, check_number, entropy, most_uncertain


@dataclass(frozen=True, kw_only=True)
class DiversePublic:
    """The n = N_cluster * N_each rows that are most central in clusters of uncertain ones.

    The most central row of every cluster comes first, then the second ones, and so on; so exactly n rows come out, also
    where n is no multiple of `each` or a cluster is small.

    Args:
        uncertain: k / n, how many uncertain rows are clustered for each that is chosen.
        components: p, how many principal directions of the pool's embeddings distances are measured in.
        each: N_each, rows per cluster; there are n / each clusters, rounded up.
        uncertainty: `entropy` or `margin` of logits.
        seed: of k-means.
    """

    uncertain: float = 10.0
    components: int = 10
    each: int = 10
    uncertainty: Uncertainty = entropy
    seed: int = 0

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        if not isinstance(self.each, int) or self.each < 1:
            raise InvalidArgument(f"each={self.each} must be a whole number of at least 1: rows per cluster.")
        E = model.of(pool).embeddings.double()  # line 1
        centred = E - E.mean(0)
        _, P = principal(centred.T @ centred, self.components)  # line 2
        likely = most_uncertain(model, pool, self.uncertainty, candidates(pool, n, self.uncertain))
        S = (centred[likely] @ P.T).cpu().numpy()  # line 3
        cluster, distance = _clustered(S, math.ceil(n / self.each), self.seed)  # line 4
        rank = _rank_in_cluster(cluster, distance)
        return likely.cpu()[torch.from_numpy(np.argsort(rank, kind="stable")[:n])]  # lines 5 to 8


def _clustered(points: np.ndarray, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For every point its cluster, and how far it is from that cluster's centre."""
    from sklearn.cluster import KMeans  # imported here: it takes a second
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different points than clusters: some stay empty
        found = KMeans(clusters, n_init=1, max_iter=25, random_state=seed).fit(points)
    centres: np.ndarray = found.cluster_centers_[found.labels_]
    return found.labels_, np.linalg.norm(points - centres, axis=1)


def _rank_in_cluster(cluster: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """0 for the most central point of its cluster, 1 for the second, ..."""
    order = np.lexsort((distance, cluster))
    starts = np.searchsorted(cluster[order], cluster[order])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts
    return rank
