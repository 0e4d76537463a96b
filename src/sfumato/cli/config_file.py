"""A TOML file of sections, one dataclass each: how the commands read theirs, check values, and compare with before."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from sfumato.errors import InvalidArgument
from sfumato.reading import field_types, read, required, suggestion, table_in


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A whole file; a command's own has a field for each section, `| None` for one that may be missing.

    Relative paths are relative to it.
    """

    path: Path
    given: frozenset[str]  # "section.key" and "section.table.key", as written in the file

    def file(self, name: str) -> Path:
        return self.path.parent / name

    def called(self, section: str) -> str:
        """A section as messages name it."""
        return f"[{section}]"

    def place(self, ledger: str) -> str:
        """Of a ledger: a file, or a database URL as it is."""
        return ledger if "://" in ledger else str(self.file(ledger))

    def to_json(self) -> dict[str, dict[str, Any] | None]:
        """The sections, as a file has them that was written and read again."""
        sections = {name: getattr(self, name) for name in sections_of(type(self))}
        plain = {name: None if section is None else asdict(section) for name, section in sections.items()}
        for section in plain.values():
            if section is not None and isinstance(section.get("ledger"), str):
                section["ledger"] = without_password(section["ledger"])
        again: dict[str, dict[str, Any] | None] = json.loads(json.dumps(plain))
        return again


def without_password(ledger: str) -> str:
    """A database URL without what comes before its host and after its name; a file as it is.

    >>> without_password("postgresql://ann:secret@host/ledger?password=secret")
    'postgresql://host/ledger'
    """
    kind, found, rest = ledger.partition("://")
    return f"{kind}://{rest.rpartition('@')[2].partition('?')[0]}" if found else ledger


Config = TypeVar("Config", bound=ConfigFile)


def sections_of(kind: type[ConfigFile]) -> dict[str, type[Any]]:
    """The dataclass of every section, by its name."""
    found = {name: table_in(hint) for name, hint in field_types(kind).items()}
    return {name: section for name, section in found.items() if section is not None}


def read_sections(kind: type[Config], path: Path, raw: Mapping[str, Any]) -> Config:
    """The file that was read from `path`; InvalidArgument names the section, the key and the remedy.

    A section whose keys all have defaults may be left out.
    """
    known = sections_of(kind)
    for name in raw:
        if name not in known:
            raise InvalidArgument(f"config={str(path)!r} has an unknown section [{name}]{suggestion(name, known)}")
    sections = {name: _section(name, field_types(kind)[name], raw, known) for name in known}
    return kind(path=path, given=frozenset(_names(raw)), **sections)


def _names(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, section in raw.items():
        for key, value in section.items():
            yield f"{name}.{key}"
            if isinstance(value, Mapping):
                yield from (f"{name}.{key}.{inner}" for inner in value)


def _section(name: str, hint: Any, raw: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Any:
    kind = known[name]
    if name not in raw:
        if type(None) in get_args(hint):
            return None
        if required(kind):
            raise InvalidArgument(f"[{name}] is missing from the config: add the section.")
        return kind()
    section = raw[name]
    if not isinstance(section, Mapping):
        raise InvalidArgument(f"{name}={section!r} must be a section: write [{name}] on a line, and its keys below.")
    tables = {f"{name}.{key}": table for key, hint in field_types(kind).items() if (table := table_in(hint))}
    for key in section:
        if key in field_types(kind):
            continue
        owners = [f"[{other}]" for other, its in {**tables, **known}.items() if key in {f.name for f in fields(its)}]
        if inside := [owner for owner in owners if owner[1:-1] in tables]:
            owners = inside  # which is nearer than another section
        if owners:
            raise InvalidArgument(f"[{name}] has no key {key!r}: it belongs to {' or '.join(owners)}.")
    return read(kind, section, f"[{name}]")


def only_given(**options: Any) -> dict[str, Any]:
    """Those that have a value; for the others the defaults of what they are handed to hold."""
    return {name: value for name, value in options.items() if value is not None}


# ------------------------------------------------------------------------------------------------ values

_RANGES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda v: v >= 1,
    "at least 2": lambda v: v >= 2,
    "a finite number": lambda v: -math.inf < v < math.inf,
    "a finite number of at least 0": lambda v: 0 <= v < math.inf,
    "a finite number of at least 1": lambda v: 1 <= v < math.inf,
    "a positive, finite number": lambda v: 0 < v < math.inf,
    "a positive number, or inf": lambda v: v > 0,
    "at least 0 and below 1": lambda v: 0 <= v < 1,
    "above 0 and below 1": lambda v: 0 < v < 1,
    "between 0 and 1": lambda v: 0 <= v <= 1,
}


def check_values(config: ConfigFile, choices: Mapping[str, Sequence[str]], ranges: Mapping[str, str]) -> None:
    """`choices` by "section.key"; `ranges` has, by what is to be said of them, such keys with spaces between.

    A section that is left out has no values, and a key without a value, or with a word for one, is in every range.
    """
    for name, known in choices.items():
        _refuse_unless(config, name, known.__contains__, f"one of {', '.join(map(repr, known))}")
    for remedy, names in ranges.items():
        for name in names.split():
            _refuse_unless(config, name, partial(_within, _RANGES[remedy]), remedy)


def _within(right: Callable[[float], bool], found: Any) -> bool:
    return isinstance(found, str) or right(found)


def _refuse_unless(config: ConfigFile, name: str, right: Callable[[Any], bool], remedy: str) -> None:
    section, key = name.split(".")
    found = getattr(getattr(config, section), key, None)
    if found is not None and not right(found):
        raise InvalidArgument(f"{config.called(section)} {key}={found!r} must be {remedy}.")


def check_delta(section: str, delta: float, size: int) -> None:
    if not 0 < delta < 1 / size:
        raise InvalidArgument(
            f"[{section}] delta={delta} must lie between 0 and 1/size={1 / size:.3g}: a larger delta permits "
            "publishing someone's row outright."
        )


def check_budget(section: str, budget: float | None, epsilon: float, what: str) -> None:
    if budget is not None and budget < epsilon:
        raise InvalidArgument(
            f"[{section}] budget={budget} must be at least epsilon={epsilon}, which this {what} costs."
        )


def check_sizes(section: str, key: str, sizes: Sequence[int] | None) -> None:
    if sizes is not None and (not sizes or min(sizes) < 1):
        raise InvalidArgument(f"[{section}] {key}={list(sizes)} must list sizes of at least 1.")


# ------------------------------------------------------------------------------------------------ what was before


def check_same(
    config: ConfigFile, before: Mapping[str, Any], *, may_change: Collection[str], began: str, otherwise: str
) -> None:
    """Raise if what `began` with another config, whose `to_json()` was `before`, cannot go on with this one.

    `may_change` has the keys that may be others by now, as "section.key"; `otherwise` says what can be done instead of
    putting things back. Of what the record does not know, nothing is said.
    """
    for section, values in config.to_json().items():
        old_values, where = before.get(section, values), config.called(section)
        if (old_values is None) != (values is None):
            was, remedy = ("not there", "take it out") if old_values is None else ("there", "put it back")
            raise InvalidArgument(f"{where} was {was} when {began} began: {remedy} to continue, {otherwise}.")
        same = {key for key in values or {} if f"{section}.{key}" in may_change}
        tables = {key for key in values or {} if is_dataclass(getattr(getattr(config, section), key))}
        if changed := _changed(values or {}, old_values or {}, same, tables):
            inner, key, value, old = changed
            where = f"{where[:-1]}.{inner}]" if inner else where
            raise InvalidArgument(
                f"{where} {key}={value!r} was {old!r} when {began} began: put it back to continue, {otherwise}."
            )


def _changed(
    values: Mapping[str, Any], before: Mapping[str, Any], same: Collection[str] = (), tables: Collection[str] = ()
) -> tuple[str, str, Any, Any] | None:
    """The first key that has another value than before: in which table of the section, its name, and both values."""
    for key, value in values.items():
        old = before.get(key, value)
        if key in same or old == value:
            continue
        if key not in tables or not isinstance(old, Mapping):
            return "", key, value, old
        if inner := _changed(value, old):
            return key, *inner[1:]
    return None
