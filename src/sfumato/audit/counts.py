"""The plain (epsilon, delta) audit, for counts: no law is assumed, so it also covers pure DP and discrete noise.

One event is chosen on half of the trials: that all counts which the person moves lie beyond a threshold, for which the
Laplace law is the most telling. How often it happens with and without the person, on the other half, bounds epsilon
from below (Clopper-Pearson). At small delta it needs trials to be many: it is for histograms, not for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sfumato.audit.bounds import Rates, Scores, all_right, check_power, epsilon_lower_bound, split
from sfumato.audit.verdict import CONFIDENCE, Verdict
from sfumato.errors import InvalidArgument

Counts = Callable[[bool, int], Any]
"""(whether the person is in, how many times) -> (times, bins) released counts"""


def counts_audit(
    counts: Counts,
    *,
    towards: Any,
    epsilon: float,
    name: str,
    audit: str = "counts",
    delta: float = 0.0,
    trials: int = 4000,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """What an attacker proves who knows which counts the person moves: `towards` has the signs, 0 for all others.

    A newcomer who gets a vote and takes one from another moves two counts: (1, -1).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> laplace = lambda present, times: present + rng.laplace(scale=2.0, size=(times, 1))
    >>> counts_audit(laplace, towards=[1], epsilon=0.5, name="right").holds
    True
    >>> counts_audit(laplace, towards=[1], epsilon=0.1, name="a fifth of the noise").holds
    False
    """

    def proven(rates: Rates) -> float:
        return epsilon_lower_bound(rates, delta=delta, confidence=confidence)

    check_power(trials, proven(all_right(trials - trials // 2)), epsilon)
    signs = np.asarray(towards, dtype=np.float64)
    moved = signs != 0
    outs, ins = (np.asarray(counts(present, trials), dtype=np.float64)[:, moved] for present in (False, True))
    if not (np.isfinite(outs).all() and np.isfinite(ins).all()):
        raise InvalidArgument("counts gives what is not finite, which no threshold compares: it must give numbers.")
    usual = outs[: trials // 2].mean(0)  # of those trials alone that choose the threshold

    def score(told: Scores) -> Scores:
        least: Scores = ((told - usual) * signs[moved]).min(1)
        return least

    return Verdict(
        method=name,
        audit=audit,
        claimed=epsilon,
        lower_bound=proven(split(score(outs), score(ins), gaussian=False)),
        confidence=confidence,
        trials=2 * trials,
    )
