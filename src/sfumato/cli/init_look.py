"""What `sfumato init` finds in public rows: columns, words, ranges, classes. Private files are not opened here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfumato.data import cells
from sfumato.data.encoding import word
from sfumato.errors import InvalidArgument
from sfumato.reading import suggestion

_MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")
_MOST_WORDS = 200  # a column with more is a name or a text, and no category
_MOST_CLASSES = 100  # of labels that are whole numbers; more are a quantity


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of public rows, all that a config can be filled with."""

    rows: int
    shape: tuple[int, ...] = ()  # of images or arrays
    columns: Sequence[str] | None = None  # where the file does not name them itself
    label: str | None = None
    classes: Sequence[str] | None = None  # where labels are words
    outputs: int = 1
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    eight_bit: bool = False  # the range is that of all pixels there can be, and not of those that were seen
    ignore: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def regression(self) -> bool:
        return self.outputs == 1

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width, where rows look like images that can be read in this order."""
        if len(self.shape) == 2:
            return (1, *self.shape)
        if len(self.shape) != 3 or (self.shape[2] in (3, 4) and self.shape[0] > 4):  # colours last
            return None
        channels, height, width = self.shape
        return (1, channels, height) if width == 1 else (channels, height, width)


def look(path: Path, *, label: str | None, columns: Sequence[str], ignore: Sequence[str]) -> Seen:
    """Read a public file or folder; InvalidArgument if nothing can be made of it."""
    if not path.exists():
        raise InvalidArgument(f"public={str(path)!r} does not exist: check the path.")
    if cells.has_cells(path):
        return _look_at_cells(path, label, columns or _made_up_names(path), ignore)
    if path.is_dir():
        return _look_at_folders(path)
    return _look_at_arrays(path)


def names_of(path: Path, columns: Sequence[str]) -> list[str]:
    """The columns of a public file, as a person may call them."""
    return cells.names(path, "public", columns or _made_up_names(path))


def _made_up_names(path: Path) -> list[str]:
    """Names for a CSV file whose first line is a row: one that holds a number. None for other files."""
    if path.suffix not in cells.CSV:
        return []
    first = next(cells.rows(path, "public", ["any"]), [])
    return [f"c{k}" for k in range(1, len(first) + 1)] if any(map(cells.is_number, first)) else []


def _look_at_cells(path: Path, label: str | None, declared: Sequence[str], ignore: Sequence[str]) -> Seen:
    header = cells.names(path, "public", declared)
    rows = list(cells.rows(path, "public", declared))
    if not rows:
        raise InvalidArgument(f"public={str(path)!r} has no rows: there is nothing to look at.")
    if ragged := next((k for k, row in enumerate(rows, 1) if len(row) != len(header)), None):
        raise InvalidArgument(
            f"public={str(path)!r} has {len(rows[ragged - 1])} cells in row {ragged} and {len(header)} columns: repair "
            "the file, or correct --columns."
        )
    label = label or header[-1]
    for name in (label, *ignore):
        if name not in header:
            raise InvalidArgument(f"public={str(path)!r} has no column {name!r}{suggestion(name, header)}")
    found = {name: [word(row[k]) for row in rows] for k, name in enumerate(header)}
    missing = [sign for sign in _MISSING if any(sign in column for n, column in found.items() if n != label)]
    categories: dict[str, list[str]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    left_out = list(ignore)
    for name in header:
        known = [cell for cell in found[name] if cell not in _MISSING]
        if name in (label, *ignore):
            continue
        numbers = [float(cell) for cell in known if cells.is_number(cell) and math.isfinite(float(cell))]
        words = sorted(set(known))
        if not known or (len(numbers) < len(known) and len(words) > _MOST_WORDS):
            left_out.append(name)
        elif len(numbers) < len(known):
            categories[name] = words
        else:
            low, high = min(numbers), max(numbers)
            ranges[name] = (low, high if high > low else low + 1)
    classes, outputs = _classes(path, label, found[label])
    return Seen(
        rows=len(rows),
        columns=declared or None,
        label=label,
        classes=classes,
        outputs=outputs,
        categories=categories,
        ranges=ranges,
        ignore=left_out,
        missing=missing,
    )


def _classes(path: Path, label: str, found: Sequence[str]) -> tuple[list[str] | None, int]:
    """Names of classes, if they have some, and how many outputs; 1 is regression."""
    words = sorted(set(found))
    if not all(map(cells.is_number, words)):
        if len(words) > _MOST_CLASSES:
            raise InvalidArgument(
                f"label={label!r} has {len(words)} different words in public={str(path)!r}: name the column to predict "
                "with --label."
            )
        return _at_least_two(path, label, words), len(words)
    numbers = [float(cell) for cell in words]
    whole = all(n == math.floor(n) for n in numbers)
    if not whole or len(words) > _MOST_CLASSES:
        return None, 1
    if min(numbers) >= 0 and max(numbers) <= _MOST_CLASSES:
        return None, max(2, int(max(numbers)) + 1)
    return _at_least_two(path, label, words), len(words)


def _at_least_two(path: Path, label: str, words: list[str]) -> list[str]:
    if len(words) < 2:
        raise InvalidArgument(
            f"label={label!r} has one value only in public={str(path)!r}: name another column with --label, or give "
            "public rows of every class."
        )
    return words


def _look_at_folders(path: Path) -> Seen:
    from sfumato.data.class_folders import shape
    from sfumato.data.image_files import image_files

    classes = sorted(place.name for place in path.iterdir() if place.is_dir())
    row = shape(path, "public")
    rows = sum(len(image_files(path / name, below=True)) for name in classes)
    found = _at_least_two(path, "the folder", classes)
    return Seen(rows=rows, shape=row, classes=found, outputs=len(found), range=(0.0, 255.0), eight_bit=True)


def _look_at_arrays(path: Path) -> Seen:
    import numpy as np

    from sfumato.data.tables import layout, read_table

    table = read_table(layout(path, "public", label=None), label=None)
    labels: Any = table.labels
    whole = bool((labels == np.floor(labels)).all()) and labels.min() >= 0 and labels.max() <= _MOST_CLASSES
    known = table.features[np.isfinite(table.features)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    # Whole numbers that need the eighth bit; digits of 0 to 16, say, would be next to black in a range up to 255.
    eight_bit = low >= 0 and 127 < high <= 255 and bool((known == np.floor(known)).all())
    return Seen(
        rows=len(labels),
        shape=table.features.shape[1:],
        outputs=max(2, int(labels.max()) + 1) if whole else 1,
        range=(0.0, 255.0) if eight_bit else (low, high if high > low else low + 1),
        eight_bit=eight_bit,
    )
