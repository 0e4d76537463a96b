"""Parameters of an estimator against the types that its class declares: one sentence instead of a TypeError within."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from sfumato.errors import InvalidArgument
from sfumato.privacy.ledger import Ledger


def check_types(estimator: Any) -> None:
    """Refuse a value that is not of its field's type; fields of other types than these are left to their methods."""
    for field in fields(estimator):
        kinds = [kind.strip() for kind in str(field.type).split("|")]
        value = getattr(estimator, field.name)
        if all(kind in _CHECKS for kind in kinds) and not any(_CHECKS[kind][0](value) for kind in kinds):
            wanted = ", or ".join(_CHECKS[kind][1] for kind in kinds)
            raise InvalidArgument(f"{field.name}={value!r} must be {wanted}.")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "None": (lambda v: v is None, "None"),
    "bool": (_is_flag, "True or False"),
    "int": (lambda v: isinstance(v, Integral) and not _is_flag(v), "a whole number"),
    "float": (lambda v: isinstance(v, Real) and not _is_flag(v), "a number"),
    "str": (lambda v: isinstance(v, str), "a string"),
    "Ledger": (lambda v: isinstance(v, Ledger), "a Ledger"),
    "os.PathLike[str]": (lambda v: isinstance(v, os.PathLike), "a path"),
}
