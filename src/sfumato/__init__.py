"""Sfumato: differentially private training that makes the most of public data.

Private data sits behind one door (`Private`); public code asks it bounded questions and gets noisy, paid-for answers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Intel's library for matrices, which CPUs compute with, then rounds a row alike wherever it lies in memory. It looks
# when it is used for the first time. Why that matters: docs/sharp_edges.md, rows on a kink.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from sfumato.gradients import Clip as Clip
    from sfumato.gradients import Gradient as Gradient
    from sfumato.loading import load as load
    from sfumato.objective import Objective as Objective
    from sfumato.objective import cross_entropy as cross_entropy
    from sfumato.privacy.budget import Budget as Budget
    from sfumato.privacy.ledger import Ledger as Ledger
    from sfumato.privacy.noise import NotPrivateSeed as NotPrivateSeed
    from sfumato.private import Planned as Planned
    from sfumato.private import Private as Private
    from sfumato.public import Public as Public
    from sfumato.questions import GradientMean as GradientMean
    from sfumato.questions import GradientSum as GradientSum
    from sfumato.questions import Gram as Gram
    from sfumato.questions import Histogram as Histogram
    from sfumato.questions import Joint as Joint
    from sfumato.questions import NoisyArgmin as NoisyArgmin
    from sfumato.questions import NoisyMean as NoisyMean
    from sfumato.run import Run as Run
    from sfumato.training import train as train

# Imported on first use, so that the command line answers `--help` without loading torch.
_HOMES = {
    "Budget": "privacy.budget",
    "Clip": "gradients",
    "Gradient": "gradients",
    "GradientMean": "questions",
    "GradientSum": "questions",
    "Gram": "questions",
    "Histogram": "questions",
    "Joint": "questions",
    "Ledger": "privacy.ledger",
    "NoisyArgmin": "questions",
    "NoisyMean": "questions",
    "Objective": "objective",
    "Planned": "private",
    "Private": "private",
    "Public": "public",
    "Run": "run",
    "cross_entropy": "objective",
    "load": "loading",
    "train": "training",
}

_FOR_TESTS = {"NotPrivateSeed": "privacy.noise"}  # importable, but not among the names to know

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _FOR_TESTS.get(name)
    if home is None:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sfumato.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
