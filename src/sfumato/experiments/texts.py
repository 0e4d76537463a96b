"""Text as the rows of an experiment: cut as the papers do, split at random, written with the vocabulary it may have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sfumato.errors import InvalidArgument
from sfumato.experiments.data import Batch, Rows, to_device
from sfumato.experiments.settings import Data, Text
from sfumato.text import END, PublicText, Vocabulary, by_line, by_stream, next_words, wikitext2

Words = list[str]


def load_text(data: Data, text: Text, device: torch.device) -> Rows:
    """Rows are split as rows; a vocabulary from public text is counted in the public rows that are trained on only."""
    training, testing = _tiny() if data.name == "tiny-text" else _wikitext2()
    rows, tested = (_cut(lines, text) for lines in (training, testing))
    if len(rows) < data.private + data.public:
        raise InvalidArgument(
            f"private={data.private} and public={data.public} are more than the {len(rows)} rows that the text has: "
            "lower them."
        )
    order = np.random.default_rng(data.split).permutation(len(rows))
    held_out, public = ([rows[i] for i in part] for part in np.split(order[: data.public], [data.hold_out]))
    private = [rows[i] for i in np.sort(order[data.public : data.public + data.private])]
    words = _vocabulary(text, public, [*private, *held_out])

    def batch(part: Sequence[Words]) -> Batch:
        return to_device(next_words([words.encode(row) for row in part], length=_row_length(text)), device)

    test = batch(tested[: data.test])
    return Rows(
        private=batch(private),
        public=batch(public),
        hold_out=batch(held_out) if held_out else None,
        test=test,
        words=words,
        text=_facts(words, [word for line in training for word in line], test),
    )


def _vocabulary(text: Text, public: Sequence[Words], others: Sequence[Words]) -> Vocabulary:
    if text.vocabulary == "public":
        return Vocabulary.from_public(PublicText([" ".join(row) for row in public]), size=text.words)
    lines = (" ".join(row) for row in (*public, *others))
    return Vocabulary.from_private_text_not_private(lines, size=text.words)


def _facts(words: Vocabulary, everything: Sequence[str], test: Batch) -> dict[str, float]:
    """What makes losses under two vocabularies comparable: an unknown word is cheap to predict, for it says nothing.

    With `nats_for_unknown` added, a loss is that of a model of all words of the benchmark, which spreads the
    probability of the unknown word evenly over those that its vocabulary has not.
    """
    beyond = len(set(everything) - set(words.words))
    share = float((test[1] == 0).double().mean())
    return {
        "words": len(words),
        "unknown_of_test": round(share, 6),
        "words_beyond": beyond,
        "nats_for_unknown": round(share * math.log(max(1, beyond)), 6),
    }


def _row_length(text: Text) -> int:
    return text.length + 1 if text.cut == "line" else text.length


def _cut(lines: Sequence[Words], text: Text) -> list[Words]:
    return by_line(lines, text.length) if text.cut == "line" else by_stream(lines, text.length, END)


def _wikitext2() -> tuple[list[Words], list[Words]]:
    files = wikitext2()
    training, testing = ([line.split() for article in part for line in article] for part in (files.train, files.test))
    return training, testing


def _tiny() -> tuple[list[Words], list[Words]]:
    """Lines of a made-up language of 60 words, in which each word has six that may follow it."""
    rng = np.random.default_rng(0)
    names = [f"w{i}" for i in range(60)]
    follow = rng.integers(0, 60, (60, 6))
    lines = []
    for _ in range(500):
        word, line = int(rng.integers(60)), []
        for _ in range(30):
            line.append(names[word])
            word = int(follow[word, min(int(rng.integers(6)), int(rng.integers(6)))])
        lines.append(line)
    return lines[:420], lines[420:]
