"""What a search must not tell, the place of the best trial and how many there were; and laws at the edge of numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from sfumato import Budget, NoisyMean, Objective, Planned, Private, Run, cross_entropy, train
from sfumato.data.samplers import FullBatch
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy.mechanisms import Gaussian, Mechanism
from sfumato.privacy.repetitions import POISSON, Repetitions
from sfumato.tuning import Candidate, Trial, Tuned, tune

SIZE = 400
MEAN = Mechanism(question="NoisyMean", noise=Gaussian(20.0), sampler=FullBatch(size=SIZE))
STEPS = Mechanism(question="GradientMean", noise=Gaussian(20.0), sampler=FullBatch(size=SIZE), times=2)
MANY = Repetitions(mean=20.0, shape=1000.0)  # fewer than four once in a million searches
QUESTION = NoisyMean(lambda batch: batch[0][:, :1], bound=1.0)


def people(ledger: Any = None) -> Private:
    inputs = torch.rand(SIZE, 3, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > inputs[:, 1]).long()
    return Private((inputs, labels), name="people", size=SIZE, ledger=ledger, budget=Budget(50.0, 1e-4))


def searched(private: Private, trial: Any, asks: Mechanism = MEAN) -> Tuned[Any]:
    found = tune(
        [Candidate(options={}, asks=(asks,))],
        private=private,
        trial=trial,
        repetitions=MANY,
        objective=lambda options: Objective(torch.nn.Linear(3, 2), cross_entropy),
    )
    assert found is not None
    return found


def trained(private: Private, **options: Any) -> Run:
    assert private.objective is not None
    module = private.objective.module
    return train(module, private=private, steps=2, sampler=STEPS.sampler, noise=20.0, progress=False, **options)


@pytest.mark.parametrize("packed", [lambda run: run, lambda run: {"run": run}, lambda run: [(1, run)]])
def test_a_run_states_what_was_paid_and_not_its_place_or_time_however_it_is_packed(packed: Any) -> None:
    private, calls = people(), itertools.count(1)

    def trial(options: Any, lent: Private) -> Trial[Any]:
        place = next(calls)
        return Trial(score=place if place <= 4 else 0.0, outcome=packed(trained(lent)))

    found = searched(private, trial, STEPS)
    (run,) = [leaf for leaf in torch.utils._pytree.tree_leaves(found.outcome) if isinstance(leaf, Run)]
    assert run.statement == private.statement().to_json()
    assert run.statement_text == private.statement().to_text()
    assert [line["epsilon"] for line in run.history] == [found.cost.epsilon] * len(run.history)
    assert run.seconds == 0.0, "the first trial is slower than the others"


def test_an_error_does_not_quote_its_place() -> None:
    said = []
    for failing in (1, 4):
        calls = itertools.count(1)

        def trial(options: Any, lent: Private, calls: Any = calls, failing: int = failing) -> Trial[None]:
            plan = lent.plan(Planned(NoisyMean, 20.0, lent.everyone(), 1))
            lent.ask(QUESTION)
            assert (plan.id, lent.account._id) == (1, 1)
            if next(calls) == failing:
                lent.ask(QUESTION)
            return Trial(score=0.0, outcome=None)

        with pytest.raises(BudgetExceeded) as error:
            searched(people(), trial)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("reserved", [True, False])
def test_a_door_that_was_kept_answers_nothing_after_its_trial(reserved: bool) -> None:
    kept: list[Private] = []

    def trial(options: Any, lent: Private) -> Trial[None]:
        if reserved:
            lent.plan(Planned(NoisyMean, 20.0, lent.everyone(), 1))
        kept.append(lent)
        return Trial(score=0.0, outcome=None)

    searched(people(), trial)
    for door in kept:
        with pytest.raises(Exception, match="closed" if reserved else "declared 0"):
            door.ask(QUESTION) if reserved else door.ask(QUESTION, noise=20.0, sampler=door.everyone())


def test_a_trial_cannot_keep_a_checkpoint_and_fails_at_the_first_one(tmp_path: Path) -> None:
    calls = []

    def trial(options: Any, lent: Private) -> Trial[Any]:
        calls.append(1)
        return Trial(score=0.0, outcome=trained(lent, checkpoint=tmp_path / "c.pt"))

    with pytest.raises(InvalidArgument, match="leave the checkpoint out"):
        searched(people(), trial, STEPS)
    assert len(calls) == 1
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize("mean", [600.0, 730.0, 745.0, 1500.0])
def test_poisson_is_poisson_where_its_first_probability_is_no_number(mean: float) -> None:
    law = Repetitions(mean=mean, shape=POISSON)
    found = np.array([p for _, p in itertools.islice(law.probabilities(), 3000)])
    assert found == pytest.approx(scipy.stats.poisson.pmf(np.arange(3000), mean), rel=1e-9, abs=1e-200)
    rng = np.random.default_rng(0)
    draws = [law.draw(rng) for _ in range(60)]
    assert len(set(draws)) > 20
    assert scipy.stats.kstest(draws, scipy.stats.poisson(mean).cdf).pvalue > 1e-6


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1e12), (10.0, 1e16), (2000.0, 1e4), (1.0 + 1e-9, 0.5)])
def test_a_law_of_any_shape_has_the_mean_that_is_charged(mean: float, shape: float) -> None:
    found = list(itertools.islice(Repetitions(mean=mean, shape=shape).probabilities(), 6000))
    assert math.fsum(p for _, p in found) == pytest.approx(1, abs=1e-11)
    assert math.fsum(k * p for k, p in found) == pytest.approx(mean, rel=1e-11)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0, POISSON])
def test_what_is_cut_off_is_less_than_rounding(shape: float) -> None:
    law = Repetitions(mean=300.0, shape=shape)
    last = law.at_most(1 - 2**-53)
    beyond = itertools.islice(law.probabilities(), last, 3 * last)
    assert math.fsum(p for _, p in beyond) < 1e-12


def test_trials_cannot_ask_the_door_itself_which_would_count_them() -> None:
    private = people()
    private.plan(Planned(NoisyMean, 20.0, private.everyone(), 100))
    before = len(private.statement().asked)

    def trial(options: Any, lent: Private) -> Trial[None]:
        for verb in (
            lambda: private.ask(QUESTION),
            lambda: private.plan(Planned(NoisyMean, 20.0, private.everyone())),
            lambda: private.reserve(Planned(NoisyMean, 20.0, private.everyone())),
            lambda: private.resume("job"),
        ):
            with pytest.raises(InvalidArgument, match="set aside while a search runs"):
                verb()
        lent.plan(Planned(NoisyMean, 20.0, lent.everyone()))
        return Trial(score=float(lent.ask(QUESTION)), outcome=None)

    searched(private, trial)
    assert len(private.statement().asked) == before + 1
    private.ask(QUESTION)
