"""The numbers beside the advice come from records, and from nowhere else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sfumato.errors import InvalidArgument
from sfumato.experiments.evidence import FILE, lines, markdown
from sfumato.experiments.page import filled_choosing
from sfumato.experiments.records import COMMITTED

CHOOSING = Path(__file__).parents[2] / "docs" / "choosing.md"


def test_every_line_is_of_an_answer_and_every_answer_has_a_number() -> None:
    text = CHOOSING.read_text()
    answers = {int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)}
    assert {line.answer for line in lines()} == answers
    assert {int(number) for number in re.findall(r"^\| \((\d+)\) \|", text, re.MULTILINE)} == answers


def test_what_is_not_measured_is_left_out(tmp_path: Path) -> None:
    assert len(markdown(tmp_path).splitlines()) == 2
    shutil.copytree(COMMITTED / "000-table7", tmp_path / "000-table7")
    shutil.copytree(COMMITTED / "001-table2", tmp_path / "001-table2")
    found = markdown(tmp_path).splitlines()[2:]
    named = {name for row in found for name in re.findall(r"\[([\w-]+)\]\(papers/00\d\.md\) \|$", row)}
    assert named == {"000-table7", "001-table2"}
    for record in (tmp_path / "000-table7" / "paper").glob("epsilon-1-dp-sgd-only-private-seed*.json"):
        record.unlink()
    assert len(markdown(tmp_path).splitlines()[2:]) == len(found) - 1


def test_epsilon_is_declared_or_what_the_ledger_said() -> None:
    told = {(row[0], row[1]) for row in re.findall(r"\| ([\d.]+) \|.*\[([\w-]+)\]\(", markdown())}
    assert ("3.23", "003-table1") in told  # which declares its noise
    assert {("2", "cifar10-public"), ("0.1", "001-table2")} <= told


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    text = CHOOSING.read_text()
    other = filled_choosing(text, tmp_path)
    assert len(other) < len(text)
    assert filled_choosing(other) == text
    assert other.startswith(text[: text.index("<!-- evidence -->")])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('["warm", "epsilon 2"]', '["warn", "epsilon 2"]', "did you mean 'warm | epsilon 2'?"),
        ('experiment = "000-table7"', 'experiment = "000-table77"', "did you mean '000-table7'?"),
        ("answer = 1", 'answer = "1"', "answer='1' must be a whole number"),
        ("[[line]]", "[[lines]]", "did you mean 'line'?"),
    ],
)
def test_a_wrong_file_is_told_in_a_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "evidence.toml"
    path.write_text(FILE.read_text().replace(old, new))
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        lines(path)
