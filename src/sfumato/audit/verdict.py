"""What an audit says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 1 - 1e-6
"""Of every bound, where nothing else is asked for: an audit of code that keeps its promise alarms once in a million."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One audit of one method: what is claimed, and the least that the evidence allows, in the same unit.

    `confidence` is that of the lower bound: if the claim holds, a finding has at most probability 1 - confidence. It is
    1 where nothing is left to chance.

    >>> Verdict(method="dp-sgd", audit="canary", claimed=2.0, lower_bound=1.3, confidence=CONFIDENCE, trials=600).holds
    True
    """

    method: str
    audit: str
    claimed: float
    lower_bound: float
    confidence: float
    trials: int
    unit: str = "epsilon"
    told: str = ""  # what was seen, in one sentence, where a number does not say it

    @property
    def holds(self) -> bool:
        """Whether the evidence is consistent with the claim."""
        return self.lower_bound <= self.claimed

    def to_json(self) -> dict[str, Any]:
        """Plain data; a bound that is infinite or NaN, which JSON does not have, is None."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return {**plain, "verdict": "holds" if self.holds else "broken"}


def findings(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that speak against the claim."""
    return [verdict for verdict in verdicts if not verdict.holds]
