"""Frozen features, kept once computed, prepared with public rows alone; and heads on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sfumato.errors import InvalidArgument
from sfumato.experiments import features
from sfumato.experiments.data import load_rows
from sfumato.experiments.runner import Job, run_job
from sfumato.experiments.settings import Data
from sfumato.experiments.spec import find_spec

CPU = torch.device("cpu")


def kept(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    rows = torch.randn(200, 8, generator=generator) + 5 + labels[:, None]
    parts = {"train.0": rows.half(), "train.1": labels, "test.0": rows[:50].half()}
    parts["test.1"] = labels[:50].clone()
    save_file(parts, folder / "cifar10-efficientnet-lite0-96.safetensors")


def test_rows_are_centred_by_public_rows_and_of_length_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path))
    kept(tmp_path)
    data = Data(name="cifar10-features", resolution=96, private=150, public=20)
    rows = load_rows(data, CPU)
    assert torch.allclose(rows.private[0].norm(dim=1), torch.ones(150), atol=1e-6)
    raw = features.cifar10_features(96).train[0]
    # Each prepared row is on the line from the public mean to the row: of its own row and public ones, nothing else.
    public = load_rows(Data(name="cifar10-features", resolution=96, private=10, public=20), CPU).public[0]
    assert torch.equal(public, rows.public[0])  # other private rows change nothing
    lengths = (raw - raw.mean(0)).norm(dim=1)
    assert float(lengths.std()) > 0.1  # they were of different lengths


def test_missing_weights_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path))
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    with pytest.raises(InvalidArgument, match="SFUMATO_DATA"):
        features.cifar10_features(96)


@pytest.mark.parametrize("row", ["no privacy", "exact mirror"])
def test_heads_are_trained(tmp_path: Path, row: str) -> None:
    spec = find_spec("backbone-head")
    cell = next(c for c in spec.cells if c.row == row)
    record = run_job(Job(spec=spec, cell=cell, seed=0, scale="smoke", out=tmp_path), device=CPU)
    assert record["metrics"]["last"]["test"] > 80
    assert record["statement"]["private"] is (row != "no privacy")
    assert (record["warm_up"] is None) == (row == "no privacy")
