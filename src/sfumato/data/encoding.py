"""How the cells of a table become numbers, as declared: nothing here is learned from a private row.

A column of words becomes one slot per declared category and one for everything else, so that a word nobody declared,
or a missing one, is no error that tells of a row. A number stays one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What is declared about the columns of a table.

    >>> code = Encoding(categories={"city": ["Bern", "Rome"]}, missing=["?"])
    >>> code.encode("city", ["Rome", " Bern", "?", "Oslo"]).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    >>> code.encode("age", ["17", "?"]).tolist()
    [[17.0], [nan]]
    """

    columns: Sequence[str] = ()  # the names, where a CSV file has no header row
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignore: Sequence[str] = ()  # columns that are left out
    missing: Sequence[str] = ()  # cells that mean: not known

    def width(self, column: str) -> int:
        """How many numbers a cell of this column becomes."""
        return len(self.categories[column]) + 1 if column in self.categories else 1

    def widths(self, columns: Sequence[str]) -> int:
        return sum(map(self.width, columns))

    def is_number(self, columns: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which of the encoded features are numbers, and no slots of a category."""
        return np.concatenate([np.full(self.width(name), name not in self.categories) for name in columns])

    def encode(self, column: str, cells: Sequence[Any]) -> Array:
        """One row per cell; ValueError if one is neither a number nor missing. A missing number is NaN."""
        if column not in self.categories:
            return np.fromiter(map(self._number, cells), np.float64, len(cells))[:, None]
        slot = {word: k for k, word in enumerate(self.categories[column])}
        found = np.zeros((len(cells), self.width(column)))
        found[np.arange(len(cells)), [slot.get(word(cell), len(slot)) for cell in cells]] = 1.0
        return found

    def _number(self, cell: Any) -> float:
        return np.nan if self.missing and (cell is None or word(cell) in self.missing) else float(cell)


def word(cell: Any) -> str:
    """A cell as text: files are full of spaces after commas."""
    return "" if cell is None else str(cell).strip()
