"""Ctrl-C, and what a person is told then: it depends on what the command was doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHARGED = "Interrupted; what was answered until now stays charged."


def kept(folder: Path, *, again: bool) -> str:
    """For a command that goes on where it was; with --again it would begin anew."""
    same = "the same command without --again" if again else "the same command"
    return f"Interrupted; {folder} keeps what was done: {same} goes on from there."


class Interrupted(Exception):
    """One sentence about what is left behind."""


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """A part of a command that leaves something behind when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None
