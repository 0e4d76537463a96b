"""The two questions of near-private: as `sfumato train` reserves them, and as `sfumato select` finds them again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sfumato.checkpoint import held_checkpoint
from sfumato.cli.config import Config
from sfumato.cli.select_statement import statement_about
from sfumato.data.samplers import FullBatch
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Account
from sfumato.privacy.mechanisms import Mechanism
from sfumato.privacy.statement import Asked, Statement
from sfumato.questions import Gram
from sfumato.run import Run
from sfumato.selection.advice import QuestionAdvice, advise_questions
from sfumato.selection.near_private import NearPrivate
from sfumato.selection.support import Threshold, TopK
from sfumato.training import plan_key


def mechanisms(strategy: NearPrivate, asked: QuestionAdvice, size: int) -> list[Mechanism]:
    """What a ledger counts of them."""
    everyone = FullBatch(size=size)
    pairs = ((Gram, asked.pca), (strategy.voters.question, asked.support))
    return [
        Mechanism(question=q.kind(), noise=q.law(scale), sampler=everyone, replace_factor=q.replace_factor)
        for q, scale in pairs
    ]


# ------------------------------------------------------------------------------------------------ reserved


def reserved_by(config: Config) -> tuple[NearPrivate, QuestionAdvice] | None:
    """What [afterwards] of a training reserves: which form of the questions, and with how much noise."""
    wished = config.afterwards
    if wished is None:
        return None
    strategy = NearPrivate(voters=TopK() if wished.voters == "top-k" else Threshold())
    budget = Budget(wished.epsilon, config.privacy.delta)
    asked = advise_questions(
        strategy,
        budget=budget,
        size=config.data.size,
        support=wished.support,
        adjacency=config.privacy.adjacency,
    )
    return strategy, asked


def reserved_mechanisms(config: Config) -> list[Mechanism]:
    found = reserved_by(config)
    return [] if found is None else mechanisms(*found, config.data.size)


# ------------------------------------------------------------------------------------------------ found again


def open_reservation(statement: Statement, run: Path) -> list[Mechanism]:
    """What the training in this folder has reserved for later, if nothing of it was asked yet."""
    later = _later(statement, run)
    return [] if any(line.answers for line in later) else [line.mechanism for line in later]


@contextmanager
def held_reservation(account: Account, run: Path) -> Iterator[None]:
    """Keeps other selections off what the training in this folder has reserved, if anything is, and the training too.

    Else one that is under way would be taken for one that was killed, and what it is about to ask be given back.
    """
    if not _later(account.statement(), run):
        yield
        return
    with held_checkpoint(run / "checkpoint.pt"):
        yield


def counted(run: Run, dataset: str, folder: Path) -> dict[str, int]:
    """Answers of its plan that the training itself knows of, by question.

    A ledger that counts fewer was put back from a backup: to close the plan there would give back what has left.
    """
    key, known = plan_key(folder / "checkpoint.pt"), statement_about(run, dataset) or {}
    lines = [line for line in known.get("mechanisms", ()) if line.get("resume_key") == key]
    return {line["question"]: line["answers_counted"] for line in lines}


def close_half_asked(account: Account, run: Run, folder: Path) -> None:
    """End its plan if something of what was reserved was asked, and the answer is gone: the rest comes back."""
    if any(line.answers for line in _later(account.statement(), folder)):
        account.resume(plan_key(folder / "checkpoint.pt"), seen=counted(run, account.name, folder)).close()


def _later(statement: Statement, run: Path) -> list[Asked]:
    """The lines of its open plan after that of the training."""
    key = plan_key(run / "checkpoint.pt")
    return [line for line in statement.asked if line.open and line.resume_key == key][1:]


def is_same(wanted: Sequence[Mechanism], reserved: Sequence[Mechanism]) -> bool:
    """Also if the noise was computed by another version, to a hair."""
    return len(wanted) == len(reserved) and all(
        a.question == b.question and a.sampler == b.sampler and math.isclose(a.noise.scale, b.noise.scale, rel_tol=1e-6)
        for a, b in zip(wanted, reserved, strict=True)
    )
