"""How much noise a fit needs, and how a run whose noise is chosen on the way stays within its budget.

A fit whose noise is fixed beforehand is planned: one composition by PLD. A fit that chooses its noise from earlier
answers asks through an `Allowance`, whose own filter is fixed before the first answer; the ledger's account checks once
more, with the filter it was made with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

from sfumato.data.samplers import FixedSize, Sampler
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting, calibration, tcdp
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import RenyiFilter
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.private import Planned, Private
from sfumato.questions import Question

_SLAB = 64  # answers that are reserved at a time, at most


@lru_cache(maxsize=256)
def planned_noise(budget: Budget, sampler: Sampler, steps: int, adjacency: Adjacency) -> float:
    """The least noise multiplier with which `steps` answers, planned beforehand, keep the budget."""
    return calibration.noise_multiplier(
        epsilon=budget.epsilon, delta=budget.delta, sampler=sampler, steps=steps, adjacency=adjacency
    )


@lru_cache(maxsize=256)
def planned_epsilon(budget: Budget, mechanisms: tuple[Mechanism, ...], adjacency: Adjacency) -> float:
    """What they cost at the budget's delta, as one composition."""
    return accounting.epsilon(mechanisms, delta=budget.delta, adjacency=adjacency).epsilon


@lru_cache(maxsize=256)
def filtered_noise(budget: Budget, sampler: Sampler, steps: int, adjacency: Adjacency) -> tuple[float, RenyiFilter]:
    """The least noise with which `steps` equal answers fit a filter, and the best filter of one order for that.

    One order needs all of delta for itself, where a grid of eight would share it: about a tenth less noise. Of the
    orders that are within 1 % of the best it is the lowest: above a critical order the divergence of a sampled Gaussian
    explodes as the noise falls, which is what growth of the noise budget does.
    """
    order = _gaussian_order(budget)
    found: list[tuple[float, float]] = []
    while order > 1.05:
        noise = _least_noise(budget, sampler, steps, adjacency, order)
        found.append((noise, order))
        lower = _rounded(1 + (order - 1) * 0.85)  # sampling moves the best order down from the Gaussian's
        if noise > 1.01 * min(found)[0] or not math.isfinite(noise) or lower == order:
            break
        order = lower
    noise, order = min((near for near in found if near[0] <= 1.01 * min(found)[0]), key=lambda near: near[1])
    if not math.isfinite(noise):
        raise InvalidArgument(
            f"epsilon={budget.epsilon} at delta={budget.delta} is out of a filter's reach: raise epsilon, or plan the "
            "noise beforehand (growth=0)."
        )
    return noise, RenyiFilter(orders=(order,))


def _gaussian_order(budget: Budget) -> float:
    """The order at which a Gaussian of divergence order * rho is converted best, if it uses up the budget."""
    return max(
        (_rounded(1 + 10 ** (i / 40)) for i in range(-40, 160)),
        key=lambda order: accounting.renyi_budget(budget.epsilon, budget.delta, order) / order,
    )


def truncated_filter(budget: Budget) -> RenyiFilter:
    """For accounts of runs whose noise tCDP decides: it is so much that the exact order hardly matters."""
    return RenyiFilter(orders=(_rounded(0.85 * _gaussian_order(budget)),))


def _rounded(order: float) -> float:
    return float(round(order)) if order > 8 else round(order, 2)  # whole orders are cheaper to compute


def _least_noise(budget: Budget, sampler: Sampler, steps: int, adjacency: Adjacency, order: float) -> float:
    """To within 1e-5, from above; infinite if no noise is enough. The divergence falls like 1 / noise^2, or faster."""
    limit = accounting.renyi_budget(budget.epsilon, budget.delta, order) / steps
    if limit <= 0:
        return math.inf

    def excess(log_noise: float) -> float:
        once = Mechanism(question="", noise=Gaussian(math.exp(log_noise)), sampler=sampler)
        return math.log(float(accounting.renyi([once], [order], adjacency)[0]) / limit)

    enough = math.log(4.0)
    while excess(enough) > 0:
        enough += max(0.1, excess(enough) / 2 + 1e-6)
        if enough > 20:
            return math.inf
    while (slack := excess(enough)) < -2e-5:
        step = max(slack / 2 + 5e-6, -1.0)
        while excess(enough + step) > 0:  # it fell faster than 1 / noise^2
            step /= 2
            if step > -1e-5:
                return math.exp(enough)
        enough += step
    return math.exp(enough)


class Allowance(ABC):
    """The right to about `steps` answers of one kind, for the whole budget of a fit; use it in a `with` statement.

    `noise` is the multiplier with which exactly `steps` answers can be had. Where noise may be chosen on the way, fewer
    answers with less noise can be had instead. `epsilon` is what all of it is proven to cost at the budget's delta.
    """

    noise: float
    epsilon: float

    @abstractmethod
    def share(self, noise: float) -> float:
        """What part of the whole one answer with that noise takes; infinite where nothing covers it."""

    @abstractmethod
    def ask(self, question: Question, noise: float) -> Any:
        """One answer; BudgetExceeded, with nothing drawn, if it is not covered."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was not asked."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlannedAllowance(Allowance):
    """Noise fixed beforehand, all answers reserved at once and composed by PLD where there is one."""

    def __init__(self, private: Private, kind: type[Question], sampler: Sampler, *, budget: Budget, steps: int) -> None:
        self._private, self._steps = private, steps
        self.noise = planned_noise(budget, sampler, steps, private.adjacency)
        self._plan = private.plan(Planned(kind, self.noise, sampler, steps))
        self.epsilon = planned_epsilon(budget, self._plan.mechanisms, private.adjacency)

    def share(self, noise: float) -> float:
        return 1 / self._steps if noise == self.noise else math.inf

    def ask(self, question: Question, noise: float) -> Any:
        assert noise == self.noise, "the noise was planned"
        return self._private.ask(question)

    def close(self) -> None:
        self._plan.close()


class _Reserved(Allowance):
    """Reserved through the door in slabs that double; a change of noise gives back the rest of a slab."""

    def __init__(self, private: Private, kind: type[Question], sampler: Sampler, *, budget: Budget) -> None:
        self._private, self._kind, self._sampler = private, kind, sampler
        self.epsilon = budget.epsilon  # a filter proves its budget, not what was used of it
        self._asked: Counter[float] = Counter()
        self._plan: Plan | None = None
        self._noise, self._slab = 0.0, 0

    def ask(self, question: Question, noise: float) -> Any:
        if self._plan is None or noise != self._noise or not self._plan.remaining():
            self._reserve(noise)
        self._asked[noise] += 1
        return self._private.ask(question)

    def _reserve(self, noise: float) -> None:
        used = math.fsum(count * self.share(known) for known, count in self._asked.items())
        affordable = math.floor(min(_SLAB, (1 + 1e-12 - used) / self.share(noise)))
        if affordable < 1:
            raise BudgetExceeded(f"noise={noise:.4g} costs more than is left of this fit's budget: raise the noise.")
        slab = min(2 * self._slab, affordable) if noise == self._noise else 1
        self._plan = None  # the door closes the slab before, also where it refuses this one
        self._plan = self._private.reserve(Planned(self._kind, noise, self._sampler, slab))
        self._noise, self._slab = noise, slab

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()


class FilteredAllowance(_Reserved):
    """Under a Rényi filter of one order, over the true mechanism."""

    def __init__(self, private: Private, kind: type[Question], sampler: Sampler, *, budget: Budget, steps: int) -> None:
        super().__init__(private, kind, sampler, budget=budget)
        self.noise, filter = filtered_noise(budget, sampler, steps, private.adjacency)
        (self._order,) = filter.orders
        self._limit = accounting.renyi_budget(budget.epsilon, budget.delta, self._order)
        self._shares: dict[float, float] = {}

    def share(self, noise: float) -> float:
        if noise not in self._shares:
            once = Mechanism(question=self._kind.kind(), noise=Gaussian(noise), sampler=self._sampler)
            divergence = accounting.renyi([once], [self._order], self._private.adjacency)[0]
            self._shares[noise] = float(divergence) / self._limit
        return self._shares[noise]


class TruncatedAllowance(_Reserved):
    """By truncated concentrated DP, as paper 001 has it, with Theorem 4's conditions enforced at every step.

    A step of noise z costs rho_t = 13 q^2 * 2 / z^2 of rho_total (eq. 4 with sensitivity 2C). It is covered only if the
    order that Theorem 4 gives reaches omega_total, and q <= 0.1; see `privacy.tcdp`.
    """

    def __init__(self, private: Private, kind: type[Question], sampler: Sampler, *, budget: Budget, steps: int) -> None:
        super().__init__(private, kind, sampler, budget=budget)
        if private.adjacency is not Adjacency.REPLACE_ONE or not isinstance(sampler, FixedSize):
            raise UnsupportedAccounting(
                f"adjacency={str(private.adjacency)!r} with {type(sampler).__name__} samples is not covered by Theorem "
                "4: use adjacency='replace-one' and sampling='fixed', or accounting='modern'."
            )
        self._q = sampler.batch_size / sampler.size
        self._total = tcdp.budget(budget.epsilon, budget.delta)
        self._largest = tcdp.largest_step(self._q, self._total.omega)
        least = tcdp.minimum_steps(self._total, self._q)
        if steps < least:
            raise UnsupportedAccounting(
                f"max_iter={steps} is too few for Theorem 4, whose order would not reach omega_total="
                f"{self._total.omega:.4g}: use at least {least}, larger batches, or accounting='modern'."
            )
        self.noise = tcdp.step_noise(self._total.rho / steps, self._q, self._total.omega)

    def share(self, noise: float) -> float:
        rho_t = 13 * self._q**2 * 2 / noise**2
        return rho_t / self._total.rho if rho_t <= self._largest * (1 + 1e-12) else math.inf
