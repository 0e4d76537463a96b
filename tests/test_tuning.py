"""Private hyper-parameter search: what it costs against independent formulas, and what a search may show."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from dp_accounting import dp_event, rdp
from torch import Tensor

from sfumato import Budget, Ledger, NoisyMean, NotPrivateSeed, Objective, Planned, Private, cross_entropy, train
from sfumato.data.samplers import FullBatch, Poisson
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting, calibration
from sfumato.privacy.accounting import Accountant
from sfumato.privacy.mechanisms import Adjacency, BestOf, DiscreteLaplace, Gaussian, Mechanism
from sfumato.privacy.repetitions import GEOMETRIC, LOGARITHMIC, POISSON, Repetitions
from sfumato.tuning import Candidate, Range, Trial, Tuned, candidates, race, search, search_cost, tune

AR = Adjacency.ADD_REMOVE
SAMPLER = Poisson(size=48000, batch_size=4096)
STEPS = Mechanism(question="GradientMean", noise=Gaussian(3.605), sampler=SAMPLER, times=352)
SHAPES = (LOGARITHMIC, 0.5, GEOMETRIC, POISSON)

# ------------------------------------------------------------------------------------------------ the law


def known_law(law: Repetitions) -> Callable[[int], float]:
    """From scipy, which has all of them in other words."""
    if law.shape == LOGARITHMIC:
        return lambda k: float(scipy.stats.logser.pmf(k, 1 - law.gamma))
    if law.shape == POISSON:
        return lambda k: float(scipy.stats.poisson.pmf(k, law.mean))
    full = scipy.stats.nbinom(law.shape, law.gamma)
    return lambda k: float(full.pmf(k) / (1 - full.pmf(0))) if k else 0.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0, 300.0])
def test_the_law_is_the_named_one_and_has_the_mean_that_was_asked_for(shape: float, mean: float) -> None:
    law = Repetitions(mean=mean, shape=shape)
    pmf = known_law(law)
    found = list(itertools.islice(law.probabilities(), 40000))
    for k, p in found[:50]:
        assert p == pytest.approx(pmf(k), rel=1e-6, abs=1e-300)
    assert math.fsum(p for _, p in found) == pytest.approx(1, abs=1e-6)
    assert math.fsum(k * p for k, p in found) == pytest.approx(mean, rel=1e-5)


def test_numbers_are_drawn_from_the_law() -> None:
    law = Repetitions(mean=4.0)
    rng, pmf, draws = np.random.default_rng(0), known_law(law), 4000
    counted = Counter(law.draw(rng) for _ in range(draws))
    bins = list(range(1, 12))
    observed = [*(counted[k] for k in bins), sum(n for k, n in counted.items() if k > bins[-1])]
    expected = [*(draws * pmf(k) for k in bins), draws * (1 - sum(map(pmf, bins)))]
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-6
    shifted = [draws * pmf(k + 1) for k in bins]
    assert scipy.stats.chisquare(observed, [*shifted, draws - sum(shifted)]).pvalue < 1e-9


def test_one_trial_is_one_trial() -> None:
    law = Repetitions(mean=1.0)
    assert {law.draw(np.random.default_rng(seed)) for seed in range(50)} == {1}
    assert law.at_most(0.999999) == 1


@pytest.mark.parametrize("wrong", [{"mean": 0.5}, {"mean": math.inf}, {"mean": 3.0, "shape": -0.1}])
def test_a_wrong_law_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=r"must"):
        Repetitions(**wrong)


# ------------------------------------------------------------------------------------------------ the cost


def best_of(law: Repetitions, *trials: tuple[Mechanism, ...]) -> Mechanism:
    return Mechanism(question="tune", noise=BestOf(1.0, repetitions=law, trials=trials), sampler=FullBatch(size=48000))


def theirs(mean: float, shape: float) -> float:
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 130))
    accountant = rdp.RdpAccountant(orders)
    step = dp_event.PoissonSampledDpEvent(SAMPLER.rate, dp_event.GaussianDpEvent(STEPS.noise.scale))
    accountant.compose(
        dp_event.RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(step, STEPS.times), mean=mean, shape=shape)
    )
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_is_that_of_dp_accounting(shape: float) -> None:
    found = accounting.epsilon([best_of(Repetitions(mean=10.0, shape=shape), (STEPS,))], delta=1e-5, adjacency=AR)
    assert found.epsilon == pytest.approx(theirs(10.0, shape), rel=1e-3)
    assert found.accountant.startswith("RDP")


def test_the_published_numbers() -> None:
    """Base epsilon 2, ten trials in the mean: 3.37 logarithmic, 4.0 geometric, 4.5 Poisson."""
    one = Candidate(options={}, asks=(STEPS,))
    for shape, expected in ((LOGARITHMIC, 3.37), (GEOMETRIC, 4.0), (POISSON, 4.5)):
        cost = search_cost([one], Repetitions(mean=10.0, shape=shape), delta=1e-5, adjacency=AR)
        assert (round(cost.trial, 2), cost.epsilon) == (2.0, pytest.approx(expected, abs=0.035))
    assert search_cost([one], Repetitions(mean=1.0), delta=1e-5, adjacency=AR).epsilon == pytest.approx(2.0, abs=5e-3)


@pytest.mark.parametrize(
    ("law", "shape"), [("logarithmic", LOGARITHMIC), ("geometric", GEOMETRIC), ("Poisson", POISSON)]
)
def test_the_table_of_the_page(law: str, shape: float) -> None:
    page = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text()
    (line,) = re.findall(rf"^\| {law} \|(.*)\|$", page, re.MULTILINE)
    *costs, half, most, single = [cell.split()[0] for cell in line.split("|")]
    one = Candidate(options={}, asks=(STEPS,))
    for mean, stated in zip((3.0, 10.0, 30.0, 100.0), costs, strict=True):
        found = search_cost([one], Repetitions(mean=mean, shape=shape), delta=1e-5, adjacency=AR).epsilon
        assert float(stated) == pytest.approx(found, rel=3e-3)
    repetitions = Repetitions(mean=10.0, shape=shape)
    assert (int(half), int(most)) == (repetitions.at_most(0.5), repetitions.at_most(0.99))
    once = math.fsum(p for k, p in itertools.islice(repetitions.probabilities(), 3) if k == 1)
    assert int(single) == round(100 * once)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon0", [0.3, 2.0])
def test_the_bound_holds_for_a_search_that_can_be_computed_exactly(shape: float, epsilon0: float) -> None:
    """Randomised response, where 1 is better than 0: the best is 1 unless all K answers were 0."""
    law = Repetitions(mean=5.0, shape=shape)
    yes = 1 / (1 + math.exp(-epsilon0))
    pmf = list(itertools.islice(law.probabilities(), 5000))
    nothing = math.fsum(p for k, p in pmf if k == 0)

    def outcomes(p: float) -> tuple[float, float, float]:
        all_zero = math.fsum(q * (1 - p) ** k for k, q in pmf)
        return nothing, all_zero - nothing, 1 - all_zero

    trial = Mechanism(question="vote", noise=DiscreteLaplace(1 / epsilon0), sampler=FullBatch(size=48000))
    orders = [1.5, 2.0, 4.0, 16.0]
    bound = accounting.renyi([best_of(law, (trial,))], orders, AR)
    for with_it, without in ((outcomes(yes), outcomes(1 - yes)), (outcomes(1 - yes), outcomes(yes))):
        for order, most in zip(orders, bound, strict=True):
            terms = [a**order * b ** (1 - order) for a, b in zip(with_it, without, strict=True) if a > 0]
            assert math.log(math.fsum(terms)) / (order - 1) <= most


def test_a_search_costs_what_its_dearest_candidate_would_at_every_order() -> None:
    many = Mechanism(question="GradientMean", noise=Gaussian(8.0), sampler=SAMPLER, times=2500)
    few = Mechanism(question="GradientMean", noise=Gaussian(1.6), sampler=SAMPLER, times=20)
    law, orders = Repetitions(mean=10.0), [1.5, 3.0, 8.0, 40.0]
    both, *alone = (
        accounting.renyi([best_of(law, *kinds)], orders, AR) for kinds in (((many,), (few,)), ((many,),), ((few,),))
    )
    # The choosing term is at most that of the largest curve, and the curves themselves are compared order by order.
    assert all(both >= np.maximum(*alone) - 1e-12)
    curves = np.array([accounting.renyi([kind], orders, AR) for kind in (many, few)])
    assert {True, False} == set(curves[0] < curves[1]), "neither dominates: the test needs that"


def test_a_search_is_accounted_by_renyi_only_and_not_on_a_sample() -> None:
    one = best_of(Repetitions(mean=2.0), (STEPS,))
    with pytest.raises(UnsupportedAccounting, match="RDP"):
        accounting.epsilon([one], delta=1e-5, adjacency=AR, accountant=Accountant.PLD)
    sampled = Mechanism(question="tune", noise=one.noise, sampler=SAMPLER)
    with pytest.raises(UnsupportedAccounting, match="FullBatch"):
        accounting.epsilon([sampled], delta=1e-5, adjacency=AR)


def test_trials_that_are_searches_or_ask_nothing_are_refused() -> None:
    law = Repetitions(mean=2.0)
    for trials in ((), ((),), ((best_of(law, (STEPS,)),),)):
        with pytest.raises(InvalidArgument, match="trials"):
            BestOf(1.0, repetitions=law, trials=trials)


# ------------------------------------------------------------------------------------------------ candidates


def test_candidates_are_a_grid_or_different_points_of_the_space() -> None:
    space: dict[str, Any] = {"rate": Range(low=0.01, high=10, log=True), "steps": Range(low=5, high=9, whole=True)}
    found = candidates(space, 20, seed=3)
    assert found == candidates(space, 20, seed=3) != candidates(space, 20, seed=4)
    assert len(found) == 20
    assert all(0.01 <= point["rate"] <= 10 and point["steps"] in range(5, 10) for point in found)
    assert 5 <= sum(point["rate"] < 0.3 for point in found) <= 15, "even in the logarithm"
    assert len(candidates({"clip": [1, 2, 3], "views": [1, 4]}, 6)) == 6
    assert len({point["clip"] for point in candidates({"clip": list(range(50))}, 10)}) == 10


def test_a_race_keeps_the_best_and_asks_less_and_less() -> None:
    asked: Counter[float] = Counter()

    def score(point: int, effort: float) -> float:
        asked[effort] += 1
        return math.nan if point == 7 else -abs(point - 11)

    assert race(range(16), score, keep=4, efforts=(0.1, 1.0)) == [11, 10, 12, 9]
    assert asked == {0.1: 16, 1.0: 8}
    with pytest.raises(InvalidArgument, match="keep=5"):
        race([1, 2], score, keep=5)


# ------------------------------------------------------------------------------------------------ the search

SIZE = 400
MEAN = Mechanism(question="NoisyMean", noise=Gaussian(20.0), sampler=FullBatch(size=SIZE))
RATES = [Candidate(options={"rate": rate}, asks=(MEAN,)) for rate in (1, 2, 3)]
LAW = Repetitions(mean=6.0)


def people(ledger: Any = None, *, seed: int | None = 0, epsilon: float = 8.0) -> Private:
    return Private(
        torch.linspace(0, 1, SIZE)[:, None],
        name="people",
        size=SIZE,
        ledger=ledger,
        budget=Budget(epsilon, 1e-4),
        seed=None if seed is None else NotPrivateSeed(seed),
    )


def ask_once(options: Any, private: Private) -> Trial[float]:
    mean = private.ask(NoisyMean(lambda rows: rows, bound=1.0), noise=20.0, sampler=private.everyone())
    return Trial(score=float(mean), outcome=float(mean))


def test_the_best_trial_is_the_one_that_is_returned() -> None:
    for seed in range(5):
        seen: list[tuple[int, float]] = []

        def trial(options: Any, private: Private, seen: Any = seen) -> Trial[float]:
            made = ask_once(options, private)
            score = math.nan if options["rate"] == 2 else made.score
            seen.append((options["rate"], score))
            return Trial(score=score, outcome=made.outcome)

        found = tune(RATES, private=people(seed=seed), trial=trial, repetitions=LAW)
        assert isinstance(found, Tuned)
        real = [pair for pair in seen if not math.isnan(pair[1])]
        if real:
            assert (found.options["rate"], found.score) == max(real, key=lambda pair: pair[1])
        assert not {"trials", "count", "k"} & set(vars(found)), "how many there were is not told"


def test_the_number_of_trials_is_random_and_candidates_are_drawn_evenly() -> None:
    numbers, rates = [], Counter[int]()
    for seed in range(25):
        seen: list[int] = []

        def trial(options: Any, private: Private, seen: Any = seen) -> Trial[None]:
            seen.append(options["rate"])
            return Trial(score=0.0, outcome=None)

        tune(RATES, private=people(seed=seed), trial=trial, repetitions=LAW)
        numbers.append(len(seen))
        rates.update(seen)
    assert len(set(numbers)) > 3
    assert scipy.stats.chisquare([rates[r] for r in (1, 2, 3)]).pvalue > 1e-6
    pmf = known_law(LAW)
    assert scipy.stats.binomtest(numbers.count(1), len(numbers), pmf(1)).pvalue > 1e-6


def test_the_ledger_is_charged_before_the_first_trial_and_never_again(tmp_path: Path) -> None:
    path, states = tmp_path / "ledger.db", []
    private = people(path, seed=None)

    def trial(options: Any, private: Private) -> Trial[None]:
        states.append(path.read_bytes())
        ask_once(options, private)
        return Trial(score=0.0, outcome=None)

    found = tune(RATES, private=private, trial=trial, repetitions=LAW)
    assert found is not None
    assert {*states, path.read_bytes()} == {states[0]}, "a later write would tell when it ended, hence how many ran"
    (asked,) = private.statement().asked
    assert (asked.answers, asked.open, asked.mechanism) == (1, False, search(RATES, LAW))
    assert private.statement().epsilon == pytest.approx(found.cost.epsilon)
    assert "secret random number of trials, 6 in the mean" in private.statement().to_text()


def test_a_search_that_fails_stays_charged_and_another_is_charged_again(tmp_path: Path) -> None:
    private = people(tmp_path / "ledger.db", epsilon=2.0)

    def fails(options: Any, private: Private) -> Trial[None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(RATES, private=private, trial=fails, repetitions=LAW)
    once = private.account.epsilon_spent()
    assert once > 0
    assert [line.answers for line in private.statement().asked] == [1]
    again = people(tmp_path / "ledger.db", epsilon=2.0)
    tune(RATES, private=again, trial=ask_once, repetitions=LAW)
    assert again.account.epsilon_spent() > 1.5 * once
    assert [line.answers for line in again.statement().asked] == [1, 1]


def test_what_does_not_fit_is_refused_before_any_trial() -> None:
    called = []
    with pytest.raises(BudgetExceeded):
        tune(RATES, private=people(epsilon=0.2), trial=lambda o, p: called.append(o), repetitions=LAW)  # type: ignore[arg-type, return-value, func-returns-value]
    assert not called


@pytest.mark.parametrize(
    "ask",
    [
        lambda private: [ask_once({}, private), ask_once({}, private)],
        lambda private: private.ask(NoisyMean(lambda r: r, bound=1.0), noise=19.0, sampler=private.everyone()),
        lambda private: private.plan(Planned(NoisyMean, 20.0, private.poisson(40), 1)),
        lambda private: private.plan(Planned(NoisyMean, 20.0, private.everyone(), 2)),
    ],
    ids=["twice", "less-noise", "other-sample", "more"],
)
def test_a_trial_gets_no_more_than_it_declared(ask: Any) -> None:
    def trial(options: Any, private: Private) -> Trial[None]:
        ask(private)
        return Trial(score=0.0, outcome=None)

    with pytest.raises(InvalidArgument, match="declare all that a trial asks"):
        tune(RATES, private=people(), trial=trial, repetitions=LAW)


def test_public_generators_do_not_count_the_trials() -> None:
    def trial(options: Any, private: Private) -> Trial[None]:
        torch.rand(3), np.random.rand(), ask_once(options, private)  # noqa: NPY002
        return Trial(score=0.0, outcome=None)

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[2]  # noqa: NPY002
    tune(RATES, private=people(seed=None), trial=trial, repetitions=LAW)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[2] == before[1]  # noqa: NPY002


def test_poisson_may_give_no_trial_and_is_charged_all_the_same() -> None:
    law = Repetitions(mean=1.0, shape=POISSON)
    found = []
    for seed in range(15):
        private = people(seed=seed)
        found.append(tune(RATES, private=private, trial=ask_once, repetitions=law) is None)
        assert [line.answers for line in private.statement().asked] == [1]
    assert scipy.stats.binomtest(sum(found), len(found), math.exp(-1)).pvalue > 1e-6


def separable(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] > inputs[:, 1]).long()


def turned_away() -> torch.nn.Linear:
    """A model that is always wrong, so that not to train it is not to be lucky."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]))
        model.bias.zero_()
    return model


def test_trainings_are_tuned_by_a_private_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """End to end: a useless learning rate loses against a good one, and the run carries the ledger's statement."""
    size, steps = 2000, 10
    private = Private(
        separable(size, 0), name="clinic", size=size, ledger=Ledger(tmp_path / "l.db"), budget=Budget(8.0, 1e-5)
    )
    score = Mechanism(question="NoisyMean", noise=Gaussian(10.0), sampler=private.everyone())
    sampler = private.poisson(500)
    noise = calibration.trial_noise_multiplier(
        epsilon=2.0, delta=1e-5, sampler=sampler, steps=steps, adjacency=AR, extra=[score]
    )
    asks = (Mechanism(question="GradientMean", noise=Gaussian(noise), sampler=sampler, times=steps), score)
    options = [Candidate(options={"rate": rate}, asks=asks) for rate in (1e-6, 4.0)]

    tried = set()

    def trial(options: Any, private: Private) -> Trial[Any]:
        tried.add(options["rate"])
        objective = private.objective
        assert objective is not None

        def hits(batch: Any) -> Tensor:
            with torch.no_grad():
                return (objective.module(batch[0]).argmax(1) == batch[1]).double()[:, None]

        run = train(
            objective.module,
            private=private,
            steps=steps,
            sampler=sampler,
            noise=noise,
            afterwards=[Planned(NoisyMean, 10.0, private.everyone(), 1)],
            optimizer=lambda params: torch.optim.SGD(params, lr=options["rate"]),
            progress=False,
        )
        return Trial(score=float(private.ask(NoisyMean(hits, bound=1.0))), outcome=run)

    found = tune(
        options,
        private=private,
        trial=trial,
        objective=lambda options: Objective(turned_away(), cross_entropy),
        repetitions=Repetitions(mean=5.0, shape=8.0),
    )
    assert found is not None
    assert found.options["rate"] == max(tried)  # almost surely 4.0, but the noise and the number are secret
    if 4.0 in tried:
        assert found.score > 0.55  # where the other has next to 0
        inputs, labels = separable(500, 1)
        guesses = (inputs @ found.outcome.weights["weight"].T + found.outcome.weights["bias"]).argmax(1)
        assert (guesses == labels).double().mean() > 0.55
    assert found.outcome.statement["epsilon"] == pytest.approx(found.cost.epsilon) == private.statement().epsilon
    assert found.cost.trial <= 2.0 < found.cost.epsilon
    assert capsys.readouterr() == ("", "")
