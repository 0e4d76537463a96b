"""What an audit says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One audit of one method: what is claimed, and the least that the evidence allows, in the same unit.

    `confidence` is that of the lower bound: if the claim holds, a finding has at most probability 1 - confidence.
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
        return {**asdict(self), "verdict": "holds" if self.holds else "broken"}
