"""A few kills of real trainings, and the proof that the harness can fail; `make faults` does it at length."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forked")


def test_a_few_kills_lose_no_count_and_mutants_are_caught() -> None:
    # A process of its own: the harness forks, and this one may have threads.
    options = ["--kills", "4", "--seed", "1", "--json", "--mutants", "late-mark", "replay"]
    command = [sys.executable, "-m", "tests.faults.kill", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert report["kills"] >= 4
    assert 0 < report["answers"] <= report["counted"]
    assert {name: found["caught"] for name, found in report["mutants"].items()} == {"late-mark": True, "replay": True}
    # For the right reason: too few counted, noise used again.
    assert "(a)" in report["mutants"]["late-mark"]["violations"][0]
    assert "(b)" in report["mutants"]["replay"]["violations"][0]
    assert done.returncode == 0
