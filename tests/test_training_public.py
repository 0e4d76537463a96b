"""The loop with methods that use public data: what is planned, kept and measured, also over an interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato import Public, Run
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.errors import InvalidArgument
from tests.test_training import STEPS, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class Stops(Exception):
    pass


def interrupted(bench: Bench, after: int, **options: Any) -> Run:
    """A training that dies between two steps, and its continuation."""
    taken = 0
    inner = options.pop("method", dp_sgd)

    class Dying:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def init(self, params: Any) -> Any:
            return inner.init(params)

        def step(self, *arguments: Any, **handed: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken > after:
                raise Stops
            return inner.step(*arguments, **handed)

    checkpoint = bench.folder / "run.pt"
    with pytest.raises(Stops):
        bench.train(method=Dying(), checkpoint=checkpoint, **options)
    return bench.train(method=inner, checkpoint=checkpoint, **options)


def test_steps_that_ask_nothing_are_not_paid_for(bench: Bench) -> None:
    run = bench.train(method=MirrorDescent(decay_steps=5, public_batch=10))
    assert run.steps_taken == STEPS
    assert bench.counted() == [5]
    assert run.config["method"] == "MirrorDescent"
    assert run.config["method_options"]["decay_steps"] == 5
    assert run.config["method_options"]["method"]["name"] == "dp_sgd"


def test_a_mixture_that_was_interrupted_asks_for_what_is_left(bench: Bench) -> None:
    run = interrupted(bench, 3, method=MirrorDescent(decay_steps=5, public_batch=10))
    assert (run.steps_taken, run.steps_lost) == (STEPS, 0)
    assert bench.counted() == [5]


def test_less_noise_is_needed_where_less_is_asked(tmp_path: Path) -> None:
    from sfumato import Budget

    noises = []
    for index, method in enumerate((MirrorDescent(decay_steps=4), dp_sgd)):
        (tmp_path / str(index)).mkdir()
        run = Bench(tmp_path / str(index)).train(method=method, budget=Budget(2.0, 1e-4))
        noises.append(run.config["noise_multiplier"])
    assert noises[0] < 0.9 * noises[1]


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "folder"])
def test_the_last_iterates_are_kept(bench: Bench, folder: bool) -> None:
    run = bench.train(keep_last=4, **({"checkpoint": bench.folder / "run.pt"} if folder else {}))
    assert run.iterates is not None
    kept = list(run.iterates)
    assert len(kept) == 4
    assert all(torch.equal(kept[-1][n], run.weights[n]) for n in kept[-1])
    assert not torch.equal(kept[0]["weight"], kept[-1]["weight"])
    assert (bench.folder / "run.pt.iterates").exists() == folder


def test_iterates_outlive_an_interruption(bench: Bench) -> None:
    run = interrupted(bench, 10, method=ShrunkOrigin(public_batch=10), keep_last=5)
    assert run.iterates is not None
    assert len(run.iterates) == 5
    assert run.steps_lost == 0


@pytest.mark.parametrize(
    "method", [dp_sgd, partial(dope_sgd, public_batch=10), ShrunkOrigin(public_batch=10)], ids=["dp", "dope", "shrunk"]
)
def test_alignment_is_measured_in_every_step(bench: Bench, method: Any) -> None:
    run = bench.train(method=method, alignment=True)
    assert [entry[0] for entry in run.alignment] == list(range(1, STEPS + 1))
    assert all(-1 <= low <= cosine <= high <= 1 for _, cosine, low, high in run.alignment)
    assert "public_cosine" in run.metrics
    # The two sets are drawn alike, and the first steps are far from the optimum.
    first = [cosine for _, cosine, *_ in run.alignment[:3]]
    assert sum(first) / 3 > 0.2


def test_alignment_outlives_an_interruption(bench: Bench) -> None:
    run = interrupted(bench, 6, method=ShrunkOrigin(public_batch=10), alignment=True)
    assert [entry[0] for entry in run.alignment] == list(range(1, STEPS + 1))


def test_alignment_looks_at_the_origin_and_draws_no_public_rows_of_its_own(bench: Bench) -> None:
    method = partial(dope_sgd, public_batch=10)
    states = []
    for alignment in (False, True):
        (bench.folder / str(alignment)).mkdir()
        each = Bench(bench.folder / str(alignment))
        each.train(method=method, alignment=alignment)
        states.append(each.public.random_state)
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("options", "names"),
    [({"keep_last": -1}, "keep_last"), ({"alignment": True, "public": None}, "alignment")],
)
def test_bad_options_cost_nothing(bench: Bench, options: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        bench.train(**options)
    assert bench.counted() == []


def test_public_batches_go_through_the_augmentation() -> None:
    from tests.test_algorithms import objective, rows

    of, data = objective(), rows(10, 1)
    doubled = Public((2 * data[0], data[1]), objective=of).gradient(of.parameters())
    seen = Public(data, objective=of, augment=lambda batch: (2 * batch[0], batch[1])).gradient(of.parameters())
    assert all(torch.equal(doubled[n], seen[n]) for n in doubled)


def test_gradient_norms_are_those_of_single_rows() -> None:
    from tests.test_algorithms import objective, rows

    of, data = objective(), rows(20, 1)
    norms = Public(data, objective=of).gradient_norms(of.parameters())
    alone = [Public(tuple(t[i : i + 1] for t in data), objective=of).gradient(of.parameters()) for i in range(20)]
    assert torch.allclose(norms, torch.stack([g.norm() for g in alone]), rtol=1e-9)
