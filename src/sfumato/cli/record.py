"""What a training began with, kept beside its checkpoint: it goes on with that, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sfumato.cli.config import Config
from sfumato.cli.config_file import check_same
from sfumato.errors import SfumatoError

_MAY_CHANGE = {"data.private", "data.public", "data.test", "training.evaluate_every", "training.checkpoint_every"}


def check_unchanged(config: Config) -> None:
    """An interrupted training goes on with the config it began with."""
    began = f"the training in out={str(config.out)!r}"
    check_same(config, read_record(config), may_change=_MAY_CHANGE, began=began, otherwise="or choose another out")


def read_record(config: Config) -> dict[str, Any]:
    """What `recorded` wrote down, or nothing if it is gone."""
    path = config.out / "config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


@contextmanager
def recorded(config: Config, clip: float) -> Iterator[None]:
    """Write down the config that a training begins with, and its clip norm; take it back if it could not begin."""
    out, record = config.out, config.out / "config.json"
    new = not record.exists()
    out.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({**config.to_json(), "clip": clip}, indent=2) + "\n")
    try:
        yield
    except SfumatoError:
        if new and not config.checkpoint.exists():
            for path in (record, config.checkpoint.with_name(f".{config.checkpoint.name}.lock")):
                path.unlink(missing_ok=True)
            for folder in (config.iterates, out):
                with suppress(OSError):  # not empty, or not there
                    folder.rmdir()
        raise
