"""`sfumato audit`: a right model passes, broken ones are found with status 1, and JSON has what programs read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import edit, files

Run = Callable[..., Any]

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn

from sfumato import cross_entropy


def rows():
    return torch.rand(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def network(*between):
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def right():
    return network(), cross_entropy, rows()


def batch_norm():
    return network(nn.BatchNorm1d(8)), cross_entropy, rows()


def mean_reduced():
    return network(), lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]), rows()


def in_batch_negatives():
    def loss(module, batch):
        z = F.normalize(module(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="none")

    return network(), loss, rows()


def nothing():
    return None


def with_arguments(images, labels=None):
    return right()


def of_size(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))
"""
KEYS = {"method", "audit", "claimed", "lower_bound", "confidence", "trials", "verdict"}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"models_of_{tmp_path.name.replace('-', '_')}"  # imported modules are kept: each test has its own
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_right_model_passes(sfumato: Run, models: str) -> None:
    result = sfumato("audit", f"{models}:right", "--json")
    assert result.status == 0, result
    found = json.loads(result.out)
    assert all(set(one) >= KEYS for one in found)
    assert {one["verdict"] for one in found} == {"holds"}
    kinds = {one["audit"].split(",")[0] for one in found}
    assert kinds == {"examples apart", "sensitivity", "noise", "sampler", "ledger"}
    assert all(one["confidence"] >= 1 - 1e-6 for one in found)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("batch_norm", "normalises over the batch"),
        ("mean_reduced", "one value per example"),
        ("in_batch_negatives", "act on each other"),
    ],
)
def test_broken_models_are_found(sfumato: Run, models: str, broken: str, said: str) -> None:
    result = sfumato("audit", f"{models}:{broken}")
    assert result.status == 1
    assert "BROKEN" in result.out
    assert "\n1 finding.\n" in result.out
    assert said in result.out
    assert "not the epsilon of your training" in result.out


def test_a_config_is_examined_without_reading_a_private_value(sfumato: Run, config: Path) -> None:
    header, *lines = (config.parent / "private.csv").read_text().splitlines()
    (config.parent / "private.csv").write_text("\n".join([header, *("not,a,number,x" for _ in lines)]) + "\n")
    before = files(config.parent)
    result = sfumato("audit", config, "--json")
    assert result.status == 0, result
    assert {one["verdict"] for one in json.loads(result.out)} == {"holds"}
    assert files(config.parent) == before


def test_a_config_whose_model_mixes_examples_is_found(sfumato: Run, config: Path, models: str, tmp_path: Path) -> None:
    edit(config, 'kind = "linear"', f'kind = "{models}:of_size"')
    result = sfumato("audit", config, "--json")
    assert result.status == 1
    (found,) = json.loads(result.out)
    assert found["verdict"] == "broken"
    assert "normalises over the batch" in found["told"]


def test_a_method_of_the_package(sfumato: Run) -> None:
    result = sfumato("audit", "--methods", "the door", "--json")
    assert result.status == 0, result
    found = json.loads(result.out)
    assert {one["method"] for one in found} == {"the door"}
    assert all(one["lower_bound"] <= one["claimed"] for one in found)
    assert {"noise", "sampler", "ledger"} == {one["audit"].split(",")[0] for one in found}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "dp-sdg"], "dp-sgd"),
        (["--methods", "dp-sgd", "dopesgd"], "dope-sgd"),
        (["dp-sgd"], "--methods"),
        (["a:b", "c:d"], "one target"),
        (["no_such_module:f"], "no_such_module"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_wrong_targets_are_status_2(sfumato: Run, arguments: list[str], said: str) -> None:
    result = sfumato("audit", *arguments)
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_function_must_return_a_model(sfumato: Run, models: str) -> None:
    result = sfumato("audit", f"{models}:nothing")
    assert result.status == 2
    assert "(module, loss, rows)" in result.err


def test_a_function_is_called_without_arguments(sfumato: Run, models: str) -> None:
    result = sfumato("audit", f"{models}:with_arguments")
    assert result.status == 2
    assert "is called without any: name a function that takes none and returns (module, loss, rows)." in result.err
    assert result.err.count("\n") == 1
