"""A small private training as files, and the command line in-process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sfumato.cli.main import main


class Answer(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def sfumato(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs the command as the shell would, but in this process."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        return Answer(status, *capsys.readouterr())

    return call


CONFIG = """
[data]
private = "private.csv"
public = "public.csv"
test = "test.csv"
label = "kind"
name = "flowers"
size = 300
range = [-1, 3]

[model]
kind = "linear"
outputs = 3

[privacy]
epsilon = 3.0
delta = 1e-4
ledger = "ledger.db"

[training]
steps = 12
batch_size = 100
learning_rate = 4.0
momentum = 0.5
checkpoint_every = 0
out = "runs/a"
"""


def write_csv(path: Path, rows: int, seed: int, *, order: str = "abc") -> None:
    """Three features and a class that can be learned from them."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, rows)
    features = rng.normal(size=(rows, 3)) * 0.5 + 2 * np.eye(3)[kinds]
    lines = [",".join([*order, "kind"])]
    lines += [
        ",".join([*(f"{x['abc'.index(c)]:.4f}" for c in order), str(k)]) for x, k in zip(features, kinds, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_csv(tmp_path / "private.csv", 310, 0)
    write_csv(tmp_path / "public.csv", 30, 1, order="cab")
    write_csv(tmp_path / "test.csv", 200, 2)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def edit(config: Path, old: str, new: str) -> None:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))


def add(config: Path, section: str) -> None:
    config.write_text(f"{config.read_text()}\n{section}\n")


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
