"""Is everybody sampled as often as was charged, independently of the others and of before, and do empty batches count?

Through the door every person's gradient is an axis of its own, with little noise: the answer shows who took part. Each
count has a binomial law, so every test is exact, and all of them share what may go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from sfumato.audit.bounds import off_by
from sfumato.audit.doors import Door, open_door, rows_objective
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.data.samplers import Indices
from sfumato.erm.losses import HuberisedHinge
from sfumato.erm.questions import LinearGradientMean
from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip
from sfumato.objective import Batch
from sfumato.private import Planned, Private
from sfumato.questions import GradientMean

Draw = Callable[[], Indices]
"""Who takes part in the next answer."""

_NOISE = 0.05  # of what one person contributes: half of it is ten standard deviations away


def sampler_audit(
    draw: Draw,
    *,
    present: int,
    rate: float,
    name: str,
    draws: int = 2000,
    confidence: float = CONFIDENCE,
) -> list[Verdict]:
    """Four verdicts about Poisson sampling of `present` people: rates, pairs, successive draws, and batch sizes.

    The first has the largest inclusion rate that is proven against the one that is charged. An empty batch that is
    skipped or drawn again shows in the fourth, so few enough people should be present that there are some.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> draw = lambda: np.flatnonzero(rng.random(20) < 0.1)
    >>> [verdict.holds for verdict in sampler_audit(draw, present=20, rate=0.1, name="poisson", draws=500)]
    [True, True, True, True]
    """
    if not 0 < rate <= 1 or draws < 2:
        raise InvalidArgument(f"rate={rate} must lie in 0..1 and draws={draws} be at least 2.")
    joined = np.zeros((draws, present), dtype=bool)
    for row in joined:
        row[draw()] = True
    each = 1 - (1 - confidence) / 4
    n = joined.sum(0)
    least = stats.beta.ppf((1 - each) / present, n, draws - n + 1)
    both = (joined.T.astype(np.int64) @ joined)[np.triu_indices(present, 1)]
    halves = draws // 2
    again = (joined[: 2 * halves : 2] & joined[1 : 2 * halves : 2]).sum(0)
    sizes = np.bincount(joined.sum(1), minlength=present + 1)
    off = {
        "pairs": off_by(both, draws, rate**2, each),
        "successive draws": off_by(again, halves, rate**2, each),
        "batch sizes": off_by(sizes, draws, stats.binom.pmf(np.arange(present + 1), present, rate), each),
    }
    return [
        Verdict(
            method=name,
            audit="sampler, rate of each person",
            claimed=rate,
            lower_bound=float(np.nan_to_num(least).max()),
            confidence=each,
            trials=draws,
            unit="inclusion rate",
        ),
        *(
            Verdict(
                method=name,
                audit=f"sampler, {what}",
                claimed=0.0,
                lower_bound=bound,
                confidence=each,
                trials=draws,
                unit="probability that is off",
            )
            for what, bound in off.items()
        ),
    ]


def drawn_through(door: Door | None = None, *, present: int, batch: float, draws: int) -> Draw:
    """Who took part in the answers of a door, read off them: `batch` is the expected one, of `present` people."""
    objective = rows_objective(present)
    rows = torch.eye(present, dtype=torch.float64)
    opened = door or partial(open_door, size=present, batch=batch)
    ask = opened(objective, rows, _NOISE, draws)
    question = GradientMean(objective.parameters(), Clip(1.0))

    def draw() -> Indices:
        answer = ask(question)
        shown: npt.NDArray[np.float64] = torch.cat([t.flatten() for t in answer.values()]).numpy() * batch
        return np.flatnonzero(shown > 0.5)

    return draw


def axes(present: int) -> Batch:
    """Rows and labels of people of whom a linear model's gradients, at zero, are axes of their own."""
    return torch.eye(present, dtype=torch.float64), -torch.ones(present, dtype=torch.float64)


def planned(batch: float, private: Private, draws: int) -> Planned:
    """What a door to `axes` has to plan for `drawn_by`."""
    return Planned(LinearGradientMean, _NOISE, private.poisson(batch), draws)


def drawn_by(private: Private, *, present: int, batch: float) -> Draw:
    """`drawn_through` in an eighth of the time, by a door to `axes`: it draws alike, whatever the question."""
    question = LinearGradientMean(HuberisedHinge(), torch.zeros(present, dtype=torch.float64), 1.0)

    def draw() -> Indices:
        answer: npt.NDArray[np.float64] = private.ask(question).numpy()
        return np.flatnonzero(answer * batch > 0.5)

    return draw
