"""Filters: when may one more question be asked, if its noise was chosen after seeing earlier answers?

A filter is fixed when an account is made, before any answer, and is consulted before every reservation. What it adds
up is a short vector of numbers, so that a ledger can keep the running total in one row.

The privacy-loss distribution (PLD) of a trace that was chosen adaptively is not a proof, so no filter uses it across
plans: `SumFilter` uses it only inside one plan, whose mechanisms are all declared before its first answer.

Plans may be open at the same time and their questions interleaved: every filter that is valid for one question after
the other is valid for that, too (Haney et al., "Concurrent Composition for Interactive Differential Privacy with
Adaptive Privacy-Loss Parameters", CCS 2023).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from sfumato.errors import InvalidArgument
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.mechanisms import Adjacency, Mechanism

Vector = list[float]

# Sums of floats may miss the exact sum by a few units in the last place: 0.1 + 0.2 must fit into 0.3.
_ROUNDING = 1.0 + 1e-12


class Filter(ABC):
    """Adds up what was reserved and says whether the total is still within the budget."""

    @abstractmethod
    def price(
        self, mechanisms: Sequence[Mechanism], *, adjacency: Adjacency, budget: Budget, delta_share: float | None
    ) -> list[Vector]:
        """One vector per mechanism, for all of its declared answers."""

    @abstractmethod
    def counted(self, price: Sequence[Vector], planned: Sequence[int], used: Sequence[int]) -> Vector:
        """What a plan counts for, of which `used` out of `planned` answers of each mechanism left the door."""

    @abstractmethod
    def fits(self, total: Vector, budget: Budget) -> bool:
        """Whether reservations that add up to `total` are covered by the budget."""

    @abstractmethod
    def spent(self, total: Vector, budget: Budget) -> float:
        """How much of budget.epsilon `total` takes up. Bookkeeping for people: the promise is the budget's."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for the privacy statement."""

    @abstractmethod
    def zero(self) -> Vector:
        """The total of nothing."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain data for the ledger."""

    @staticmethod
    def from_json(data: dict[str, Any]) -> Filter:
        if data["kind"] == "SumFilter":
            return SumFilter()
        return RenyiFilter(orders=tuple(data["orders"]))


@final
@dataclass(frozen=True)
class SumFilter(Filter):
    """Epsilons and deltas of the plans add up (basic composition).

    Every plan or charge is given an explicit share of the account's delta and costs the epsilon that it has at that
    share. It takes mechanisms that have no Renyi accountant, and is wasteful for many small questions.

    *Formal guarantee.* Everything admitted is (epsilon, delta)-DP with the budget's epsilon and delta, however plans
    were chosen from earlier answers: basic composition is a valid filter (Rogers et al. 2016, theorem 3.6). A plan
    that was begun counts in full, since its price is not a sum over its answers.
    """

    def price(
        self, mechanisms: Sequence[Mechanism], *, adjacency: Adjacency, budget: Budget, delta_share: float | None
    ) -> list[Vector]:
        if delta_share is None:
            raise InvalidArgument(
                f"delta_share=None must be given under SumFilter: name the part of delta={budget.delta} for this plan."
            )
        if not 0 < delta_share <= budget.delta:
            raise InvalidArgument(
                f"delta_share={delta_share} must lie between 0 and the budget's delta={budget.delta}: lower it."
            )
        cost = accounting.epsilon(mechanisms, delta=delta_share, adjacency=adjacency)
        return [[cost.epsilon, delta_share]] + [[0.0, 0.0] for _ in mechanisms[1:]]

    def counted(self, price: Sequence[Vector], planned: Sequence[int], used: Sequence[int]) -> Vector:
        return list(price[0]) if any(used) else self.zero()

    def fits(self, total: Vector, budget: Budget) -> bool:
        return total[0] <= budget.epsilon * _ROUNDING and total[1] <= budget.delta * _ROUNDING

    def spent(self, total: Vector, budget: Budget) -> float:
        return total[0]

    def describe(self) -> str:
        return "filter, sums of epsilon and of delta"

    def zero(self) -> Vector:
        return [0.0, 0.0]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "SumFilter"}


@final
@dataclass(frozen=True, kw_only=True)
class RenyiFilter(Filter):
    """Renyi divergences add up at each order of a small grid; one order with budget left is enough.

    Order a may spend B_a, the largest Renyi divergence that still gives the budget's epsilon at delta / len(orders).

    *Formal guarantee.* Everything admitted is (epsilon, delta)-DP with the budget's epsilon and delta, however noise,
    plans and stopping were chosen from earlier answers. Let L be the privacy loss of the whole transcript and R_a the
    sum of the orders-a divergences of the answers in it; each summand is known before its answer is drawn.
    (1) exp((a - 1) (L_t - R_a,t)) is a supermartingale in t for every a, so its mean at any stopping time is at most 1
    (Feldman and Zrnic 2021). (2) delta(epsilon) = E[(1 - exp(epsilon - L))+], and the conversion used bounds
    (1 - exp(epsilon - x))+ by c_a exp((a - 1) (x - epsilon)); hence the part of that mean in which R_a <= B_a is at
    most delta / len(orders). (3) When the last answer was admitted some order had R_a <= B_a, so these parts cover
    everything, and a union bound over the grid gives delta. Which order survives may depend on the answers: that is
    what the factor len(orders) pays for. Answers that never left do not count, since stopping is allowed.
    """

    orders: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.orders) <= 10:
            raise InvalidArgument(
                f"orders={self.orders} must hold 1 to 10 orders: each one costs a share of delta, so a few are best."
            )
        if any(not (math.isfinite(order) and order > 1) for order in self.orders):
            raise InvalidArgument(f"orders={self.orders} must all be finite and above 1.")

    @staticmethod
    def around(budget: Budget) -> RenyiFilter:
        """The default: eight orders below the one that textbooks give for a Gaussian mechanism at this budget.

        A Gaussian with divergence a * rho is converted best, by the textbook, at a = 1 + sqrt(log(1/delta) / rho),
        where rho solves epsilon = rho + 2 sqrt(rho log(1/delta)). The sharper conversion used here moves the best order
        down to about 0.6 of that, and sampling further (above a critical order the divergence of a sampled Gaussian
        explodes): for epsilon 0.1 to 8 and rates 0.001 to 1 the best a - 1 was 0.3 to 0.9 of the textbook's. So a - 1
        runs geometrically from a fifth of it to all of it. Against the best order with all of delta, known beforehand,
        the filter then asks for 3 % (epsilon 8) to 17 % (epsilon 0.1) more noise.
        """
        log_delta = math.log(8 / budget.delta)
        root_rho = budget.epsilon / (math.sqrt(log_delta + budget.epsilon) + math.sqrt(log_delta))
        best = math.sqrt(log_delta) / root_rho
        orders = [1 + best * 5 ** (-i / 7) for i in reversed(range(8))]
        # Whole orders are cheaper to compute; between 1 and 8 the fractions are worth it.
        return RenyiFilter(orders=tuple(float(round(a)) if a > 8 else 1 + float(f"{a - 1:.3g}") for a in orders))

    def price(
        self, mechanisms: Sequence[Mechanism], *, adjacency: Adjacency, budget: Budget, delta_share: float | None
    ) -> list[Vector]:
        if delta_share is not None:
            raise InvalidArgument(f"delta_share={delta_share} has no meaning under RenyiFilter: leave it out.")
        return [[float(r) for r in accounting.renyi([m], self.orders, adjacency)] for m in mechanisms]

    def counted(self, price: Sequence[Vector], planned: Sequence[int], used: Sequence[int]) -> Vector:
        # A mechanism with no answer is left out: 0 * inf is not a number.
        shares = [(vector, u / p) for vector, p, u in zip(price, planned, used, strict=True) if u]
        return [math.fsum(vector[i] * share for vector, share in shares) for i in range(len(self.orders))]

    def _limits(self, budget: Budget) -> Vector:
        share = budget.delta / len(self.orders)
        return [accounting.renyi_budget(budget.epsilon, share, order) for order in self.orders]

    def fits(self, total: Vector, budget: Budget) -> bool:
        limits = self._limits(budget)
        return any(limit > 0 and spent <= limit * _ROUNDING for spent, limit in zip(total, limits, strict=True))

    def spent(self, total: Vector, budget: Budget) -> float:
        # The share of the order that has most left: linear in the answers, 0 for nothing and epsilon where it refuses.
        limits = self._limits(budget)
        return budget.epsilon * min(
            (t / limit for t, limit in zip(total, limits, strict=True) if limit > 0), default=1.0
        )

    def describe(self) -> str:
        return f"filter, Renyi orders {', '.join(f'{order:g}' for order in self.orders)}"

    def zero(self) -> Vector:
        return [0.0] * len(self.orders)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "RenyiFilter", "orders": list(self.orders)}
