"""Every performance knob is inert: it changes time and memory, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfumato.data.samplers import Indices
from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Performance, Units, clipped_sum
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.questions import GradientSum
from tests.gradients import layers, oracle

VALUES: dict[str, list[object]] = {
    "micro_batch": [1, 2, 5, 100],
    "ghost": [True, False],
    "only_fallback": [True],
    "kernels": [False],
    "cuda_graph": [True, False],
    "instantiated_bytes": [1, 10_000],
    "activation_bytes": [1, 10_000],
    "load_rows": [1, 2],
}
LAYERS = [
    "mlp",
    "linear-sequence",
    "conv2d",
    "conv-deep",
    "embedding",
    "layer-norm",
    "lstm",
    "tied-head",
    "padded-dict",
]


def test_no_knob_is_forgotten() -> None:
    assert set(VALUES) == {field.name for field in dataclasses.fields(Performance)}


@pytest.mark.parametrize("name", LAYERS)
def test_knobs_change_nothing(name: str) -> None:
    objective, batch = layers.make(name, torch.float64)
    params = objective.parameters()
    clip = Clip(0.05, origin=oracle.like(params, 1), scale=oracle.like(params, 2, positive=True))
    offsets = [dict(0.05 * oracle.like(params, 10 + k)) for k in range(2)]
    for options in ({"clip": clip}, {"clip": Clip(0.05)}, {"clip": clip, "views": 2, "offsets": offsets}):
        truth = clipped_sum(objective, params, batch, **options)
        for knob, values in VALUES.items():
            for value in values:
                ours = clipped_sum(objective, params, batch, performance=Performance(**{knob: value}), **options)
                assert oracle.relative_error(ours, truth) <= 1e-12, (knob, value)


def test_knobs_change_nothing_for_users() -> None:
    objective, batch = layers.make("mlp", torch.float64)
    params, rows = objective.parameters(), tuple(t[:4] for t in batch)
    units = Units(records=2, weights=torch.tensor([0.5, 0.5, 1.0, 0.0], dtype=torch.float64))
    truth = clipped_sum(objective, params, rows, clip=Clip(0.05), units=units)
    for knob, values in VALUES.items():
        for value in values:
            performance = Performance(**{knob: value})  # type: ignore[arg-type]
            ours = clipped_sum(objective, params, rows, clip=Clip(0.05), units=units, performance=performance)
            assert oracle.relative_error(ours, truth) <= 1e-12, (knob, value)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x[i]


@pytest.mark.parametrize("load_rows", [1, 2, 3, 256])
def test_loading_in_pieces_changes_nothing(load_rows: int) -> None:
    """Of a dataset, so many rows at a time are loaded, whatever the units."""
    objective, batch = layers.make("mlp", torch.float64)
    params = objective.parameters()
    question = GradientSum(params, Clip(0.05))
    answers = []
    for data in (Rows(batch[0]), batch[0]):
        for users in (None, [0, 1, 0, 0, 2]):
            private = Private(
                data,
                name="rows",
                size=5,
                objective=objective,
                budget=Budget(1.0, 1e-6),
                unit="example" if users is None else "user",
                users=users,
                performance=Performance(load_rows=load_rows),
            )
            everyone: Indices = private.everyone().draw(5 if users is None else 3, private._noise.sampling)
            answers.append(question.exact(private._sample(everyone)))
    assert oracle.relative_error(answers[0], answers[2]) <= 1e-12
    assert oracle.relative_error(answers[1], answers[3]) <= 1e-12
    assert oracle.relative_error(answers[0], answers[1]) > 1e-3  # users are something else


def test_senseless_knobs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="micro_batch=0"):
        Performance(micro_batch=0)
