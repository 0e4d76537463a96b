"""Public files of `sfumato select` are not the private ones: what is shown, measured or learned here has no noise."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.cli.predict_rows import holds_private
from sfumato.cli.select_config import SelectConfig
from sfumato.data.preprocessing import PREPROCESSING
from sfumato.errors import InvalidArgument

POOL_ARRAYS = ("x_pool", "x_public", "x", "images")
ORACLE_ARRAYS = ("y_pool", "y_public", "y", "labels")
TEST_ARRAYS = ("x", "x_test")
RECORDED = "private_rows"  # in the config.json of a fine-tuned model


@dataclass(frozen=True)
class PrivateRows:
    """Where somebody's rows are, and what the ledger calls them."""

    data: Path
    name: str


def private_rows(config: SelectConfig, folder: Path, trained: dict[str, Any]) -> tuple[PrivateRows, ...]:
    """What the model was trained on, as the record in its folder says, and whom near-private asks.

    One dataset has one account: under another name its questions would not be counted with those of the training.
    """
    before = _recorded(folder, trained)
    if config.private is None:
        return before
    asked = PrivateRows(config.file(config.private.data), config.private.name)
    for rows in before:
        if rows.name != asked.name and _same_file(asked.data, rows.data):
            raise InvalidArgument(
                f"[private] name={asked.name!r} is another name than the training gave to the rows of "
                f"data={config.private.data!r}: give name = {rows.name!r}, so that one account counts all of it."
            )
    return (*before, asked)


def check_apart(what: str, path: Path, private: Iterable[PrivateRows], arrays: Sequence[str] = ()) -> None:
    """Raise if a file, of which the first of these arrays would be read, holds private rows."""
    if any(holds_private(path, rows.data, arrays=arrays) for rows in private):
        raise InvalidArgument(
            f"{what}={str(path)!r} holds private rows, of which things would be told without noise: give images of "
            "other people."
        )


def as_record(private: Iterable[PrivateRows], folder: Path) -> list[dict[str, str]]:
    """For the config.json of a model in this folder, so that the next selection knows of them."""
    places = {(os.path.relpath(rows.data, folder), rows.name): None for rows in private}  # each once, in this order
    return [{"data": data, "name": name} for data, name in places]


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _recorded(folder: Path, trained: dict[str, Any]) -> tuple[PrivateRows, ...]:
    """Of `sfumato train` and `sfumato tune`, whose paths begin at their config, or of this command; none of others."""
    if RECORDED in trained:
        return tuple(PrivateRows(folder / rows["data"], rows["name"]) for rows in trained[RECORDED])
    data, made = trained.get("data") or {}, folder / PREPROCESSING
    if "private" not in data or not made.exists():
        return ()
    home = folder / json.loads(made.read_text())["config_folder"]
    return (PrivateRows(home / data["private"], data["name"]),)
