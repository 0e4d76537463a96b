"""Byte-pair tokens (Sennrich et al. 2016) learned from public text by the `tokenizers` library: no word is unknown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.text.vocabulary import END, PublicText


class BytePairs:
    """Any text to numbers and back; number 0 ends a line.

    >>> pairs = BytePairs.from_public(PublicText(["low lower lowest"] * 9), size=260)
    >>> pairs.decode(pairs.encode("slow, too"))
    'slow, too'
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def from_public(text: PublicText, *, size: int) -> BytePairs:
        """Merge the most frequent pairs of public text until there are `size` tokens, bytes and end included."""
        if not isinstance(text, PublicText):
            raise InvalidArgument(
                f"text={type(text).__name__} must be a PublicText: pairs are counted in public text only."
            )
        if not isinstance(size, int) or size < 257:
            raise InvalidArgument(f"size={size} must be at least 257: there are 256 bytes and the end of a line.")
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(text.lines, trainer)
        return BytePairs(tokenizer)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Numbers of tokens."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, numbers: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(numbers)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, in the library's own form."""
        self._tokenizer.save(os.fspath(path))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> BytePairs:
        try:
            return BytePairs(_library().Tokenizer.from_file(os.fspath(path)))
        except Exception as error:  # the library raises nothing narrower
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"path={str(path)!r} holds no tokenizer: give a file that `save` wrote.") from None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InvalidArgument("BytePairs needs the library tokenizers: pip install 'sfumato[models]'.") from None
    return tokenizers
