"""The frame around all commands: help, version, and errors as one sentence."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import sfumato as library
from sfumato.cli import main as frame
from sfumato.cli.interruption import Interrupted
from sfumato.errors import BudgetExceeded

Run = Callable[..., Any]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from sfumato.cli.main import main; status = main(['--help']); "
        "heavy = {'torch', 'dp_accounting', 'sklearn', 'matplotlib', 'sqlalchemy', 'numpy'} & set(sys.modules); "
        "sys.exit(f'{heavy} loaded' if heavy else status)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 30  # 0.3 s on an idle machine
    for command in ("account", "demo", "train"):
        assert command in done.stdout


def test_version(sfumato: Run) -> None:
    assert sfumato("--version") == (0, f"sfumato {library.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["train"], ["train", "missing.toml"]])
def test_wrong_commands_are_status_2(sfumato: Run, arguments: list[str]) -> None:
    result = sfumato(*arguments)
    assert result.status == 2
    assert result.err.startswith("sfumato: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BudgetExceeded("The plan costs\ntoo much."), 2, "The plan costs too much."),
        (FileNotFoundError(2, "No such file or directory", "x.csv"), 2, "x.csv"),
        (KeyboardInterrupt(), 130, "sfumato: Interrupted.\n"),
        (Interrupted("Interrupted; all is kept."), 130, "sfumato: Interrupted; all is kept.\n"),
        (RuntimeError("row 17 holds 42"), 1, "RuntimeError"),
    ],
)
def test_errors_become_one_sentence(
    sfumato: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(frame, "app", fail)
    monkeypatch.delenv("SFUMATO_TRACEBACK", raising=False)
    result = sfumato("account")
    assert result.status == status
    assert said in result.err
    assert result.err.count("\n") == 1
    assert "42" not in result.err  # the text of an unforeseen error may quote a private row
