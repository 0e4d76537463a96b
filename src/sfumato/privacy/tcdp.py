"""Truncated concentrated DP, the accounting of PPSGD (Private-Public Stochastic Gradient Descent) as its paper has it.

Kept to compare with: where it applies it asks for about five times the noise that `accounting` does. Adjacency is
replace-one, sampling is without replacement, and q = s/m is the paper's sampling ratio. Theorem numbers are the
paper's; all of them are due to Bun, Dwork, Rothblum and Steinke (2018).

Deviations from the paper as printed:

1. Its eq. (3) subtracts nearly equal numbers (in single precision the budget rounds to 0); `budget` does not.
2. Its footnote leaves Theorem 4's conditions to the reader, and its eq. (4) confuses the order the theorem *needs* with
   the one it *gives*. The one it gives is log(1/q) / (4 rho_s), and it must reach omega_total, or Theorem 2 cannot be
   applied to the sum. That condition binds always; `largest_step` is its closed form, and so a run has `minimum_steps`.
3. rho_t chosen from earlier answers is not covered by Theorem 3, which fixes rho_2. The conclusion holds by the Rényi
   filter (Feldman and Zrnic 2021), since one scalar bounds all orders at once: sum rho_t <= rho_total, and every
   rho_t <= largest_step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sfumato.errors import InvalidArgument, UnsupportedAccounting


@dataclass(frozen=True, kw_only=True)
class TCDP:
    """(rho, omega)-tCDP, Definition 2: the Rényi divergence of every order alpha < omega is at most rho * alpha."""

    rho: float
    omega: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rho) and self.rho > 0):
            raise InvalidArgument(f"rho={self.rho} must be a positive, finite number.")
        if not self.omega > 1:
            raise InvalidArgument(f"omega={self.omega} must be above 1.")


def budget(epsilon: float, delta: float) -> TCDP:
    """Eq. (3): the (rho_total, omega_total) that gives (epsilon, delta), in the form that does not cancel."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InvalidArgument(f"epsilon={epsilon} must be a positive, finite number.")
    L = _log_inverse(delta)
    rho = (epsilon / (math.sqrt(L + epsilon) + math.sqrt(L))) ** 2
    return TCDP(rho=rho, omega=math.sqrt(L / rho) + 1)


def gaussian_noise(rho: float, sensitivity: float) -> float:
    """Theorem 1: the standard deviation with which the Gaussian mechanism is (rho, infinity)-tCDP."""
    return sensitivity / math.sqrt(2 * rho)


def epsilon(guarantee: TCDP, delta: float) -> float:
    """Theorem 2. Where delta is below its condition, the same proof at alpha = omega, the largest order there is."""
    L = _log_inverse(delta)
    alpha = min(guarantee.omega, 1 + math.sqrt(L / guarantee.rho))
    return guarantee.rho * alpha + L / (alpha - 1)


def compose(first: TCDP, second: TCDP) -> TCDP:
    """Theorem 3."""
    return TCDP(rho=first.rho + second.rho, omega=min(first.omega, second.omega))


def subsample(guarantee: TCDP, q: float) -> TCDP:
    """Theorem 4: what a mechanism that sees a fraction q guarantees to all data; refuses outside its conditions."""
    rho, omega = guarantee.rho, guarantee.omega
    _check_rate(q)
    if rho > 0.1:
        raise UnsupportedAccounting(f"rho={rho:.4g} breaks Theorem 4's condition rho <= 0.1: add noise.")
    # With rho, q <= 0.1 this one never binds (the right side grows with rho, and is 1.6 < log 10 at rho = 0.1).
    if math.log(1 / q) < 3 * rho * (2 + math.log2(1 / rho)):
        raise UnsupportedAccounting(
            f"q={q:.4g} and rho={rho:.4g} break Theorem 4's condition log(1/q) >= 3 rho (2 + log2(1/rho)): add noise."
        )
    if omega < math.log(1 / q) / (2 * rho):
        raise UnsupportedAccounting(
            f"omega={omega:.4g} breaks Theorem 4's condition omega >= log(1/q) / (2 rho) = "
            f"{math.log(1 / q) / (2 * rho):.4g}: use a mechanism with more orders, such as the Gaussian."
        )
    return TCDP(rho=13 * q**2 * rho, omega=math.log(1 / q) / (4 * rho))


def largest_step(q: float, omega_total: float) -> float:
    """The largest rho_t of one step that Theorem 4 covers with an output order of at least omega_total.

    Output order: log(1/q) / (4 rho_s) >= omega_total; and rho_s <= 0.1; where rho_t = 13 q^2 rho_s.
    """
    _check_rate(q)
    return 13 * q**2 * min(math.log(1 / q) / (4 * omega_total), 0.1)


def step_noise(rho_t: float, q: float, omega_total: float) -> float:
    """Eq. (4) and line 8 of Algorithm 1: standard deviation on the sum / C for a step of rho_t, or a refusal."""
    largest = largest_step(q, omega_total)
    if not 0 < rho_t <= largest:
        raise UnsupportedAccounting(
            f"rho_t={rho_t:.4g} must lie between 0 and {largest:.4g}, else Theorem 4 gives fewer orders than "
            f"omega_total={omega_total:.4g}: spend less per step."
        )
    rho_s = rho_t / (13 * q**2)
    return gaussian_noise(rho_s, sensitivity=2.0)  # replacing one of s clipped gradients moves their sum by 2C


def minimum_steps(total: TCDP, q: float) -> int:
    """The least number of equal steps that spend `total` with every step inside Theorem 4."""
    return math.ceil(total.rho / largest_step(q, total.omega))


def _log_inverse(delta: float) -> float:
    if not 0 < delta < 1:
        raise InvalidArgument(f"delta={delta} must lie strictly between 0 and 1: choose less than 1 / number of units.")
    return math.log(1 / delta)


def _check_rate(q: float) -> None:
    if not 0 < q <= 0.1:
        raise UnsupportedAccounting(f"q={q:.4g} breaks Theorem 4's condition 0 < q <= 0.1: use smaller batches.")
