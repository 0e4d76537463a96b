"""The scripts in examples/ run as a user runs them, and print what their prose says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "ecosystem.md"


def printed(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def figures(text: str) -> dict[str, tuple[float, float]]:
    """Accuracy and epsilon (0 where none is told) by what stands before them."""
    found = re.findall(r"^(.+): accuracy ([\d.]+)(?:, epsilon (\S+))?$", text, re.MULTILINE)
    return {name: (float(accuracy), float(epsilon or 0)) for name, accuracy, epsilon in found}


def test_images_on_a_pretrained_backbone() -> None:
    text = printed("images.py")
    found = figures(text)
    alone, _ = found.pop("public rows alone")
    assert set(found) == {"DP-SGD", "DOPE-SGD", "exact mirror descent"}
    assert 0.7 < alone < 0.93  # five classes: learned, and not all there is to learn
    for name, (accuracy, epsilon) in found.items():
        assert 1.99 < epsilon <= 2.0, name
        assert accuracy > 0.84, name
    assert sum(accuracy for accuracy, _ in found.values()) / 3 > alone  # private rows do teach something
    assert "NOT PRIVATE" not in text
    assert "30 of 30 planned answers" in text


def test_a_table_with_fifty_public_rows() -> None:
    text = printed("table.py")
    found = figures(text)
    for table in ("made up", "breast cancer"):
        for method in ("DP-SGD", "PPSGD"):
            assert 0.49 < found[f"{table}, {method}"][1] <= 0.5, (table, method)
        assert found[f"{table}, public rows alone"][1] == 0.0
        assert found[f"{table}, not private"][1] == float("inf")
    # Several points, where 1,000 test rows of three splits tell one: private rows do teach something.
    assert found["made up, PPSGD"][0] > found["made up, public rows alone"][0] + 0.03
    assert found["made up, PPSGD"][0] <= found["made up, not private"][0] + 0.02
    assert found["breast cancer, PPSGD"][0] > 0.85
    assert "NOT PRIVATE" not in text


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the 'models' extra")
def test_your_own_loop_around_a_transformer(tmp_path: Path) -> None:
    """On a part of its text, after so little public training that a few private steps must help; it exits if not."""
    for name in sorted(topics)[::3]:
        (tmp_path / f"{name}.txt").write_text(topics[name][:3000])
    sizes = ("--length", "32", "--size", "1200", "--passes", "2", "--steps", "8")
    text = printed("gpt2.py", "--texts", str(tmp_path), *sizes)
    before, after = (float(n) for n in re.findall(r"(\d+\.\d+) after", text))
    assert after < before < 256  # what a model that knows nothing has, over bytes
    assert "epsilon = 4 " in text
    assert "8 of 8 planned answers" in text
    assert "NOT PRIVATE" not in text


@pytest.mark.parametrize("script", ["gpt2.py", "images.py", "table.py"])
def test_a_script_is_a_notebook(script: str) -> None:
    """Cells in percent format: prose in comments alone, and code that compiles by itself."""
    _, *cells = re.split(r"^# %%", (EXAMPLES / script).read_text(), flags=re.MULTILINE)
    kinds = ["prose" if cell.startswith(" [markdown]\n") else "code" for cell in cells]
    assert kinds.count("prose") >= 3
    assert kinds.count("code") >= 3
    for kind, cell in zip(kinds, cells, strict=True):
        if kind == "prose":
            assert all(not line or line.startswith("#") for line in cell.splitlines()[1:]), cell
        else:
            compile(cell, script, "exec")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own, of a newer PyTorch
def test_the_pages_recipe_for_lightning_runs() -> None:
    """Apart from the other blocks, since it needs `lightning`."""
    pytest.importorskip("lightning", reason="needs lightning, which nothing else here does")
    blocks = re.findall(r"^```(python|py)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    first = next(text for kind, text in blocks if kind == "python")
    recipe = next(text for kind, text in blocks if kind == "py" and "lightning" in text)
    for block in (first, recipe):
        exec(compile(block, str(PAGE), "exec"), names)
    told = names["private"].statement()
    assert told.asked[0].answers == names["steps"]
    assert told.epsilon <= 2.0
