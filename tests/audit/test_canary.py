"""The canary: silent where the promise is kept, loud where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.audit.canary import white_box
from sfumato.audit.doors import worlds
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.objective import Objective
from sfumato.questions import GradientMean

METHODS: dict[str, Any] = {
    "dp_sgd": partial(dp_sgd, clip=1.0),
    "dope_sgd": partial(dope_sgd, clip=1.0, public_batch=6),
}


def leaking(
    divide_by_batch: bool = False, batch_times_origin: bool = False, short: float = 1.0
) -> Callable[[Objective, Tensor, float, int], Callable[[GradientMean], Gradient]]:
    """Doors as papers and peers have got them wrong."""

    def door(objective: Objective, rows: Tensor, noise: float, _: int) -> Callable[[GradientMean], Gradient]:
        def ask(q: GradientMean) -> Gradient:
            # Rows are their own gradients, so that the sum is written down here once more, without the engine.
            origin = torch.zeros(rows.shape[1]) if q.clip.origin is None else torch.cat(list(q.clip.origin.values()))
            residuals = rows - origin
            residuals = residuals * (q.clip.norm / residuals.norm(dim=1, keepdim=True).clamp_min(q.clip.norm))
            parts = residuals.sum(0).split([len(p) for p in q.params.values()])
            total = dict(zip(q.params, parts, strict=True))
            if batch_times_origin and q.clip.origin is not None:
                total = {n: t + len(rows) * q.clip.origin[n] for n, t in total.items()}
            size = max(len(rows), 1) if divide_by_batch else 8
            law = short * noise * q.clip.norm
            return Gradient({n: (t + law * torch.randn_like(t)) / size for n, t in total.items()})

        return ask

    return door


@pytest.mark.parametrize("name", METHODS)
def test_right_methods_pass(name: str) -> None:
    tried = worlds()[1::3]
    found = white_box(METHODS[name], name=name, trials=50, noise=2.0, among=tried)
    assert all(verdict.holds for verdict in found), found
    assert {verdict.method for verdict in found} == {name}
    assert len({verdict.audit for verdict in found}) == len(tried)


def test_the_attack_is_strong_where_it_may_be() -> None:
    options = {"trials": 500, "confidence": 0.999, "door": leaking(), "among": worlds()[:1]}
    found = white_box(METHODS["dp_sgd"], name="dp_sgd", **options)
    assert 0.25 * found[0].claimed < found[0].lower_bound <= found[0].claimed


@pytest.mark.parametrize(
    ("name", "world", "door", "trials"),
    [
        ("dope_sgd", 1, leaking(batch_times_origin=True), 1500),
        ("dp_sgd", 4, leaking(divide_by_batch=True), 1000),
        ("dp_sgd", 3, leaking(short=0.25), 400),
    ],
    ids=["the batch's size times the origin", "divided by the batch's size", "a quarter of the noise"],
)
def test_leaks_are_found(name: str, world: int, door: Any, trials: int) -> None:
    only = worlds()[world : world + 1]
    (found,) = white_box(METHODS[name], name=name, trials=trials, door=door, among=only)
    assert not found.holds
    right = white_box(METHODS[name], name=name, trials=150, door=leaking(), among=only)
    assert right[0].holds  # the same door without the mistake


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="trials=5"):
        white_box(METHODS["dp_sgd"], name="dp_sgd", trials=5)
    with pytest.raises(InvalidArgument, match="trials=100 prove at most"):
        white_box(METHODS["dp_sgd"], name="dp_sgd", trials=100, noise=0.2)
