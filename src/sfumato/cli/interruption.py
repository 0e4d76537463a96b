"""Ctrl-C and SIGTERM, and what a person is told then: it depends on what the command was doing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sfumato.patience import Interruption

CHARGED = "Interrupted; what was answered until now stays charged."
RESUMABLE = "Interrupted; what was answered until now stays charged, and the same command goes on from there."


def kept(folder: Path, *, again: bool) -> str:
    """For a command that goes on where it was; with --again it would begin anew."""
    same = "the same command without --again" if again else "the same command"
    return f"Interrupted; {folder} keeps what was done: {same} goes on from there."


# What handles a signal where nobody has chosen otherwise. Scripts start what they put into the background with Ctrl-C
# ignored, and it stays so.
_USUAL: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, by which schedulers end a program, does what Ctrl-C does; unless somebody else takes care of them."""
    main = threading.current_thread() is threading.main_thread()
    mine = [which for which, usual in _USUAL.items() if main and signal.getsignal(which) is usual]
    interruption = Interruption()
    for which in mine:
        signal.signal(which, interruption)
    try:
        yield
    finally:
        for which in mine:
            signal.signal(which, _USUAL[which])


class Interrupted(Exception):
    """One sentence about what is left behind."""


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """A part of a command that leaves something behind when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None
