"""Is the noise there, of the law that was charged, and never the same twice?

Nobody is in the data set, so an answer of the door *is* its noise: whatever the model, no private value is needed, and
nothing has to be switched off. Three tests, each exact: the variance of every tensor in every answer (chi2), the law
of all of it (Kolmogorov-Smirnov), and the correlation between any two answers, be they of successive steps, of
several processes, or from before and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from sfumato.algorithms.method import Ask
from sfumato.audit.bounds import Scores, epsilon_of_mu
from sfumato.audit.doors import DELTA, Door, open_door
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip
from sfumato.objective import Batch, Objective
from sfumato.privacy.budget import Budget
from sfumato.private import Planned, Private
from sfumato.questions import GradientMean

Noises = Sequence[Mapping[str, Tensor]]
"""Answers about nobody, by tensor, in units of what one person may contribute."""

_CLIP = 2.0  # of the questions: not 1, so that noise which is not in proportion to it shows
_FEW = 16  # entries, below which a tensor is looked at together with others
_LAW = 5000  # entries whose law is looked at: exact quantiles for more take long


def noise_audit(
    noises: Noises, *, noise: float, name: str, about: str = "steps", confidence: float = CONFIDENCE
) -> list[Verdict]:
    """Three verdicts: enough noise in every tensor of every answer, of Gaussian law, and uncorrelated answers.

    >>> import torch
    >>> fresh = [{"w": torch.randn(400, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    >>> [verdict.holds for verdict in noise_audit(fresh, noise=1.0, name="fresh")]
    [True, True, True]
    >>> [verdict.holds for verdict in noise_audit([fresh[0], fresh[0]], noise=1.0, name="used twice")]
    [True, True, False]
    """
    if len(noises) < 2:
        raise InvalidArgument(f"noises has {len(noises)} answers: give at least two, so that they can be compared.")
    answers = [_entries(answer) for answer in noises]
    return [
        _variance(answers, noise, name, about, confidence),
        _law(np.concatenate([np.concatenate(list(a.values())) for a in answers]), noise, name, about, confidence),
        _correlation(answers, name, about, confidence),
    ]


def pure_noise(
    objective: Objective, rows: Batch, *, noise: float, steps: int, door: Door = open_door, batch: float = 8.0
) -> Noises:
    """Answers of a door about nobody: `rows` has the shape of the data and no rows. `batch` is the declared one."""
    return _answers(door(objective, rows, noise, steps), objective, steps, batch)


Resume = Callable[[Objective, Batch, float, int, Path], Sequence[Ask]]
"""(objective, no rows, noise multiplier, answers in all, a folder) -> ask before a crash, and after it"""


def resumed_noise(
    objective: Objective, rows: Batch, *, noise: float, steps: int, resume: Resume | None = None
) -> Noises:
    """Answers from before and after a training was interrupted and taken up again from its ledger."""
    with TemporaryDirectory() as folder:
        found: list[Any] = []
        for ask in (resume or _resumed)(objective, rows, noise, 2 * steps, Path(folder)):
            found += _answers(ask, objective, steps, 8.0)
        return found


def _resumed(objective: Objective, rows: Batch, noise: float, times: int, folder: Path) -> Sequence[Ask]:
    def opened(*, again: bool) -> Private:
        budget = Budget(1e9, DELTA)
        path = folder / "ledger.db"
        private = Private(rows, name="audit", size=8, objective=objective, ledger=path, budget=budget)
        if again:
            private.resume("training")
        else:
            # Many more than are asked: those that may have left before the crash stay counted.
            private.plan(Planned(GradientMean, noise, private.everyone(), 500 * times), resume_key="training")
        return private

    before = opened(again=False)
    after: list[Private] = []

    def ask(question: GradientMean) -> Any:
        if not after:
            after.append(opened(again=True))  # as a new process does, after the first one was killed
        return after[0].ask(question)

    return before.ask, ask


def _answers(ask: Ask, objective: Objective, steps: int, batch: float) -> list[dict[str, Tensor]]:
    question = GradientMean(objective.parameters(), Clip(_CLIP))
    return [{n: t.double().cpu() * (batch / _CLIP) for n, t in ask(question).items()} for _ in range(steps)]


def _entries(answer: Mapping[str, Tensor]) -> dict[str, Scores]:
    """By tensor; small ones together, since few numbers say little of a variance."""
    flat = {name: t.detach().double().cpu().numpy().ravel() for name, t in answer.items()}
    large = {name: x for name, x in flat.items() if len(x) >= _FEW}
    small = [x for x in flat.values() if len(x) < _FEW]
    return {**large, **({"small tensors": np.concatenate(small)} if small else {})}


def _variance(answers: list[dict[str, Scores]], noise: float, name: str, about: str, confidence: float) -> Verdict:
    """S / sigma^2 is chi2, so sigma^2 <= S / (its lower quantile): an attacker has mu >= 1 / sigma."""
    parts = {f"{key} of answer {i}": x for i, answer in enumerate(answers) for key, x in answer.items()}
    parts["all of it"] = np.concatenate(list(parts.values()))
    each = (1 - confidence) / len(parts)
    mu = {key: float(np.sqrt(stats.chi2.ppf(each, len(x)) / np.sum(x**2))) for key, x in parts.items() if x.any()}
    silent = [key for key, x in parts.items() if not x.any()]
    worst = silent[0] if silent else max(mu, key=lambda key: mu[key])
    return Verdict(
        method=name,
        audit=f"noise, variance over {about}",
        claimed=epsilon_of_mu(1 / noise, DELTA),
        lower_bound=float("inf") if silent else epsilon_of_mu(mu[worst], DELTA),
        confidence=confidence,
        trials=len(parts["all of it"]),
        told=f"The least noise is in {worst}.",
    )


def _law(entries: Scores, noise: float, name: str, about: str, confidence: float) -> Verdict:
    some = entries[:: max(1, len(entries) // _LAW)][:_LAW]
    distance = float(stats.kstest(some / noise, "norm", method="asymp").statistic)
    return Verdict(
        method=name,
        audit=f"noise, law over {about}",
        claimed=float(stats.kstwo.isf(1 - confidence, len(some))),
        lower_bound=distance,
        confidence=confidence,
        trials=len(some),
        unit="distance from the law",
    )


def _correlation(answers: list[dict[str, Scores]], name: str, about: str, confidence: float) -> Verdict:
    flat = [np.concatenate(list(answer.values())) for answer in answers]
    pairs = list(combinations(range(len(flat)), 2))
    n, each = len(flat[0]), (1 - confidence) / len(pairs)
    # r of independent normals: r sqrt((n - 2) / (1 - r^2)) has Student's law.
    t = float(stats.t.isf(each / 2, n - 2))
    allowed = t / np.sqrt(n - 2 + t**2)
    found = {pair: abs(float(np.corrcoef(flat[pair[0]], flat[pair[1]])[0, 1])) for pair in pairs}
    worst = max(pairs, key=lambda pair: found[pair] if found[pair] == found[pair] else np.inf)
    return Verdict(
        method=name,
        audit=f"noise, correlation over {about}",
        claimed=0.0,
        lower_bound=max(0.0, float(found[worst] - allowed)) if found[worst] == found[worst] else float("inf"),
        confidence=confidence,
        trials=len(pairs),
        unit="correlation",
        told=f"The most alike are answers {worst[0]} and {worst[1]}.",
    )
