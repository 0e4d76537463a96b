"""Public rows that were made, and say by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sfumato.objective import Batch, Objective
from sfumato.public import Public


class Synthetic(Public):
    """A `Public` like any other, with the `provenance` of its rows: what made them, from what, and how."""

    def __init__(
        self,
        data: Any,
        *,
        provenance: Mapping[str, Any],
        objective: Objective | None = None,
        seed: int | None = None,
        augment: Callable[[Batch], Batch] | None = None,
    ) -> None:
        super().__init__(data, objective=objective, seed=seed, augment=augment)
        self.provenance = provenance
