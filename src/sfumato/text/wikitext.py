"""WikiText-2 (Merity et al. 2017) from files, in the forms in which it is handed around."""

from __future__ import annotations

import lzma
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import InvalidArgument

Article = list[str]  # lines

_FOLDERS = ("", "wikitext-2", "text")
_TOKENS, _COMPACT, _ARCHIVE = "wiki.{}.tokens", "wikitext-2.{}.txt.xz", "wikitext-2-v1.zip"
_PARTS = ("train", "valid", "test")
_HEADING = re.compile(r" = [^=].* = \s*")  # of an article; those of its sections have more signs


@dataclass(frozen=True, kw_only=True)
class WikiText:
    """Articles, each a list of lines of words between spaces."""

    train: list[Article]
    valid: list[Article]
    test: list[Article]


def wikitext2(folder: str | Path | None = None) -> WikiText:
    """WikiText-2: 2,088,628 words to train on, ends of lines included.

    `folder` ($SFUMATO_DATA by default) holds `wikitext-2/wiki.train.tokens` and its two siblings, or the official
    archive `wikitext-2-v1.zip`, or `text/wikitext-2.train.txt.xz` and its siblings.
    """
    found = os.environ.get("SFUMATO_DATA") if folder is None else folder
    if found is None:
        raise InvalidArgument("WikiText-2 is looked for in a folder: give folder=..., or set SFUMATO_DATA.")
    root = Path(found)
    texts = _texts(root)
    if texts is None:
        looked_for = f"{_FOLDERS[1]}/{_TOKENS.format('train')}, {_ARCHIVE}, {_FOLDERS[2]}/{_COMPACT.format('train')}"
        raise InvalidArgument(f"folder={str(root)!r} holds no WikiText-2: it needs one of {looked_for}.")
    return WikiText(**{part: articles(text) for part, text in zip(_PARTS, texts, strict=True)})


def articles(text: str) -> list[Article]:
    """A text cut where a new article's heading stands; what stands before the first heading is part of the first.

    >>> [len(lines) for lines in articles(" = One = \\n a b \\n = = Section = = \\n = Two = \\n c \\n")]
    [3, 2]
    """
    found: list[Article] = []
    begun = False
    for line in text.removesuffix("\n").split("\n"):
        heading = _HEADING.fullmatch(line) is not None
        if not found or (heading and begun):
            found.append([])
        begun = begun or heading
        found[-1].append(line)
    return found


def _texts(root: Path) -> Sequence[str] | None:
    try:
        for place in (root / name for name in _FOLDERS):
            if (place / _TOKENS.format("train")).is_file():
                return [(place / _TOKENS.format(part)).read_text(encoding="utf-8") for part in _PARTS]
            if (place / _COMPACT.format("train")).is_file():
                return [_unpacked(place / _COMPACT.format(part)) for part in _PARTS]
        if (root / _ARCHIVE).is_file():
            with zipfile.ZipFile(root / _ARCHIVE) as archive:
                return [archive.read(f"wikitext-2/{_TOKENS.format(part)}").decode("utf-8") for part in _PARTS]
    except (OSError, ValueError, KeyError, lzma.LZMAError, zipfile.BadZipFile) as error:
        kind = type(error).__name__
        raise InvalidArgument(f"WikiText-2 in {str(root)!r} cannot be read ({kind}): fetch it again.") from error
    return None


def _unpacked(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        return file.read()
