"""docs/start.md: its commands are run as they stand, on Adult where it is there, and on made-up rows of that form."""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.transcript import BLOCKS, ROOT, commands, commands_of, labels

Sfumato = Callable[..., Any]
TRANSCRIPT = (ROOT / "docs" / "transcript.md").read_text(encoding="utf-8")
WORDS = {
    1: ["Private", "State-gov", "?"],
    3: ["Bachelors", "HS-grad"],
    5: ["Divorced", "Never-married"],
    6: ["Sales", "Tech-support", "?"],
    7: ["Husband", "Wife"],
    8: ["Black", "White"],
    9: ["Female", "Male"],
    13: ["Cuba", "United-States"],
}


def made_up(rows: int, seed: int, stop: str = "") -> str:
    """Fifteen columns as Adult has them; the label follows from the first and the fifth."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        cells = [str(rng.choice(WORDS[k])) if k in WORDS else str(rng.integers(0, 100)) for k in range(14)]
        label = ">50K" if int(cells[0]) + int(cells[4]) > 110 else "<=50K"
        lines.append(", ".join([*cells, f"{label}{stop}"]))
    return "\n".join(lines) + "\n\n"


@pytest.fixture(params=["Adult", "made up"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """With UCI's two files, or two like them."""
    folder = tmp_path / "mine"
    folder.mkdir()
    if request.param == "Adult":
        found = Path(os.environ.get("SFUMATO_DATA", "nowhere"), "tabular")
        if not (found / "adult.data.xz").exists():
            pytest.skip("SFUMATO_DATA names no folder with tabular/adult.data.xz")
        for name in ("adult.data", "adult.test"):
            (folder / name).write_bytes(lzma.decompress((found / f"{name}.xz").read_bytes()))
    else:
        (folder / "adult.data").write_text(made_up(2000, 0))
        (folder / "adult.test").write_text(f"|1x3 Cross validator\n{made_up(300, 1, '.')}")
    return folder


def test_a_table_of_ones_own(sfumato: Sfumato, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    printed = {}
    for line in (*commands("table"), *commands("after")):
        if line.startswith("sfumato "):
            result = sfumato(*shlex.split(line)[1:])
            assert result.status == 0, result.err
            printed[line] = result.out
            assert "leaves next to nothing" not in " ".join(f"{result.err} {result.out}".split())
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "PATH": path}
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            printed[line] = done.stdout
    python = next(said for line, said in printed.items() if line.startswith("python"))
    assert "50K" in python  # what was predicted
    run = json.loads(Path("runs/adult/run.json").read_text())
    assert run["statement"]["epsilon"] <= 1
    known = [line.rpartition(", ")[2] for line in Path("held_out.csv").read_text().split("\n") if line]
    largest = max(known.count(label) for label in set(known)) / len(known)
    assert run["metrics"]["test_accuracy"] > largest + 0.05
    predicted = [line.split(",")[1] for line in Path("predictions.csv").read_text().split("\n")[1:] if line]
    right = [label == said for label, said in zip(known, predicted, strict=True)]
    assert sum(right) / len(right) == pytest.approx(run["metrics"]["test_accuracy"])
    assert "epsilon" in Path("runs/adult/report.html").read_text()
    # The transcript shows what is printed today: the same lines, whatever their figures.
    shown = dict(re.findall(r"^\$ (.*)\n((?:(?!```).*\n)*)", TRANSCRIPT, re.MULTILINE))
    for line in ("sfumato train config.toml --dry-run", "sfumato train config.toml --report"):
        assert len(labels(shown[line])) > 8
        assert labels(shown[line]) == labels(printed[line])


def test_the_transcript_has_all_commands_which_are_few() -> None:
    assert commands_of(TRANSCRIPT) == [line for name in BLOCKS for line in commands(name)]
    assert len(commands("demo")) + len(commands("table")) < 10


def test_the_demo_and_its_report(sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `git clone` and the environment that make sets up; with fewer steps."""
    clone, make, path = commands("demo")
    assert clone.startswith("git clone")
    assert make == "make demo"
    assert path.startswith("export PATH")
    assert re.search(r"^demo:.*\n\t\$\(BIN\)/sfumato demo$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert sfumato("demo", "--steps", 2, "--json").status == 0
    assert Path("runs/demo/report.html").stat().st_size > 10_000
