"""One plan for the training and for what is asked afterwards: nothing is undercounted, also not after a crash.

`Bench` and `Stop` are those of the ready-made loop's own tests.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from sfumato import Budget, Gram, Histogram, Ledger, NoisyMean, Planned, Private, Public
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.data.samplers import FullBatch, Poisson
from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError
from sfumato.privacy import accounting, calibration
from sfumato.privacy.mechanisms import Adjacency, DiscreteLaplace, Gaussian, Mechanism
from sfumato.selection import NearPrivate, Released
from tests.test_training import BATCH, BUDGET, NOISE, STEPS, Bench, Recording, Stop, separable

EVERYONE = FullBatch(size=400)
LATER = (Planned(Gram, 8.0, EVERYONE), Planned(Histogram, 2.0, EVERYONE))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    torch.manual_seed(0)
    return Bench(tmp_path)


def gram(private: Private) -> torch.Tensor:
    answer = private.ask(Gram(lambda rows: rows[0].double(), 1.0, 5))
    assert isinstance(answer, torch.Tensor)
    return answer


def votes(private: Private) -> torch.Tensor:
    answer = private.ask(Histogram(lambda rows: rows[1], 2))
    assert isinstance(answer, torch.Tensor)
    return answer


def asked(bench: Bench) -> dict[str, int]:
    """What the ledger, opened anew, counts by question."""
    statement = Ledger(bench.folder / bench.ledger).account("people").statement()
    return {line.mechanism.question: line.answers for line in statement.asked}


def counts(gradients: int, gram: int, histogram: int) -> dict[str, int]:
    return {"GradientMean": gradients, "Gram": gram, "Histogram": histogram}


def oracle(noise: float, *, pca: float = 8.0, support: float = 2.0, times: int = STEPS, size: int = 400) -> float:
    """dp-accounting by itself, on the three mechanisms; not through ours."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    step = dp_event.PoissonSampledDpEvent(BATCH / size, dp_event.GaussianDpEvent(noise))
    accountant.compose(step, times)
    accountant.compose(dp_event.GaussianDpEvent(pca))
    accountant.compose(dp_event.DiscreteLaplaceDpEvent(1 / support, 1))
    return float(accountant.get_epsilon(BUDGET.delta))


# ------------------------------------------------------------------------------------------------ one composition


def test_the_noise_of_the_training_leaves_room_for_the_rest(bench: Bench) -> None:
    run = bench.train(budget=BUDGET, afterwards=LATER)
    noise = run.config["noise_multiplier"]
    total = oracle(noise)
    assert 0.995 * BUDGET.epsilon < total <= BUDGET.epsilon * 1.001
    assert run.statement["epsilon"] == pytest.approx(total, rel=2e-3)
    assert oracle(0.98 * noise) > BUDGET.epsilon  # and it is no more than that
    alone = Bench(bench.folder, ledger="alone.db").train(budget=BUDGET)
    assert alone.config["noise_multiplier"] < 0.99 * noise


def test_the_ledger_replays_to_the_same_epsilon(bench: Bench) -> None:
    bench.train(afterwards=LATER)
    gram(bench.private)
    votes(bench.private)
    bench.private.close()
    statement = Ledger(bench.folder / bench.ledger).account("people").statement()
    assert [line.mechanism.question for line in statement.asked] == ["GradientMean", "Gram", "Histogram"]
    assert [line.answers for line in statement.asked] == [STEPS, 1, 1]
    assert not any(line.open for line in statement.asked)
    mechanisms = [line.mechanism for line in statement.asked]
    replayed = accounting.epsilon(mechanisms, delta=BUDGET.delta, adjacency=Adjacency.ADD_REMOVE)
    assert statement.epsilon == replayed.epsilon
    assert statement.epsilon == pytest.approx(oracle(NOISE), rel=2e-3)
    assert "PLD" in statement.accountant


def test_what_does_not_fit_together_is_refused_before_anything_is_charged(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="extra costs epsilon="):
        bench.train(budget=BUDGET, afterwards=(Planned(Histogram, 0.1, EVERYONE),))
    with pytest.raises(BudgetExceeded):
        bench.train(noise=0.5, afterwards=(Planned(Gram, 0.5, EVERYONE),))
    assert asked(bench) == {}


def test_lines_of_gradients_and_of_other_sizes_are_refused(bench: Bench) -> None:
    from sfumato import GradientMean

    with pytest.raises(InvalidArgument, match="afterwards has a line of GradientMean"):
        bench.train(afterwards=(Planned(GradientMean, 1.0, EVERYONE),))
    with pytest.raises(InvalidArgument, match="declared size=400"):
        bench.train(afterwards=(Planned(Gram, 1.0, FullBatch(size=300)),))


def test_the_numbers_of_a_whole_pipeline() -> None:
    """At a total of (3.2, 1e-5), with DP-SGD worth 2.2 and PCA worth 0.5: added up, that leaves 0.5 for the support.

    Composed, it costs 2.69, and the support may have half that noise: continuous Laplace of scale 0.99. The discrete
    one that is drawn instead is a little dearer, and needs 1.035.
    """
    delta, everyone, batches = 1e-5, FullBatch(size=60_000), Poisson(size=60_000, batch_size=600)
    noise = calibration.noise_multiplier(
        epsilon=2.2, delta=delta, sampler=batches, steps=4000, adjacency=Adjacency.ADD_REMOVE
    )
    sgd = Mechanism(question="g", noise=Gaussian(noise), sampler=batches, times=4000)
    pca = Mechanism(question="p", noise=Gaussian(7.034), sampler=everyone)

    def ours(*support: Mechanism) -> float:
        return accounting.epsilon([sgd, pca, *support], delta=delta, adjacency=Adjacency.ADD_REMOVE).epsilon

    def theirs(support: dp_event.DpEvent) -> float:
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        accountant.compose(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(noise)), 4000)
        accountant.compose(dp_event.GaussianDpEvent(7.034))
        accountant.compose(support)
        return float(accountant.get_epsilon(delta))

    assert theirs(dp_event.LaplaceDpEvent(2.0)) == pytest.approx(2.69, abs=0.005)
    assert theirs(dp_event.LaplaceDpEvent(0.99)) == pytest.approx(3.2, abs=0.005)
    for scale, total in ((2.0, 2.713), (1.035, 3.2)):
        discrete = Mechanism(question="s", noise=DiscreteLaplace(scale), sampler=everyone)
        assert ours(discrete) == pytest.approx(total, abs=0.003)
        assert ours(discrete) == pytest.approx(theirs(dp_event.DiscreteLaplaceDpEvent(1 / scale, 1)), rel=2e-3)


# ------------------------------------------------------------------------------------------------ after the training


def test_the_plan_stays_open_and_close_gives_back_what_was_not_asked(bench: Bench) -> None:
    # A budget that the filter has room in, too, so that something can be given back.
    bench.budget = Budget(40.0, 1e-4)
    run = bench.train(afterwards=LATER)
    assert run.steps_taken == STEPS
    assert asked(bench) == counts(STEPS, 0, 0)
    before = bench.private.account.left()
    gram(bench.private)
    with pytest.raises(BudgetExceeded, match="no answer to 'Gram' left"):
        gram(bench.private)
    bench.private.close()
    assert asked(bench) == counts(STEPS, 1, 0)
    assert bench.private.account.left() > before  # the votes were not counted
    with pytest.raises(InvalidArgument, match="No plan covers Histogram"):
        votes(bench.private)
    bench.private.close()  # twice is once


def test_without_lines_a_training_still_closes_its_plan(bench: Bench) -> None:
    bench.train()
    statement = Ledger(bench.folder / bench.ledger).account("people").statement()
    assert not any(line.open for line in statement.asked)


def test_the_count_is_exact_when_the_training_ends(bench: Bench) -> None:
    """The ledger is written ahead in slabs; a crash after the training must not look like lost answers."""
    bench.train(afterwards=LATER, reserve=50)
    assert asked(bench)["GradientMean"] == STEPS


def test_progress_shows_the_cost_of_the_training_alone(bench: Bench) -> None:
    run = bench.train(afterwards=(Planned(Gram, 1.0, EVERYONE),), evaluate_every=1)
    shown = [entry["epsilon"] for entry in run.history]
    sampler = Poisson(size=400, batch_size=BATCH)
    alone = Mechanism(question="g", noise=Gaussian(NOISE), sampler=sampler, times=STEPS)
    exact = accounting.epsilon([alone], delta=BUDGET.delta, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert shown[-1] == pytest.approx(exact, rel=0.03)
    assert run.statement["epsilon"] > 2 * exact
    assert shown == sorted(shown)


# ------------------------------------------------------------------------------------------------ crashes


def test_a_crash_between_training_and_the_rest_loses_nothing(bench: Bench) -> None:
    file = bench.folder / "run.ckpt"
    first = bench.train(afterwards=LATER, checkpoint=file)
    weights = {n: p.clone() for n, p in bench.model.state_dict().items()}
    del bench.private  # the process died here

    again = bench.train(afterwards=LATER, checkpoint=file)
    assert (again.steps_taken, again.steps_lost) == (STEPS, 0)
    assert again.statement["epsilon"] == first.statement["epsilon"]
    assert all(torch.equal(p, weights[n]) for n, p in bench.model.state_dict().items())
    assert asked(bench) == counts(STEPS, 0, 0)
    gram(bench.private)
    del bench.private  # and here, between the two questions

    third = bench.train(afterwards=LATER, checkpoint=file)
    assert (third.steps_taken, third.steps_lost) == (STEPS, 0)
    with pytest.raises(BudgetExceeded, match="no answer to 'Gram' left"):
        gram(bench.private)  # it may have left the door
    votes(bench.private)
    assert asked(bench) == counts(STEPS, 1, 1)

    fourth = bench.train(afterwards=LATER, checkpoint=file)  # nothing is left: the plan ends
    assert fourth.steps_lost == 0
    assert not any(line.open for line in bench.private.statement().asked)
    with pytest.raises(LedgerError, match="is closed here"):
        votes(bench.private)


def test_a_crash_within_the_training_keeps_the_rest(bench: Bench) -> None:
    file = bench.folder / "run.ckpt"
    with pytest.raises(Stop):
        bench.train(afterwards=LATER, checkpoint=file, method=Recording(stop_at=6), reserve=2)
    counted = asked(bench)
    assert counted["GradientMean"] == 6
    assert counted["Gram"] == counted["Histogram"] == 0
    run = bench.train(afterwards=LATER, checkpoint=file, method=Recording(), reserve=2)
    assert (run.steps_taken, run.steps_lost) == (STEPS, 1)  # the step that was not whole
    assert asked(bench) == counts(STEPS + 1, 0, 0)
    gram(bench.private)
    votes(bench.private)
    assert asked(bench) == counts(STEPS + 1, 1, 1)


def test_answers_asked_afterwards_are_not_taken_for_steps(bench: Bench) -> None:
    """A training that lost answers has as many left as its own question has; those of others do not help it."""
    file = bench.folder / "run.ckpt"
    many = (Planned(Gram, 100.0, EVERYONE, 30),)
    with pytest.raises(Stop):
        bench.train(afterwards=many, checkpoint=file, method=Recording(stop_at=4))
    run = bench.train(afterwards=many, checkpoint=file, method=Recording())
    assert (run.steps_taken, run.steps_lost, run.steps_short) == (STEPS - 1, 1, 1)


def test_a_plan_is_continued_with_its_own_lines_only(bench: Bench) -> None:
    file = bench.folder / "run.ckpt"
    bench.train(afterwards=LATER, checkpoint=file)
    counted = asked(bench)
    for other in ((), LATER[:1], (Planned(Gram, 9.0, EVERYONE), LATER[1])):
        with pytest.raises(InvalidArgument, match=r"was planned with afterwards=Gram with Gaussian\(scale=8.0\), Hist"):
            bench.train(afterwards=other, checkpoint=file)
    assert asked(bench) == counted


# ------------------------------------------------------------------------------------------------ end to end


@pytest.mark.parametrize("total", [4.0])
def test_training_pca_and_support_spend_one_budget(bench: Bench, total: float) -> None:
    bench.budget = Budget(total, 1e-4)
    pool = Public(separable(200, seed=3)[0])
    near = NearPrivate(components=2)
    lines = near.lines(bench.parts()[0], pca=10.0, support=2.0)
    run = bench.train(budget=bench.budget, afterwards=lines, method=partial(dp_sgd, clip=1.0))
    chosen = near(Released(bench.model), pool, 10, bench.private.ask)
    assert len(chosen.unique()) == 10
    bench.private.close()
    statement: Any = bench.private.statement()
    assert statement.epsilon == pytest.approx(total, rel=2e-3)
    assert statement.epsilon <= total
    assert run.statement["epsilon"] == statement.epsilon
    assert asked(bench) == counts(STEPS, 1, 1)


def test_a_reservation_that_is_settled_is_still_paid_for(tmp_path: Path) -> None:
    """Settling writes what was taken; of a reservation, all of which may still be taken, that would be too little."""
    rows = torch.rand(100, 1)

    def door() -> Private:
        return Private(rows, name="c", size=100, ledger=tmp_path / "ledger.db", budget=Budget(1.0, 1e-5))

    first = door()
    plan = first.reserve(Planned(NoisyMean, 6.0, first.everyone()))
    spent = first.statement().epsilon
    assert spent > 0
    plan.settle()
    with plan.kept_open():
        pass
    assert first.statement().epsilon == spent
    second = door()
    whole = calibration.noise_multiplier(
        epsilon=1.0, delta=1e-5, sampler=second.everyone(), steps=1, adjacency=second.adjacency
    )
    with pytest.raises(BudgetExceeded):
        second.plan(Planned(NoisyMean, whole, second.everyone()))
    assert torch.isfinite(first.ask(NoisyMean(lambda part: part, bound=1.0))).all()
