"""Lower bounds: against other people's intervals, right as often as they say, and strong enough to find a leak."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from sfumato.audit import (
    Rates,
    Verdict,
    best_of,
    clopper_pearson,
    epsilon_lower_bound,
    epsilon_of_mu,
    epsilon_one_run,
    guessed,
    mu_lower_bound,
    split,
)
from sfumato.audit.one_run import p_value
from sfumato.errors import InvalidArgument
from tests.statistics import FALSE_ALARM, binomial_p

RNG = np.random.default_rng(7)  # of made-up attacks; nothing here draws a mechanism's noise


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 10), (499, 1000), (1, 100_000)])
@pytest.mark.parametrize("confidence", [0.9, 0.999])
def test_intervals_are_scipys(successes: int, trials: int, confidence: float) -> None:
    theirs = stats.binomtest(successes, trials).proportion_ci(confidence, method="exact")
    assert clopper_pearson(successes, trials, confidence) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def randomised_response(epsilon: float, trials: int) -> Rates:
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    said = RNG.binomial(trials, truth), RNG.binomial(trials, 1 - truth)
    return Rates(true_positives=said[0], positives=trials, false_positives=said[1], negatives=trials)


def test_epsilon_is_overstated_as_rarely_as_promised_and_not_far_below() -> None:
    found = [epsilon_lower_bound(randomised_response(1.0, 2000), delta=0.0, confidence=0.9) for _ in range(400)]
    assert stats.binomtest(sum(e > 1 for e in found), 400, 0.1, alternative="greater").pvalue > FALSE_ALARM
    assert np.median(found) > 0.85
    # An attacker who says the opposite of what it believes proves as much.
    told = randomised_response(1.0, 2000)
    turned = Rates(
        true_positives=told.false_positives, positives=2000, false_positives=told.true_positives, negatives=2000
    )
    assert epsilon_lower_bound(turned, delta=0.0) == pytest.approx(epsilon_lower_bound(told, delta=0.0))


def test_delta_is_taken_off() -> None:
    always = Rates(true_positives=50, positives=1000, false_positives=0, negatives=1000)
    assert epsilon_lower_bound(always, delta=0.0) > 2
    assert epsilon_lower_bound(always, delta=0.1) == 0.0


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_mu_of_a_gaussian_is_found(mu: float) -> None:
    found = [mu_lower_bound(split(RNG.normal(0, 1, 2000), RNG.normal(mu, 1, 2000)), confidence=0.9) for _ in range(200)]
    assert stats.binomtest(sum(m > mu for m in found), 200, 0.1, alternative="greater").pvalue > FALSE_ALARM
    assert np.median(found) > 0.6 * mu
    nothing = [mu_lower_bound(split(RNG.normal(size=500), RNG.normal(size=500)), confidence=0.9) for _ in range(100)]
    assert sum(m > 0 for m in nothing) < 30


def test_the_threshold_does_not_see_the_trials_that_are_counted() -> None:
    outs, ins = RNG.normal(0, 1, 400), RNG.normal(2, 1, 400)
    rates = split(outs, ins)
    changed = split(np.concatenate([outs[:200], np.full(200, 9.0)]), ins)
    assert changed.true_positives == rates.true_positives
    assert changed.false_positives == 200
    with pytest.raises(InvalidArgument, match="too few"):
        split(outs[:1], ins)


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 1e-6), (4.0, 1e-5), (0.1, 1e-3)])
def test_epsilon_of_mu_is_dp_accountings(mu: float, delta: float) -> None:
    theirs = PLDAccountant().compose(GaussianDpEvent(1 / mu)).get_epsilon(delta)
    assert epsilon_of_mu(mu, delta) == pytest.approx(theirs, rel=2e-3, abs=2e-4)
    assert epsilon_of_mu(0.0, delta) == 0.0


@pytest.mark.parametrize(("guesses", "right"), [(10, 9), (100, 80), (1000, 600)])
def test_one_run_without_delta_is_an_exact_binomial_bound(guesses: int, right: int) -> None:
    q = stats.beta.ppf(0.05, right, guesses - right + 1)  # one-sided, of Clopper and Pearson
    expected = max(0.0, math.log(q / (1 - q)))
    assert epsilon_one_run(canaries=5000, guesses=guesses, right=right, delta=0.0) == pytest.approx(expected, abs=1e-5)
    weaker = epsilon_one_run(canaries=5000, guesses=guesses, right=right, delta=1e-6)
    assert 0 <= weaker < expected or weaker == expected == 0
    assert p_value(canaries=10, guesses=guesses, right=0, epsilon=1.0, delta=0.0) == 1.0


def test_one_run_holds_where_every_canary_is_told_of_with_epsilon_1() -> None:
    found = []
    for _ in range(200):
        included = RNG.random(400) < 0.5
        told = np.where(RNG.random(400) < math.e / (1 + math.e), included, ~included)
        found.append(best_of(told + RNG.uniform(0, 0.1, 400), included, delta=0.0)[0])
    assert stats.binomtest(sum(e > 1 for e in found), 200, 0.05, alternative="greater").pvalue > FALSE_ALARM
    assert np.median(found) > 0.5


def test_one_run_finds_a_training_without_noise() -> None:
    included = RNG.random(1000) < 0.5
    epsilon, guesses = best_of(included + RNG.normal(0, 0.05, 1000), included, delta=1e-5)
    assert epsilon > 4
    assert guesses >= 100
    assert abs(guessed(included.astype(float), included, 1000) - 1000) <= 2 * abs(500 - int(included.sum()))
    assert binomial_p(int(included.sum()), 1000, 0.5) > FALSE_ALARM


def test_a_verdict_is_json() -> None:
    right = Verdict(method="dp_sgd", audit="canary", claimed=2.0, lower_bound=1.3, confidence=0.999, trials=2000)
    assert right.holds
    assert right.to_json()["verdict"] == "holds"
    assert Verdict(**{**vars(right), "lower_bound": 2.1}).to_json()["verdict"] == "broken"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: clopper_pearson(1, 2, 1.0), "confidence=1.0"),
        (lambda: Rates(true_positives=3, positives=2, false_positives=0, negatives=1), "3 of 2"),
        (lambda: epsilon_of_mu(1.0, 0.0), "delta=0.0"),
        (lambda: epsilon_one_run(canaries=5, guesses=6, right=2, delta=0.0), "guesses=6"),
        (lambda: guessed(np.zeros(3), np.zeros(3, bool), 4), "guesses=4"),
    ],
)
def test_what_is_not_possible_is_refused(call: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        call()  # type: ignore[operator]
