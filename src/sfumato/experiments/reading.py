"""Dataclasses from TOML or JSON, strictly: an unknown key or a value of another type is an error, in one sentence."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from sfumato.errors import InvalidArgument


def check_keys(kind: type[Any], raw: Any, where: str) -> None:
    """Refuse keys that the dataclass has not, and values that do not fit; keys may be missing here."""
    if not isinstance(raw, Mapping):
        raise InvalidArgument(f"{where} is {raw!r}: it must be a table.")
    hints = _hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise InvalidArgument(f"{where} has no key {key!r}{suggestion(key, hints)}.")
        inner = _table(hints[key])
        if inner is not None and isinstance(value, Mapping):
            check_keys(inner, value, f"{where}, {key}")
        elif not _fits(value, hints[key]):
            raise InvalidArgument(f"{where} {key}={value!r} must be {_describe(hints[key])}.")


def read(kind: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    """The dataclass; numbers and lists become what its types say, so that equal settings are equal objects."""
    check_keys(kind, raw, where)
    hints = _hints(kind)
    for f in fields(kind):
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidArgument(f"{where} lacks the key {f.name!r}: add it.")
    return kind(**{key: _converted(value, hints[key], f"{where}, {key}") for key, value in raw.items()})


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Later tables win, key by key, also inside tables."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            before = result.get(key)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(names)}"


def _hints(kind: type[Any]) -> dict[str, Any]:
    return _compiled(kind)  # type: ignore[arg-type]  # mypy does not know that classes are hashable


_compiled = cache(typing.get_type_hints)  # anew each time, it would be most of the time of reading


def _table(hint: Any) -> type[Any] | None:
    """The dataclass in a type such as `Crops` or `Crops | None`."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((part for part in parts if is_dataclass(part)), None)  # type: ignore[return-value]


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not is_dataclass(hint) and isinstance(value, hint)


def _converted(value: Any, hint: Any, where: str) -> Any:
    inner = _table(hint)
    if inner is not None and isinstance(value, Mapping):
        return read(inner, value, where)
    if isinstance(value, list):
        return tuple(value)
    takes_floats = hint is float or (isinstance(hint, types.UnionType) and float in typing.get_args(hint))
    return float(value) if takes_floats and isinstance(value, int) and not isinstance(value, bool) else value


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _describe(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"a list, each of them {_describe(typing.get_args(hint)[0])}"
    return _WORDS.get(hint, "a table")
