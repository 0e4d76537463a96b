"""Labels that a person gave to chosen points, read back and checked; or, in experiments, those that are known."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.public import Public
from sfumato.selection.sheet import check_classes

_HEADER = ["index", "label"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """Numbers of points in the pool, their classes, and the chosen points that have none yet; in chosen order."""

    indices: Tensor
    labels: Tensor
    missing: tuple[int, ...] = ()

    def public(self, images: Tensor, **options: Any) -> Public:
        """The labelled ones of all the pool's images, as rows `(image, label)` of a `Public`."""
        return Public((images[self.indices.to(images.device)], self.labels.to(images.device)), **options)


def read_labels(path: str | os.PathLike[str], *, chosen: Sequence[int], classes: Sequence[str]) -> Labelled:
    """Read a CSV file with a line `index,label` for each point; a missing line or an empty label is a missing label.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "labels.csv"
    >>> _ = path.write_text("index,label\\n7,dog\\n3,\\n")
    >>> labelled = read_labels(path, chosen=[3, 7], classes=["cat", "dog"])
    >>> labelled.indices.tolist(), labelled.labels.tolist(), labelled.missing
    ([7], [1], (3,))
    """
    check_classes(classes)
    number_of = {name: k for k, name in enumerate(classes)}
    known = {int(i) for i in chosen}
    found: dict[int, int] = {}
    seen: dict[int, int] = {}
    for line, cells in _lines(Path(path)):
        where = f"labels={str(path)!r}, line {line}"
        if len(cells) != 2:
            raise InvalidArgument(f"{where}: has {len(cells)} cells instead of 2, write index,label.")
        index, label = cells
        if not (index.isdecimal() and len(index) < 20 and int(index) in known):
            raise InvalidArgument(
                f"{where}: index {index[:80]!r} is not one of the {len(known)} chosen points, remove it."
            )
        if (before := seen.setdefault(int(index), line)) != line:
            raise InvalidArgument(f"{where}: index {index} is on line {before} already, keep one of the two.")
        if not label:
            continue
        if label not in number_of:
            raise InvalidArgument(f"{where}: label {label[:80]!r} is not a class{_known(classes)}.")
        found[int(index)] = number_of[label]
    if not found:
        raise InvalidArgument(f"labels={str(path)!r} has no label yet: label at least one of the {len(known)} points.")
    indices = [int(i) for i in chosen if int(i) in found]
    return Labelled(
        indices=torch.tensor(indices),
        labels=torch.tensor([found[i] for i in indices]),
        missing=tuple(int(i) for i in chosen if int(i) not in found),
    )


def oracle_labels(known: Any, *, chosen: Sequence[int], classes: int) -> Labelled:
    """For experiments: the labels of the chosen points out of those of the whole pool, which nobody had to give.

    >>> oracle_labels(np.array([0, 1, 2, 1]), chosen=[3, 0], classes=3).labels.tolist()
    [1, 0]
    """
    everything = np.asarray(known)
    if everything.ndim != 1 or everything.dtype.kind not in "iu":
        raise InvalidArgument(
            f"known has the shape {everything.shape} and type {everything.dtype}: give a whole number per pool row."
        )
    indices = np.asarray([int(i) for i in chosen], dtype=np.int64)
    if not len(indices) or int(indices.min()) < 0 or int(indices.max()) >= len(everything):
        raise InvalidArgument(
            f"known has {len(everything)} labels, and the chosen points are others: give the labels of the whole pool."
        )
    labels = everything[indices].astype(np.int64)
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise InvalidArgument(
            f"known has labels from {labels.min()} to {labels.max()}: they must be 0 to {classes - 1}."
        )
    return Labelled(indices=torch.from_numpy(indices), labels=torch.from_numpy(labels))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and stripped cells below the header; commas or semicolons, as spreadsheets have them."""
    if not path.is_file():
        raise InvalidArgument(f"labels={str(path)!r} does not exist: save it from the sheet, or give its path.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        first = text.split("\n", 1)[0]
        reader = csv.reader(io.StringIO(text), delimiter=";" if ";" in first else ",", strict=True)
        header = [cell.strip().lower() for cell in next(reader, [])]
        if header != _HEADER:
            raise InvalidArgument(f"labels={str(path)!r}, line 1: must be the header index,label, write it first.")
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield reader.line_num, cells
    except (csv.Error, UnicodeDecodeError):
        raise InvalidArgument(
            f"labels={str(path)!r} is not a CSV file in UTF-8: save it from the sheet again."
        ) from None


def _known(classes: Sequence[str]) -> str:
    return f", they are {', '.join(classes)}" if len(classes) <= 12 else ", check its spelling in the config"
