"""Rows of text, and WikiText-2 in its forms."""

from __future__ import annotations

import lzma
import os
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sfumato.errors import InvalidArgument
from sfumato.text import IGNORED, by_document, by_line, by_stream, next_words, wikitext2
from sfumato.text.wikitext import articles

REAL = Path(os.environ.get("SFUMATO_DATA", "nowhere"))


def test_rows_of_a_line_overlap_by_the_one_word_that_is_predicted() -> None:
    rows = by_line([range(100, 111), range(3), range(4)], length=3)
    assert rows == [[100, 101, 102, 103], [103, 104, 105, 106], [106, 107, 108, 109], [0, 1, 2, 3]]
    targets = [word for row in rows for word in row[1:]]
    assert len(set(targets)) == len(targets)  # nobody is predicted twice


def test_rows_of_a_stream_share_nothing_and_lose_less_than_one() -> None:
    lines = [list(range(10 * i, 10 * i + n)) for i, n in enumerate((3, 0, 9, 1))]
    rows = by_stream(lines, length=5, end=-1)
    assert [word for row in rows for word in row] == [0, 1, 2, -1, -1, 20, 21, 22, 23, 24, 25, 26, 27, 28, -1]
    assert all(len(row) == 5 for row in rows)
    assert by_stream([[1]], length=3, end=-1) == []


def test_rows_of_documents_stay_within_them() -> None:
    documents = [[[1, 2, 3], [4]], [], [[9]]]
    rows, owners = by_document(documents, length=4, end=0)
    assert rows == [[1, 2, 3, 0], [4, 0], [9, 0]]
    assert owners == [0, 0, 2]
    alone, _ = by_document(documents[:1], length=4, end=0)
    assert rows[:2] == alone
    rows, _ = by_document([[[1, 2, 3, 4]]], length=4, end=0)
    assert rows == [[1, 2, 3, 4]]  # the end alone predicts nothing


def test_inputs_and_targets_are_one_word_apart_and_padded() -> None:
    inputs, targets = next_words([[5, 6, 7], [8, 9]], length=4, filler=1)
    assert inputs.tolist() == [[5, 6, 1], [8, 1, 1]]
    assert targets.tolist() == [[6, 7, IGNORED], [9, IGNORED, IGNORED]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert next_words([], length=4)[0].shape == (0, 3)
    for rows in ([[1, 2, 3]], [[1]]):
        with pytest.raises(InvalidArgument, match="length=2"):
            next_words(rows, length=2)
    with pytest.raises(InvalidArgument, match="length=1"):
        by_stream([[1, 2]], length=1, end=0)


TEXT = " \n = One = \n \n a b \n = = A section = = \n c \n \n = Two = \n d \n"


def test_an_article_begins_with_its_heading() -> None:
    first, second = articles(TEXT)
    assert first[1] == " = One = "
    assert second == [" = Two = ", " d "]
    assert "\n".join([*first, *second]) + "\n" == TEXT


def test_wikitext_is_read_in_all_its_forms(tmp_path: Path) -> None:
    parts = {"train": TEXT, "valid": " = V = \n v \n", "test": " = T = \n t é \n"}
    folders = [tmp_path / name for name in ("tokens", "archive", "compact")]
    (folders[0] / "wikitext-2").mkdir(parents=True)
    (folders[2] / "text").mkdir(parents=True)
    folders[1].mkdir()
    with zipfile.ZipFile(folders[1] / "wikitext-2-v1.zip", "w") as archive:
        for part, text in parts.items():
            (folders[0] / "wikitext-2" / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
            archive.writestr(f"wikitext-2/wiki.{part}.tokens", text)
            with lzma.open(folders[2] / "text" / f"wikitext-2.{part}.txt.xz", "wt", encoding="utf-8") as file:
                file.write(text)
    found = [wikitext2(folder) for folder in folders]
    assert all(a == b for a, b in pairwise(found))
    assert found[0].train == articles(TEXT)
    assert found[0].test == [[" = T = ", " t é "]]


def test_missing_and_broken_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="holds no WikiText-2"):
        wikitext2(tmp_path)
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    with pytest.raises(InvalidArgument, match="SFUMATO_DATA"):
        wikitext2()
    (tmp_path / "wikitext-2-v1.zip").write_bytes(b"no archive")
    with pytest.raises(InvalidArgument, match="BadZipFile"):
        wikitext2(tmp_path)


@pytest.mark.skipif(
    not (REAL / "text" / "wikitext-2.train.txt.xz").is_file(), reason="SFUMATO_DATA has no text/wikitext-2.train.txt.xz"
)
def test_the_papers_numbers_of_sequences() -> None:
    """Papers 003 and 000 report 48,764 and 59,675: their ways of cutting are these."""
    found = wikitext2(REAL)
    lines = [line.split() for article in found.train for line in article]
    assert len(by_line(lines, 35)) == 48_764
    assert len(by_stream(lines, 35, "<eos>")) == 59_675
    assert 600 <= len(found.train) <= 640
