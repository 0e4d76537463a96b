"""The budget of a private dataset: the most that everything asked of it, together, may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from numbers import Real
from typing import Any

from sfumato.errors import InvalidArgument


@dataclass(frozen=True)
class Budget:
    """Everything asked of the dataset, taken together, is to be (epsilon, delta)-differentially private.

    >>> Budget(epsilon=2.0, delta=1e-5)
    Budget(epsilon=2.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        for name, value in given.items():
            if not isinstance(value, Real):
                raise InvalidArgument(f"{name}={value!r} must be a number: give Budget(epsilon=2.0, delta=1e-5).")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InvalidArgument(f"epsilon={self.epsilon} must be a positive, finite number: 1 to 8 is usual.")
        if not 0 < self.delta < 1:
            raise InvalidArgument(
                f"delta={self.delta} must lie strictly between 0 and 1: choose it well below 1 / the number of people."
            )


def at_most(epsilon: float) -> str:
    """Five digits, and never less than the number: a promise is not rounded down.

    >>> at_most(1.00001), at_most(0.5), at_most(2.0), at_most(123456.7)
    ('1.0001', '0.5', '2', '123460')
    """
    if not math.isfinite(epsilon):
        return str(epsilon)
    return f"{Context(prec=5, rounding=ROUND_CEILING).create_decimal(repr(float(epsilon))).normalize():f}"
