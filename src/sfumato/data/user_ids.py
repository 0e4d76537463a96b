"""Whose row it is: an id that is missing would make one user of everybody who has none."""

from __future__ import annotations

from typing import Any

_NOBODY = {"", "nan", "NaN"}  # as text, too: so numpy and pandas write what they do not know


def is_missing(user: Any) -> bool:
    """Whether an id says nobody: null, NaN, NaT or an empty word.

    >>> [is_missing(user) for user in (None, float("nan"), " ", "ann", 0)]
    [True, True, True, False, False]
    """
    if user is None:
        return True
    if isinstance(user, str | bytes):
        return (user if isinstance(user, str) else user.decode(errors="replace")).strip() in _NOBODY
    try:
        return bool(user != user)  # NaN and NaT differ from themselves
    except TypeError:  # pandas' NA, which is neither equal nor different
        return True
