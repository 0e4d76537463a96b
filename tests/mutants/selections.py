"""Counts and matrices whose sensitivity is stated too small."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from sfumato.audit.selections import gram_sensitivity, near_private_conversation, votes_audit, votes_sensitivity
from sfumato.audit.sensitivity import Neighbours, question_sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.privacy.mechanisms import Adjacency
from sfumato.private import Private
from sfumato.questions import Exact, Gram, Histogram, NoisyMean, Question, Sample
from sfumato.selection import Threshold, TopK, TopKHistogram
from sfumato.selection.support import Votes
from tests.mutants.mutant import Mutant


class OneVote(TopKHistogram):
    """Paper 004, Algorithm 2, line 10: Laplace noise of scale 1 / epsilon, as if a newcomer pushed nobody out."""

    @property
    def unit(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class TopKOfOneVote(TopK):
    question: ClassVar[type[Question]] = OneVote

    def of(self, votes: Votes, k: int) -> Question:
        return OneVote(votes, k, self.k or k)


class Centred:
    """A sample whose rows are centred by their own mean."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sample, name)

    def parts(self, **options: Any) -> Any:
        parts = list(self._sample.parts(**options))
        rows = [torch.nan_to_num(batch, 0.0, 0.0, 0.0) for batch, _ in parts]
        mean = torch.cat(rows).mean(0) if rows else 0.0
        return [(batch - mean, units) for batch, units in parts]


class CentredGram(Gram):
    """sum (x_i - m)(x_i - m)' with the private mean m, as scikit-learn's PCA has it."""

    def exact(self, sample: Sample) -> Exact:
        return super().exact(Centred(sample))  # type: ignore[arg-type]


class CentredHistogram(Histogram):
    """Nearest neighbours of embeddings that were centred by their own mean: one row moves all of them."""

    def exact(self, sample: Sample) -> Exact:
        return super().exact(Centred(sample))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class CentredThreshold(Threshold):
    question: ClassVar[type[Question]] = CentredHistogram

    def of(self, votes: Votes, k: int) -> Question:
        return CentredHistogram(lambda rows: votes(rows)[:, 1].long(), k)


class AddRemoveUnit(NoisyMean):
    """Replace-one is charged as add/remove: C, where exchanging a row moves the sum by 2 C."""

    replace_factor: ClassVar[float] = 1.0


def by_votes(voters: TopK) -> list[Verdict]:
    return votes_sensitivity(voters, name=type(voters).__name__)


def by_counting(voters: TopK) -> list[Verdict]:
    return [votes_audit(voters, name=type(voters).__name__, trials=2000)]


def by_far_out_rows(kinds: tuple[type[Gram], Threshold]) -> list[Verdict]:
    gram, voters = kinds
    return [
        *gram_sensitivity(name=gram.__name__, question=gram),
        *near_private_conversation(voters, name=type(voters).__name__),
    ]


def by_exchanged_rows(question: type[NoisyMean]) -> list[Verdict]:
    here, there = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[-1.0], [0.0]]).double()
    added = [Neighbours(name="one more", one=here[1:], other=here)]
    exchanged = [Neighbours(name="one for another", one=here, other=there)]

    def total(private: Private, asked: Any) -> Any:
        return private.ask(asked, noise=0.02, sampler=private.everyone()) * private.size

    ask = partial(
        question_sensitivity, lambda _: question(lambda rows: rows, 1.0), name=question.__name__, release=total
    )
    return [ask(added), ask(exchanged, adjacency=Adjacency.REPLACE_ONE)]


MUTANTS = (
    Mutant(
        name="M11",
        wrong="noise for one vote, where the k most uncertain rows vote",
        right=TopK(k=3),
        broken=TopKOfOneVote(k=3),
        audits=by_votes,
    ),
    Mutant(
        name="M12",
        wrong="rows centred by their own mean",
        right=(Gram, Threshold()),
        broken=(CentredGram, CentredThreshold()),
        audits=by_far_out_rows,
    ),
    Mutant(
        name="M16",
        wrong="replace-one charged as add/remove",
        right=NoisyMean,
        broken=AddRemoveUnit,
        audits=by_exchanged_rows,
    ),
    Mutant(
        name="M11",
        wrong="noise for one vote, where the k most uncertain rows vote",
        right=TopK(k=3),
        broken=TopKOfOneVote(k=3),
        audits=by_counting,
        slow=True,
    ),
)
