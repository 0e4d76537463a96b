"""The frame around all commands: help, version, and errors as one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3  # 0.3 s
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


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system has no transparent huge pages"
)
@pytest.mark.parametrize(("wanted", "large"), [(None, True), ("0", False)])
def test_torch_allocates_in_large_pages_unless_told_otherwise(wanted: str | None, large: bool) -> None:
    """What madvise(MADV_HUGEPAGE) leaves behind is the flag hg of a mapping."""
    code = (
        "import re; from pathlib import Path; from sfumato.cli.main import main; main(['--version']); import torch; "
        "kept = torch.ones(1 << 24); at = kept.data_ptr() + (1 << 25); "
        "maps = re.split(r'(?m)^(?=[0-9a-f]+-[0-9a-f]+ )', Path('/proc/self/smaps').read_text()); "
        "ends = [[int(end, 16) for end in m.split(' ')[0].split('-')] for m in maps[1:]]; "
        "own = next(m for m, (start, end) in zip(maps[1:], ends) if start <= at < end); "
        "print(' hg' in own)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {} if wanted is None else {"THP_MEM_ALLOC_ENABLE": wanted}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(large)
