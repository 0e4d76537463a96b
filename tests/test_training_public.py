"""The loop with methods that use public data: what is planned, kept and measured, also over an interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato import GradientMean, Objective, Private, Public, Run, cross_entropy
from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import algorithm
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.diagnostics import cosine
from sfumato.errors import InvalidArgument
from sfumato.privacy.noise import NotPrivateSeed
from tests.test_training import BATCH, NOISE, STEPS, Bench, separable


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class Stops(Exception):
    pass


class Around:
    """Stands around a method like somebody's own object: no `Algorithm`, but with all that one has."""

    def __init__(self, inner: Any) -> None:
        self.inner = algorithm(inner)

    def init(self, params: Any) -> Any:
        return self.inner.init(params)

    def answers(self, steps: int) -> int:
        return self.inner.answers(steps)

    def step(self, *arguments: Any, **handed: Any) -> Any:
        return self.inner.step(*arguments, **handed)


class Dying(Around):
    def __init__(self, inner: Any, after: int, asked: bool) -> None:
        super().__init__(inner)
        self.left, self.asked = after, asked

    def step(self, *arguments: Any, **handed: Any) -> Any:
        self.left -= 1
        if self.left < 0 and not self.asked:
            raise Stops
        done = super().step(*arguments, **handed)
        if self.left < 0:
            raise Stops
        return done


def interrupted(
    bench: Bench,
    after: int,
    *,
    asked: bool = False,
    killed: bool = False,
    then: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A training that dies between two steps, or after an answer, and its continuation, with other options.

    One that is killed had no time to write its checkpoint, and has that of its first step.
    """
    method, checkpoint = options.pop("method", dp_sgd), bench.folder / "run.pt"
    first = b""

    class Kept(Dying):
        def step(self, *arguments: Any, **handed: Any) -> Any:
            nonlocal first
            first = first or (checkpoint.read_bytes() if checkpoint.exists() else b"")
            return super().step(*arguments, **handed)

    with pytest.raises(Stops):
        bench.train(method=Kept(method, after, asked), checkpoint=checkpoint, **options)
    if killed:
        checkpoint.write_bytes(first)
    lives = Kept(method, STEPS + 1, asked)
    return bench.train(method=lives, checkpoint=checkpoint, **(options | (then or {})))


def planned(run: Run) -> list[int]:
    return [line["times_planned"] for line in run.statement["mechanisms"]]


def test_steps_that_ask_nothing_are_not_paid_for(bench: Bench) -> None:
    run = bench.train(method=MirrorDescent(decay_steps=5, public_batch=10))
    assert run.steps_taken == STEPS
    assert bench.counted() == planned(run) == [5]
    assert run.config["method"] == "MirrorDescent"
    assert run.config["method_options"]["decay_steps"] == 5
    assert run.config["method_options"]["method"]["name"] == "dp_sgd"


def test_a_mixture_that_was_interrupted_asks_for_what_is_left(bench: Bench) -> None:
    run = interrupted(bench, 3, method=MirrorDescent(decay_steps=5, public_batch=10))
    assert (run.steps_taken, run.steps_lost) == (STEPS, 0)
    assert bench.counted() == planned(run) == [5]


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


def test_iterates_of_another_training_in_the_folder_are_not_mixed_in(bench: Bench) -> None:
    bench.train(checkpoint=bench.folder / "run.pt", keep_last=STEPS, steps=8)
    (bench.folder / "run.pt").unlink()
    run = interrupted(bench, 6, name="another", then={"keep_last": STEPS})
    assert run.iterates is not None
    assert run.iterates.steps == [7, 8, 9, 10, 11, 12]


def test_what_a_crash_shortens_keeps_its_last_iterates(bench: Bench) -> None:
    run = interrupted(bench, 4, asked=True, killed=True, keep_last=4)
    assert (run.steps_taken, run.steps_lost) == (STEPS - 4, 4)
    assert run.iterates is not None
    assert run.iterates.steps == [5, 6, 7, 8]
    assert len(run.iterates) == 4


def test_iterates_of_lost_steps_are_gone(bench: Bench) -> None:
    """Nothing is left to ask, so no later step replaces them."""
    run = interrupted(bench, STEPS - 1, asked=True, killed=True, keep_last=STEPS)
    assert (run.steps_taken, run.steps_lost) == (1, STEPS - 1)
    assert run.iterates is not None
    assert run.iterates.steps == [1]
    (left,) = run.iterates
    assert all(torch.equal(left[n], run.weights[n]) for n in left)


@pytest.mark.parametrize(
    "method", [dp_sgd, partial(dope_sgd, public_batch=10), ShrunkOrigin(public_batch=10)], ids=["dp", "dope", "shrunk"]
)
def test_alignment_is_measured_in_every_step(bench: Bench, method: Any) -> None:
    torch.manual_seed(0)
    run = bench.train(method=method, alignment=True, private={"seed": NotPrivateSeed(1)})
    assert [entry[0] for entry in run.alignment] == list(range(1, STEPS + 1))
    assert all(-1 <= low <= cosine <= high <= 1 for _, cosine, low, high in run.alignment)
    assert "public_cosine" in run.metrics
    # The two sets are drawn alike, and the first steps are far from the optimum.
    first = [cosine for _, cosine, *_ in run.alignment[:3]]
    assert sum(first) / 3 > 0.2


def test_alignment_outlives_an_interruption(bench: Bench) -> None:
    run = interrupted(bench, 6, method=ShrunkOrigin(public_batch=10), alignment=True)
    assert [entry[0] for entry in run.alignment] == list(range(1, STEPS + 1))


def test_a_step_that_failed_after_its_answer_is_aligned_once(bench: Bench) -> None:
    run = interrupted(bench, 6, asked=True, method=ShrunkOrigin(public_batch=10), alignment=True, reserve=1)
    assert run.steps_lost == 1
    assert [entry[0] for entry in run.alignment] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("inner", [partial(dp_sgd, clip=0.5), partial(dope_sgd, clip=0.5)], ids=["dp", "dope"])
def test_alignment_by_hand_from_the_answers(bench: Bench, inner: Any, scaled: bool) -> None:
    found = []

    class Spying(Around):
        def step(self, state: Any, params: Any, public: Public, ask: Any, **handed: Any) -> Any:
            def spied(question: GradientMean) -> Any:
                answer, clip = ask(question), question.clip
                p = public.gradient(params) if clip.origin is None else clip.origin
                shift = answer * 0.0 if clip.origin is None else clip.origin
                if clip.scale is not None:
                    p, shift = clip.scale * p, clip.scale * shift
                found.append(cosine(answer + shift, p, NOISE * 0.5 / BATCH).tolist())
                return answer

            return super().step(state, params, public, spied, **handed)

    run = bench.train(method=Spying(AdaDPS(damping=0.1, method=inner) if scaled else inner), alignment=True)
    assert len(found) == STEPS
    assert [entry[1:] for entry in run.alignment] == [pytest.approx(entry, abs=2e-6) for entry in found]


class Wide(Bench):
    """With more public rows than alignment takes at once, and views of them."""

    augment: Any = None

    def parts(self, **private: Any) -> tuple[Private, Public, Objective]:
        torch.manual_seed(0)
        hidden, _, objective = super().parts(seed=NotPrivateSeed(7), **private)
        return hidden, Public(separable(700, seed=1), objective=objective, seed=5, augment=self.augment), objective


def noisy(batch: Any) -> Any:
    return batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]


@pytest.mark.parametrize("augment", [None, noisy], ids=["rows", "views"])
@pytest.mark.parametrize(
    "method", [MirrorDescent(decay_steps=5, public_batch=50), AdaDPS(public_batch=50)], ids=["mirror", "ada"]
)
def test_alignment_leaves_the_weights_as_they_were(tmp_path: Path, method: Any, augment: Any) -> None:
    weights = []
    for alignment in (False, True):
        (tmp_path / str(alignment)).mkdir()
        each = Wide(tmp_path / str(alignment))
        each.augment = augment
        weights.append(each.train(method=method, alignment=alignment).weights)
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_evaluation_leaves_a_frozen_part_in_eval_mode(tmp_path: Path) -> None:
    modes = []

    class Partly(Bench):
        def parts(self, **private: Any) -> tuple[Private, Public, Objective]:
            module = torch.nn.Sequential(torch.nn.Linear(5, 5).requires_grad_(False), torch.nn.Linear(5, 2))
            module[0].eval()
            hidden, public, objective = super().parts(**private)
            hidden.objective = public.objective = objective = Objective(module, cross_entropy)
            return hidden, public, objective

    bench = Partly(tmp_path)

    def step(*arguments: Any, **handed: Any) -> Any:
        modes.append([part.training for part in bench.model.modules()])
        return dp_sgd(*arguments, **handed)

    bench.train(method=step, evaluate_every=1, ema=True)
    modes.append([part.training for part in bench.model.modules()])
    assert modes == [[True, False, True]] * (STEPS + 1)


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
