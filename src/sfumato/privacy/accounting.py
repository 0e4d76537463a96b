"""What a plan of mechanisms costs: one composition by `dp-accounting`, always an upper bound.

A plan is composed by privacy loss distributions (PLD) where they cover every mechanism in it, else by Rényi divergences
(RDP). Noise scales are in the question's unit under every adjacency (see `mechanisms`); the two accountants disagree
about the unit under replace-one, and `event` is the one place that converts.

| sample    | adjacency   | Gaussian  | DiscreteGaussian | DiscreteLaplace |
|-----------|-------------|-----------|------------------|-----------------|
| FullBatch | add-remove  | PLD, RDP  | RDP              | PLD, RDP        |
| FullBatch | replace-one | PLD, RDP  | RDP              | PLD, RDP        |
| Poisson   | add-remove  | PLD, RDP  | refused          | refused         |
| Poisson   | replace-one | PLD, RDP* | refused          | refused         |
| FixedSize | add-remove  | refused   | refused          | refused         |
| FixedSize | replace-one | RDP       | refused          | refused         |

A SealedGaussian is covered on the FullBatch, under the adjacency of its own proof, by PLD only. A BestOf is covered on
the FullBatch by RDP, if everything in its trials is.

* dp-accounting has no such RDP bound; ours goes through the data set without the unit, by the weak triangle inequality.

Formal guarantees, cell by cell:

- Gaussian, FullBatch. The answer moves by 1 unit (add-remove) or `replace_factor` units (replace-one): exact.
- Gaussian, Poisson, replace-one. A sampled unit contributes some v with |v| <= 1, its replacement some w with |w| <= 1.
  The pair charged is v = -w, the worst one, so `replace_factor` cannot help and is not used.
- Gaussian, FixedSize, replace-one. Theorem 27 of Wang, Balle and Kasiviswanathan (2019), sensitivity `replace_factor`.
  Under add-remove the rate would depend on the private number of units: refused.
- DiscreteGaussian. Canonne, Kamath and Steinke (2020): noise of parameter sigma on integer vectors that move by D in L2
  is D^2 / (2 sigma^2)-zCDP, as if it were continuous, in every dimension and for every unit. The theorem orders Rényi
  divergences, not (epsilon, delta) curves, so PLD of the continuous Gaussian would be no bound, and PLD of the discrete
  one needs the unit in integers: RDP only.
- DiscreteLaplace. Integer vectors that move by D in L1 change a log-probability by at most D / (scale * unit), so the
  answer is pure epsilon0-DP, epsilon0 = 1 / scale or replace_factor / scale, in every dimension and for every unit.
  Randomised response at epsilon0 dominates every such mechanism (Kairouz, Oh and Viswanath 2015) and *is* the discrete
  Laplace when the answer moves by the integer 1; nothing is rounded to an integer. The continuous Laplace is no bound.
- SealedGaussian. One answer is (epsilon, delta)-DP by its own proof. The pair that gives everything away with
  probability delta, and else is randomised response at epsilon, dominates every such mechanism (Kairouz et al. 2015).
  Its Renyi divergences are infinite.
- BestOf. Theorem 2 (truncated negative binomial) and Theorem 6 (Poisson) of Papernot and Steinke (2022), of a trial
  that first draws its kind with a law that does not depend on the data, and tells it: the divergence of such a mixture
  is at most the largest one of its kinds, order by order.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from sfumato.data.samplers import FixedSize, FullBatch, Poisson
from sfumato.errors import InvalidArgument, UnsupportedAccounting
from sfumato.privacy.mechanisms import (
    Adjacency,
    BestOf,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Mechanism,
    SealedGaussian,
)

# dp_accounting is imported where it is used: it takes more than a second, and most commands never account.

# PLD composes by FFT in double precision; below this delta its rounding could matter, so RDP takes over.
RESOLUTION = 1e-12
# The relative error at which refinement stops.
TOLERANCE = 3e-4

_Word = TypeVar("_Word", bound=StrEnum)


class Accountant(StrEnum):
    """The two ways to compose."""

    PLD = "PLD"
    RDP = "RDP"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An (epsilon, delta) guarantee, with what is needed to state it: between which data sets, by which accountant."""

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: str


def epsilon(
    mechanisms: Sequence[Mechanism],
    *,
    delta: float,
    adjacency: Adjacency,
    tolerance: float = TOLERANCE,
    accountant: Accountant | None = None,
) -> Cost:
    """The epsilon of the whole plan at `delta`; a larger `tolerance` is faster and can only overstate it.

    Without an `accountant` it is the tightest one there is.

    >>> sampler = Poisson(size=48000, batch_size=4096)
    >>> plan = [Mechanism(question="gradients", noise=Gaussian(3.0), sampler=sampler, times=350)]
    >>> round(epsilon(plan, delta=1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon, 2)
    2.27
    """
    if not 0 < delta < 1:
        raise InvalidArgument(f"delta={delta} must lie strictly between 0 and 1: choose less than 1 / number of units.")
    plan, adjacency = _merged(mechanisms), _meant(Adjacency, adjacency)
    accountant = _accountant(plan, adjacency, delta) if accountant is None else _meant(Accountant, accountant)
    value = _epsilon(plan, delta, adjacency, tolerance, accountant)
    return Cost(epsilon=value, delta=delta, adjacency=adjacency, accountant=_name(accountant))


@lru_cache(maxsize=4096)
def _epsilon(
    plan: tuple[Mechanism, ...], delta: float, adjacency: Adjacency, tolerance: float, accountant: Accountant
) -> float:
    """Kept: a plan is priced by its quote, its reservation and its statement, and by searches for noise."""
    if accountant is Accountant.PLD:
        return _coarse_to_fine(lambda grid: _pld(plan, adjacency, grid).get_epsilon(delta), plan, adjacency, tolerance)
    curve = partial(_renyi, plan, adjacency=adjacency)
    return _best_order(lambda order, rdp: renyi_to_epsilon(rdp, order, delta), curve, tolerance)


def delta(
    mechanisms: Sequence[Mechanism], *, epsilon: float, adjacency: Adjacency, tolerance: float = TOLERANCE
) -> Cost:
    """The delta of the whole plan at `epsilon`, never stated below `RESOLUTION` where PLD computes it."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InvalidArgument(f"epsilon={epsilon} must be a finite number of at least 0.")
    plan, adjacency = _merged(mechanisms), _meant(Adjacency, adjacency)
    accountant = _accountant(plan, adjacency)
    if accountant is Accountant.PLD:
        value = _coarse_to_fine(lambda grid: _pld(plan, adjacency, grid).get_delta(epsilon), plan, adjacency, tolerance)
        value = min(1.0, max(value, RESOLUTION))
    else:
        curve = partial(_renyi, plan, adjacency=adjacency)
        value = _best_order(lambda order, rdp: _renyi_to_delta(rdp, order, epsilon), curve, tolerance)
    return Cost(epsilon=epsilon, delta=value, adjacency=adjacency, accountant=_name(accountant))


def event(mechanism: Mechanism, adjacency: Adjacency, accountant: Accountant) -> tuple[Any, Any]:
    """One answer of the mechanism in dp-accounting's words, and the relation under which to read it.

    The words are a DpEvent, or for what states its own epsilon and delta, DifferentialPrivacyParameters.
    """
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    adjacency, accountant = _meant(Adjacency, adjacency), _meant(Accountant, accountant)
    replaced = adjacency is Adjacency.REPLACE_ONE
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    scale, sampler = mechanism.noise.scale, mechanism.sampler
    moved = mechanism.replace_factor if replaced else 1.0  # how far the exact answer of a full batch moves, in units
    match sampler, mechanism.noise:
        case FullBatch(), SealedGaussian(epsilon=stated, delta=fails, adjacency=proven) if (
            accountant is Accountant.PLD and adjacency is proven
        ):
            return DifferentialPrivacyParameters(stated, fails), relation
        case _, SealedGaussian() | BestOf():
            pass  # above all it is not to be taken for a Gaussian
        case FullBatch(), Gaussian():
            # Under REPLACE_ONE the PLD accountant itself moves the answer by two units, the RDP accountant by one.
            its_own = 2.0 if replaced and accountant is Accountant.PLD else 1.0
            return dp_event.GaussianDpEvent(its_own * scale / moved), relation
        case FullBatch(), DiscreteGaussian() if accountant is Accountant.RDP:
            return dp_event.ZCDpEvent(rho=0.5 * (moved / scale) ** 2), relation
        case FullBatch(), DiscreteLaplace() if replaced or accountant is Accountant.RDP:
            # Randomised response with two buckets at epsilon0: it dominates, whatever relation it came from.
            response = dp_event.RandomizedResponseDpEvent(2 * float(expit(-moved / scale)), 2)
            return response, NeighboringRelation.REPLACE_ONE
        case FullBatch(), DiscreteLaplace():
            # The same pair, by the name that PLD knows under ADD_OR_REMOVE_ONE.
            return dp_event.DiscreteLaplaceDpEvent(moved / scale, 1), relation
        case Poisson(), Gaussian() if not replaced or accountant is Accountant.PLD:
            return dp_event.PoissonSampledDpEvent(sampler.rate, dp_event.GaussianDpEvent(scale)), relation
        case FixedSize(), Gaussian() if replaced and accountant is Accountant.RDP:
            gaussian = dp_event.GaussianDpEvent(scale / moved)
            return dp_event.SampledWithoutReplacementDpEvent(sampler.size, sampler.batch_size, gaussian), relation
    raise UnsupportedAccounting(_refusal(mechanism, adjacency, accountant))


def renyi(mechanisms: Sequence[Mechanism], orders: Sequence[float], adjacency: Adjacency) -> npt.NDArray[np.float64]:
    """Rényi divergences of the whole list at fixed orders, for a filter that chose its orders beforehand."""
    for order in orders:
        if not (math.isfinite(order) and order > 1):
            raise InvalidArgument(f"orders={list(orders)} must all be finite and above 1: drop {order}.")
    plan, adjacency = _merged(mechanisms), _meant(Adjacency, adjacency)
    return np.array([_renyi(plan, float(order), adjacency) for order in orders], dtype=np.float64)


def renyi_to_epsilon(rdp: float, order: float, delta: float) -> float:
    """The epsilon at `delta` of a Rényi divergence `rdp` at one order: Proposition 12 of Canonne et al. (2020)."""
    epsilon = rdp + _conversion(order, delta)
    return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))  # what is not known is not free


def renyi_budget(epsilon: float, delta: float, order: float) -> float:
    """The largest Rényi divergence at `order` that still gives `epsilon` at `delta`; if negative, none does."""
    return epsilon - _conversion(order, delta)


def _conversion(order: float, delta: float) -> float:
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def _renyi_to_delta(rdp: float, order: float, epsilon: float) -> float:
    return math.exp(min(0.0, (order - 1) * (rdp - epsilon + math.log1p(-1 / order)) - math.log(order)))


def _meant(kind: type[_Word], given: _Word) -> _Word:
    """Of a plain word, the constant. The two are equal, also as keys of what is kept, but all code here asks `is`.

    So "replace-one" would be charged as add-remove, and that value be found again by whoever asks with the constant.
    """
    if given not in tuple(kind):
        raise InvalidArgument(f"{kind.__name__.lower()}={given!r} must be one of {', '.join(kind)}.")
    return kind(given)


def _merged(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, ...]:
    """The plan without repetitions: composition knows no order, and the same mechanism is cheaper to account once."""
    times: Counter[Mechanism] = Counter()
    names: dict[Mechanism, str] = {}
    for mechanism in mechanisms:
        key = replace(mechanism, question="", times=1)
        times[key] += mechanism.times
        names.setdefault(key, mechanism.question)
    return tuple(replace(key, question=names[key], times=count) for key, count in times.items())


def _accountant(plan: tuple[Mechanism, ...], adjacency: Adjacency, delta: float = 1.0) -> Accountant:
    try:
        for mechanism in plan:
            event(mechanism, adjacency, Accountant.PLD)
    except UnsupportedAccounting:
        return Accountant.RDP
    return Accountant.PLD if delta >= RESOLUTION else Accountant.RDP


def _name(accountant: Accountant) -> str:
    return f"{accountant} (dp-accounting {version('dp-accounting')})"


def _refusal(mechanism: Mechanism, adjacency: Adjacency, accountant: Accountant) -> str:
    noise, sample = type(mechanism.noise).__name__, type(mechanism.sampler).__name__
    if isinstance(mechanism.noise, SealedGaussian):
        if adjacency is not mechanism.noise.adjacency:
            remedy = f"its proof is about {mechanism.noise.adjacency} adjacency, so declare that"
        elif isinstance(mechanism.sampler, FullBatch):
            remedy = f"declare it in the first plan of its account, whose delta must be at least {RESOLUTION:g}"
        else:
            remedy = "ask it of the FullBatch"
    elif isinstance(mechanism.noise, BestOf):
        remedy = "account for it by RDP, on the FullBatch"
    elif isinstance(mechanism.sampler, FixedSize) and adjacency is Adjacency.ADD_REMOVE:
        remedy = "sample by Poisson, or declare replace-one adjacency"
    elif not isinstance(mechanism.noise, Gaussian) and not isinstance(mechanism.sampler, FullBatch):
        remedy = "ask it of the FullBatch, or use Gaussian noise"
    else:
        remedy = f"account for it by {'RDP' if accountant is Accountant.PLD else 'PLD'}"
    return (
        f"question={mechanism.question!r}: {accountant} does not support {noise} noise on a {sample} sample "
        f"under {adjacency} adjacency: {remedy}."
    )


# --- PLD: a grid of privacy losses, coarse to fine -------------------------------------------------------------------


@lru_cache(maxsize=32)
def _pld(plan: tuple[Mechanism, ...], adjacency: Adjacency, grid: float) -> Any:
    """The plan composed on a grid of that width, rounded pessimistically; an accountant to ask for epsilon or delta."""
    from dp_accounting import NeighboringRelation, RandomizedResponseDpEvent, pld
    from dp_accounting.pld.common import DifferentialPrivacyParameters
    from dp_accounting.pld.privacy_loss_distribution import from_privacy_parameters

    replaced = adjacency is Adjacency.REPLACE_ONE
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(relation, value_discretization_interval=grid)
    for mechanism in plan:
        dp_event, _ = event(mechanism, adjacency, Accountant.PLD)
        if isinstance(dp_event, DifferentialPrivacyParameters):
            # PLDAccountant 0.6 has no event for it, although the distribution is there.
            accountant._pld = accountant._pld.compose(
                from_privacy_parameters(dp_event, grid).self_compose(mechanism.times)
            )
        elif isinstance(dp_event, RandomizedResponseDpEvent):
            # PLDAccountant 0.6 drops the count of this one event and would charge it once: repeat it by hand.
            for _ in range(mechanism.times):
                accountant.compose(dp_event)
        else:
            accountant.compose(dp_event, mechanism.times)
    return accountant


def _coarse_to_fine(
    value: Callable[[float], float], plan: tuple[Mechanism, ...], adjacency: Adjacency, tolerance: float
) -> float:
    """`value` on ever finer grids until it settles. Every grid gives an upper bound, so stopping early is sound."""
    one, whole = (sum(spans) for spans in zip((0.0, 0.0), *(_spans(m, adjacency) for m in plan), strict=True))
    affordable = max(one / 2e4, whole / 1e5)
    if affordable > 700:  # exp(grid) would be no number; nothing is left of a promise long before
        return math.inf
    grid, order = max(0.04, affordable), 2
    if stated := [m.noise.epsilon for m in plan if isinstance(m.noise, SealedGaussian)]:
        # A stated epsilon that lies on the grid is not rounded: halving is exact. One far below all else would take a
        # grid of any number of points; it is rounded up instead, by less and less.
        exact = math.ldexp(max(stated), -max(0, math.ceil(math.log2(max(stated) / grid))))
        grid, order = (exact, 2) if exact >= affordable else (grid, 1)
    finest = max(one / 4e5, whole / 2e6)
    finer, result = 4, float(value(grid))
    while grid > finest:
        grid /= finer
        refined = float(value(grid))
        if refined == result:  # also where both are infinite
            break
        # The error is quadratic in the grid once the grid resolves one answer, and far from settled before; rounding up
        # what one answer costs is linear.
        error = (result - refined) / (finer**order - 1)
        result = min(result, refined)
        if error <= tolerance * result:
            break
        finer = 4 if error > 3 * tolerance * result else 2
    return result


def _spans(mechanism: Mechanism, adjacency: Adjacency) -> tuple[float, float]:
    """Roughly the largest losses of one answer and of all: what bounds the number of grid points, hence memory."""
    if isinstance(mechanism.noise, SealedGaussian):
        return mechanism.noise.epsilon, mechanism.times * mechanism.noise.epsilon
    shift = (2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0) / mechanism.noise.scale
    variance = mechanism.times * shift**2
    if isinstance(mechanism.sampler, Poisson):
        variance = mechanism.times * math.log1p(mechanism.sampler.rate**2 * math.expm1(min(shift**2, 500.0)))
    return shift * (10 + shift), math.sqrt(variance) * (10 + math.sqrt(variance))


# --- RDP: one number per order ---------------------------------------------------------------------------------------


def _renyi(plan: tuple[Mechanism, ...], order: float, adjacency: Adjacency) -> float:
    return math.fsum(m.times * _renyi_once(replace(m, times=1), order, adjacency) for m in plan)


@lru_cache(maxsize=4096)
def _renyi_once(mechanism: Mechanism, order: float, adjacency: Adjacency) -> float:
    from dp_accounting import rdp

    if isinstance(mechanism.noise, BestOf) and isinstance(mechanism.sampler, FullBatch):
        return _renyi_of_best(mechanism.noise, order, adjacency)
    if (
        adjacency is Adjacency.REPLACE_ONE
        and isinstance(mechanism.sampler, Poisson)
        and type(mechanism.noise) is Gaussian
    ):
        # Through the data set R without the unit: D_a(P|Q) <= (a - 1/2) / (a - 1) D_2a(P|R) + D_{2a-1}(R|Q), the weak
        # triangle inequality of Mironov (2017, Proposition 11); P, R and R, Q are add-remove neighbours. At large
        # orders it loses next to nothing against the worst pair, v = -w.
        to, fro = (_renyi_once(mechanism, at, Adjacency.ADD_REMOVE) for at in (2 * order, 2 * order - 1))
        return (order - 0.5) / (order - 1) * to + fro
    dp_event, relation = event(mechanism, adjacency, Accountant.RDP)
    accountant = rdp.RdpAccountant([order], relation)
    logger = logging.getLogger("absl")  # where it reports a series that does not converge, which is dealt with below
    was, logger.disabled = logger.disabled, True
    try:
        accountant.compose(dp_event)
    finally:
        logger.disabled = was
    value = float(accountant.rdp[0])
    if isinstance(mechanism.sampler, FullBatch):
        return value  # closed form
    if isinstance(mechanism.sampler, Poisson) and not order.is_integer():
        # dp-accounting's series for fractional orders is loose or diverges when the rate is large: (order - 1) times
        # the divergence is convex in the order and zero at 1, so the chord between the two integers bounds it too.
        below, above = (
            (at - 1) * _renyi_once(mechanism, float(at), adjacency) if at > 1 else 0.0
            for at in (math.floor(order), math.ceil(order))
        )
        share = order - math.floor(order)
        value = min(value, ((1 - share) * below + share * above) / (order - 1))
    # A sampled divergence is the logarithm of a sum near 1, cut off at a relative e^-30: for tiny rates that rounds to
    # zero or below. This covers the rounding, and is far below anything one would notice.
    return max(value, 0.0) + 1e-12 / (order - 1)


def _renyi_of_best(best: BestOf, order: float, adjacency: Adjacency) -> float:
    """Theorem 2 or 6 of Papernot and Steinke (2022): see `repetitions`."""
    law, curve = best.repetitions, partial(_renyi_of_trial, best.trials, adjacency=adjacency)
    if law.shape == math.inf:
        threshold = math.log1p(1 / (order - 1))
        choosing = law.mean * _best_order(lambda at, rdp: _renyi_to_delta(rdp, at, threshold), curve, TOLERANCE)
    else:
        choosing = min(_best_order(law.choosing, curve, TOLERANCE), law.choosing(1.0, 0.0))  # also if K = 1 always
    return law.divergence(order, curve(order), choosing)


@lru_cache(maxsize=4096)
def _renyi_of_trial(trials: tuple[tuple[Mechanism, ...], ...], order: float, adjacency: Adjacency) -> float:
    return max(_renyi(_merged(trial), order, adjacency) for trial in trials)


_ORDERS = (
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    96.0,
    128.0,
    256.0,
    512.0,
    2048.0,
)


def _best_order(value: Callable[[float, float], float], curve: Callable[[float], float], tolerance: float) -> float:
    """The least `value(order, rdp)`: over a few orders, then twice around the best. Each order gives an upper bound."""
    values = {order: value(order, curve(order)) for order in _ORDERS}
    for _ in range(0 if tolerance > 4 * TOLERANCE else 2):
        orders = sorted(values)
        best = orders.index(min(orders, key=values.__getitem__))
        between = np.geomspace(orders[max(best - 1, 0)], orders[min(best + 1, len(orders) - 1)], 10)
        for order in between:
            # Without replacement an order between two integers costs both of them and gains nothing.
            order = float(round(order)) if order > 20 else float(order)
            if order not in values:
                values[order] = value(order, curve(order))
    return min(values.values())
