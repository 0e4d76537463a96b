"""NearPrivate (paper 004, Algorithm 2): uncertain public rows that private rows lie close to.

It asks the door twice: for the Gram matrix of embeddings, whose main directions distances are measured in, and for how
many private rows have each public row as their nearest. Corrected against the paper: embeddings are clipped to a public
bound and centred by the *public* mean, never by the private one, which would move every private row when one is added;
and one private row has one vote whatever the others do (see `support`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.privacy.mechanisms import Noise
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import Gram
from sfumato.selection.principal import principal
from sfumato.selection.released import Released, Views
from sfumato.selection.strategy import Ask, Uncertainty, candidates, check_number, descending, entropy
from sfumato.selection.support import Threshold, TopK


@dataclass(frozen=True, kw_only=True)
class NearPrivate:
    """The n uncertain public rows with the most private support, by noisy counts; of equals the less certain.

    Reserve what it asks with `lines`, best in one plan with the training (`train(..., afterwards=lines)`). The rows
    come best first, so that one answer serves every smaller n, too.

    Args:
        uncertain: k / n, how many uncertain public rows are voted for, for each that is chosen.
        components: p, how many principal directions distances are measured in.
        bound: what the norm of a centred embedding is clipped to; None: the median norm in the public pool.
        voters: which private rows vote: `Threshold()`, or `TopK()` as in the paper, for twice the noise.
        uncertainty: `entropy` or `margin` of logits.
    """

    uncertain: float = 10.0
    components: int = 10
    bound: float | None = None
    voters: Threshold | TopK = field(default_factory=Threshold)
    uncertainty: Uncertainty = entropy

    def lines(self, private: Private, *, pca: float | Noise, support: float | Noise) -> tuple[Planned, Planned]:
        """What it will ask, for a plan: `pca` is the noise multiplier of the Gram matrix, `support` that of the counts.

        Both are in units of what one person can change, as everywhere; `advise` says how much noise suits a budget.
        """
        everyone = private.everyone()
        return Planned(Gram, pca, everyone), Planned(self.voters.question, support, everyone)

    def __call__(self, model: Released, pool: Public, n: int, ask: Ask | None = None) -> Tensor:
        check_number(pool, n)
        if ask is None:
            raise InvalidArgument("ask is missing, and NearPrivate looks at private rows: give ask=private.ask.")
        E_public, logits = model.of(pool)
        mean, scores = E_public.double().mean(0), self.uncertainty(logits)
        centred = E_public.double() - mean

        embedded = model.row_map(lambda views: views.embeddings.double() - mean)  # line 1: E_train
        bound = float(centred.norm(dim=1).median()) if self.bound is None else self.bound
        k, width = candidates(pool, n, self.uncertain), centred.shape[1]
        principal(torch.eye(width), self.components)  # a wrong number is told of before anything is asked
        _, P = principal(ask(Gram(embedded, bound, width)), self.components)  # line 2
        P = P.to(centred.device)
        likely = descending(scores)[:k]
        S_public = _Nearest(_projected(centred[likely], P))  # line 4
        tau = self.voters.least(scores)

        def vote(views: Views) -> Tensor:  # lines 3, 6 and 7, for each private row alone
            score = self.uncertainty(views.logits).double()
            place = S_public(_projected(views.embeddings.double() - mean, P), score >= tau)
            return torch.stack([score, place.to(score)], 1)

        N_support = ask(self.voters.of(model.row_map(vote), len(likely)))  # lines 5 to 11
        return likely.cpu()[descending(N_support.cpu())[:n]]  # line 12


def _projected(rows: Tensor, P: Tensor) -> Tensor:
    """Not rows @ P.T: a matrix product may round a row otherwise in another place, and move its nearest neighbour."""
    return torch.stack([(rows * direction).sum(1) for direction in P], 1)


class _Nearest:
    """For each point alone the number of the nearest of given points; -1 for one that is left out or not finite."""

    def __init__(self, points: Tensor) -> None:
        from scipy.spatial import cKDTree

        self._tree = cKDTree(points.cpu().numpy(), leafsize=32, balanced_tree=False)

    def __call__(self, points: Tensor, asked: Tensor) -> Tensor:
        asked = (asked & torch.isfinite(points).all(1)).cpu()
        place = torch.full((len(points),), -1, dtype=torch.int64)
        near = self._tree.query(points.cpu()[asked].numpy(), workers=torch.get_num_threads())[1]
        place[asked] = torch.as_tensor(near, dtype=torch.int64)
        return place
