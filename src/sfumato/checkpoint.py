"""Checkpoints of a training: the public state, exactly. Noise and sampling are never part of it; they start afresh."""

from __future__ import annotations

import errno
import glob
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.privacy.ledger import Account

try:
    import fcntl
except ImportError:  # Windows: the ledger still sees to it that two processes never spend one answer
    fcntl = None  # type: ignore[assignment]


@contextmanager
def held_checkpoint(path: Path | None) -> Iterator[None]:
    """Keeps other processes off the checkpoint; the system lets go of it however this process ends.

    Between machines whose disk has no locks only the ledger protects: a process that was given up for dead and wakes
    again spends nothing twice, but may put an older checkpoint in the place of a newer one.
    """
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        if fcntl is not None:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not inherited by workers
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise SfumatoError(
                        f"checkpoint={str(path)!r} is in use by another process that is still at work: end that one "
                        "first, or name another file."
                    ) from error
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by processes that were killed
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        os.close(handle)


def check_checkpoint(path: Path, state: Any) -> None:
    """Refuse, before a training begins, what would fail in the middle of it: a bad place, or a state that is lost."""
    try:
        draft = _draft(path)
        draft.touch()
        draft.unlink()
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise _unwritable(path, error) from error
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise InvalidArgument(
            f"The method's state, a {type(state).__name__}, cannot be read back from a checkpoint: make it of tensors, "
            "numbers, strings, lists, tuples and dicts."
        ) from error


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write, flush to disk and rename: a crash leaves the old checkpoint or the new one, never half of one."""
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns some errors of the disk into RuntimeError
        with suppress(OSError):
            draft.unlink()
        raise _unwritable(path, error) from error


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _unwritable(path: Path, error: Exception) -> SfumatoError:
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):  # which torch says more about than is of use
        first = first.__context__
    reason = getattr(first, "strerror", None) or str(first or error).partition("\n")[0]
    return SfumatoError(
        f"checkpoint={str(path)!r} cannot be written ({reason}): name another file, or free some space."
    )


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


class LedgerHead:
    """The newest head of an account that could be read, for checkpoints.

    A ledger that cannot be reached just now does not keep a training from saving its last step: an older head is as
    good a witness, only of less.
    """

    def __init__(self, account: Account) -> None:
        self._account, self._last = account, account.head()

    def __call__(self) -> str:
        with suppress(SfumatoError):
            self._last = self._account.head()
        return self._last
