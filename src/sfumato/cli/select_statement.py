"""What `sfumato select` promises to whom: one statement for each dataset, and never one number for two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.run import Run

Facts = Mapping[str, Any]


def statements_of(run: Run) -> list[dict[str, Any]]:
    """One for each dataset that the run rests on, each with its text; none where nothing was stated."""
    if "statements" in run.statement:
        return [dict(one) for one in run.statement["statements"]]
    return [{**run.statement, "text": run.statement_text}] if run.statement else []


def statement_about(run: Run, dataset: str) -> Facts | None:
    return next((one for one in statements_of(run) if one.get("dataset") == dataset), None)


def with_latest(run: Run, latest: Facts) -> tuple[dict[str, Any], str]:
    """The statement and its text after `latest`, which takes the place of what was said of its dataset before.

    For several datasets it is a list, in `statements`, without an epsilon of its own; `private` only if all are.
    """
    found = [one for one in statements_of(run) if one.get("dataset") != latest["dataset"]] + [dict(latest)]
    if len(found) == 1:
        return {key: value for key, value in found[0].items() if key != "text"}, found[0]["text"]
    private = all(one.get("private") is True for one in found)
    first = f"This rests on {len(found)} datasets, and each has a statement of its own.\n"
    return {"private": private, "statements": found}, "\n".join([first, *(one["text"] for one in found)])


def epsilons(statement: Facts) -> Any:
    """One number, or one for each dataset by its name."""
    if "statements" in statement:
        return {one["dataset"]: one["epsilon"] for one in statement["statements"]}
    return statement.get("epsilon")


def check_ledger(began: Facts, now: Facts) -> None:
    """Raise unless all that counts in what the model began with is in the ledger's statement of the same dataset."""
    known = {_identity(line) for line in now["mechanisms"]}
    counted = [line for line in began.get("mechanisms", ()) if _counts(line)]
    stamped = began.get("private") is False and now["private"]
    if stamped or any(_identity(line) not in known for line in counted):
        raise not_the_ledger(now["dataset"])


def not_the_ledger(dataset: str) -> InvalidArgument:
    return InvalidArgument(
        f"[private] ledger is not the one of the training: what the statement of [model] weights counts for the "
        f"dataset {dataset!r} is not in it, so give the ledger that the training was charged to."
    )


def check_size(size: int, statement: Facts | None) -> None:
    """Raise if other numbers of units were declared for the same dataset."""
    lines: Sequence[Facts] = () if statement is None else statement.get("mechanisms", ())
    declared = {line["sampler"]["size"] for line in lines if _counts(line)}
    if declared and size not in declared:
        raise InvalidArgument(
            f"[private] size={size} was {' or '.join(map(str, sorted(declared)))} in what was asked before: declare "
            "that, since one dataset has one size."
        )


def _counts(line: Facts) -> bool:
    return bool(line["open"] or line["answers_counted"])


def _identity(line: Facts) -> str:
    """Of what was planned; how many answers were taken may have been written later."""
    return json.dumps([line.get(key) for key in ("created", "resume_key", "question", "noise")], sort_keys=True)
