"""The white-box canary: one step of a method, asked again and again with and without one person's row.

The attacker knows everything but that row: weights, the other rows, the public ones. It sees the update. The noise is
Gaussian and everybody takes part, so that no amplification hides a leak: the step claims mu = 1 / noise multiplier, and
what the attack proves is compared with that. The data sets are those in which known leaks show, since a mean over
typical others hides a leak that is infinite without them: nobody else there, others without gradient, others along the
public gradient. Little noise, which claims a large mu, shows a wrong factor with the fewest trials.

`distinguish` is the same attack on anything that is released, such as the weights of a whole fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.method import Method, StatefulMethod, algorithm
from sfumato.audit.bounds import (
    Rates,
    Scores,
    all_right,
    check_power,
    epsilon_lower_bound,
    epsilon_of_mu,
    mu_lower_bound,
    split,
    told_apart,
)
from sfumato.audit.doors import DELTA, Door, World, open_door, rows_objective, worlds
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public

_TO_CHOOSE = 0.25  # the share of the scored trials that choose the threshold

Release = Callable[[bool], Any]
"""What leaves, as a row of numbers, with (True) or without (False) one person's row."""


def white_box(
    method: Method | StatefulMethod,
    *,
    name: str,
    noise: float = 0.5,
    steps: int = 1,
    trials: int = 600,
    confidence: float = CONFIDENCE,
    among: Sequence[World] | None = None,
    door: Door = open_door,
) -> list[Verdict]:
    """One verdict per world: what an attacker who sees `trials` updates with the row and as many without proves.

    With several `steps` it sees them all, each from the same weights, so that what a method remembers is audited, too.

    >>> from functools import partial
    >>> from sfumato.algorithms.dp_sgd import dp_sgd
    >>> found = white_box(partial(dp_sgd, clip=1.0), name="dp_sgd", trials=60, noise=2.0)
    >>> [verdict.holds for verdict in found]
    [True, True, True, True, True]
    """
    _check_trials(trials)
    tried = worlds() if among is None else list(among)
    each = 1 - (1 - confidence) / len(tried)
    claimed = epsilon_of_mu(math.sqrt(steps) / noise, DELTA)

    def proven(rates: Rates) -> float:
        return epsilon_of_mu(mu_lower_bound(rates, confidence=each), DELTA)

    check_power(trials, proven(all_right(_counted(trials))), claimed)
    found = []
    for world in tried:
        outs = updates(method, world, world.others, noise, trials, door, steps)
        ins = updates(method, world, world.everybody, noise, trials, door, steps)
        found.append(
            Verdict(
                method=name,
                audit=f"canary, {world.name}",
                claimed=claimed,
                lower_bound=proven(split(*_scores(outs, ins), share=_TO_CHOOSE)),
                confidence=each,
                trials=2 * trials,
            )
        )
    return found


def distinguish(
    release: Release,
    *,
    name: str,
    audit: str,
    epsilon: float,
    delta: float,
    gaussian: bool,
    trials: int = 200,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """The same attack on whatever `release` gives, which claims (epsilon, delta).

    `gaussian` says that the claim is that of a Gaussian mechanism, whose trade-off holds at all thresholds: then far
    fewer trials prove as much.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> told = {"name": "a sum", "audit": "canary", "epsilon": 4.4, "delta": 1e-5, "gaussian": True}
    >>> distinguish(lambda present: [rng.normal(present, 1.0)], **told).holds
    True
    >>> distinguish(lambda present: [rng.normal(present, 0.1)], **told).holds
    False
    """
    _check_trials(trials)

    def proven(rates: Rates) -> float:
        if gaussian:
            return epsilon_of_mu(mu_lower_bound(rates, confidence=confidence), delta)
        return epsilon_lower_bound(rates, delta=delta, confidence=confidence)

    check_power(trials, proven(all_right(_counted(trials))), epsilon)
    outs, ins = (_drawn(release, present, trials) for present in (False, True))
    return Verdict(
        method=name,
        audit=audit,
        claimed=epsilon,
        lower_bound=proven(split(*_scores(outs, ins), share=_TO_CHOOSE, gaussian=gaussian)),
        confidence=confidence,
        trials=2 * trials,
    )


def updates(
    method: Method | StatefulMethod, world: World, rows: Tensor, noise: float, trials: int, door: Door, steps: int = 1
) -> Scores:
    """(trials, steps * width): first updates from the same weights."""
    objective = rows_objective(world.public.shape[1])
    way, params = algorithm(method), objective.parameters()
    ask = door(objective, rows, noise, way.answers(steps) * trials)
    found = []
    for trial in range(trials):
        public = Public(world.public, objective=objective, seed=trial)
        found.append(flat(step_by_step(way, params, public, ask, steps)))
    return np.stack(found)


def step_by_step(
    method: Method | StatefulMethod, params: Mapping[str, Tensor], public: Public | None, ask: Any, steps: int
) -> list[Gradient]:
    """The first updates of a method, all from the same weights."""
    way = algorithm(method)
    state, found = way.init(params), []
    for _ in range(steps):
        update, state = way.step(state, params, public, ask)
        found.append(update)
    return found


def flat(updates: Sequence[Mapping[str, Tensor]]) -> Any:
    """One row of numbers."""
    parts = [tensor.detach().double().flatten() for update in updates for tensor in update.values()]
    return torch.cat(parts).cpu().numpy()


def _drawn(release: Release, present: bool, trials: int) -> Scores:
    return np.stack([np.asarray(release(present), dtype=np.float64).ravel() for _ in range(trials)])


def _scores(outs: Scores, ins: Scores) -> tuple[Scores, Scores]:
    """Along the direction in which the means differ on a sixth of the trials; the others are scored."""
    some, columns = _to_learn(len(outs)), outs.shape[1]
    outs, ins = told_apart(outs), told_apart(ins)
    towards = ins[:some].mean(0) - outs[:some].mean(0)
    # A NaN that only one side has is worth more than all numbers together, however large.
    towards[columns:] *= 1e3 * (1 + max(np.linalg.norm(side[:some], axis=1).max() for side in (outs, ins))) ** 2
    return outs[some:] @ towards, ins[some:] @ towards


def _to_learn(trials: int) -> int:
    return max(1, trials // 6)


def _counted(trials: int) -> int:
    """How many trials are left to count, after those that the direction and the threshold are learned from."""
    scored = trials - _to_learn(trials)
    return scored - int(_TO_CHOOSE * scored)


def _check_trials(trials: int) -> None:
    if trials < 12:
        raise InvalidArgument(f"trials={trials} is too few: an attack learns from the first of them, so give some 600.")
