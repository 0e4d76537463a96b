"""Which statements a report shows: the latest of every account, and never fewer than are needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato.report import report
from sfumato.report.promises import add_up

Changed = Callable[..., Path]


def test_the_later_statement_of_one_ledger_covers_both_runs(examples: Path) -> None:
    """dope-sgd was trained after dp-sgd: its statement counts both trainings."""
    first, second = (json.loads((examples / run / "run.json").read_text()) for run in ("dp-sgd", "dope-sgd"))
    assert len(first["statement"]["mechanisms"]) == 1
    for order in (["dp-sgd", "dope-sgd"], ["dope-sgd", "dp-sgd"]):
        (found,) = report([examples / run for run in order]).promises
        assert found.statement == second["statement"]
        assert set(found.runs) == {"dp-sgd", "dope-sgd"}


def test_other_ledgers_and_fewer_answers_are_not_swallowed(examples: Path, changed: Changed) -> None:
    def other_ledger(run: dict[str, Any]) -> None:
        run["statement"]["mechanisms"][0]["created"] = "1999-01-01T00:00:00+00:00"

    def more_answers(run: dict[str, Any]) -> None:
        run["statement"]["mechanisms"][0]["answers_counted"] += 1000

    def void(run: dict[str, Any]) -> None:
        run["statement"] |= {"private": False, "warnings": ["NOT PRIVATE: the noise had a known seed."]}

    for k, edit in enumerate((other_ledger, more_answers, void)):
        copy = changed("dp-sgd", edit, name=f"copy-{k}")
        found = report([copy, examples / "dope-sgd"])
        assert len(found.promises) == 2, edit.__name__
        assert add_up(found.promises) == ["digits"]
        assert "what they cost adds up" in found.to_html()
    assert "what they cost adds up" not in report([examples]).to_html()


def test_a_void_statement_is_told_first(changed: Changed) -> None:
    def void(run: dict[str, Any]) -> None:
        run["statement"] |= {"private": False, "warnings": ["NOT PRIVATE: the noise had a known seed."]}

    page = report([changed("dp-sgd", void)]).to_html()
    warning = page.index("the noise had a known seed")
    assert warning < page.index("<dt>epsilon</dt>")
    assert ">NO<" in page
    unsaid = report([changed("dp-sgd", lambda run: run["statement"].update(private=False), name="unsaid")])
    assert "NOT PRIVATE: " in unsaid.to_html()


def test_a_training_without_a_statement_promises_nothing(changed: Changed) -> None:
    found = report([changed("dp-sgd", lambda run: run.update(statement={}))])
    assert found.to_json()["without_statement"] == ["dp-sgd"]
    assert "has no privacy statement: nothing is promised" in found.to_html()


def test_a_model_of_two_datasets_has_two_statements(examples: Path, changed: Changed) -> None:
    def both(run: dict[str, Any]) -> None:
        one = {**run["statement"], "text": "first text"}
        run["statement"] = {"private": True, "statements": [one, {**one, "dataset": "other", "text": "second text"}]}

    found = report([changed("dp-sgd", both)])
    assert [promise.dataset for promise in found.promises] == ["digits", "other"]
    page = found.to_html()
    assert "first text" in page
    assert "second text" in page


def test_epsilon_is_not_rounded_down(changed: Changed) -> None:
    page = report([changed("dp-sgd", lambda run: run["statement"].update(epsilon=2.0000001))]).to_html()
    assert "<dt>epsilon</dt><dd>2.0001</dd>" in page


def test_a_selection_brings_the_statement_of_its_model(examples: Path) -> None:
    (found,) = report([examples / "to_label"]).promises
    assert found.dataset == "digits, by the command line"
    (both,) = report([examples / "to_label", examples / "averaged"]).promises
    assert set(both.runs) == {"to_label", "averaged"}
