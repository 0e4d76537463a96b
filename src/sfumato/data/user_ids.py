"""Whose row it is: ids that are missing, or rounded, would make one user of many people."""

from __future__ import annotations

from typing import Any

import numpy as np

from sfumato.errors import InvalidArgument

_NOBODY = {"", "nan", "none", "null", "nat", "n/a", "<na>"}  # as text: so numpy, pandas and files write it
_WANTED = "users must hold one id per row of the data, as a plain array"


def is_missing(user: Any) -> bool:
    """Whether an id says nobody: null, NaN, NaT or an empty word.

    >>> [is_missing(user) for user in (None, float("nan"), " ", "ann", 0)]
    [True, True, True, False, False]
    """
    if user is None or user is np.ma.masked:
        return True
    if isinstance(user, str | bytes):
        return (user if isinstance(user, str) else user.decode(errors="replace")).strip().lower() in _NOBODY
    try:
        return bool(user != user)  # NaN and NaT differ from themselves
    except TypeError:  # pandas' NA, which is neither equal nor different
        return True


def user_ids(users: Any) -> list[Any]:
    """The ids as they were given, equal ones equal. None may be missing.

    A list never passes through numpy, which has one type for all: beside a single 0.5, integers beyond 2^53 would
    become floats, and many people one.

    >>> user_ids([2**60, 2**60 + 1, 0.5, 3.0])
    [1152921504606846976, 1152921504606846977, 0.5, 3]
    """
    if isinstance(users, np.ma.MaskedArray):
        raise InvalidArgument(f"{_WANTED}.")
    try:
        given = list(users) if isinstance(users, list | tuple) else np.asanyarray(users)
    except ValueError:  # ids of unequal length, which its message would count
        raise InvalidArgument(f"{_WANTED}.") from None
    if isinstance(given, np.ndarray):
        if given.ndim != 1:
            raise InvalidArgument(f"{_WANTED}.")
        if given.dtype.kind == "f" and bool((np.abs(given) >= 2.0 ** (np.finfo(given.dtype).nmant + 1)).any()):
            raise InvalidArgument(
                f"users are {given.dtype} numbers so large that different ids are one: give whole numbers or words."
            )
        given = given.tolist()
    found = [user if user is np.ma.masked else _plain(user) for user in given]
    if any(map(is_missing, found)):
        raise InvalidArgument("users has missing ids: give every row one, since nobody is protected without it.")
    return found


def _plain(user: Any) -> Any:
    """Without its wrapping in numpy or torch, and 3.0 as the 3 that it equals: what is equal is written alike."""
    if getattr(user, "shape", None) == () and hasattr(user, "item"):
        user = user.item()
    if isinstance(user, bool | float) and user == user and abs(user) != float("inf") and user == int(user):
        return int(user)
    try:
        hash(user)
    except TypeError:  # a list, say, which its message would quote
        raise InvalidArgument(f"{_WANTED}: an id is a number or a word.") from None
    return user
