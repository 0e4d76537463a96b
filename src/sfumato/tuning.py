"""Private hyper-parameter search: random search with a secret random number of trials, paid for before it begins.

Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy" (2022). One *trial* draws a candidate,
trains with it, and scores what came out. A search runs K independent trials and releases the best one alone.

Formal guarantee. `tune` is as private as the `BestOf` that it charges, if nothing but what it returns is seen:
(1) Every trial is the same mechanism, whatever candidate it draws: candidates are public, finitely many, and declare
    all that they ask; they are drawn independently and secretly; and the divergence charged is the largest of theirs,
    order by order. Were the sequence of candidates known, the trials would not be alike, and the winner's place in it
    would tell about K.
(2) What a trial asks is held to what its candidate declared, by the account that it is lent.
(3) K comes from the door's secret generator. It is not returned, and nothing is written until the search is over.
(4) The ledger is charged with the whole before K is drawn. A search that fails keeps its charge and releases nothing;
    to begin again is another search, with another charge. So nobody can draw K again until it pleases.

The score may be a private answer, which is then one of the declared questions, or any function of the outcome and
public data. The theorem is the same: a public score saves the price of the private one, and nothing else. What is free
is whatever happens before: `race` leaves out candidates that do badly on public data.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from torch.utils._pytree import tree_map

from sfumato.data.samplers import FixedSize, FullBatch, Poisson, Sampler
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.objective import Objective
from sfumato.privacy import accounting
from sfumato.privacy.accounting import Accountant, Cost
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Vector
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Adjacency, BestOf, Mechanism
from sfumato.privacy.repetitions import Repetitions
from sfumato.privacy.statement import Statement
from sfumato.private import Private
from sfumato.run import Run

T = TypeVar("T")
QUESTION = "tune"
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Hyper-parameters, and everything that one trial with them asks of the private data."""

    options: Options
    asks: tuple[Mechanism, ...]


@dataclass(frozen=True, kw_only=True)
class Trial(Generic[T]):
    """What one trial gives: anything, and how good it is; higher is better, and NaN is worst."""

    score: float
    outcome: T


@dataclass(frozen=True, kw_only=True)
class Tuned(Generic[T]):
    """The best trial, the only one that is released. How many there were is not known to anyone."""

    options: Options
    score: float
    outcome: T
    cost: SearchCost


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """What a search costs, known before it begins."""

    trial: float
    """The epsilon of one trial alone."""
    epsilon: float
    """Of the whole search."""
    delta: float
    mean_trials: float
    usually_at_most: int
    """So many trials, or fewer, in 99 of 100 searches: a fact about the law, not about this search."""


# ------------------------------------------------------------------------------------------------ candidates, in public


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, evenly or evenly in their logarithm; with `whole`, whole ones."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InvalidArgument(f"low={self.low} must be below high={self.high}, and both finite.")
        if self.log and self.low <= 0:
            raise InvalidArgument(f"low={self.low} must be positive for log=True: raise it, or leave log out.")

    def at(self, share: float) -> float | int:
        """The number so far along the way: 0 is low, 1 is high."""
        evenly = self.low + (self.high - self.low) * share
        found = math.exp(math.log(self.low) + math.log(self.high / self.low) * share) if self.log else evenly
        return round(found) if self.whole else found


def candidates(space: Mapping[str, Range | Sequence[Any]], count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`count` different points of a space, drawn in public; the whole grid where it has no more than that.

    >>> candidates({"clip": [0.1, 1.0], "method": ["dp-sgd"]}, 8)
    [{'clip': 0.1, 'method': 'dp-sgd'}, {'clip': 1.0, 'method': 'dp-sgd'}]
    """
    if count < 1:
        raise InvalidArgument(f"count={count} must be at least 1.")
    for name, values in space.items():
        if not isinstance(values, Range) and not len(values):
            raise InvalidArgument(f"space has no value for {name!r}: list some, or leave it out.")
    grids = [values for values in space.values() if not isinstance(values, Range)]
    if len(grids) == len(space) and math.prod(map(len, grids)) <= count:
        return [dict(zip(space, point, strict=True)) for point in itertools.product(*grids)]
    rng = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    for _ in range(100 * count):
        point = {
            name: values.at(float(rng.random()))
            if isinstance(values, Range)
            else values[int(rng.integers(len(values)))]
            for name, values in space.items()
        }
        if point not in found:
            found.append(point)
        if len(found) == count:
            break
    return found


def race(
    points: Sequence[T], score: Callable[[T, float], float], *, keep: int, efforts: Sequence[float] = (0.25, 1.0)
) -> list[T]:
    """Successive halving on public data, which is free: the `keep` best, best first.

    `score(point, effort)` may see public data only, and what was released before. `effort` is what part of a whole
    training it may take; after each effort fewer points are left, in equal ratios, and the last ones decide.

    >>> race([3, 1, 2], lambda point, effort: -point, keep=2)
    [1, 2]
    """
    if not 1 <= keep <= len(points):
        raise InvalidArgument(f"keep={keep} must lie between 1 and the {len(points)} candidates.")
    left = list(points)
    ratio = (keep / len(points)) ** (1 / max(1, len(efforts)))
    for rung, effort in enumerate(efforts, start=1):
        number = keep if rung == len(efforts) else max(keep, math.ceil(len(points) * ratio**rung))
        scores = [_finite(score(point, effort)) for point in left]
        order = sorted(range(len(left)), key=lambda i: -scores[i])
        left = [left[i] for i in order[:number]]
    return left


def rehearse(
    candidate: Candidate,
    *,
    rows: Any,
    size: int,
    trial: Callable[[Options, Private], Trial[T]],
    objective: Objective | None = None,
) -> Trial[T]:
    """One trial with public rows in the place of the private ones: free. `rehearsed` gives a candidate for it."""
    stage = Private(rows, name="public rows", size=size, budget=Budget(1.0, 0.5 / size))
    stage._rehearses = True
    with _Lent.of(stage, candidate, stage.statement()).lent() as account:
        return trial(candidate.options, stage._lend(account, objective))


def rehearsed(candidate: Candidate, size: int) -> Candidate:
    """The same candidate for `size` rows: with as much noise beside each step's mean, although fewer rows are in it.

    >>> from sfumato.privacy.mechanisms import Gaussian, Poisson
    >>> step = Mechanism(question="GradientMean", noise=Gaussian(4.0), sampler=Poisson(size=4000, batch_size=400))
    >>> rehearsed(Candidate(options={}, asks=(step,)), 100).asks[0].noise
    Gaussian(scale=1.0)
    """

    def smaller(mechanism: Mechanism) -> Mechanism:
        sampler: Sampler = FullBatch(size=size)
        if isinstance(mechanism.sampler, Poisson):
            sampler = Poisson(size=size, batch_size=min(mechanism.sampler.batch_size, size))
        elif isinstance(mechanism.sampler, FixedSize):
            sampler = FixedSize(size=size, batch_size=min(mechanism.sampler.batch_size, size))
        ratio = sampler.expected / mechanism.sampler.expected
        return replace(mechanism, sampler=sampler, noise=replace(mechanism.noise, scale=mechanism.noise.scale * ratio))

    return replace(candidate, asks=tuple(map(smaller, candidate.asks)))


# ------------------------------------------------------------------------------------------------ what it costs


def search(options: Sequence[Candidate], repetitions: Repetitions) -> Mechanism:
    """The whole search as one mechanism, as the ledger is charged for it."""
    if not options:
        raise InvalidArgument("candidates=[] leaves nothing to try: give at least one.")
    trials = tuple(dict.fromkeys(candidate.asks for candidate in options))
    asked = [mechanism for trial in trials for mechanism in trial]
    if not asked:
        raise InvalidArgument("candidates ask nothing of private data: such a search is free, and needs no ledger.")
    if len(sizes := {mechanism.sampler.size for mechanism in asked}) > 1:
        raise InvalidArgument(f"candidates are of declared sizes {sorted(sizes)}: all must be of one dataset.")
    least = min(mechanism.noise.scale for mechanism in asked)
    best = BestOf(least, repetitions=repetitions, trials=trials)
    return Mechanism(question=QUESTION, noise=best, sampler=FullBatch(size=sizes.pop()))


def search_cost(
    options: Sequence[Candidate], repetitions: Repetitions, *, delta: float, adjacency: Adjacency
) -> SearchCost:
    """What `tune` would charge an account of which nothing was asked; no ledger is touched.

    >>> from sfumato.privacy.mechanisms import Gaussian, Poisson
    >>> step = Mechanism(question="GradientMean", noise=Gaussian(3.605), sampler=Poisson(size=48000, batch_size=4096))
    >>> one = Candidate(options={}, asks=(replace(step, times=352),))
    >>> cost = search_cost([one], Repetitions(mean=10.0), delta=1e-5, adjacency=Adjacency.ADD_REMOVE)
    >>> round(cost.trial, 2), round(cost.epsilon, 2)
    (2.0, 3.37)
    """
    whole = accounting.epsilon([search(options, repetitions)], delta=delta, adjacency=adjacency)
    kinds = dict.fromkeys(candidate.asks for candidate in options)
    alone = max(_by_renyi(asks, delta, adjacency).epsilon for asks in kinds)
    return SearchCost(
        trial=alone,
        epsilon=whole.epsilon,
        delta=delta,
        mean_trials=repetitions.mean,
        usually_at_most=repetitions.at_most(0.99),
    )


def _by_renyi(asks: Sequence[Mechanism], delta: float, adjacency: Adjacency) -> Cost:
    return accounting.epsilon(asks, delta=delta, adjacency=adjacency, accountant=Accountant.RDP)


# ------------------------------------------------------------------------------------------------ the search


def tune(
    options: Sequence[Candidate],
    *,
    private: Private,
    trial: Callable[[Options, Private], Trial[T]],
    repetitions: Repetitions | None = None,
    objective: Callable[[Options], Objective] | None = None,
    note: str = "",
    delta_share: float | None = None,
) -> Tuned[T] | None:
    """Charge the ledger, run a secret random number of trials, and return the best one.

    Args:
        options: the candidates, from public knowledge only.
        private: the data; its ledger is charged with the whole search before the first trial.
        trial: called with a candidate's options and a `Private` that answers what the candidate declared, and no more.
            It must not print, log or write anything: only the best trial may be seen. `sfumato.train` is silent with
            progress=False and without a checkpoint.
        repetitions: the law of the number of trials; logarithmic with mean 10 by default.
        objective: makes a new objective, with a new model, for every trial.
        delta_share: as of `Account.plan`.

    Returns None only under the Poisson law, which may give no trial at all.
    """
    law = repetitions or Repetitions(mean=10.0)
    if private.processes.count > 1:
        raise InvalidArgument("private is shared by several processes, and a search runs in one: make it in one.")
    mechanism = search(options, law)
    if mechanism.sampler.size != private.size:
        raise InvalidArgument(
            f"candidates are for size={mechanism.sampler.size} and private has size={private.size}: use its samplers."
        )
    cost = search_cost(options, law, delta=private.account.budget.delta, adjacency=private.adjacency)
    plan = private.account.plan([mechanism], note=note, delta_share=delta_share)
    plan.take(QUESTION)
    plan.close()  # at once: a later change of the ledger would show when the search ended, and so how long it was
    paid = private.statement()  # now: what others ask meanwhile, with its time, would show how long the search was
    secret = private._noise.sampling
    best: tuple[Candidate, Trial[T]] | None = None
    for _ in range(law.draw(secret)):
        candidate = options[int(secret.integers(len(options)))]
        # What public code draws in a trial leaves no trace either: the generators outside would count the trials.
        lending = _Lent.of(private, candidate, paid).lent()
        with own_generators(int(secret.integers(2**63))), lending as account, private._set_aside():
            made = None if objective is None else objective(candidate.options)
            found = trial(candidate.options, private._lend(account, made))
        # The first of equals stays, which is as good as any: trials are alike and independent.
        if best is None or _finite(found.score) > _finite(best[1].score):
            best = candidate, found
        del found, account, made
    if best is None:
        return None
    candidate, chosen = best
    outcome: Any = tree_map(lambda leaf: _stated(leaf, cost) if isinstance(leaf, Run) else leaf, chosen.outcome)
    return Tuned(options=candidate.options, score=float(chosen.score), outcome=outcome, cost=cost)


def _stated(run: Run, cost: SearchCost) -> Run:
    """With what the search costs, and without its time: the first trial is slower, so that would tell the place."""
    return replace(run, history=[{**line, "epsilon": cost.epsilon} for line in run.history], seconds=0.0)


def _finite(score: float) -> float:
    return -math.inf if math.isnan(score) else float(score)


class _Lent(Account):
    """A trial's account, in memory: it grants what the candidate declared, once, and prices nothing.

    Each has a ledger of its own, in which everything is number 1, and states what was paid for the whole search: what a
    trial returns, or an error quotes, must not tell its place among the trials.
    """

    _left: Counter[Mechanism]
    _plans: list[Plan]
    _paid: Statement

    @classmethod
    def of(cls, private: Private, candidate: Candidate, paid: Statement) -> _Lent:
        real = private.account
        made = Ledger.in_memory().account(
            private.name, unit=real.unit, adjacency=real.adjacency, budget=real.budget, filter=real.filter
        )
        row = made._store.read(lambda tx: tx.account(made.name))
        assert row is not None
        lent = cls(made._store, row, wait=0.0)
        lent._left, lent._plans, lent._paid = Counter(), [], paid
        for mechanism in candidate.asks:
            lent._left[replace(mechanism, times=1)] += mechanism.times
        return lent

    @contextmanager
    def lent(self) -> Iterator[_Lent]:
        """For one trial: whoever kept the door gets nothing from it afterwards."""
        try:
            yield self
        finally:
            self._left.clear()
            for plan in self._plans:
                plan.close()
            self._store.close()

    def plan(self, mechanisms: Sequence[Mechanism], **options: Any) -> Plan:
        if options.get("resume_key") is not None:
            raise InvalidArgument(
                f"resume_key={options['resume_key']!r} is for what can be resumed, and a trial cannot: its files would "
                "be seen; leave the checkpoint out."
            )
        self._grant(mechanisms)
        self._plans.append(super().plan(mechanisms, **options))
        return self._plans[-1]

    def charge(self, mechanism: Mechanism, **options: Any) -> Plan:
        self._grant([mechanism])
        self._plans.append(super().charge(mechanism, **options))
        return self._plans[-1]

    def resume(self, plan: int | str, *, seen: int | Mapping[str, int] | None = None) -> NoReturn:
        raise InvalidArgument(f"plan={plan!r} is of a trial, which cannot be resumed: plan what it asks once.")

    def statement(self) -> Statement:
        return self._paid

    def _grant(self, mechanisms: Sequence[Mechanism]) -> None:
        wanted: Counter[Mechanism] = Counter()
        for mechanism in mechanisms:
            wanted[replace(mechanism, times=1)] += mechanism.times
        for one, times in wanted.items():
            if times > self._left[one]:
                raise InvalidArgument(
                    f"A trial asks {one.question} with {one.noise} on {one.sampler} {times} times, and its candidate "
                    f"declared {self._left[one]}: declare all that a trial asks."
                )
        self._left -= wanted

    def _whole(self, mechanisms: Sequence[Mechanism]) -> Cost:
        return Cost(epsilon=0.0, delta=self.budget.delta, adjacency=self.adjacency, accountant="paid for by the search")

    def _price(self, mechanisms: Sequence[Mechanism], delta_share: float | None, *, needed: bool) -> list[Vector]:
        return [self.filter.zero() for _ in mechanisms]
