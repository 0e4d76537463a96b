"""What a mutant is: something that is wrong, beside the right one, and the audits that both are put through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfumato.audit.verdict import Verdict, findings

Audits = Callable[[Any], list[Verdict]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`broken` differs from `right` by the one mistake that `wrong` tells; `audits` takes either of them.

    `slow` ones need many trials, and are left out of the ordinary tests.
    """

    name: str
    wrong: str
    right: Any
    broken: Any
    audits: Audits
    slow: bool = False

    def found(self) -> list[Verdict]:
        """What is found out about the broken one: it must be something."""
        return findings(self.audits(self.broken))

    def of_the_right_one(self) -> list[Verdict]:
        """What the same audits say of the right one: all of it must hold."""
        return self.audits(self.right)


def killed_by(found: list[Verdict]) -> list[str]:
    """The audits that found something, once each."""
    return list(dict.fromkeys(verdict.audit for verdict in found))
