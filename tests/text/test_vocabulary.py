"""Vocabularies and byte pairs: learned from public text only, or marked as what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato.errors import InvalidArgument
from sfumato.text import END, UNKNOWN, BytePairs, PublicText, Vocabulary

LINES = ["the cat sat on the mat", "the dog sat", "a cat <unk> <eos>"]


def test_the_most_frequent_words_are_kept_and_ties_do_not_depend_on_the_order_of_lines() -> None:
    words = Vocabulary.from_public(PublicText(LINES), size=6)
    assert words.words == (UNKNOWN, END, "the", "cat", "sat", "a")  # 3, 2, 2, and the first of five with one
    assert Vocabulary.from_public(PublicText(LINES[::-1]), size=6) == words


def test_special_words_in_the_text_keep_their_numbers() -> None:
    words = Vocabulary.from_public(PublicText(LINES), size=100)
    assert len(words) == 9
    assert words.encode(["<unk>", "<eos>", "zebra", "the"]) == [0, 1, 0, 2]
    assert words.decode(words.encode(["the", "zebra", "sat"])) == ["the", UNKNOWN, "sat"]


def test_words_are_counted_in_public_text_only() -> None:
    for text in (LINES, tuple(LINES), "the cat"):
        with pytest.raises(InvalidArgument, match="must be a PublicText"):
            Vocabulary.from_public(text, size=6)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="must be a PublicText"):
            BytePairs.from_public(text, size=300)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="list of strings"):
        PublicText("the cat")
    with pytest.raises(InvalidArgument, match="empty"):
        PublicText([])


def test_a_vocabulary_of_private_text_says_so_for_ever(tmp_path: Path) -> None:
    taken = Vocabulary.from_private_text_not_private(LINES, size=6)
    public = Vocabulary.from_public(PublicText(LINES), size=6)
    assert taken.words == public.words
    for words in (taken, public):
        words.save(tmp_path / "words.json")
        assert Vocabulary.load(tmp_path / "words.json") == words
    assert taken.counted_in_private_text
    assert not public.counted_in_private_text


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    for content in ("", "[]", '{"words": [1, 2], "counted_in_private_text": false}', '{"words": ["<unk>", "<eos>"]}'):
        path.write_text(content)
        with pytest.raises(InvalidArgument, match="holds no vocabulary"):
            Vocabulary.load(path)
    path.write_text(json.dumps({"words": ["<unk>", "<eos>", "a", "a"], "counted_in_private_text": False}))
    with pytest.raises(InvalidArgument, match="twice"):
        Vocabulary.load(path)
    with pytest.raises(InvalidArgument, match="size=2"):
        Vocabulary.from_public(PublicText(LINES), size=2)


def test_byte_pairs_write_any_text_and_learn_from_public_text(tmp_path: Path) -> None:
    pairs = BytePairs.from_public(PublicText(["the cat sat on the mat"] * 20), size=265)
    text = "the cät, 猫 = 1"
    assert pairs.decode(pairs.encode(text)) == text
    assert len(pairs) == 265
    assert len(pairs.encode("the cat sat")) < len("the cat sat")  # merged, as it was in the text
    assert len(pairs.encode("zqx jvk wpy")) == len("zqx jvk wpy")  # not merged: it was not
    pairs.save(tmp_path / "pairs.json")
    assert BytePairs.load(tmp_path / "pairs.json").encode(text) == pairs.encode(text)
    with pytest.raises(InvalidArgument, match="holds no tokenizer"):
        BytePairs.load(tmp_path / "none.json")
    with pytest.raises(InvalidArgument, match="size=256"):
        BytePairs.from_public(PublicText(LINES), size=256)
