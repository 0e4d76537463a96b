"""Accounting against closed forms, brute-force integration, published values, and its own table of what it supports."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from sfumato.data.samplers import FixedSize, FullBatch, Poisson, Sampler
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting
from sfumato.privacy.accounting import Accountant, event, renyi, renyi_budget, renyi_to_epsilon
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import (
    Adjacency,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Mechanism,
    Noise,
    SealedGaussian,
)

AR, RO = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
PLD, RDP = Accountant.PLD, Accountant.RDP
QUICK = settings(max_examples=6, deadline=None, derandomize=True)
ORDERS = (
    [1 + x / 10 for x in range(1, 100)]
    + list(range(11, 64))
    + [80, 100, 128, 160, 200, 256, 320, 400, 512, 640, 800, 1024]
)
FULL = FullBatch(size=1000)
SAMPLED = Poisson(size=1000, batch_size=10)
Array = npt.NDArray[np.float64]


def ask(noise: Noise, sampler: Sampler = FULL, times: int = 1, replace_factor: float = 2.0) -> Mechanism:
    return Mechanism(question="test", noise=noise, sampler=sampler, times=times, replace_factor=replace_factor)


def epsilon_of(mechanism: Mechanism, delta: float = 1e-5, adjacency: Adjacency = AR) -> float:
    return accounting.epsilon([mechanism], delta=delta, adjacency=adjacency).epsilon


def delta_of(mechanism: Mechanism, epsilon: float, adjacency: Adjacency = AR) -> float:
    return accounting.delta([mechanism], epsilon=epsilon, adjacency=adjacency).delta


def by_rdp(mechanism: Mechanism, delta: float, adjacency: Adjacency = AR) -> float:
    divergences = renyi([mechanism], ORDERS, adjacency)
    return min(renyi_to_epsilon(r, a, delta) for r, a in zip(divergences, ORDERS, strict=True))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The exact profile of the Gaussian mechanism that moves by mu standard deviations (Balle and Wang 2018)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def test_a_word_for_the_adjacency_is_charged_as_what_it_says() -> None:
    """It equals the constant, so that what is kept of one is found by the other: nothing but the truth may be kept."""
    for noise, words in ((3.1, ("replace-one", RO)), (3.2, (RO, "replace-one"))):
        plan, found = [ask(Gaussian(noise), times=3)], []
        for word in words:
            found.append(accounting.epsilon(plan, delta=1e-5, adjacency=word).epsilon)  # type: ignore[arg-type]
        assert found[0] == found[1] > 1.9 * epsilon_of(plan[0])
        assert (renyi(plan, [4.0], "replace-one") == renyi(plan, [4.0], RO)).all()  # type: ignore[arg-type]
        assert delta_of(plan[0], 1.0, "replace-one") == delta_of(plan[0], 1.0, RO)  # type: ignore[arg-type]
    by_word = accounting.epsilon(plan, delta=1e-5, adjacency=AR, accountant="PLD")  # type: ignore[arg-type]
    assert by_word == accounting.epsilon(plan, delta=1e-5, adjacency=AR, accountant=PLD)
    assert by_word.epsilon < accounting.epsilon(plan, delta=1e-5, adjacency=AR, accountant=RDP).epsilon
    for wrong in ({"adjacency": "replace"}, {"adjacency": AR, "accountant": "PRV"}):
        with pytest.raises(InvalidArgument, match="must be one of"):
            accounting.epsilon(plan, delta=1e-5, **wrong)  # type: ignore[arg-type]


# --- published values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch", "noise", "steps", "low", "high"),
    [(48000, 4096, 3.0, 350, 2.27317, 2.2755), (100, 1, 1.0, 5000, 4.2018, 4.206)],
)
def test_golden_pld(size: int, batch: int, noise: float, steps: int, low: float, high: float) -> None:
    cost = accounting.epsilon(
        [ask(Gaussian(noise), Poisson(size=size, batch_size=batch), steps)], delta=1e-5, adjacency=AR
    )
    assert low <= cost.epsilon <= high
    assert cost.accountant.startswith("PLD (dp-accounting 0.")


@pytest.mark.parametrize(
    ("size", "batch", "steps", "noise", "delta", "rdp", "pld"),
    [
        (46813, 250, 3745, 0.5, 1e-5, 15.72, 13.76),
        (46813, 250, 3745, 1.08, 1e-5, 1.712, 1.55),
        (48000, 500, 9600, 1.51, 1e-5, 3.508, 3.23),
        (48000, 500, 9600, 20.0, 1e-5, 0.182, 0.164),
        (670015, 500, 67001, 0.41, 1e-6, 25.93, 23.07),
        (670015, 500, 67001, 1.89, 1e-6, 0.478, 0.443),
    ],
)
def test_golden_mirror_descent(
    size: int, batch: int, steps: int, noise: float, delta: float, rdp: float, pld: float
) -> None:
    """The privacy of the PDA-DPMD experiments on WikiText-2, CIFAR-10 and EMNIST, all steps charged."""
    mechanism = ask(Gaussian(noise), Poisson(size=size, batch_size=batch), steps)
    assert by_rdp(mechanism, delta) == pytest.approx(rdp, rel=3e-3)
    assert epsilon_of(mechanism, delta) == pytest.approx(pld, rel=6e-3)


# PPSGD on adult-a: epsilon, batch, steps; noise by RDP of FixedSize RO, PLD of Poisson RO, PLD of Poisson AR.
TABLE_A = [
    (0.1, 64, 425, 8.37, 3.69, 2.06),
    (0.1, 260, 34, 9.81, 4.26, 2.53),
    (0.1, 260, 500, 36.2, 16.2, 8.23),
    (0.1, 1024, 500, 142, 63.9, 32.1),
    (0.5, 64, 2136, 4.27, 1.85, 1.18),
    (0.5, 260, 169, 4.97, 2.12, 1.40),
    (0.5, 260, 500, 8.11, 3.61, 2.02),
    (0.5, 1024, 500, 31.4, 14.2, 7.22),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("epsilon", "batch", "steps", "wor_ro", "poisson_ro", "poisson_ar"), TABLE_A)
def test_golden_table_a(
    epsilon: float, batch: int, steps: int, wor_ro: float, poisson_ro: float, poisson_ar: float
) -> None:
    """At the published noise, printed to three digits, the cost is the published epsilon."""
    fixed, poisson = FixedSize(size=26022, batch_size=batch), Poisson(size=26022, batch_size=batch)
    assert epsilon_of(ask(Gaussian(wor_ro), fixed, steps), 1e-6, RO) == pytest.approx(epsilon, rel=6e-3)
    assert epsilon_of(ask(Gaussian(poisson_ro), poisson, steps), 1e-6, RO) == pytest.approx(epsilon, rel=8e-3)
    assert epsilon_of(ask(Gaussian(poisson_ar), poisson, steps), 1e-6, AR) == pytest.approx(epsilon, rel=8e-3)


# --- oracles: the unsampled Gaussian ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", [AR, RO])
@pytest.mark.parametrize(
    ("noise", "times", "factor"), [(5.0, 1, 2.0), (1.0, 1, math.sqrt(2)), (20.0, 300, 1.0), (0.1, 1, 2.0)]
)
def test_full_batch_gaussian_is_exact(noise: float, times: int, factor: float, adjacency: Adjacency) -> None:
    mechanism = ask(Gaussian(noise), times=times, replace_factor=factor)
    mu = math.sqrt(times) / noise * (factor if adjacency is RO else 1.0)
    for delta in (1e-3, 1e-5, 1e-9):
        epsilon = epsilon_of(mechanism, delta, adjacency)
        assert gaussian_delta(mu, epsilon) <= delta
        assert gaussian_delta(mu, epsilon * 0.999) >= delta


def test_the_unit_trap() -> None:
    """dp-accounting's two accountants read the same event in two units under replace-one; ours agree with the truth."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    relation = NeighboringRelation.REPLACE_ONE
    rdp = RdpAccountant(neighboring_relation=relation).compose(GaussianDpEvent(5)).get_epsilon(1e-6)
    pld = PLDAccountant(relation, 1e-3).compose(GaussianDpEvent(5)).get_epsilon(1e-6)
    assert rdp == pytest.approx(0.90, abs=0.01)
    assert pld == pytest.approx(1.77, abs=0.01)

    mechanism = ask(Gaussian(5.0))
    ours = epsilon_of(mechanism, 1e-6, RO)
    assert ours == pytest.approx(1.77, abs=0.01)
    assert ours <= by_rdp(mechanism, 1e-6, RO) <= 1.12 * ours
    assert renyi([mechanism], [4.0], RO)[0] == pytest.approx(4.0 * 2**2 / (2 * 5**2))
    assert renyi([mechanism], [4.0], AR)[0] == pytest.approx(4.0 / (2 * 5**2))
    # A replace factor of 1 makes replace-one the same as add-remove.
    assert epsilon_of(ask(Gaussian(5.0), replace_factor=1.0), 1e-5, RO) == pytest.approx(
        epsilon_of(mechanism), rel=1e-3
    )


# --- oracles: one sampled step by brute force ------------------------------------------------------------------------

GRID = np.linspace(-36, 36, 100_001)


def density(q: float, shift: float, noise: float, x: Array = GRID) -> Array:
    def normal(at: float) -> Array:
        return np.asarray(np.exp(-0.5 * ((x - at) / noise) ** 2) / (noise * math.sqrt(2 * math.pi)))

    return (1 - q) * normal(0) + q * normal(shift)


def hockey_stick(p: Array, q: Array, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (GRID[1] - GRID[0]))


def divergence(p: Array, q: Array, order: float) -> float:
    return float(
        np.log(np.sum(np.exp(order * np.log(p) + (1 - order) * np.log(q))) * (GRID[1] - GRID[0])) / (order - 1)
    )


@pytest.mark.parametrize(("q", "noise"), [(0.1, 1.0), (0.5, 2.0), (0.01, 0.7)])
@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0])
def test_one_poisson_step_by_integration(q: float, noise: float, epsilon: float) -> None:
    mechanism = ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * q))
    without, plus, minus = density(q, 0, noise), density(q, 1, noise), density(q, -1, noise)
    add_remove = max(hockey_stick(plus, without, epsilon), hockey_stick(without, plus, epsilon))
    replace_one = hockey_stick(plus, minus, epsilon)
    assert add_remove * (1 - 1e-6) <= delta_of(mechanism, epsilon, AR) <= add_remove * 1.01 + 2e-12
    assert replace_one * (1 - 1e-6) <= delta_of(mechanism, epsilon, RO) <= replace_one * 1.01 + 2e-12


def test_no_pair_of_contributions_beats_the_one_charged_under_replace_one() -> None:
    q, noise = 0.2, 1.0
    mechanism = ask(Gaussian(noise), Poisson(size=10, batch_size=2), replace_factor=math.sqrt(2))
    x, y = np.meshgrid(np.linspace(-8, 8, 401), np.linspace(-8, 8, 401))
    for epsilon in (0.1, 0.5, 1.0):
        charged = delta_of(mechanism, epsilon, RO)
        for v, w in itertools.permutations(np.linspace(-1, 1, 5), 2):
            assert hockey_stick(density(q, v, noise), density(q, w, noise), epsilon) <= charged * (1 + 1e-6)
        # Orthogonal contributions, which only two dimensions have: N(0) N(0) mixed with N(1) N(0), or with N(0) N(1).
        rest_x, rest_y = density(0, 0, noise, x), density(0, 0, noise, y)
        p = (1 - q) * rest_x * rest_y + q * density(1, 1, noise, x) * rest_y
        r = (1 - q) * rest_x * rest_y + q * rest_x * density(1, 1, noise, y)
        assert np.maximum(p - math.exp(epsilon) * r, 0).sum() * 0.04**2 <= charged


@pytest.mark.parametrize(("q", "noise"), [(0.1, 1.0), (0.01, 2.0), (0.5, 4.0)])
def test_poisson_replace_one_divergence_is_bounded(q: float, noise: float) -> None:
    mechanism = ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * q))
    plus, minus = density(q, 1, noise), density(q, -1, noise)
    for order in (1.5, 2.0, 4.0, 8.0):
        truth, bound = divergence(plus, minus, order), renyi([mechanism], [order], RO)[0]
        assert truth <= bound
        add_remove = divergence(plus, density(q, 0, noise), order)
        assert add_remove * (1 - 1e-6) <= renyi([mechanism], [order], AR)[0]
        if float(order).is_integer():
            assert renyi([mechanism], [order], AR)[0] == pytest.approx(add_remove, rel=1e-5)
    assert bound <= 1.5 * truth or noise < 2  # nearly tight while 2 * order is small for the noise


def test_fixed_size_is_theorem_27() -> None:
    """Wang, Balle and Kasiviswanathan (2019), in 100 digits, with the replace-one sensitivity of 2 units."""
    q, noise, order = 260 / 26022, 9.81, 24
    with mpmath.workdps(100):
        sigma = mpmath.mpf(noise) / 2

        def difference(k: int) -> mpmath.mpf:
            terms = (
                (-1) ** i * mpmath.binomial(k, i) * mpmath.exp(mpmath.mpf(i) * (i - 1) / (2 * sigma**2))
                for i in range(k + 1)
            )
            return abs(mpmath.fsum(terms))

        total = mpmath.mpf(1)
        for j in range(2, order + 1):
            last = mpmath.exp(mpmath.mpf(j) * (j - 1) / (2 * sigma**2))
            pair = 4 * mpmath.sqrt(difference(2 * (j // 2)) * difference(2 * ((j + 1) // 2)))
            if j == 2:
                pair = 4 * mpmath.expm1(1 / sigma**2)
            total += mpmath.mpf(q) ** j * mpmath.binomial(order, j) * min(pair, 2 * last)
        theorem = float(mpmath.log(total) / (order - 1))
    ours = renyi([ask(Gaussian(noise), FixedSize(size=26022, batch_size=260))], [order], RO)[0]
    assert theorem <= ours <= theorem * (1 + 1e-6)


# --- oracles: discrete noise, in integers, whatever the unit and the dimension ---------------------------------------


def worst_delta(pmf: Callable[[npt.NDArray[np.int64]], Array], move: Sequence[int], epsilon: float) -> float:
    """Hockey stick between independent integer noises and the same moved by an integer vector."""
    k = np.arange(-60, 61)
    p, q = np.ones(1), np.ones(1)
    for step in move:
        p, q = np.outer(p, pmf(k)).ravel(), np.outer(q, pmf(k - step)).ravel()
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() / p.sum())


@pytest.mark.parametrize("adjacency", [AR, RO])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 1.9])
@pytest.mark.parametrize(
    ("unit", "added", "replaced"), [(1, [(1,)], [(2,), (1, -1)]), (3, [(3,), (1, 2)], [(6,), (4, -2), (3, -3)])]
)
def test_discrete_laplace_is_bounded_in_every_unit(
    unit: int, added: list[tuple[int, ...]], replaced: list[tuple[int, ...]], epsilon: float, adjacency: Adjacency
) -> None:
    scale = 1.0
    charged = delta_of(ask(DiscreteLaplace(scale)), epsilon, adjacency)
    truths = [
        worst_delta(lambda k: np.exp(-np.abs(k) / (scale * unit)), move, epsilon)
        for move in (added if adjacency is AR else replaced)
    ]
    assert max(truths) <= charged + 1e-9
    if unit == 1 and adjacency is AR:
        assert charged == pytest.approx(max(truths), rel=0.02, abs=1e-9)  # randomised response: nothing is lost


@pytest.mark.parametrize("adjacency", [AR, RO])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_discrete_gaussian_is_bounded(epsilon: float, adjacency: Adjacency) -> None:
    for scale in (0.5, 1.0, 3.0):
        charged = delta_of(ask(DiscreteGaussian(scale)), epsilon, adjacency)
        for move in [(1,)] if adjacency is AR else [(2,), (1, -1)]:
            assert worst_delta(lambda k: np.exp(-0.5 * (k / scale) ** 2), move, epsilon) <= charged  # noqa: B023


@pytest.mark.parametrize(("adjacency", "epsilon0"), [(AR, 0.25), (RO, 0.5)])
def test_repeated_discrete_laplace_is_the_binomial(adjacency: Adjacency, epsilon0: float) -> None:
    """Every repetition is charged: composed randomised response has a closed form (Kairouz, Oh and Viswanath 2015)."""
    times = 30
    mechanism = ask(DiscreteLaplace(4.0), times=times)
    losses = epsilon0 * (2 * np.arange(times + 1) - times)
    masses = binom.pmf(np.arange(times + 1), times, 1 / (1 + math.exp(-epsilon0)))
    for epsilon in (1.03, 2.2, 4.4):
        exact = float(np.sum(masses * np.maximum(0, -np.expm1(epsilon - losses))))
        assert exact <= delta_of(mechanism, epsilon, adjacency) <= exact * 1.1


def test_discrete_laplace_is_pure() -> None:
    """At epsilon0 = 1 / scale delta falls to the resolution, and no epsilon or order exceeds epsilon0 by much."""
    mechanism = ask(DiscreteLaplace(2.0))
    assert delta_of(mechanism, 0.5001) <= 1e-11
    assert epsilon_of(mechanism, 1e-9) == pytest.approx(0.5, rel=2e-3)
    assert epsilon_of(mechanism, 1e-9, RO) == pytest.approx(1.0, rel=2e-3)
    assert renyi([mechanism], [1e4], AR)[0] == pytest.approx(0.5, rel=1e-3)
    assert renyi([mechanism], [1e4], RO)[0] == pytest.approx(1.0, rel=1e-3)


# --- oracles: what states its own epsilon and delta -------------------------------------------------------------------


def stated(
    epsilon: float, delta: float, sampler: Sampler = FULL, times: int = 1, scale: float = 7.0, proven: Adjacency = RO
) -> Mechanism:
    noise = SealedGaussian(scale, epsilon=epsilon, delta=delta, adjacency=proven)
    return Mechanism(question="test", noise=noise, sampler=sampler, times=times, replace_factor=0.0)


@pytest.mark.parametrize("scale", [1e-3, 1e6])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.013, 1e-9), (0.7, 1e-6), (3.3, 1e-6), (40.0, 1e-3)])
def test_one_answer_costs_what_its_proof_states_whatever_the_noise(epsilon: float, delta: float, scale: float) -> None:
    for adjacency in (AR, RO):
        mechanism = stated(epsilon, delta, scale=scale, proven=adjacency)
        cost = accounting.epsilon([mechanism], delta=delta, adjacency=adjacency)
        assert cost.epsilon == pytest.approx(epsilon, rel=1e-9)
        assert cost.accountant.startswith("PLD")
        assert epsilon_of(mechanism, delta * 0.999, adjacency) == math.inf
        assert delta_of(mechanism, epsilon, adjacency) == pytest.approx(delta, rel=1e-6)
        assert delta_of(mechanism, epsilon * 1.5, adjacency) == pytest.approx(delta, rel=1e-6), "it never goes away"


def test_repeated_statements_are_the_optimal_composition() -> None:
    """Kairouz, Oh and Viswanath (2015): 1 - (1 - delta)^k (1 - delta of k randomised responses)."""
    times, each, fails = 30, 0.25, 1e-5
    losses = each * (2 * np.arange(times + 1) - times)
    masses = binom.pmf(np.arange(times + 1), times, 1 / (1 + math.exp(-each)))
    for epsilon in (1.03, 2.2, 4.4):
        responses = float(np.sum(masses * np.maximum(0, -np.expm1(epsilon - losses))))
        exact = 1 - (1 - fails) ** times * (1 - responses)
        assert exact <= delta_of(stated(each, fails, times=times), epsilon, RO) <= exact * 1.1


def test_a_statement_and_a_gaussian_compose_as_they_should() -> None:
    """With probability delta everything is known, else the loss is that of the Gaussian plus or minus epsilon."""
    each, fails, noise = 0.8, 1e-5, 5.0
    plan = [stated(each, fails), ask(Gaussian(noise))]
    mu, up = 2 / noise, 1 / (1 + math.exp(-each))
    for epsilon in (1.0, 2.0, 3.0):
        rest = up * gaussian_delta(mu, epsilon - each) + (1 - up) * gaussian_delta(mu, epsilon + each)
        exact = fails + (1 - fails) * rest
        got = accounting.delta(plan, epsilon=epsilon, adjacency=RO).delta
        assert exact * (1 - 1e-6) <= got <= exact * 1.01
    whole = accounting.epsilon(plan, delta=2e-5, adjacency=RO).epsilon
    assert whole <= each + epsilon_of(ask(Gaussian(noise)), 1e-5, RO), "never above the sum of the parts"


@pytest.mark.parametrize("each", [1e-2, 1e-4, 1e-7, 1e-300])
def test_a_tiny_statement_beside_a_gaussian_costs_next_to_nothing(each: float) -> None:
    """A grid that it lies on could have any number of points: what is used has no more than without it."""
    fails, noise = 1e-7, 2.0
    plan = [stated(each, fails), ask(Gaussian(noise))]
    alone = brentq(lambda epsilon: gaussian_delta(2 / noise, epsilon) - (1e-6 - fails), 1.0, 20.0)  # but for fails^2
    assert alone * (1 - 1e-6) <= accounting.epsilon(plan, delta=1e-6, adjacency=RO).epsilon <= (alone + each) * 1.001


@pytest.mark.parametrize(
    ("mechanism", "adjacency", "accountant", "remedy"),
    [
        (stated(1.0, 1e-6), RO, RDP, "first plan of its account, whose delta must be at least 1e-12"),
        (stated(1.0, 1e-6), AR, PLD, "about replace-one adjacency, so declare that"),
        (stated(1.0, 1e-6, proven=AR), RO, PLD, "about add-remove adjacency, so declare that"),
        (stated(1.0, 1e-6, SAMPLED), RO, PLD, "ask it of the FullBatch"),
        (stated(1.0, 1e-6, SAMPLED), RO, RDP, "ask it of the FullBatch"),
        (stated(1.0, 1e-6, FixedSize(size=1000, batch_size=10)), RO, RDP, "ask it of the FullBatch"),
    ],
)
def test_a_statement_is_never_taken_for_a_gaussian(
    mechanism: Mechanism, adjacency: Adjacency, accountant: Accountant, remedy: str
) -> None:
    with pytest.raises(UnsupportedAccounting, match=remedy) as caught:
        event(mechanism, adjacency, accountant)
    assert str(caught.value).startswith("question='test'")
    assert str(caught.value).count(".") == 1, "one sentence"
    with pytest.raises(UnsupportedAccounting, match=remedy):
        renyi([mechanism], [3.0], adjacency)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": Gaussian(3.0)}, "give the SealedGaussian of its proof"),
        ({"noise": DiscreteLaplace(3.0)}, "give the SealedGaussian of its proof"),
        ({"replace_factor": 2.0}, "test has none: use Gaussian"),
        ({"replace_factor": 1.0}, "test has none: use Gaussian"),
    ],
)
def test_statements_and_questions_without_a_bound_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(stated(1.0, 1e-6), **changes)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (501.0, 0.1), (math.nan, 0.1), (1.0, 1.0), (1.0, -0.1)])
def test_impossible_statements(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidArgument, match=r"(epsilon|delta)="):
        stated(epsilon, delta)


@pytest.mark.parametrize("mechanism", [stated(1.0, 1e-6), ask(Gaussian(3.0)), ask(DiscreteLaplace(2.0))])
def test_mechanisms_survive_storage(mechanism: Mechanism) -> None:
    kept = Mechanism.from_json(json.loads(json.dumps(mechanism.to_json())))
    assert kept == mechanism
    assert type(kept.noise) is type(mechanism.noise)
    assert epsilon_of(kept, 1e-5, RO) == epsilon_of(mechanism, 1e-5, RO)


# --- the table -------------------------------------------------------------------------------------------------------

SAMPLERS = {"full": FULL, "poisson": Poisson(size=1000, batch_size=10), "fixed": FixedSize(size=1000, batch_size=10)}
NOISES: list[type[Noise]] = [Gaussian, DiscreteGaussian, DiscreteLaplace]
SUPPORTED = {
    ("full", AR, Gaussian): {PLD, RDP},
    ("full", RO, Gaussian): {PLD, RDP},
    ("full", AR, DiscreteGaussian): {RDP},
    ("full", RO, DiscreteGaussian): {RDP},
    ("full", AR, DiscreteLaplace): {PLD, RDP},
    ("full", RO, DiscreteLaplace): {PLD, RDP},
    ("poisson", AR, Gaussian): {PLD, RDP},
    ("poisson", RO, Gaussian): {PLD, RDP},
    ("fixed", RO, Gaussian): {RDP},
}


@pytest.mark.parametrize("cell", list(itertools.product(SAMPLERS, (AR, RO), NOISES)))
def test_the_table_of_what_is_supported(cell: tuple[str, Adjacency, type[Noise]]) -> None:
    sampler, adjacency, noise = cell
    mechanism = ask(noise(4.0), SAMPLERS[sampler])
    supported = SUPPORTED.get(cell, set())
    if PLD in supported:
        event(mechanism, adjacency, PLD)
    else:
        with pytest.raises(UnsupportedAccounting, match=noise.__name__):
            event(mechanism, adjacency, PLD)
    if RDP in supported:
        assert renyi([mechanism], [3.0], adjacency)[0] > 0
    else:
        with pytest.raises(UnsupportedAccounting, match=r"question='test'.*: .*(FullBatch|Poisson)"):
            renyi([mechanism], [3.0], adjacency)
    if supported:
        cost = accounting.epsilon([mechanism], delta=1e-5, adjacency=adjacency)
        assert cost.accountant.startswith("PLD" if PLD in supported else "RDP")
        assert 0 < cost.epsilon < 3
        assert cost.epsilon <= by_rdp(mechanism, 1e-5, adjacency) * 1.001
        # Repetition is charged by both accountants alike.
        many = replace(mechanism, times=50)
        repeated = epsilon_of(many, 1e-5, adjacency)
        assert 0.6 * by_rdp(many, 1e-5, adjacency) <= repeated <= by_rdp(many, 1e-5, adjacency) * 1.001
    else:
        with pytest.raises(UnsupportedAccounting):
            accounting.epsilon([mechanism], delta=1e-5, adjacency=adjacency)


def test_one_mechanism_that_only_rdp_knows_takes_the_plan_to_rdp() -> None:
    train = ask(Gaussian(3.0), Poisson(size=48000, batch_size=4096), 100)
    count = ask(DiscreteGaussian(20.0))
    for adjacency in (AR, RO):
        together = accounting.epsilon([train, count], delta=1e-5, adjacency=adjacency)
        assert together.accountant.startswith("RDP")
        assert together.epsilon > epsilon_of(train, 1e-5, adjacency)


def test_a_pipeline_is_composed_once() -> None:
    """Training, a Gram matrix and a histogram in one plan cost less than the sum of their parts."""
    plan = [
        ask(Gaussian(3.346), Poisson(size=48000, batch_size=4096), 352),
        ask(Gaussian(7.03), replace_factor=math.sqrt(2)),
        ask(DiscreteLaplace(2.0)),
    ]
    for adjacency in (AR, RO):
        parts = [epsilon_of(mechanism, 1e-5, adjacency) for mechanism in plan]
        together = accounting.epsilon(plan, delta=1e-5, adjacency=adjacency)
        assert together.accountant.startswith("PLD")
        assert max(parts) < together.epsilon < 0.95 * sum(parts)


# --- properties ------------------------------------------------------------------------------------------------------

noises, rates, times = st.floats(0.8, 20.0), st.floats(0.005, 1.0), st.integers(1, 300)
adjacencies = st.sampled_from([AR, RO])


@QUICK
@given(noise=noises, rate=rates, times=times, adjacency=adjacencies)
def test_cost_is_monotone(noise: float, rate: float, times: int, adjacency: Adjacency) -> None:
    def cost(noise: float, rate: float, times: int) -> float:
        return epsilon_of(ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * rate), times), 1e-5, adjacency)

    here = cost(noise, rate, times)
    assert cost(noise * 1.1, rate, times) < here
    assert cost(noise, rate * 0.8, times) < here * 1.001
    assert cost(noise, rate, times + 1 + times // 10) > here * 0.999


@QUICK
@given(noise=noises, rate=rates, times=times, adjacency=adjacencies)
def test_pld_is_below_rdp_and_replace_one_above_add_remove(
    noise: float, rate: float, times: int, adjacency: Adjacency
) -> None:
    mechanism = ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * rate), times)
    assert epsilon_of(mechanism, 1e-5, adjacency) <= by_rdp(mechanism, 1e-5, adjacency) * 1.001
    assert epsilon_of(mechanism, 1e-5, AR) <= epsilon_of(mechanism, 1e-5, RO) * 1.001


@QUICK
@given(noise=noises, rate=rates, times=times, delta=st.floats(1e-8, 1e-3))
def test_epsilon_and_delta_are_inverse(noise: float, rate: float, times: int, delta: float) -> None:
    mechanism = ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * rate), times)
    epsilon = epsilon_of(mechanism, delta)
    if epsilon > 0:
        assert delta_of(mechanism, epsilon) == pytest.approx(delta, rel=0.05)


def test_epsilon_and_delta_are_inverse_by_rdp() -> None:
    for mechanism in (ask(Gaussian(3.0), FixedSize(size=1000, batch_size=10), 50), ask(DiscreteGaussian(3.0))):
        assert delta_of(mechanism, epsilon_of(mechanism, 1e-6, RO), RO) == pytest.approx(1e-6, rel=0.05)


@QUICK
@given(noise=noises, rate=rates, times=times, tolerance=st.floats(1e-3, 0.5))
def test_tolerance_only_overstates(noise: float, rate: float, times: int, tolerance: float) -> None:
    plan = [ask(Gaussian(noise), Poisson(size=1000, batch_size=1000 * rate), times)]
    coarse = accounting.epsilon(plan, delta=1e-5, adjacency=AR, tolerance=tolerance).epsilon
    assert coarse >= accounting.epsilon(plan, delta=1e-5, adjacency=AR).epsilon


def test_asking_twice_is_asking_two_times() -> None:
    once = ask(Gaussian(2.0), Poisson(size=1000, batch_size=10), 50)
    again = Mechanism(question="another name", noise=once.noise, sampler=once.sampler, times=70)
    together = ask(Gaussian(2.0), Poisson(size=1000, batch_size=10), 120)
    assert accounting.epsilon([once, again], delta=1e-5, adjacency=AR).epsilon == epsilon_of(together)
    np.testing.assert_allclose(renyi([once, again], [2.0, 9.0], AR), renyi([together], [2.0, 9.0], AR))


def test_nothing_costs_nothing() -> None:
    assert accounting.epsilon([], delta=1e-5, adjacency=AR).epsilon == 0
    assert renyi([], [2.0], AR)[0] == 0


# --- Rényi conversions -----------------------------------------------------------------------------------------------


def test_conversion_agrees_with_dp_accounting() -> None:
    from dp_accounting.rdp import compute_epsilon

    for order, rdp, delta in ((2.0, 1.0, 1e-5), (17.0, 0.3, 1e-6), (1.5, 4.0, 1e-2), (400.0, 0.01, 1e-9)):
        assert renyi_to_epsilon(rdp, order, delta) == pytest.approx(
            compute_epsilon([order], [rdp], delta)[0], rel=1e-12
        )


@QUICK
@given(order=st.floats(1.1, 500.0), epsilon=st.floats(0.01, 20.0), delta=st.floats(1e-10, 1e-2))
def test_renyi_budget_is_the_inverse(order: float, epsilon: float, delta: float) -> None:
    budget = renyi_budget(epsilon, delta, order)
    if budget >= 0:
        assert renyi_to_epsilon(budget, order, delta) == pytest.approx(epsilon, rel=1e-9)
    else:
        assert renyi_to_epsilon(0.0, order, delta) > epsilon


def test_a_low_order_is_unusable() -> None:
    assert renyi_budget(1.0, 1e-5, 2.0) < 0


def test_tiny_rates_do_not_round_to_free() -> None:
    mechanism = ask(Gaussian(1.0), Poisson(size=10**12, batch_size=10))
    assert np.all(renyi([mechanism], [1.1, 2.0, 8.0, 64.0], AR) > 0)
    assert np.all(renyi([mechanism], [1.1, 2.0, 8.0], AR) < 1e-10)


def test_orders_whose_series_does_not_converge_are_still_bounded() -> None:
    mechanism = ask(Gaussian(4.0), Poisson(size=10, batch_size=5))
    fractional = renyi([mechanism], [1.5, 2.5, 7.3], AR)
    assert np.all(fractional <= renyi([mechanism], [2, 3, 8], AR) * (1 + 1e-9))
    without, plus = density(0.5, 0, 4.0), density(0.5, 1, 4.0)
    for order, bound in zip((1.5, 2.5, 7.3), fractional, strict=True):
        assert divergence(plus, without, order) <= bound


def test_a_delta_below_the_resolution_of_pld_is_answered_by_rdp() -> None:
    cost = accounting.epsilon([ask(Gaussian(5.0))], delta=1e-20, adjacency=AR)
    assert cost.accountant.startswith("RDP")
    assert gaussian_delta(1 / 5, cost.epsilon) <= 1e-20


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_impossible_delta(delta: float) -> None:
    with pytest.raises(InvalidArgument, match="delta="):
        accounting.epsilon([ask(Gaussian(1.0))], delta=delta, adjacency=AR)


@pytest.mark.parametrize("epsilon", [-0.1, math.inf, math.nan])
def test_impossible_epsilon(epsilon: float) -> None:
    with pytest.raises(InvalidArgument, match="epsilon="):
        accounting.delta([ask(Gaussian(1.0))], epsilon=epsilon, adjacency=AR)


@pytest.mark.parametrize("order", [1.0, 0.5, math.inf, math.nan])
def test_impossible_order(order: float) -> None:
    with pytest.raises(InvalidArgument, match="orders="):
        renyi([ask(Gaussian(1.0))], [2.0, order], AR)


@pytest.mark.parametrize("scale", [1e-31, 1e-160, 1e-200, 0.0, -1.0, 1e31, math.inf, math.nan])
def test_noise_beyond_what_accountants_compute_is_refused(scale: float) -> None:
    with pytest.raises(InvalidArgument, match="noise="):
        Gaussian(scale)


def test_what_is_not_a_number_is_not_free() -> None:
    assert accounting.renyi_to_epsilon(math.nan, 2.0, 1e-5) == math.inf
    assert accounting.renyi_to_epsilon(math.inf, 2.0, 1e-5) == math.inf


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_next_to_no_noise_costs_more_than_anyone_has(adjacency: Adjacency) -> None:
    sampler = FixedSize(size=1000, batch_size=100) if adjacency is Adjacency.REPLACE_ONE else FullBatch(size=1000)
    asked = Mechanism(question="sum", noise=Gaussian(1e-30), sampler=sampler, times=5)
    account = Ledger.in_memory().account("clinic", unit="example", adjacency=adjacency, budget=Budget(1.0, 1e-5))
    with pytest.raises(BudgetExceeded):
        account.plan([asked])
