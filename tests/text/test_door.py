"""Text behind the door: what is protected, and what voids it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sfumato import Budget, Clip, GradientSum, NotPrivateSeed, Objective, Private
from sfumato.gradients import Units, clipped_sum
from sfumato.models.lstm import WordLSTM
from sfumato.text import BytePairs, PublicText, Vocabulary, by_document, next_word, next_words, private_text

WORDS = Vocabulary.from_public(PublicText(["a b c d e f g"]), size=9)
RNG = np.random.default_rng(0)


def document(words: int) -> list[list[int]]:
    return [RNG.integers(2, 9, words).tolist()]


def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(WordLSTM(len(WORDS), hidden=4).double(), next_word)


def door(words: Any = WORDS, **options: Any) -> Private:
    rows, owners = by_document([document(11) for _ in range(12)], length=5, end=1)
    terms = {"objective": objective(), "budget": Budget(50.0, 1e-3), "length": 5, "name": "letters"}
    if options.pop("by_document", False):
        terms["documents"] = owners
    return private_text(rows, words, **{"size": 40, **terms, **options})


def test_words_counted_in_private_text_void_the_statement() -> None:
    taken = Vocabulary(words=WORDS.words, counted_in_private_text=True)
    assert door().statement().private
    assert door(BytePairs.from_public(PublicText(["a b"]), size=257)).statement().private
    statement = door(taken).statement()
    assert not statement.private
    assert "vocabulary of 9 words was counted in the private text" in statement.to_text()


def test_the_unit_is_a_row_or_a_document() -> None:
    assert door().unit == "example"
    assert door(by_document=True, size=12).unit == "user"


def test_a_document_moves_the_sum_by_at_most_the_clip_norm() -> None:
    """Neighbours: a document of many rows is added, and the exact sum moves by C, not by C per row."""
    model, clip = objective(), Clip(0.05)  # below every gradient's norm, so that the bound is met
    params = model.parameters()

    def exact(documents: list[list[list[int]]]) -> dict[str, torch.Tensor]:
        total: dict[str, torch.Tensor] = {}
        for lines in documents:
            rows, _ = by_document([lines], length=5, end=1)
            units = Units(len(rows), torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))
            part = clipped_sum(model, params, next_words(rows, length=5), clip=clip, units=units)
            total = {n: g + total.get(n, torch.zeros(())) for n, g in part.items()}
        return total

    shared, long = [document(7), document(12)], document(60)
    before, after = exact(shared), exact([*shared, long])
    moved = sum(float((after[n] - before[n]).square().sum()) for n in before) ** 0.5
    assert moved == pytest.approx(0.05, rel=1e-5)
    # The door itself groups rows by document: without noise to speak of, it gives that very sum.
    rows, owners = by_document([*shared, long], length=5, end=1)
    private = private_text(
        rows,
        WORDS,
        name="letters",
        size=3,
        length=5,
        documents=owners,
        objective=model,
        budget=Budget(1e14, 1e-2),
        seed=NotPrivateSeed(0),
    )
    answer = private.ask(GradientSum(params, clip), noise=1e-6, sampler=private.everyone())
    for name, expected in after.items():
        torch.testing.assert_close(answer[name], expected, rtol=0, atol=1e-6)


def test_the_loss_of_a_row_is_the_mean_over_its_own_words() -> None:
    model = objective().module
    rows = [[2, 3, 4, 5, 6], [7, 8, 2]]
    inputs, targets = next_words(rows, length=5)
    found = next_word(model, (inputs, targets))
    for row, loss in zip(rows, found, strict=True):
        logits = model(torch.tensor([row[:-1]]))[0].log_softmax(-1)
        by_hand = -sum(logits[i, word] for i, word in enumerate(row[1:])) / (len(row) - 1)
        torch.testing.assert_close(loss, by_hand)


def test_what_stands_in_padding_does_not_count() -> None:
    model = objective().module
    short = [[7, 8, 2]]
    a, b = (next_word(model, next_words(short, length=6, filler=filler)) for filler in (0, 5))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
