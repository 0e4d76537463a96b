"""docs/sharp_edges.md has every known edge, with a severity, a remedy and tests that exist."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "sharp_edges.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (\w) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
NAMED = [
    (int(number), path, name)
    for number, *_, guards in ROWS
    for path, name, _ in re.findall(r"\[`([\w/]+\.py)::(\w+)`\]\((\.\./tests/[\w/]+\.py)\)", guards)
]


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_edge_is_there_once_and_in_order() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 59))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_edge_has_a_severity_a_remedy_and_a_guard(row: tuple[str, ...]) -> None:
    number, severity, edge, remedy, guards = row
    assert severity in "ABC"
    assert min(len(edge), len(remedy)) > 20
    named = [name for n, _, name in NAMED if n == int(number)]
    assert named
    assert guards.count("::") == len(named), "every guard is a link of the one form"


def test_every_named_test_exists() -> None:
    missing = [
        f"{number}: {path}::{name}"
        for number, path, name in NAMED
        if name not in functions_of(path) or name[:5] != "test_"
    ]
    assert not missing, missing


def test_tests_that_are_named_in_passing_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > len(NAMED)
    assert not [f"{path}::{name}" for path, name in named if name not in functions_of(path)]


def test_links_lead_to_the_named_files() -> None:
    wrong = re.findall(r"\[`([\w/]+\.py)::\w+`\]\((?!\.\./tests/\1\))", PAGE)
    assert not wrong


def test_a_missing_test_would_be_found() -> None:
    assert "test_no_such_test" not in functions_of("test_private.py")
    assert "test_it_cannot_be_looked_into" in functions_of("test_private.py")


def test_the_faults_of_the_page_are_those_that_were_counted() -> None:
    """`python -m tests.faults.table` wrote them; the page has them in another order, with a few words."""
    stored = json.loads((TESTS.parent / "docs" / "faults.json").read_text())["faults"]
    counted = sorted((r["injected"], r["answers"], r["counted"], r["unpaid"]) for r in stored)
    lines = PAGE.partition("## Faults that were injected")[2].splitlines()
    shown = [line.split("|")[2:6] for line in lines if re.match(r"\| [^|]+ \| \d", line)]
    assert sorted(tuple(int(cell.replace(",", "")) for cell in row) for row in shown) == counted
    assert all(not r["unpaid"] and not r["violations"] for r in stored)
