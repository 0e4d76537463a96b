"""From a file's cells to the rows that a model sees; all of it declared or public, so it is kept beside the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.data.encoding import Encoding
from sfumato.data.tables import Scaling

Array = npt.NDArray[Any]
PREPROCESSING = "preprocessing.json"  # beside the weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessing:
    """Applied to features as they are read: scaled, holes filled with what says nothing, and in the model's shape.

    >>> made = Preprocessing(shape=(2,), scaling=Scaling.declared(0, 4, (2,)), encoding=Encoding(missing=["?"]))
    >>> made(np.array([[1.0, np.nan]])).tolist()
    [[0.25, 0.5]]
    """

    shape: tuple[int, ...]
    columns: Sequence[str] = ()  # of the features, in the model's order
    encoding: Encoding = field(default_factory=Encoding)
    scaling: Scaling | None = None
    label: str | None = None
    classes: Sequence[str] | None = None

    def __call__(self, features: Array) -> Array:
        found = features if self.scaling is None else self.scaling(features)
        if self.encoding.missing:  # the middle of the declared range
            found = np.where(np.isnan(found), 0.0 if self.scaling is None else 0.5, found)
        return np.ascontiguousarray(found, dtype=np.float32).reshape(len(found), *self.shape)

    def to_json(self) -> dict[str, Any]:
        scale = self.scaling
        return {
            "shape": list(self.shape),
            "columns": list(self.columns),
            "label": self.label,
            "classes": None if self.classes is None else list(self.classes),
            "encoding": {
                "columns": list(self.encoding.columns),
                "categories": {name: list(words) for name, words in self.encoding.categories.items()},
                "ignore": list(self.encoding.ignore),
                "missing": list(self.encoding.missing),
            },
            "scaling": None if scale is None else {"lower": scale.lower.tolist(), "upper": scale.upper.tolist()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Preprocessing:
        scale = data["scaling"]
        return Preprocessing(
            shape=tuple(data["shape"]),
            columns=tuple(data["columns"]),
            encoding=Encoding(**data["encoding"]),
            # As float32, in which it was applied: the same rows give the same numbers.
            scaling=None if scale is None else Scaling(*(np.asarray(scale[k], np.float32) for k in ("lower", "upper"))),
            label=data["label"],
            classes=data["classes"],
        )
