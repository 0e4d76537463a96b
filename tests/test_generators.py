"""The global generators, lent and given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sfumato.generators import own_generators, seed_torch


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_what_is_drawn_inside_leaves_no_trace() -> None:
    with own_generators(3):
        plain = drawn(), drawn()
    with own_generators(3):
        first = drawn()
        with own_generators():
            drawn()
        with own_generators(9):
            inside = drawn()
        assert (first, drawn()) == plain
    with own_generators(9):
        assert drawn() == inside


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, whose generator is seeded too")
def test_seeding_again_and_again_keeps_nothing() -> None:
    before = len(torch.cuda._queued_calls)
    for seed in range(5):
        seed_torch(seed)
        with own_generators(seed):
            pass
    assert len(torch.cuda._queued_calls) == before
    torch.manual_seed(5)
    expected = torch.rand(3)
    seed_torch(5)
    assert torch.equal(torch.rand(3), expected)
