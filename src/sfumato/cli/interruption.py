"""Ctrl-C and SIGTERM, and what a person is told then: it depends on what the command was doing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CHARGED = "Interrupted; what was answered until now stays charged."
RESUMABLE = "Interrupted; what was answered until now stays charged, and the same command goes on from there."


def kept(folder: Path, *, again: bool) -> str:
    """For a command that goes on where it was; with --again it would begin anew."""
    same = "the same command without --again" if again else "the same command"
    return f"Interrupted; {folder} keeps what was done: {same} goes on from there."


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, by which schedulers end a program, does what Ctrl-C does; unless somebody else takes care of it."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, _as_control_c)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_control_c(_: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # scripts start what they put into the background with Ctrl-C ignored
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


class Interrupted(Exception):
    """One sentence about what is left behind."""


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """A part of a command that leaves something behind when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None
