"""The chosen points as a folder for a person to label: images, a contact sheet for the browser, and a CSV to fill in.

Nothing here guesses a label. The folder holds public images only; which of them were chosen is released knowledge, and
`chosen.json` says by what and at what cost.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument

INLINE_BYTES = 24 << 20  # images of more than this in all stay beside the page, which would be slow to open with them
RECORD, SHEET, LABELS, IMAGES = "chosen.json", "sheet.html", "labels.csv", "images"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sheet:
    """Chosen points of a public pool, ready to be written down.

    Args:
        images: the chosen ones, (n, channels, height, width) with 1 or 3 channels: uint8, or floats in 0..1.
        indices: their numbers in the pool, best first.
        classes: names of the classes, in the order of the model's outputs.
        provenance: how they were chosen; anything that JSON can hold, kept in `chosen.json`.
        facts: what of that a person who labels should read on the sheet.
        names: captions, such as file names; by default the indices.

    >>> from tempfile import mkdtemp
    >>> sheet = Sheet(images=torch.rand(2, 1, 8, 8), indices=[7, 3], classes=["cat", "dog"])
    >>> folder = sheet.write(mkdtemp())
    >>> sorted(path.name for path in folder.iterdir())
    ['chosen.json', 'images', 'labels.csv', 'sheet.html']
    >>> (folder / "labels.csv").read_text().split()
    ['index,label', '7,', '3,']
    """

    images: Tensor
    indices: Sequence[int]
    classes: Sequence[str]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] | None = None
    title: str = "Which class is it?"

    def __post_init__(self) -> None:
        check_classes(self.classes)
        if len(self.indices) < 1 or len(set(self.indices)) < len(self.indices) or min(self.indices) < 0:
            raise InvalidArgument(
                f"indices has {len(self.indices)} entries: give at least one, and none of them twice."
            )
        wanted = {"images": len(self.images), "names": len(self.indices if self.names is None else self.names)}
        for name, count in wanted.items():
            if count != len(self.indices):
                raise InvalidArgument(f"{name} has {count} entries and indices {len(self.indices)}: give one each.")
        check_pictures(self.images)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write `chosen.json` first, which all else can be made from again; labels that are there stay as they are."""
        path = Path(folder)
        (path / IMAGES).mkdir(parents=True, exist_ok=True)
        record = {**self.provenance, "classes": list(self.classes), "indices": [int(i) for i in self.indices]}
        _replace(path / RECORD, json.dumps(record, indent=2, allow_nan=False) + "\n")
        pictures = [png(picture) for picture in _pixels(self.images)]
        for name, content in zip(self._files(), pictures, strict=True):
            (path / name).write_bytes(content)
        if not (path / LABELS).exists():
            _replace(path / LABELS, "\n".join(["index,label", *(f"{i}," for i in self.indices), ""]))
        _replace(path / SHEET, self._page(pictures))
        return path

    def _files(self) -> list[str]:
        digits = len(str(max(self.indices)))
        return [f"{IMAGES}/{int(i):0{digits}d}.png" for i in self.indices]

    def _page(self, pictures: Sequence[bytes]) -> str:
        inline = sum(map(len, pictures)) <= INLINE_BYTES
        sources = [_data_url(p) for p in pictures] if inline else self._files()
        names = [str(int(i)) for i in self.indices] if self.names is None else self.names
        points = [
            {"index": int(i), "src": source, "name": name}
            for i, source, name in zip(self.indices, sources, names, strict=True)
        ]
        data = {
            "id": self._identity(pictures),
            "classes": list(self.classes),
            "points": points,
            "facts": [[name, text] for name, text in self.facts.items()],
        }
        parts = files("sfumato.selection")
        script = (parts / "sheet.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        page = (parts / "sheet.html").read_text(encoding="utf-8")
        texts = {"SCRIPT_HASH": digest, "SCRIPT": script, "TITLE": html.escape(self.title), "DATA": _json_in_html(data)}
        # In one pass: what stands in a text that was put in is not looked at again.
        return re.sub(r"\{\{([A-Z_]+)\}\}", lambda found: texts[found[1]], page)

    def _identity(self, pictures: Sequence[bytes]) -> str:
        """The same for the same sheet alone: under it the browser keeps the labels."""
        digest = hashlib.sha256(json.dumps([[int(i) for i in self.indices], list(self.classes)]).encode())
        for picture in pictures:
            digest.update(hashlib.sha256(picture).digest())
        return digest.hexdigest()[:32]


def check_classes(classes: Sequence[str]) -> None:
    """Raise unless the names can be told apart in a CSV file: different, not empty, on one line, no blanks around."""
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise InvalidArgument(f"classes={list(classes)} must be at least two different names.")
    for name in classes:
        if not name or name != name.strip() or not name.isprintable():
            raise InvalidArgument(
                f"classes has the name {name!r}: give printable text on one line, no blanks around it."
            )


def check_pictures(images: Tensor) -> None:
    """Raise unless these can be shown: (n, 1 or 3, height, width), uint8 or finite floats in 0..1."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 1:
        raise InvalidArgument(
            f"images has the shape {tuple(images.shape)}: give (n, channels, height, width) with 1 or 3 channels."
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise InvalidArgument(f"images has the type {images.dtype}: give uint8, or floats in 0..1.")
    if len(images) and not bool(((images >= 0) & (images <= 1)).all()):
        raise InvalidArgument("images has values outside of 0..1: divide them by what white is, or give uint8.")


def png(picture: npt.NDArray[np.uint8]) -> bytes:
    """(height, width, 1 or 3) as a PNG file, the same bytes for the same pixels.

    >>> png(np.zeros((2, 3, 1), dtype=np.uint8))[:4]
    b'\\x89PNG'
    """
    height, width, channels = picture.shape
    rows = picture.reshape(height, width * channels)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # each row begins with its filter, 0
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _pixels(images: Tensor) -> npt.NDArray[np.uint8]:
    """(n, height, width, channels)."""
    values = images if images.dtype == torch.uint8 else (images.double() * 255).round().to(torch.uint8)
    found: npt.NDArray[np.uint8] = values.permute(0, 2, 3, 1).cpu().contiguous().numpy()
    return found


def _data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _json_in_html(data: Any) -> str:
    """JSON that ends no script element and opens no comment, whatever text is in it."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)
