"""Many processes spend from one budget, and the proof that the harness can fail; `make faults` does it at length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.faults.postgres import missing, running

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="spenders are forked")
SERVER = pytest.param("postgres", marks=pytest.mark.postgres)


def spend(where: str, *options: str) -> dict[str, Any]:
    if where == "postgres" and (missing() is not None or running() is None):
        pytest.skip(missing() or "no PostgreSQL server is running: make services")
    # A process of its own: the harness forks, and this one may have threads. Its server is its own, too.
    command = [sys.executable, "-m", "tests.faults.spend", "--where", where, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["violations"])
    return report


@pytest.mark.parametrize("where", ["file", SERVER])
def test_many_processes_never_overspend_and_lose_nothing(where: str) -> None:
    report = spend(where, "--seconds", "3")
    assert report["violations"] == []
    assert report["kills"] == 2
    assert report["answers"] <= report["counted"]
    if where == "postgres":  # nobody who spent was killed, so the count is exact
        assert report["answers"] == report["counted"]
        assert report["unknown plans"] == 0
    # It has to have been a fight for the budget.
    assert report["refused"] > 0
    assert report["most reserved at once"] > 0.6


@pytest.mark.parametrize("where", ["file", SERVER])
def test_a_filter_that_lets_everything_pass_is_caught(where: str) -> None:
    # It never refuses, so the end never comes by itself: the harness stops at the first violation.
    report = spend(where, "--seconds", "2", "--kills", "0", "--processes", "3", "--mutant", "generous")
    assert report["violations"]


@pytest.mark.postgres
def test_a_missing_lock_is_caught() -> None:
    report = spend("postgres", "--seconds", "4", "--kills", "0", "--mutant", "unlocked")
    assert any("(e)" in violation for violation in report["violations"])
