"""What trackers are told of a training: all that is public, nothing else, and the same numbers as the Run's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sfumato import (
    Budget,
    Clip,
    GradientMean,
    NotPrivateSeed,
    Objective,
    Planned,
    Private,
    Public,
    Run,
    cross_entropy,
    train,
)
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.errors import InvalidArgument
from sfumato.tracking import series, settings, to_mlflow, to_tensorboard

STEPS = 6


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return inputs, (inputs[:, 0] > 0).long()


@pytest.fixture(scope="module")
def run() -> Run:
    model = nn.Linear(4, 2)
    objective = Objective(model, cross_entropy)
    return train(
        model,
        private=Private(rows(500, 1), name="clinic", size=500, objective=objective, budget=Budget(2.0, 1e-4)),
        public=Public(rows(40, 2), objective=objective, seed=0),
        test=Public(rows(100, 3)),
        method=partial(dope_sgd, clip=0.7),
        steps=STEPS,
        batch_size=100,
        evaluate_every=2,
        alignment=True,
        progress=False,
    )


# ------------------------------------------------------------------------------------------------ what is told


def test_every_number_of_the_history_is_told_once(run: Run) -> None:
    found = series(run)
    told = {(name, step): value for name, points in found.items() for step, value in points}
    assert len(told) == sum(map(len, found.values()))
    for row in run.history:
        for name in set(row) - {"step"}:
            assert told.pop((name, row["step"])) == row[name]
    for step, cosine, lowest, highest in run.alignment:
        assert told.pop(("alignment/cosine", step)) == cosine
        assert told.pop(("alignment/cosine_lowest", step)) == lowest
        assert told.pop(("alignment/cosine_highest", step)) == highest
    assert not told
    assert [step for step, _ in found["epsilon"]] == [0, 2, 4, 6]


def test_settings_hold_the_configuration_and_the_promise(run: Run) -> None:
    found = settings(run)
    assert found["method"] == "dope_sgd"
    assert found["method_options.clip"] == 0.7
    assert found["sampler.batch_size"] == 100
    assert found["privacy.epsilon"] == run.statement["epsilon"] <= 2.0
    assert found["privacy.dataset"] == "clinic"
    assert found["privacy.private"] is True
    assert found["steps_taken"] == STEPS
    assert not any(isinstance(value, dict) for value in found.values())


def test_time_stays_out(run: Run) -> None:
    """It depends on how many private rows were drawn; the largest number that a Run has is nowhere in what is told."""
    told = json.dumps([series(replace(run, seconds=123456.789)), settings(replace(run, seconds=123456.789))])
    assert "123456" not in told
    assert told == json.dumps([series(run), settings(run)])


def test_a_run_with_a_known_seed_says_that_it_is_not_private() -> None:
    objective = Objective(nn.Linear(4, 2), cross_entropy)
    private = Private(
        rows(50, 1), name="x", size=50, objective=objective, budget=Budget(2.0, 1e-4), seed=NotPrivateSeed(0)
    )
    done = train(objective.module, private=private, steps=1, batch_size=10, progress=False)
    assert settings(done)["privacy.private"] is False


@pytest.mark.parametrize(("write", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_package_is_named(
    run: Run, write: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidArgument, match=rf"^{write} is not installed: .*pip install {write}`\.$"):
        to_tensorboard(run, tmp_path) if write == "tensorboard" else to_mlflow(run)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ TensorBoard, MLflow


def test_tensorboard_reads_back_what_was_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert to_tensorboard(run, tmp_path / "logs") == tmp_path / "logs"
    read = EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0})
    read.Reload()
    told = series(run)
    assert set(read.Tags()["scalars"]) == set(told)
    for name, points in told.items():
        assert [event.step for event in read.Scalars(name)] == [step for step, _ in points]
        values = [event.value for event in read.Scalars(name)]
        assert values == pytest.approx([value for _, value in points], rel=1e-6)  # stored in float32
    texts = {
        name: read.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("privacy statement", "settings")
    }
    assert [line.removeprefix("    ") for line in texts["privacy statement"].splitlines()] == (
        run.statement_text.splitlines()
    )
    assert json.loads(texts["settings"]) == settings(run)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # `mlflow-skinny` has no database
    found = pytest.importorskip("mlflow", reason="needs the package mlflow or mlflow-skinny")
    found.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield found
    while found.active_run() is not None:
        found.end_run()


@pytest.mark.filterwarnings("ignore:.*filesystem tracking backend:FutureWarning")
def test_mlflow_reads_back_what_was_written(run: Run, mlflow: Any) -> None:
    key = to_mlflow(run, name="first")
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    read = client.get_run(key)
    assert read.info.run_name == "first"
    assert read.info.status == "FINISHED"
    assert read.data.params == {name: str(value) for name, value in settings(run).items()}
    told = series(run)
    assert set(read.data.metrics) == set(told)
    for name, points in told.items():
        assert sorted((m.step, m.value) for m in client.get_metric_history(key, name)) == points
    assert mlflow.artifacts.load_text(f"runs:/{key}/privacy_statement.txt") == run.statement_text
    assert mlflow.artifacts.load_dict(f"runs:/{key}/privacy_statement.json") == run.statement


@pytest.mark.filterwarnings("ignore:.*filesystem tracking backend:FutureWarning")
def test_an_active_run_of_mlflow_is_written_to_and_left_open(run: Run, mlflow: Any) -> None:
    with mlflow.start_run() as mine:
        with pytest.raises(InvalidArgument, match="name='second'"):
            to_mlflow(run, name="second")
        assert to_mlflow(run) == mine.info.run_id
        assert mlflow.active_run() is not None


# ------------------------------------------------------------------------------------------------ optimisers


def one_cycle(params: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)


def plainly(model: nn.Linear, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Without a door: the oracle."""
    optimizer, schedule = one_cycle(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("loop", ["own", "train"])
def test_any_optimiser_and_schedule_work_unwrapped(loop: str) -> None:
    """Everyone in every step, no clipping, little noise: AdamW and OneCycleLR do what they do without a door."""
    torch.manual_seed(0)
    inputs, labels = rows(6000, 5)
    data = (inputs.double(), labels)
    model, twin = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    twin.load_state_dict(model.state_dict())
    begun = model.weight.detach().clone()
    plainly(twin, data)

    objective = Objective(model, cross_entropy)
    private = Private(data, name="x", size=6000, objective=objective, budget=Budget(1e4, 1e-5))
    noise, clip = 0.1, 3.2  # no gradient is longer: sqrt(2) for the classes, sqrt(5) for inputs and bias
    if loop == "own":
        optimizer, schedule = one_cycle(model.parameters())
        private.plan(Planned(GradientMean, noise, private.everyone(), STEPS))
        for _ in range(STEPS):
            private.ask(GradientMean(objective.parameters(), Clip(clip))).write_to(model)
            optimizer.step()
            schedule.step()
    else:

        def scheduled(params: Any) -> torch.optim.Optimizer:
            optimizer, schedule = one_cycle(params)
            optimizer.register_step_post_hook(lambda *_: schedule.step())
            return optimizer

        train(
            model,
            private=private,
            method=partial(dp_sgd, clip=clip),
            noise=noise,
            steps=STEPS,
            sampler=private.everyone(),
            optimizer=scheduled,
            progress=False,
        )
    assert float((twin.weight.detach() - begun).abs().max()) > 0.2
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0.01)
