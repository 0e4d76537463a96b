"""Real runs, made once, and a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.examples import make_examples

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of every kind."""
    return make_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture
def changed(examples: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run whose JSON was edited."""

    def copy(run: str, edit: Edit, *, name: str | None = None, file: str = "run.json") -> Path:
        folder = tmp_path / (name or run)
        shutil.copytree(examples / run, folder)
        found = json.loads((folder / file).read_text())
        edit(found)
        (folder / file).write_text(json.dumps(found))
        return folder

    return copy
