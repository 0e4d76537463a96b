"""Noise that drowns everything is told before it is paid for; what the documentation shows is not called hopeless."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato import Budget, Clip, GradientMean, Objective, Planned, Private, cross_entropy
from sfumato.cli import demo
from sfumato.cli.estimates import noise_over_signal
from sfumato.data.samplers import FullBatch, Poisson
from sfumato.models.basic import linear
from sfumato.privacy.calibration import noise_multiplier
from sfumato.privacy.mechanisms import Adjacency
from tests.cli.conftest import edit, files

Sfumato = Callable[..., Any]


def ratio(*, size: int, epsilon: float, delta: float, batch: int, steps: int, parameters: int) -> float:
    sampler = FullBatch(size=size) if batch == size else Poisson(size=size, batch_size=batch)
    noise = noise_multiplier(epsilon=epsilon, delta=delta, sampler=sampler, steps=steps, adjacency=Adjacency.ADD_REMOVE)
    return noise_over_signal(noise=noise, batch=batch, answers=steps, parameters=parameters, size=size)


# Sizes of trainings that are known to learn, and of some that cannot.
WELL = {
    "the demo": {
        "size": demo.PRIVATE,
        "epsilon": demo.EPSILON,
        "delta": demo.DELTA,
        "batch": demo.BATCH,
        "steps": demo.STEPS,
        "parameters": 4810,
    },
    "Adult": {"size": 31500, "epsilon": 1, "delta": 1e-5, "batch": 2048, "steps": 100, "parameters": 210},
    "the README's": {"size": 2000, "epsilon": 2, "delta": 1e-5, "batch": 200, "steps": 100, "parameters": 515},
    "CIFAR-10": {"size": 50000, "epsilon": 2, "delta": 1e-5, "batch": 4096, "steps": 1100, "parameters": 2_700_000},
    "GPT-2 large": {"size": 42000, "epsilon": 3, "delta": 1e-6, "batch": 1024, "steps": 410, "parameters": 774_000_000},
}
DROWNED = {
    "few rows, little epsilon": {"size": 100, "epsilon": 0.1, "delta": 1e-3, "batch": 50, "steps": 100},
    "all rows at once": {"size": 100, "epsilon": 0.1, "delta": 1e-3, "batch": 100, "steps": 10},
    "one row at a time": {"size": 1000, "epsilon": 0.1, "delta": 1e-5, "batch": 1, "steps": 100},
}


@pytest.mark.parametrize("name", WELL)
def test_trainings_that_learn_are_far_below_one(name: str) -> None:
    assert ratio(**WELL[name]) < 0.1


@pytest.mark.parametrize("name", DROWNED)
def test_trainings_that_cannot_are_above_one(name: str) -> None:
    assert ratio(**DROWNED[name], parameters=100_000) > 1


@pytest.mark.parametrize("parameters", [8, 2000])
def test_the_ratio_is_that_of_lengths_along_the_rows(parameters: int) -> None:
    """Every row pulls one way; of the noise, what lies along some row's gradient is measured."""
    size, steps, noise = 30, 50, 3.0
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(size, parameters, generator=draws, dtype=torch.float64)
    basis = torch.linalg.svd(rows, full_matrices=False)[2]
    said = noise_over_signal(noise=noise, batch=size, answers=steps, parameters=parameters, size=size)
    lengths = []
    for _ in range(400):
        sums = noise / size * torch.randn(steps, parameters, generator=draws, dtype=torch.float64).sum(0)
        lengths.append(float((basis @ sums).norm()) / steps)
    assert math.sqrt(sum(x * x for x in lengths) / len(lengths)) == pytest.approx(said, rel=0.1)


def test_unequal_weights_of_steps_do_not_help() -> None:
    weights = 0.9 ** torch.arange(50)
    even = noise_over_signal(noise=1.0, batch=10, answers=50, parameters=5, size=100)
    assert weights.norm() / weights.sum() / 10 * math.sqrt(5) > even


def test_no_answers_no_noise() -> None:
    assert noise_over_signal(noise=1.0, batch=10, answers=0, parameters=5, size=100) == 0


@pytest.mark.parametrize(("wanted", "learns"), [(0.03, True), (3.0, False)])
def test_digits_are_learned_below_and_not_above(wanted: float, learns: bool) -> None:
    """With the best of three learning rates; a tenth would be chance."""
    rows, _, (test, labels) = demo.split(1)
    size, steps = demo.PRIVATE, 40
    best = 0.0
    for rate in (0.03, 0.3, 3.0):
        torch.manual_seed(0)
        model = linear(64, 10)
        objective = Objective(model, cross_entropy)
        noise = wanted / noise_over_signal(noise=1.0, batch=size, answers=steps, parameters=650, size=size)
        private = Private(rows, name="digits", size=size, objective=objective, budget=Budget(1e6, 1e-5))
        private.plan(Planned(GradientMean, noise, private.everyone(), steps))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            private.ask(GradientMean(objective.parameters(), Clip(1.0))).write_to(model)
            optimizer.step()
        best = max(best, float((model(test).argmax(1) == labels).double().mean()))
    assert (best > 0.8) if learns else (best < 0.4)


# ------------------------------------------------------------------------------------------------ the command


def drown(config: Path) -> None:
    edit(config, "size = 300", "size = 100")
    edit(config, "batch_size = 100", "batch_size = 50")
    edit(config, "epsilon = 3.0", "epsilon = 0.1")
    edit(config, "delta = 1e-4", "delta = 1e-3")
    edit(config, 'kind = "linear"', 'kind = "mlp"\nhidden = [512, 512]')


def test_a_dry_run_warns(sfumato: Sfumato, config: Path) -> None:
    plan = json.loads(sfumato("train", config, "--dry-run", "--json").out)
    assert plan["warning"] is None
    by_hand = plan["noise_multiplier"] / 100 * math.sqrt(12 / 12)
    assert plan["noise_over_signal"] == pytest.approx(by_hand, rel=0.01)
    drown(config)
    before = files(config.parent)
    plan = json.loads(sfumato("train", config, "--dry-run", "--json").out)
    assert plan["noise_over_signal"] > 1
    for word in ("epsilon=0.1", "size=100", "more rows", "batch_size", "fewer than 100 parameters", "[warmup]"):
        assert word in plan["warning"]
    shown = sfumato("train", config, "--dry-run")
    assert "leaves next to nothing to learn" in " ".join(shown.out.split())
    assert files(config.parent) == before


def test_a_training_warns_before_it_is_charged(
    sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sfumato.cli import job

    drown(config)
    execute, said = job.execute, []

    def seen(*arguments: Any, **options: Any) -> Any:
        said.append((capsys.readouterr().err, (config.parent / "ledger.db").exists()))
        return execute(*arguments, **options)

    monkeypatch.setattr(job, "execute", seen)
    assert sfumato("train", config).status == 0
    (err, charged), *_ = said
    assert not charged
    assert err.startswith("sfumato: [privacy] epsilon=0.1")
    assert err.count("\n") == 1
    edit(config, "runs/a", "runs/b")
    edit(config, "ledger.db", "other.db")
    result = sfumato("train", config, "--json")
    assert (result.status, result.err) == (0, "")
    assert "leaves next to nothing" in json.loads(result.out)["warning"]
