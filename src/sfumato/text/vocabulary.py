"""Which words a model knows. A list of the most frequent words of private text is itself an answer about that text.

So words are counted in public text. Counting private words, as the papers do, is for comparison only: the vocabulary
remembers it, and whatever is trained with it is stamped as not private.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument

UNKNOWN, END = "<unk>", "<eos>"


@dataclass(frozen=True)
class PublicText:
    """Lines of text that may be looked at: whoever writes this vouches for it, as with `Public`."""

    lines: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.lines, str) or not all(isinstance(line, str) for line in self.lines):
            raise InvalidArgument("lines must be a list of strings, one per line of text.")
        if not self.lines:
            raise InvalidArgument("lines is empty: there is nothing to learn words from.")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Words and their numbers: 0 is the unknown word, 1 the end of a line, then the most frequent words.

    >>> words = Vocabulary.from_public(PublicText(["a rose is a rose", "a tulip"]), size=4)
    >>> words.words, words.encode("a rose is red".split())
    (('<unk>', '<eos>', 'a', 'rose'), [2, 3, 0, 0])
    """

    words: tuple[str, ...]
    counted_in_private_text: bool = False

    def __post_init__(self) -> None:
        if self.words[:2] != (UNKNOWN, END) or len(set(self.words)) < len(self.words):
            raise InvalidArgument(f"words must begin with {UNKNOWN!r}, {END!r} and name no word twice.")

    @staticmethod
    def from_public(text: PublicText, *, size: int) -> Vocabulary:
        """The most frequent words of public text; `size` counts the two special ones."""
        if not isinstance(text, PublicText):
            raise InvalidArgument(
                f"text={type(text).__name__} must be a PublicText: words are counted in public text only."
            )
        return Vocabulary(words=_most_frequent(text.lines, size))

    @staticmethod
    def from_private_text_not_private(lines: Iterable[str], *, size: int) -> Vocabulary:
        """As papers 000 and 003 do: the most frequent words of all text, private lines included. Nobody is protected.

        A word that a single person uses may be in it. Doors made by `private_text` are stamped for it.
        """
        return Vocabulary(words=_most_frequent(lines, size), counted_in_private_text=True)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By word."""
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, words: Iterable[str]) -> list[int]:
        """Numbers of words; 0 for those that are not known."""
        numbers = self.numbers
        return [numbers.get(word, 0) for word in words]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        return [self.words[number] for number in numbers]

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON."""
        plain = {"words": list(self.words), "counted_in_private_text": self.counted_in_private_text}
        Path(path).write_text(json.dumps(plain, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Vocabulary:
        try:
            plain: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            words, private = tuple(plain["words"]), plain["counted_in_private_text"]
            if not isinstance(private, bool) or not all(isinstance(word, str) for word in words):
                raise TypeError
        except (OSError, ValueError, TypeError, LookupError):
            raise InvalidArgument(f"path={str(path)!r} holds no vocabulary: give a file that `save` wrote.") from None
        return Vocabulary(words=words, counted_in_private_text=private)


def _most_frequent(lines: Iterable[str], size: int) -> tuple[str, ...]:
    if not isinstance(size, int) or size < 3:
        raise InvalidArgument(f"size={size} must be a whole number of at least 3: two words are special.")
    counts = Counter(word for line in lines for word in line.split())
    for special in (UNKNOWN, END):
        counts.pop(special, None)
    # Of equals the first in the alphabet: the same text gives the same words in whatever order its lines are.
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return (UNKNOWN, END, *ordered[: size - 2])
