"""Dataclasses from TOML or JSON, strictly: an unknown key or a value of another type is an error, in one sentence."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument


def read_toml(path: Path) -> dict[str, Any]:
    """A config file; InvalidArgument if there is none, or if it is no TOML."""
    if not path.is_file():
        raise InvalidArgument(f"config={str(path)!r} does not exist: give the path of a TOML file.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config={str(path)!r} is not valid TOML: {error}.") from None


def check_keys(kind: type[Any], raw: Any, where: str) -> None:
    """Refuse keys that the dataclass has not, and values that do not fit; keys may be missing here."""
    if not isinstance(raw, Mapping):
        raise InvalidArgument(f"{where} is {raw!r}: it must be a table.")
    hints = field_types(kind)
    for key, value in raw.items():
        if key not in hints:
            raise InvalidArgument(f"{where} has no key {key!r}{suggestion(key, hints)}")
        inner = table_in(hints[key])
        if inner is not None and isinstance(value, Mapping):
            check_keys(inner, value, _inside(where, key))
        elif not _fits(value, hints[key]):
            raise InvalidArgument(f"{where} {key}={value!r} must be {_describe(hints[key])}.")


def read(kind: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    """The dataclass; numbers and lists become what its types say, so that equal settings are equal objects."""
    check_keys(kind, raw, where)
    hints = field_types(kind)
    for name in required(kind):
        if name not in raw:
            raise InvalidArgument(f"{where} lacks the key {name!r}: add it.")
    return kind(**{key: _converted(value, hints[key], _inside(where, key)) for key, value in raw.items()})


def _inside(where: str, key: str) -> str:
    """A table in another one: that of a section as TOML calls it."""
    return f"{where[:-1]}.{key}]" if where.startswith("[") and where.endswith("]") else f"{where}, {key}"


def required(kind: type[Any]) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown name, to the end of the sentence.

    >>> suggestion("steqs", ["steps", "seed"])
    ": did you mean 'steps'?"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(names)}."


def field_types(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass' fields, by name."""
    return _compiled(kind)  # type: ignore[arg-type]  # mypy does not know that classes are hashable


_compiled = cache(typing.get_type_hints)  # anew each time, it would be most of the time of reading


def table_in(hint: Any) -> type[Any] | None:
    """The dataclass in a type such as `Crops` or `Crops | None`."""
    return next((part for part in _alternatives(hint) if isinstance(part, type) and is_dataclass(part)), None)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not is_dataclass(hint) and isinstance(value, typing.get_origin(hint) or hint)


def _converted(value: Any, hint: Any, where: str) -> Any:
    inner = table_in(hint)
    if inner is not None and isinstance(value, Mapping):
        return read(inner, value, where)
    if isinstance(value, list) and any(typing.get_origin(part) is tuple for part in _alternatives(hint)):
        return tuple(value)
    number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if number and float in _alternatives(hint) else value


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _describe(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) in (list, tuple):
        return f"a list of {_describe(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return _WORDS.get(hint, "a table")
