"""Modes are lent: whatever happens inside, every part is afterwards in the mode that it was in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfumato.nn.modes import being_trained, in_mode, recurring_shapes


def mixed() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    module[1].eval()
    module[0].requires_grad_(False)
    return module


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_parts_are_put_back_also_after_an_error(training: bool) -> None:
    module = mixed()
    before = modes(module)
    assert len(set(before)) == 2
    with in_mode(module, training=training):
        assert set(modes(module)) == {training}
    assert modes(module) == before
    with pytest.raises(RuntimeError), in_mode(module, training=training):
        raise RuntimeError
    assert modes(module) == before


def test_training_leaves_no_gradient_and_cudnn_as_it_was() -> None:
    module = mixed()
    before, benchmark = modes(module), torch.backends.cudnn.benchmark
    frozen = next(module[0].parameters())
    frozen.grad = torch.ones_like(frozen)  # somebody's own
    with being_trained(module):
        assert set(modes(module)) == {True}
        assert torch.backends.cudnn.benchmark
        module(torch.ones(1, 2)).sum().backward()
        assert module[1][1].weight.grad is not None
    assert modes(module) == before
    assert torch.backends.cudnn.benchmark == benchmark
    assert module[1][1].weight.grad is None
    assert frozen.grad is not None


def test_shapes_recur_for_a_while() -> None:
    benchmark = torch.backends.cudnn.benchmark
    with recurring_shapes():
        assert torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError), recurring_shapes():
        raise RuntimeError
    assert torch.backends.cudnn.benchmark == benchmark
