"""Public data: batches, gradients and losses, for free, and nothing private by accident."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.gradients import Clip, clipped_sum
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public

X, Y = torch.arange(24.0).reshape(8, 3) / 24, torch.tensor([0, 1] * 4)


@pytest.fixture
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(nn.Linear(3, 2).double(), cross_entropy)


@pytest.fixture
def public(objective: Objective) -> Public:
    return Public((X.double(), Y), objective=objective, seed=0)


def test_the_gradient_of_all_rows_is_the_mean_of_the_unclipped_sum(objective: Objective, public: Public) -> None:
    params = objective.parameters()
    total = clipped_sum(objective, params, (X.double(), Y), clip=Clip(float("inf")))
    mean = public.gradient(params)
    for name, t in total.items():
        assert torch.allclose(mean[name], t.double() / 8, rtol=1e-12)


def test_a_batch_has_distinct_rows_and_the_seed_repeats(public: Public) -> None:
    x, _ = public.batch(5)
    assert len(torch.unique(x, dim=0)) == 5
    state = public.random_state
    first = public.batch(3)[0]
    public.random_state = state
    assert torch.equal(first, public.batch(3)[0])
    assert len(public.batch(None)[0]) == len(public.batch(100)[0]) == len(public) == 8


def test_a_pass_shows_every_row_once(public: Public) -> None:
    for shuffle in (False, True):
        rows = torch.cat([x for x, _ in public.batches(3, shuffle=shuffle)])
        assert torch.equal(rows.sort(0).values, X.double())


def test_losses_are_in_order_and_of_any_objective(objective: Objective, public: Public) -> None:
    params = objective.parameters()
    whole = objective.losses(params, (X.double(), Y))
    assert torch.allclose(public.losses(params, batch_size=3), whole)
    first = public.losses(params, objective=Objective(objective.module, lambda m, b: b[0][:, 0]))
    assert torch.equal(first, X[:, 0].double())


def test_an_unused_parameter_has_gradient_zero(public: Public) -> None:
    objective = Objective(nn.Linear(3, 2).double(), lambda m, b: (b[0] @ m.weight.T).sum(1))
    found = Public((X.double(), Y), objective=objective).gradient(objective.parameters())
    assert not found["bias"].any()
    assert found["weight"].any()


def test_arrays_and_datasets_are_public_data_too(objective: Objective) -> None:
    rows = [(X[i].double(), int(Y[i])) for i in range(8)]
    params = objective.parameters()
    truth = Public((X.double(), Y), objective=objective).gradient(params)
    for data in ((X.double().numpy(), Y.numpy()), rows):
        found = Public(data, objective=objective).gradient(params)
        assert all(torch.allclose(found[n], t) for n, t in truth.items())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_position(bad: float) -> None:
    x = X.clone()
    x[3, 1] = bad
    with pytest.raises(InvalidArgument, match="array 1"):
        Public((Y, x))


def test_senseless_arguments(public: Public) -> None:
    with pytest.raises(InvalidArgument, match="no rows"):
        Public(X[:0])
    with pytest.raises(InvalidArgument, match="batch_size=0"):
        public.batch(0)
    for size in (0, -3):
        with pytest.raises(InvalidArgument, match=f"batch_size={size}"):
            list(public.batches(size))
    with pytest.raises(InvalidArgument, match="objective is missing"):
        Public(X).gradient({"w": torch.zeros(1)})


def test_private_data_does_not_pass_for_public() -> None:
    private = Private(X, name="clinic", size=8, budget=Budget(1.0, 1e-5))
    with pytest.raises(SfumatoError, match="ask it a question"):
        Public(private)
