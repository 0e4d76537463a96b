"""Sensitivity and conversations: nothing to say about the real door, and a word about each way to break it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.audit.canary import step_by_step
from sfumato.audit.conversation import conversation
from sfumato.audit.doors import SIZE, adversaries, open_door, rows_objective, worlds
from sfumato.audit.selections import gram_sensitivity, near_private_conversation, votes_sensitivity
from sfumato.audit.sensitivity import Neighbours, method_sensitivity, sensitivity
from sfumato.gradients import Gradient, clipped_sum
from sfumato.gradients.reference import per_example_gradients
from sfumato.objective import Objective
from sfumato.public import Public
from sfumato.questions import GradientMean
from sfumato.selection import Threshold, TopK
from sfumato.selection.support import Votes

Sums = Callable[[Objective, GradientMean, Tensor], dict[str, Tensor]]
DOPE = partial(dope_sgd, public_batch=4)


def right(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    return clipped_sum(objective, q.params, rows, clip=q.clip)


def origin_per_row(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    assert q.clip.origin is not None
    return {n: t + len(rows) * q.clip.origin[n] for n, t in right(objective, q, rows).items()}


def over_the_batch(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    return {n: t * SIZE / max(1, len(rows)) for n, t in right(objective, q, rows).items()}


def aggregate(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    found = per_example_gradients(objective, q.params, rows)
    return dict(Gradient({n: t.sum(0) for n, t in found.items()}).clipped(3 * q.clip.norm))


def layer_by_layer(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    found = per_example_gradients(objective, q.params, rows)
    norms = {n: t.norm(dim=1, keepdim=True).clamp_min(q.clip.norm) for n, t in found.items()}
    return {n: torch.nan_to_num(t * q.clip.norm / norms[n]).sum(0) for n, t in found.items()}


def nan_passes(objective: Objective, q: GradientMean, rows: Tensor) -> dict[str, Tensor]:
    found = per_example_gradients(objective, q.params, rows)
    return {n: t.clamp(-0.1, 0.1).sum(0) for n, t in found.items()}


def door(sums: Sums) -> Any:
    """A door of one's own, whose noise comes from torch's global generator, as in most people's code."""

    def opened(objective: Objective, rows: Tensor, noise: float, _: int, *, seed: int) -> Any:
        def ask(q: GradientMean) -> Gradient:
            total = sums(objective, q, rows)
            return Gradient({n: (t + noise * q.clip.norm * torch.randn_like(t)) / SIZE for n, t in total.items()})

        return ask

    return opened


def test_the_same_door_without_mistakes_passes() -> None:
    assert method_sensitivity(DOPE, name="dope", door=door(right)).holds


@pytest.mark.parametrize("broken", [origin_per_row, over_the_batch, aggregate, layer_by_layer, nan_passes])
def test_every_broken_sum_is_found(broken: Sums) -> None:
    found = method_sensitivity(DOPE, name="broken", door=door(broken))
    assert not found.holds
    assert found.confidence == 1.0
    assert found.told


def test_the_real_door_is_used_up_to_its_bound_and_not_beyond() -> None:
    found = method_sensitivity(dp_sgd, name="dp-sgd", among=adversaries()[::3])
    assert found.holds
    assert found.lower_bound == pytest.approx(1.0, abs=1e-6)  # else the rows would not attack it


def test_an_answer_that_is_no_number_is_infinitely_far() -> None:
    pairs = [Neighbours(name="NaN", one=[1.0], other=[np.nan])]
    found = sensitivity(lambda rows: rows, pairs, claimed=1.0, name="NaN")
    assert found.lower_bound == np.inf
    assert not found.holds
    assert found.to_json()["lower_bound"] is None


# ------------------------------------------------------------------------------------------------ conversations


def three_steps(method: Any, one: Any, other: Any) -> list[bool]:
    world, objective = worlds()[-1], rows_objective()

    def talk(ask: Any) -> None:
        public = Public(world.public, objective=objective, seed=0)
        step_by_step(method(), objective.parameters(), public, ask, 3)

    doors = [made(objective, rows) for made, rows in ((one, world.others), (other, world.everybody))]
    return [verdict.holds for verdict in conversation(talk, *doors, size=SIZE, name="talk")]


def real(objective: Objective, rows: Tensor) -> Any:
    return open_door(objective, rows, 0.02, 3, seed=5)


class Remembering:
    """DP-SGD around what the last step was told."""

    def __init__(self) -> None:
        self.last: Gradient | None = None

    def init(self, params: Any) -> None:
        return None

    def step(self, state: Any, params: Any, public: Any, ask: Any, **_: Any) -> tuple[Gradient, Any]:
        update = dp_sgd(params, public, ask, origin=self.last)
        self.last = update
        return update, state


def test_a_method_may_remember_answers() -> None:
    assert three_steps(Remembering, real, real) == [True, True]


def test_a_method_that_remembers_what_had_no_noise_is_found() -> None:
    class Leaking(Remembering):
        def step(self, state: Any, params: Any, public: Any, ask: Any, **_: Any) -> tuple[Gradient, Any]:
            update, state = super().step(state, params, public, ask)
            self.last = exact[-1]
            return update, state

    exact: list[Gradient] = []

    def whispering(objective: Objective, rows: Tensor) -> Any:
        ask = real(objective, rows)

        def told(q: GradientMean) -> Any:
            exact.append(Gradient(right(objective, q, rows)))
            return ask(q)

        return told

    assert three_steps(Leaking, whispering, whispering)[1] is False


# ------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("voters", [Threshold(), TopK(k=3)])
def test_counts_move_by_their_unit(voters: Any) -> None:
    for found in votes_sensitivity(voters, name="votes"):
        assert found.holds, found
        assert found.lower_bound == 1.0


def test_top_k_counted_as_one_vote_is_found() -> None:
    class OneVote(TopK):
        def of(self, votes: Votes, k: int) -> Any:
            question = super().of(votes, k)
            cheap = type("Cheap", (type(question),), {"unit": property(lambda self: 1.0)})
            return cheap(votes, k, 3)

    assert not votes_sensitivity(OneVote(), name="votes")[0].holds


def test_gram_matrices_and_the_whole_of_near_private() -> None:
    assert all(found.holds for found in gram_sensitivity(name="gram"))
    assert all(found.holds for found in near_private_conversation(Threshold(), name="near-private"))
