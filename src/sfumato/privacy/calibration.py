"""The inverse of accounting: the least noise, the most steps or the largest batch that a budget allows.

Formal guarantee: for whatever is returned, `accounting.epsilon` of the whole plan, extra mechanisms included, has been
computed and is at most `epsilon` at `delta`. A search on coarse grids, which overstate the cost, finds the
neighbourhood; one at full accuracy finishes within 1e-4 of epsilon, or at the exact integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

from sfumato.data.samplers import Poisson, Sampler
from sfumato.errors import InvalidArgument
from sfumato.privacy import accounting
from sfumato.privacy.accounting import Accountant
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

_COARSE = 0.005  # the accounting tolerance of the first search
_CLOSE = 1e-4  # how far below epsilon a calibrated noise may stay
_NOISE = (2.0**20, 2.0**-5)  # the range in which a noise multiplier is looked for
_MOST_STEPS = 10.0**8


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampler: Sampler,
    steps: int,
    adjacency: Adjacency,
    extra: Sequence[Mechanism] = (),
    replace_factor: float = 2.0,
) -> float:
    """The least Gaussian noise multiplier (std / unit) with which `steps` answers and `extra` cost at most `epsilon`.

    >>> sampler = Poisson(size=48000, batch_size=4096)
    >>> s = noise_multiplier(epsilon=2.0, delta=1e-5, sampler=sampler, steps=352, adjacency=Adjacency.ADD_REMOVE)
    >>> round(s, 2)
    3.35
    """
    return _noise(epsilon, delta, sampler, steps, adjacency, extra, replace_factor, None)


def trial_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampler: Sampler,
    steps: int,
    adjacency: Adjacency,
    extra: Sequence[Mechanism] = (),
) -> float:
    """The same for one trial of a search, by Renyi divergences: what a search costs follows from those alone."""
    return _noise(epsilon, delta, sampler, steps, adjacency, extra, 2.0, Accountant.RDP)


def _noise(
    epsilon: float,
    delta: float,
    sampler: Sampler,
    steps: int,
    adjacency: Adjacency,
    extra: Sequence[Mechanism],
    replace_factor: float,
    accountant: Accountant | None,
) -> float:
    def train(noise: float) -> Mechanism:
        return Mechanism(
            question="train", noise=Gaussian(noise), sampler=sampler, times=steps, replace_factor=replace_factor
        )

    found = _search(
        _excess(train, epsilon, delta, adjacency, extra, accountant),
        start=2.0,
        cheapest=_NOISE[0],
        dearest=_NOISE[1],
        impossible=f"steps={steps} cannot be had for epsilon={epsilon} at delta={delta} with any noise: raise epsilon.",
    )
    if found == _NOISE[1]:
        raise InvalidArgument(f"epsilon={epsilon} is met by next to no noise, which protects nobody: lower epsilon.")
    return found


def steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampler: Sampler,
    adjacency: Adjacency,
    extra: Sequence[Mechanism] = (),
    replace_factor: float = 2.0,
) -> int:
    """The largest number of answers with that noise that, with `extra`, cost at most `epsilon`."""
    noise = Gaussian(noise_multiplier)

    def train(times: float) -> Mechanism:
        return Mechanism(
            question="train", noise=noise, sampler=sampler, times=int(times), replace_factor=replace_factor
        )

    found = _search(
        _excess(train, epsilon, delta, adjacency, extra),
        start=100.0,
        cheapest=1.0,
        dearest=_MOST_STEPS,
        integer=True,
        impossible=f"noise_multiplier={noise_multiplier} makes one step cost more than epsilon={epsilon} "
        f"at delta={delta}: raise noise_multiplier or epsilon.",
    )
    return int(found)


def batch_size(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    size: int,
    steps: int,
    adjacency: Adjacency,
    extra: Sequence[Mechanism] = (),
) -> int:
    """The largest Poisson batch out of `size` units with which `steps` answers and `extra` cost at most `epsilon`."""
    noise = Gaussian(noise_multiplier)

    def train(batch: float) -> Mechanism:
        return Mechanism(question="train", noise=noise, sampler=Poisson(size=size, batch_size=batch), times=steps)

    found = _search(
        _excess(train, epsilon, delta, adjacency, extra),
        start=max(1.0, size // 100),
        cheapest=1.0,
        dearest=float(size),
        integer=True,
        impossible=f"noise_multiplier={noise_multiplier} makes steps={steps} cost more than epsilon={epsilon} "
        f"at delta={delta} even for batches of 1: raise noise_multiplier or lower steps.",
    )
    return int(found)


def _excess(
    train: Callable[[float], Mechanism],
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    extra: Sequence[Mechanism],
    accountant: Accountant | None = None,
) -> Callable[..., float]:
    """log(cost / epsilon) of a candidate, clamped; not above zero if and only if the candidate fits the budget."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InvalidArgument(f"epsilon={epsilon} must be a positive, finite number.")
    before = accounting.epsilon(extra, delta=delta, adjacency=adjacency, accountant=accountant).epsilon
    if before >= epsilon:
        raise InvalidArgument(
            f"extra costs epsilon={before:.4g} at delta={delta}, which leaves nothing of epsilon={epsilon}: "
            "raise epsilon, or give the extra mechanisms more noise."
        )

    def excess(candidate: float, *, tolerance: float) -> float:
        plan = (*extra, train(candidate))
        cost = accounting.epsilon(
            plan, delta=delta, adjacency=adjacency, tolerance=tolerance, accountant=accountant
        ).epsilon
        if cost <= epsilon:
            return max(-3.0, math.log(max(cost, 1e-300) / epsilon))
        return min(3.0, max(1e-12, math.log(cost / epsilon)))

    return excess


def _search(
    excess: Callable[..., float],
    *,
    start: float,
    cheapest: float,
    dearest: float,
    impossible: str,
    integer: bool = False,
) -> float:
    """The dearest candidate that fits; `dearest` itself if that fits, InvalidArgument if `cheapest` does not."""
    coarse = cache(partial(excess, tolerance=_COARSE))
    fine = cache(partial(excess, tolerance=accounting.TOLERANCE))
    near = _shrink(coarse, *_bracket(coarse, start, cheapest, dearest, 2.0, integer), 0.02, integer)
    good, bad = _bracket(fine, near, cheapest, dearest, 1.01, integer)
    if fine(good) > 0:
        raise InvalidArgument(impossible)
    return _shrink(fine, good, bad, 0.0 if integer else _CLOSE, integer)


def _bracket(
    f: Callable[[float], float], x: float, cheapest: float, dearest: float, stride: float, integer: bool
) -> tuple[float, float]:
    """Walks from x until one candidate fits and the next does not: (good, bad). At an end of the range: (end, end)."""
    fits = f(x) <= 0
    end = dearest if fits else cheapest
    low, high = min(x, end), max(x, end)
    while x != end:
        jump = min(8.0, max(stride, math.exp(abs(f(x)))))
        step = x * jump if end > x else x / jump
        step = (math.ceil(step) if end > x else math.floor(step)) if integer else step
        there = min(high, max(low, step))
        if (f(there) <= 0) != fits:
            return (x, there) if fits else (there, x)
        x = there
    return end, end


def _shrink(f: Callable[[float], float], good: float, bad: float, closeness: float, integer: bool) -> float:
    """The Illinois variant of regula falsi, in log x, from the side that fits: returns a candidate that fits."""
    f_good, f_bad = f(good), f(bad)
    while f(good) < -closeness and not (abs(good - bad) <= 1 if integer else abs(math.log(bad / good)) < 1e-6):
        aim = (f_good + closeness / 2) / (f_good - f_bad)
        x = good * (bad / good) ** min(0.98, max(0.02, aim))
        if integer:
            x = min(max(good, bad) - 1.0, max(min(good, bad) + 1.0, float(round(x))))
        if f(x) <= 0:
            good, f_good, f_bad = x, f(x), f_bad / 2
        else:
            bad, f_bad, f_good = x, f(x), f_good / 2
    return good
