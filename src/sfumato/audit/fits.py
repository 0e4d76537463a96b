"""Whole fits of estimators by neighbours: every answer that a fit hears, every question that it asks, and what it paid.

A fit makes its own door. Here somebody stands in it: both neighbours are told the answers of the first, as in
`conversation`, and the noise that each answer was charged for is written down. Nothing is left to chance, and a few
fits are enough, where the attack on the weights alone (`estimators`) needs hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from sfumato.algorithms.method import Ask
from sfumato.audit.bounds import epsilon_of_mu
from sfumato.audit.conversation import conversation
from sfumato.audit.estimators import DELTA, ROWS, WIDTH, public_table
from sfumato.audit.verdict import Verdict
from sfumato.erm.agd import BestStep
from sfumato.erm.objective_perturbation import ApproximateMinimum
from sfumato.erm.pnsgd import OnePass
from sfumato.erm.questions import LinearGradientMean
from sfumato.privacy.mechanisms import Mechanism, SealedGaussian

_TOLERANCE = 1e-5  # noise of these fits is as large as what a row contributes, and its grid is std / 2^20
_SEED = 7

Fit = Callable[[Any, Any], Any]
"""(an estimator, rows) -> the estimator, fitted"""


class _Overheard:
    """A fit's own door, but for `ask`."""

    def __init__(self, private: Any, ask: Ask, paid: list[Mechanism]) -> None:
        self._private, self._told, self._paid = private, ask, paid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._private, name)

    def ask(self, question: Any) -> Any:
        plan = self._private._reserved.get(question.kind(), self._private._plan)
        self._paid += [m for m in plan.mechanisms if m.question == question.kind()][:1]
        return self._told(question)


def neighbours() -> list[tuple[Any, Any]]:
    """One row exchanged for another, among rows of zeros: opposite ones, huge ones, and one that is no number."""
    unit = np.eye(WIDTH)
    pairs = ((unit[0], -unit[0]), (1e6 * unit[0], -1e6 * unit.sum(0)), (np.full(WIDTH, np.nan), 1e6 * unit[0]))
    zeros = np.zeros((ROWS - 1, WIDTH))
    return [(np.vstack([zeros, one]), np.vstack([zeros, other])) for one, other in pairs]


def classified(estimator: Any, rows: Any) -> Any:
    """Fitted to rows with labels in turn, and to public ones."""
    return estimator.fit(rows, np.arange(len(rows)) % 2, *public_table())


def fit_audit(made: partial[Any], *, name: str, fit: Fit = classified) -> list[Verdict]:
    """Three verdicts, each over all pairs: how far answers differ, whether questions do, and what the ledger says.

    `made` is an estimator's class with its options; its noise is repeated.

    >>> from sfumato.erm import PNSGDClassifier
    >>> from sfumato.audit.estimators import EPSILON
    >>> made = partial(PNSGDClassifier, epsilon=EPSILON, delta=DELTA, classes=(0, 1))
    >>> [verdict.holds for verdict in fit_audit(made, name="pnsgd")]
    [True, True, True]
    """
    worst: dict[str, Verdict] = {}
    for one, other in neighbours():
        for verdict in (*_conversation(made, one, other, name, fit), _ledger(made, other, name, fit)):
            before = worst.get(verdict.audit)
            if before is None or not verdict.lower_bound <= before.lower_bound:
                worst[verdict.audit] = verdict
    return list(worst.values())


def _conversation(made: partial[Any], one: Any, other: Any, name: str, fit: Fit) -> list[Verdict]:
    sides = iter((one, other))
    current: list[Any] = []  # the door of the fit that runs

    def talk(ask: Ask) -> None:
        def heard(private: Any) -> _Overheard:
            current.append(private)
            return _Overheard(private, ask, [])

        fit(_through(made, heard), next(sides))

    def real(question: Any) -> Any:
        return current[-1].ask(question)

    return conversation(
        talk, real, real, size=1.0, name=name, unit=lambda q: _claimed(q, current[-1].size), tolerance=_TOLERANCE
    )


def _ledger(made: partial[Any], rows: Any, name: str, fit: Fit) -> Verdict:
    """What its statement says of a fit, against the cost of as many Gaussian answers to the worst of rows."""
    paid: list[Mechanism] = []
    fitted = fit(_through(made, lambda private: _Overheard(private, private.ask, paid)), rows)
    mu = math.sqrt(sum((m.replace_factor / m.noise.scale) ** 2 for m in paid))  # all rows take part in these fits
    stated = [m.noise.epsilon for m in paid if isinstance(m.noise, SealedGaussian)]  # by their own proofs
    return Verdict(
        method=name,
        audit="ledger, whole fit",
        claimed=fitted.ledger_.epsilon,
        lower_bound=max(epsilon_of_mu(mu, DELTA), *stated, 0.0),
        confidence=1.0,
        trials=len(paid),
    )


def _through(made: partial[Any], heard: Callable[[Any], _Overheard]) -> Any:
    """An estimator whose door is overheard."""

    class Overheard(made.func):  # type: ignore[misc, name-defined]
        @contextmanager
        def _door(self, *args: Any) -> Iterator[Any]:
            with super()._door(*args) as private:
                yield heard(private)

    return Overheard(*made.args, **{**made.keywords, "not_private_seed": _SEED})


def _claimed(question: Any, size: int) -> float:
    """How far the answer may move when a row is exchanged and the noise is the same."""
    if isinstance(question, BestStep):
        return math.inf  # an index, which noise decides
    if isinstance(question, OnePass):
        return 2 * question.eta * question.L  # its step; no later one moves two points apart
    if isinstance(question, ApproximateMinimum):
        return 2 * (question.L + question.gamma) / question.Lambda  # of a strongly convex sum, each off by gamma
    moved = float(question.replace_factor * question.unit)
    return moved / size if isinstance(question, LinearGradientMean) else moved
