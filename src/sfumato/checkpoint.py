"""Checkpoints of a training: the public state, exactly. Noise and sampling are never part of it; they start afresh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import InvalidArgument


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write, flush to disk and rename: a crash leaves the old checkpoint or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state, or None if there is none yet."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise InvalidArgument(
            f"checkpoint={str(path)!r} cannot be read ({type(error).__name__}): move it away to start afresh."
        ) from error
    return state
