"""`sfumato report`: a page, the facts as JSON, and one sentence for everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sfumato.experiments.records import COMMITTED

Sfumato = Callable[..., Any]
RECORDS = sorted((COMMITTED / "000-table9" / "paper").glob("*.json"))


def test_a_training_and_its_report(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    trained = json.loads(sfumato("train", config, "--json").out)
    result = sfumato("report", trained["out"])
    assert result.status == 0, result.err
    assert "report.html" in result.out
    page = (config.parent / "report.html").read_text()
    assert "The dataset flowers" in page
    assert "noise_multiplier" in page
    facts = json.loads(sfumato("report", trained["out"], "--json").out)
    (run,) = facts["runs"]
    assert run["metrics"]["test_accuracy"] == trained["metrics"]["test_accuracy"]
    assert run["asked"]["data"]["name"] == "flowers"
    (statement,) = facts["statements"]
    assert (statement["epsilon"], statement["runs"]) == (trained["epsilon"], ["a"])


def test_json_alone_writes_nothing(sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = json.loads(sfumato("report", *RECORDS, "--json").out)
    assert [run["epsilon"] for run in facts["runs"]] == pytest.approx([1, 2, 4, 6], rel=1e-3)
    assert list(tmp_path.iterdir()) == []
    sfumato("report", *RECORDS, "--json", "-o", "both.html")
    assert [path.name for path in tmp_path.iterdir()] == ["both.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUN"),
        (["nowhere"], "does not exist"),
        (["empty"], "holds no run.json"),
        (["broken"], "is not valid JSON"),
        (["wrong"], "is no run, or damaged"),
        (["record", "--beside", "000-tabel9"], "did you mean '000-table9'?"),
        (["record", "-o", "thesis.txt"], "exists and is no report"),
        (["record", "-o", "empty"], "is a folder"),
        (["record", "-o", "thesis.txt/report.html"], "cannot be used"),
    ],
)
def test_wrong_commands_are_one_sentence(
    sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken": "{", "wrong": '{"history": 3}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    result = sfumato("report", *(RECORDS[0] if a == "record" else a for a in arguments))
    assert result.status == 2
    assert said in result.err
    assert result.err.startswith("sfumato: ")
    assert result.err.count("\n") == 1
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
