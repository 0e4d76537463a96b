"""What was measured: one JSON file per cell, `<spec>/<cell>.json`, with all of its repeats.

A record belongs to every cell that has its settings, whichever cell it was made for. One that was made with other
settings belongs to no cell, so it cannot end up in a table by accident.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.settings import Settings, read_settings
from sfumato.experiments.convex.spec import Cell, Spec, convex_names

Record = Mapping[str, Any]
LISTS = ("repeats", "scores", "epsilons", "iterations", "seconds")  # one entry per repeat


def record_path(folder: Path, spec: Spec, cell: Cell) -> Path:
    return folder / spec.name / f"{cell.slug}.json"


def read_record(path: Path) -> Record:
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if len({len(record[name]) for name in LISTS}) != 1 or "settings" not in record:
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidArgument(f"{str(path)!r} is no record of a cell: delete it, or put it back.") from None
    return record


def all_records(folder: Path, spec: Spec) -> dict[Path, Record]:
    """All in a folder that were made for this spec or another convex one, those of this one first."""
    names = dict.fromkeys([spec.name, *convex_names()])
    return {path: read_record(path) for name in names for path in sorted((folder / name).glob("*.json"))}


def has_settings(record: Record, settings: Settings) -> bool:
    return settings_of(record) == settings


def settings_of(record: Record) -> Settings | None:
    """None if a version made it that knew other keys."""
    return _settings(json.dumps(record["settings"]))


@lru_cache(maxsize=4096)
def _settings(stored: str) -> Settings | None:
    """Read once, though every cell of a table compares them."""
    try:
        return read_settings(json.loads(stored), "settings")
    except InvalidArgument:
        return None


def record_of(cell: Cell, records: Iterable[Record]) -> Record | None:
    return next((record for record in records if has_settings(record, cell.settings)), None)


def with_repeat(record: Record, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The record with one repeat more, or anew; in order of the repeats."""
    rows = [dict(zip(LISTS, values, strict=True)) for values in zip(*(record[name] for name in LISTS), strict=True)]
    rows = [row for row in rows if row["repeats"] != entry["repeats"]] + [{name: entry[name] for name in LISTS}]
    rows.sort(key=lambda row: row["repeats"])
    return {**record, **{name: [row[name] for row in rows] for name in LISTS}}
