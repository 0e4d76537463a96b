"""Values of a config's keys, checked by tables: which are one of a few, and within which range the others lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfumato.errors import InvalidArgument

_RANGES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda v: v >= 1,
    "at least 2": lambda v: v >= 2,
    "a positive, finite number": lambda v: 0 < v < math.inf,
    "a finite number": lambda v: -math.inf < v < math.inf,
    "a finite number of at least 0": lambda v: 0 <= v < math.inf,
    "at least 0 and below 1": lambda v: 0 <= v < 1,
    "between 0 and 1": lambda v: 0 <= v <= 1,
}


def check_values(config: object, choices: Mapping[str, Sequence[str]], ranges: Mapping[str, str]) -> None:
    """`choices` by "section.key"; `ranges` has, by what is to be said of them, such keys with spaces between.

    A section that is left out has no values, and a key without a value is not looked at.
    """
    for name, known in choices.items():
        _refuse_unless(config, name, known.__contains__, f"one of {', '.join(map(repr, known))}")
    for remedy, names in ranges.items():
        for name in names.split():
            _refuse_unless(config, name, _RANGES[remedy], remedy)


def _refuse_unless(config: object, name: str, right: Callable[[Any], bool], remedy: str) -> None:
    section, key = name.split(".")
    found = getattr(getattr(config, section), key, None)
    if found is not None and not right(found):
        raise InvalidArgument(f"[{section}] {key}={found!r} must be {remedy}.")
