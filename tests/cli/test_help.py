"""Help is one screen for every command and loads nothing heavy; `import sfumato` costs little beside torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sfumato.cli.main import app

Sfumato = Callable[..., Any]
COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
LINES, COLUMNS = 50, 100  # one screen

# What torch itself loads is free; of all else, only what sfumato has not asked for may be missing here.
HEAVY = ("scipy", "sklearn", "matplotlib", "dp_accounting", "sqlalchemy", "transformers", "pandas", "PIL", "pyarrow")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_one_screen(sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERMINAL_WIDTH", str(COLUMNS))
    result = sfumato(*command.split(), "--help")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert "Usage: sfumato" in result.out


def test_every_command_that_tells_facts_has_json(sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    without = [name for name in COMMANDS if "--json" not in sfumato(name, "--help").out]
    assert not without


def test_the_list_of_commands_has_all(sfumato: Sfumato) -> None:
    shown = sfumato("--help").out
    assert {"init", "train", "report"} <= set(COMMANDS)
    assert [name for name in COMMANDS if name not in shown] == []


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after this code."""
    told = "import sys; sys.stdout = sys.stderr\n" + code + "\nprint(*sys.modules, file=sys.__stdout__)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=300, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_help_does_not_load_torch() -> None:
    found = loaded("from sfumato.cli.main import main; assert main(['init', '--help']) == 0; main(['--help'])")
    assert "typer" in found
    assert not found & {"torch", "numpy", *HEAVY}


@pytest.mark.parametrize(("typed", "completed"), [("sfumato tr", "train"), ("sfumato train --dr", "--dry-run")])
def test_the_shell_completes(typed: str, completed: str) -> None:
    environment = {**os.environ, "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).parent / "sfumato"],
        env={**environment, "_SFUMATO_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed in done.stdout.split()


def test_importing_sfumato_loads_nothing_heavy() -> None:
    assert not loaded("import sfumato") & {"torch", "numpy", *HEAVY}


def test_the_names_to_know_load_nothing_heavy_that_torch_has_not() -> None:
    """A training brings the accountant and the ledger; objectives and public rows bring torch alone."""
    code = "from sfumato import Budget, Clip, Gradient, Objective, cross_entropy"
    assert not loaded(code) & set(HEAVY) - loaded("import torch")


def seconds(code: str, times: int = 5) -> float:
    """The least processor time of several: what other processes do is not counted."""
    told = f"{code}\nimport time, sys; print(time.process_time(), file=sys.__stdout__)"
    found = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=300, check=True)
        found.append(float(done.stdout.split()[-1]))
    return min(found)


@pytest.mark.slow
def test_import_and_help_are_quick() -> None:
    torch = seconds("import torch")
    assert seconds("import sfumato") < 1.5 * torch
    assert seconds("from sfumato import Objective, Public, cross_entropy") < 1.5 * torch
    assert seconds("from sfumato.cli.main import main; main(['--help'])") < 0.5


def test_what_a_training_leaves_is_loaded_without_scikit_learn() -> None:
    assert not loaded("import sfumato; sfumato.load") & {"sklearn", "matplotlib", "transformers"}
