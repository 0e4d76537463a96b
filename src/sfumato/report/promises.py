"""Which privacy statements stand at the top of a report: one per account, the latest that was made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sfumato.report.contents import Facts, Item, Selection, Training


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A statement, and the runs that it covers."""

    statement: Facts
    text: str
    runs: tuple[str, ...]

    @property
    def dataset(self) -> str:
        return str(self.statement.get("dataset", "?"))

    @property
    def private(self) -> bool:
        return self.statement.get("private") is True

    def to_json(self) -> dict[str, Any]:
        keys = ("dataset", "private", "epsilon", "delta", "unit", "adjacency", "budget", "left", "warnings")
        return {**{key: self.statement.get(key) for key in keys}, "runs": list(self.runs)}


def promises(items: Iterable[Item]) -> list[Promise]:
    """One per account. A statement that a later one of the same account includes is not repeated."""
    found: list[Promise] = []
    for item in items:
        for statement, text in _statements(item):
            new = Promise(statement=statement, text=text, runs=(item.name,))
            for k, old in enumerate(found):
                if _includes(new.statement, old.statement):
                    found[k] = Promise(statement=statement, text=text, runs=_joined(old, new))
                    break
                if _includes(old.statement, new.statement):
                    found[k] = Promise(statement=old.statement, text=old.text, runs=_joined(old, new))
                    break
            else:
                found.append(new)
    return found


def add_up(found: Iterable[Promise]) -> list[str]:
    """Datasets with statements of several ledgers, of which none knows of the other."""
    names = [promise.dataset for promise in found]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _joined(old: Promise, new: Promise) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*old.runs, *new.runs)))


def _statements(item: Item) -> list[tuple[Facts, str]]:
    """Of a model that rests on several datasets, one each."""
    if isinstance(item, Training):
        statement, text = item.statement, item.statement_text
    elif isinstance(item, Selection):
        privacy = item.record["privacy"]
        statement, text = privacy.get("statement") or {}, str(privacy.get("statement_text", ""))
    else:
        return []
    if isinstance(statement.get("statements"), list):
        return [(one, str(one.get("text", ""))) for one in statement["statements"]]
    return [(statement, text)] if statement else []


def _includes(later: Facts, earlier: Facts) -> bool:
    """Whether everything that the earlier one counts is in the later one, which is of the same account."""
    if any(later.get(key) != earlier.get(key) for key in ("dataset", "created", "delta", "unit", "adjacency")):
        return False
    if later.get("private") is True and earlier.get("private") is not True:
        return False  # a warning is never dropped
    known = {_identity(line): line.get("answers_counted", 0) for line in later.get("mechanisms", ())}
    return all(
        known.get(_identity(line), -1) >= line.get("answers_counted", 0) for line in earlier.get("mechanisms", ())
    )


def _identity(line: Facts) -> str:
    keys = ("plan", "created", "resume_key", "question", "noise", "sampler")
    return json.dumps([line.get(key) for key in keys], sort_keys=True)
