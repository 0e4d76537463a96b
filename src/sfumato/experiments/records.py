"""What was measured: one JSON file per training, `<spec>/<scale>/<cell>-seed<k>.json`.

A record belongs to every cell that has its settings, whichever cell it was made for: tables share their runs. One that
was made with other settings belongs to no cell, so it cannot end up in a table by accident.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.settings import Settings, read_settings
from sfumato.experiments.spec import CHOSEN, Cell, Scale, Spec

COMMITTED = Path(__file__).parent / "runs"
Record = Mapping[str, Any]


def record_path(folder: Path, spec: Spec, cell: Cell, scale: Scale, seed: int) -> Path:
    return folder / spec.name / scale / f"{cell.slug}-seed{seed}.json"


def read_record(path: Path) -> Record:
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if not {"config", "metrics", "seed", "scale"} <= set(record):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise InvalidArgument(f"{str(path)!r} is no record of a training: delete it, or put it back.") from None
    return record


def all_records(folder: Path, scale: Scale) -> dict[Path, Record]:
    """All in a folder, of whatever spec."""
    return {path: read_record(path) for path in sorted(folder.glob(f"*/{scale}/*-seed*.json"))}


def has_settings(record: Record, settings: Settings) -> bool:
    return _settings(json.dumps(record["config"])) == settings


@lru_cache(maxsize=4096)
def _settings(config: str) -> Settings | None:
    """Read once, though every cell of a table compares them; None if a version made it that knew other keys."""
    try:
        return read_settings(json.loads(config), "config")
    except InvalidArgument:
        return None


def by_settings(records: Iterable[Record]) -> dict[Settings, list[Record]]:
    """Those with the same settings together, one per seed, by seed: what cells of tables look theirs up in."""
    found: dict[Settings, dict[int, Record]] = {}
    for record in records:
        if (settings := _settings(json.dumps(record["config"]))) is not None:
            found.setdefault(settings, {})[record["seed"]] = record
    return {settings: [seeds[seed] for seed in sorted(seeds)] for settings, seeds in found.items()}


def reported(record: Record, cell: Cell) -> float:
    """The number that stands in the table: test accuracy in percent, or loss or perplexity per word."""
    which = record["chosen"] if cell.report == CHOSEN else _key(record, cell)
    if which not in record["metrics"]:
        raise InvalidArgument(f"The record of {cell.row!r} | {cell.column!r} has no {which!r}: run the cell again.")
    found = float(record["metrics"][which]["test"])
    return math.exp(found) if cell.measure == "perplexity" else found


def polluted(record: Record, cell: Cell) -> float | None:
    """Which share of the rows chosen for labelling was pollution, where there was any in the pool."""
    shares = record.get("polluted")
    return None if not shares else float(shares[_key(record, cell)])


def _key(record: Record, cell: Cell) -> str:
    """Under which the record has what is reported: other numbers of labels are tried at smoke scale."""
    labels = cell.labels_at(record["scale"])
    return cell.report if labels is None else str(labels)


def write_record(path: Path, record: Record, *, indent: int | None = 1) -> None:
    """Whole or not at all, and as JSON that everybody reads: a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(_finite(record), indent=indent, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
