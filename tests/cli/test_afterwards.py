"""[afterwards] of `sfumato train` and `sfumato select`: one plan for the training and for what is asked after it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato import Ledger, Run
from sfumato.cli import select_job
from tests.cli.conftest import add, edit, files
from tests.cli.test_select import PRIVATE, SELECT, TRAIN, digits

Sfumato = Callable[..., Any]


@pytest.fixture
def training(tmp_path: Path) -> Path:
    np.savez(tmp_path / "digits.npz", **digits())
    path = tmp_path / "train.toml"
    path.write_text(TRAIN.replace("epsilon = 2.0\nbudget = 4.0", "epsilon = 2.7") + "\n[afterwards]\nepsilon = 1.0\n")
    return path


@pytest.fixture
def selection(training: Path) -> Path:
    path = training.with_name("select.toml")
    path.write_text(SELECT.replace('"entropy"', '"near-private"') + PRIVATE)
    return path


def told(sfumato: Sfumato, *arguments: object) -> dict[str, Any]:
    result = sfumato(*arguments, "--json")
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def asked(config: Path) -> dict[str, tuple[int, bool]]:
    """Answers to each question, and whether its plan is open."""
    with Ledger(config.parent / "ledger.db") as ledger:
        lines = ledger.account("digits").statement().asked
        return {line.mechanism.question: (line.answers, line.open) for line in lines}


def test_one_plan_for_the_training_and_the_selection(sfumato: Sfumato, training: Path, selection: Path) -> None:
    """Nothing is left in the account, and yet both questions are asked: they are in the plan of the training."""
    plan = told(sfumato, "train", training, "--dry-run")
    assert plan["epsilon"] <= 2.7
    assert set(plan["afterwards"]["noise_multipliers"]) == {"Gram", "Histogram"}
    found = told(sfumato, "train", training)
    assert (found["epsilon"], found["noise_multiplier"]) == (plan["epsilon"], plan["noise_multiplier"])
    assert asked(training) == {"GradientMean": (10, True), "Gram": (0, True), "Histogram": (0, True)}
    assert told(sfumato, "train", training)["steps_taken"] == 10  # again, which asks nothing and gives nothing back
    assert asked(training)["Gram"] == (0, True)

    would = told(sfumato, "select", selection, "--dry-run")
    assert (would["fits"], would["reserved"]) == (True, True)
    assert would["noise_multipliers"]["pca"] == plan["afterwards"]["noise_multipliers"]["Gram"]
    chosen = told(sfumato, "select", selection)
    assert chosen["epsilon_spent"] == 0
    assert chosen["epsilon_in_all"] == found["epsilon"]
    assert "which the training had reserved and paid for" in chosen["privacy"]
    assert asked(training) == {"GradientMean": (10, False), "Gram": (1, False), "Histogram": (1, False)}
    assert told(sfumato, "train", training)["epsilon"] == found["epsilon"]
    statement = json.loads((selection.parent / "new/to_label/chosen.json").read_text())["privacy"]["statement"]
    assert statement["epsilon"] == Run.load(training.parent / "runs/digits").statement["epsilon"]

    edit(selection, "new/to_label", "new/again")  # the reservation is used up
    refused = sfumato("select", selection)
    assert refused.status == 2
    assert "does not fit into the budget" in refused.err


def test_it_is_cheaper_than_two_plans(sfumato: Sfumato, training: Path) -> None:
    """The noise of a training at 2.7 with 1.0 reserved is less than that of a training at 2.7 - 1.0 alone."""
    both = told(sfumato, "train", training, "--dry-run")["noise_multiplier"]
    edit(training, "[afterwards]\nepsilon = 1.0\n", "")
    alone = told(sfumato, "train", training, "--dry-run")["noise_multiplier"]
    edit(training, "epsilon = 2.7", "epsilon = 1.7")
    assert alone < both < told(sfumato, "train", training, "--dry-run")["noise_multiplier"]


def test_other_questions_than_the_reserved_ones_are_refused(sfumato: Sfumato, training: Path, selection: Path) -> None:
    told(sfumato, "train", training)
    for old, new in (("epsilon = 1.0", "epsilon = 0.9"), ("n = 30", 'n = 30\nvoters = "top-k"')):
        edit(selection, old, new)
        for options in ((), ("--dry-run",)):
            before = files(selection.parent)
            result = sfumato("select", selection, *options)
            assert result.status == 2
            assert "is not what [afterwards] of the training has reserved" in result.err
            assert files(selection.parent) == before
        edit(selection, new, old)
    assert asked(training)["Gram"] == (0, True)


def test_top_k_is_reserved_as_such(sfumato: Sfumato, training: Path, selection: Path) -> None:
    add(training, 'voters = "top-k"\nsupport = 0.3')
    edit(selection, "n = 30", 'n = 30\nvoters = "top-k"')
    edit(selection, "epsilon = 1.0", "epsilon = 1.0\nsupport = 0.3")
    told(sfumato, "train", training)
    assert told(sfumato, "select", selection)["epsilon_spent"] == 0


def test_what_fails_before_a_question_keeps_the_reservation(
    sfumato: Sfumato, training: Path, selection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(sfumato, "train", training)

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(select_job.NearPrivate, "__call__", fails)
    assert sfumato("select", selection).status == 130
    monkeypatch.undo()
    assert asked(training)["Gram"] == (0, True)

    def half(self: Any, model: Any, pool: Any, n: int, ask: Any) -> Any:
        return real(self, model, pool, n, lambda question: ask(question) if question.kind() == "Gram" else fails())

    real = select_job.NearPrivate.__call__
    monkeypatch.setattr(select_job.NearPrivate, "__call__", half)
    assert sfumato("select", selection).status == 130
    monkeypatch.undo()
    assert (asked(training)["Gram"], asked(training)["Histogram"]) == ((1, False), (0, False))


def test_what_a_killed_selection_left_is_given_back(sfumato: Sfumato, training: Path, selection: Path) -> None:
    """Half asked, and the answer is gone: the other half is not kept for nothing."""
    told(sfumato, "train", training)
    with Ledger(training.parent / "ledger.db") as ledger:
        account = ledger.account("digits")
        plan = account.resume(account.statement().asked[0].plan)
        plan.take("Gram")
        plan.pause()
    assert asked(training)["Histogram"] == (0, True)
    refused = sfumato("select", selection)
    assert refused.status == 2
    assert "does not fit into the budget" in refused.err
    assert asked(training)["Histogram"] == (0, False)


def test_a_ledger_that_counts_too_little_gives_nothing_back(sfumato: Sfumato, training: Path, selection: Path) -> None:
    """Put back from a backup made during the training: to close its plan there would give back what has left."""
    edit(training, "epsilon = 2.7", "epsilon = 2.7\nbudget = 6.0")
    told(sfumato, "train", training)
    for asked_before in (0, 1):
        with Ledger(training.parent / "ledger.db") as ledger:
            account = ledger.account("digits")
            plan = account.resume(account.statement().asked[0].plan)
            account._count(plan, {"GradientMean": 3, "Gram": asked_before, "Histogram": 0}, close=False)
        refused = sfumato("select", selection)
        assert refused.status == 2
        assert "put back from an old backup" in refused.err
        assert asked(training) == {"GradientMean": (3, True), "Gram": (asked_before, True), "Histogram": (0, True)}


def test_a_selection_under_way_is_not_taken_for_one_that_was_killed(
    sfumato: Sfumato, training: Path, selection: Path
) -> None:
    """It has asked one question and is about to ask the other: nobody else gives that back."""
    told(sfumato, "train", training)
    script = """
import sys
from pathlib import Path
from sfumato import Ledger
from sfumato.cli.near_private import held_reservation
account = Ledger(sys.argv[1]).account("digits")
with held_reservation(account, Path(sys.argv[2])):
    plan = account.resume(account.statement().asked[0].plan)
    plan.take("Gram")
    print("asked", flush=True)
    sys.stdin.read()
    plan.take("Histogram")
"""
    places = (str(training.parent / "ledger.db"), str(training.parent / "runs/digits"))
    command = [sys.executable, "-c", script, *places]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "asked\n"
        refused = sfumato("select", selection)
        other.communicate("")
    assert refused.status == 2
    assert "in use by another process" in refused.err
    assert other.returncode == 0
    assert asked(training)["Histogram"] == (1, True)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[afterwards]\nepsilon = 1.0", "[afterwards]", "[afterwards] lacks the key 'epsilon'"),
        ("[afterwards]\nepsilon = 1.0", "[afterwards]\nepsilon = 2.7", "must be below [privacy] epsilon=2.7"),
        ("[afterwards]\nepsilon = 1.0", "[afterwards]\nepsilon = 1\nsupport = 1", "above 0 and below 1"),
        ("[afterwards]\nepsilon = 1.0", '[afterwards]\nepsilon = 1\nvoters = "all"', "one of 'threshold', 'top-k'"),
        ("[afterwards]\nepsilon = 1.0", "[afterwards]\nepsilon = 1\nvotes = 3", "did you mean 'voters'"),
        ("outputs = 10", "outputs = 1", "outputs=1"),
        ("[afterwards]", "[afterward]", "did you mean 'afterwards'"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    sfumato: Sfumato, training: Path, old: str, new: str, named: str
) -> None:
    edit(training, old, new)
    before = files(training.parent)
    result = sfumato("train", training)
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert named in result.err
    assert files(training.parent) == before


def test_a_reservation_is_kept_when_a_training_goes_on(sfumato: Sfumato, training: Path) -> None:
    told(sfumato, "train", training)
    edit(training, "[afterwards]\nepsilon = 1.0", "[afterwards]\nepsilon = 0.9")
    refused = sfumato("train", training)
    assert refused.status == 2
    assert "[afterwards] epsilon=0.9 was 1.0 when the training" in refused.err
    edit(training, "outputs = 10", "outputs = 1")
    edit(training, "steps = 10", 'steps = 10\nloss = "squared-error"')
    assert "which is of classifiers" in sfumato("train", training).err


def test_a_search_reserves_nothing(sfumato: Sfumato, training: Path) -> None:
    add(training, '[tune]\nmean = 2\ncandidates = 2\n[tune.space]\n"training.learning_rate" = [1.0, 2.0]')
    edit(training, "epsilon = 2.7", "epsilon = 2.7\nbudget = 50")
    result = sfumato("tune", training)
    assert result.status == 2
    assert "[afterwards] is of `sfumato train`" in result.err
