"""Does the ledger say at least what the answers that left have cost, also after a crash?

The cost of the answers is computed again from their number alone, by another road: an optimistic privacy loss
distribution, which can only be below the truth, while what the ledger says can only be above it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sfumato.audit.verdict import Verdict
from sfumato.data.samplers import Poisson, Sampler
from sfumato.errors import SfumatoError
from sfumato.privacy.budget import Budget
from sfumato.private import Planned, Private
from sfumato.questions import NoisyMean

Opened = Callable[[Path, bool], Any]
"""(a ledger's file, whether a training is taken up again there) -> what has `ask` and `statement`, as `Private` has"""

_DELTA = 1e-6
_KEY = "training"


@lru_cache(maxsize=64)
def least_cost(sampler: Sampler, noise: float, answers: int, delta: float = _DELTA) -> float:
    """A lower bound on epsilon under add/remove of so many Gaussian answers.

    >>> round(least_cost(Poisson(size=1, batch_size=1.0), 2.0, 1, 1e-5), 2)
    1.99
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    rate = sampler.expected / sampler.size
    once = from_gaussian_mechanism(
        noise,
        pessimistic_estimate=False,
        value_discretization_interval=1e-3,
        sampling_prob=rate,
        use_connect_dots=False,  # which is pessimistic only
    )
    return float(once.self_compose(answers).get_epsilon_for_delta(delta))


def ledger_audit(
    *,
    name: str,
    noise: float = 1.0,
    steps: int = 12,
    sampler: Sampler | None = None,
    opened: Opened | None = None,
) -> list[Verdict]:
    """Two verdicts, after half of the answers and after a crash and the other half: what the ledger says they cost.

    >>> [verdict.holds for verdict in ledger_audit(name="the door", steps=4)]
    [True, True]
    """
    drawn = sampler or Poisson(size=1000, batch_size=100.0)
    make = opened or partial(_opened, noise=noise, steps=steps, sampler=drawn)
    question = NoisyMean(lambda rows: rows, bound=1.0)
    found, answers = [], 0
    with TemporaryDirectory() as folder:
        for again, many in ((False, steps // 2), (True, steps - steps // 2)):
            private = make(Path(folder) / "ledger.db", again)  # the one before is left as a killed process leaves it
            answers += _answered(private, question, many)
            found.append(
                Verdict(
                    method=name,
                    audit="ledger, after a crash" if again else "ledger",
                    claimed=private.statement().epsilon,
                    lower_bound=least_cost(drawn, noise, answers),
                    confidence=1.0,
                    trials=answers,
                )
            )
    return found


def _answered(private: Any, question: NoisyMean, wanted: int) -> int:
    """How many answers left: after a crash fewer are left to give, since those that may have left stay counted."""
    for done in range(wanted):
        try:
            private.ask(question)
        except SfumatoError:
            return done
    return wanted


def _opened(path: Path, again: bool, *, noise: float, steps: int, sampler: Sampler) -> Private:
    rows = torch.zeros(3, 1, dtype=torch.float64)
    private = Private(rows, name="audit", size=sampler.size, ledger=path, budget=Budget(1e4, _DELTA))
    if again:
        private.resume(_KEY)
    else:
        private.plan(Planned(NoisyMean, noise, sampler, steps), resume_key=_KEY)
    return private
