"""The door for text: rows of numbers, whose unit is a sequence or a document; a stamp where words were private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.privacy.statement import NOT_PRIVATE
from sfumato.private import Private
from sfumato.text.byte_pairs import BytePairs
from sfumato.text.cutting import next_words
from sfumato.text.vocabulary import END, Vocabulary


def private_text(
    rows: Sequence[Sequence[int]],
    words: Vocabulary | BytePairs,
    *,
    name: str,
    size: int,
    length: int,
    documents: Sequence[Any] | None = None,
    **terms: Any,
) -> Private:
    """A `Private` of rows of word numbers, `(inputs, targets)` to its objective.

    `length` is the declared number of words of the longest row: how long the longest one is would be a private fact.
    Without `documents` the privacy unit is one row. With `documents`, whose row each is (an article, an author), it is
    all rows of a document, whose gradients are reduced before the clip; `size` then counts documents. `terms` are those
    of `Private`: objective, budget, ledger, reduction, records_per_user, ...

    >>> from sfumato import Budget, Objective
    >>> from sfumato.models.lstm import WordLSTM
    >>> from sfumato.text import PublicText, Vocabulary, by_stream, next_word
    >>> words = Vocabulary.from_public(PublicText(["public words are free"]), size=6)
    >>> rows = by_stream([words.encode("private words are not".split())] * 40, length=5, end=1)
    >>> objective = Objective(WordLSTM(len(words), hidden=4), next_word)
    >>> private_text(rows, words, name="letters", size=40, length=5, objective=objective, budget=Budget(1.0, 1e-3))
    Private(name='letters', size=40 declared, unit='example', adjacency='add-remove')
    """
    filler = words.numbers[END] if isinstance(words, Vocabulary) else 0
    owned: dict[str, Any] = {} if documents is None else {"unit": "user", "users": list(documents)}
    private = Private(next_words(rows, length=length, filler=filler), name=name, size=size, **owned, **terms)
    stamp(private, words)
    return private


def stamp(private: Private, words: Vocabulary | BytePairs) -> None:
    """Void the statement of a door whose rows were written with words that were counted in private text."""
    if isinstance(words, Vocabulary) and words.counted_in_private_text:
        private.account.stamp(
            NOT_PRIVATE, f"The vocabulary of {len(words)} words was counted in the private text, without noise."
        )
