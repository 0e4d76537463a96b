"""Text cut into rows. Each function works on words and on numbers of words alike.

A row is a privacy unit, or one of the records of a document that is. `by_line` and `by_stream` are how papers 003 and
000 make theirs: they give the 48,764 and 59,675 sequences that those report of WikiText-2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument

T = TypeVar("T")

IGNORED = -100
"""A target that is no word: padding."""


def by_line(lines: Iterable[Sequence[T]], length: int) -> list[list[T]]:
    """Every line by itself into `length` inputs and the targets one further on: rows of length + 1, the rest dropped.

    The last word of a row is the first one of the next: it is only read there, but it does stand in two rows.

    >>> by_line([list("abcdefgh"), list("xyz")], length=3)
    [['a', 'b', 'c', 'd'], ['d', 'e', 'f', 'g']]
    """
    _check(length)
    return [
        list(line[start : start + length + 1])
        for line in lines
        for start in range(0, (len(line) - 1) // length * length, length)
    ]


def by_stream(lines: Iterable[Sequence[T]], length: int, end: T) -> list[list[T]]:
    """All lines one after the other, each ended by `end`, into rows of `length`, the rest dropped. Rows share nothing.

    A row may hold the end of one document and the beginning of the next, so no document is a unit here: `by_document`.

    >>> by_stream([list("abc"), list("de")], length=3, end="$")
    [['a', 'b', 'c'], ['$', 'd', 'e']]
    """
    _check(length)
    stream = [word for line in lines for word in (*line, end)]
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


def by_document(documents: Iterable[Iterable[Sequence[T]]], length: int, end: T) -> tuple[list[list[T]], list[int]]:
    """Every document by itself, as by `by_stream` but with its rest as a shorter row; and whose row each is.

    >>> by_document([[list("abcd")], [list("xy")]], length=3, end="$")
    ([['a', 'b', 'c'], ['d', '$'], ['x', 'y', '$']], [0, 0, 1])
    """
    _check(length)
    rows: list[list[T]] = []
    owners: list[int] = []
    for owner, lines in enumerate(documents):
        stream = [word for line in lines for word in (*line, end)]
        starts = range(0, len(stream) - 1, length)  # one word alone predicts nothing
        rows += [stream[start : start + length] for start in starts]
        owners += [owner] * len(starts)
    return rows, owners


def next_words(rows: Sequence[Sequence[int]], *, length: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (N, length - 1) each: every word but the last of its row, and what follows it.

    Rows have at most `length` words. Shorter ones are padded, inputs with `filler` and targets with `IGNORED`.

    >>> next_words([[1, 2, 3], [4, 5]], length=3)
    (tensor([[1, 2],
            [4, 0]]), tensor([[   2,    3],
            [   5, -100]]))
    """
    _check(length)
    if not all(2 <= len(row) <= length for row in rows):
        raise InvalidArgument(f"length={length} does not fit all rows: they must have 2 to length words.")
    inputs = [[*row[:-1], *[filler] * (length - len(row))] for row in rows]
    targets = [[*row[1:], *[IGNORED] * (length - len(row))] for row in rows]
    shape = (len(rows), length - 1)
    return tuple(torch.tensor(part, dtype=torch.int64).reshape(shape) for part in (inputs, targets))  # type: ignore[return-value]


def _check(length: int) -> None:
    if not isinstance(length, int) or length < 2:
        raise InvalidArgument(f"length={length} must be a whole number of at least 2: it counts the words of a row.")
