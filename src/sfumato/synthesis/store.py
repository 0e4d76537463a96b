"""Tensors and facts in safetensors files: nothing in them is code, and a crash leaves the old file or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument, SfumatoError


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write, flush to disk and rename."""
    from safetensors.torch import save

    # Tied weights share storage, which safetensors refuses: every name gets its own copy.
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    put(path, save(copies, metadata={"facts": json.dumps(facts)}))


def put(path: Path, content: bytes) -> None:
    """The bytes in place of what was there."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise SfumatoError(
            f"{str(path)!r} cannot be written ({error.strerror}): name another place, or free some space."
        ) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` was given, on the host."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except Exception as error:
        raise InvalidArgument(
            f"{str(path)!r} cannot be read ({type(error).__name__}): move it away to start afresh."
        ) from error


def in_parts(tensors: Mapping[str, Tensor], most_bytes: int | None) -> list[dict[str, Tensor]]:
    """The tensors in order, in parts of at most so many bytes; a tensor that is larger has a part of its own."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and most_bytes is not None and size + tensor.nbytes > most_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def put_into(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors by name, in place: layout, type and device stay mine."""
    if missing := sorted(set(mine) ^ set(theirs)):
        raise InvalidArgument(
            f"{what} does not fit the network: {missing[0]!r} is in one of them only; give the network that it was "
            "written for."
        )
    with torch.no_grad():
        for name, tensor in mine.items():
            if tensor.shape != theirs[name].shape:
                raise InvalidArgument(
                    f"{what} does not fit the network: {name!r} has the shape {tuple(theirs[name].shape)} there and "
                    f"{tuple(tensor.shape)} here; give the network that it was written for."
                )
            tensor.copy_(theirs[name])
