"""The sampled units as questions see them, inside the door only: rows in parts, and whose records they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.data.samplers import Indices
from sfumato.data.sources import DatasetSource, Source, TensorSource, ahead
from sfumato.data.user_ids import user_ids
from sfumato.errors import InvalidArgument
from sfumato.gradients import Performance, Units
from sfumato.gradients.watched import AT_ONCE
from sfumato.objective import Batch, Objective

WHOLE = 64  # rows that fill whole vectors of numbers, of whatever precision
FEW = 32  # of these each may as well pass alone: to find out whether they may pass together takes as many passes


@dataclass(frozen=True, eq=False)
class Sampled:
    """The `questions.Sample` that the door makes."""

    source: Source
    groups: list[Indices] | None
    indices: Indices
    reduction: str
    objective: Objective | None
    performance: Performance
    limit: int
    shown: Batch | None = None
    largest: int | None = None

    @property
    def at_once(self) -> int:
        """Whole vectors, so that no number of a pass is a last one; and parts are cut into passes evenly."""
        if self.largest is not None and self.largest <= FEW:
            return 1
        limit, micro_batch = self.limit, self.performance.micro_batch
        wanted = limit if self.largest is None else min(limit, -(-self.largest // WHOLE) * WHOLE)
        even = -(-wanted // -(-wanted // AT_ONCE))
        size = min(micro_batch or limit, -(-even // WHOLE) * WHOLE, limit)
        return size - size % WHOLE if size > WHOLE else size

    def parts(self, *, lend: bool = False) -> Iterator[tuple[Batch, Units]]:
        parts = [
            (part, records)
            for records, units in self._by_records()
            for part in np.split(units, range(max(1, self.limit // records), len(units), max(1, self.limit // records)))
            if len(part)
        ]
        batches = (self._part(part, records, lend) for part, records in parts)
        yield from (ahead(batches) if isinstance(self.source, DatasetSource) and len(parts) > 1 else batches)

    def _by_records(self) -> Iterator[tuple[int, Indices]]:
        """Units by their number of records, rounded up to a power of two, to which they are padded.

        It saves padding; above all, how a unit is computed and rounded then depends on its own records alone.
        """
        if self.groups is None or not len(self.indices):
            yield 1, self.indices
            return
        padded = np.array([1 << (len(self.groups[u]) - 1).bit_length() for u in self.indices])
        for records in np.unique(padded):
            yield int(records), self.indices[padded == records]

    def first_rows(self) -> Batch | None:
        return None if self.shown is None else self._moved(self.shown)

    def no_rows(self) -> Batch | None:
        return self._moved(self.source.made_up(0)) if isinstance(self.source, TensorSource) else None

    def _part(self, units: Indices, records: int, lend: bool) -> tuple[Batch, Units]:
        if self.groups is None:
            return self._moved(self.source.gather(units, lend=lend)), Units()
        groups = [self.groups[u] for u in units]
        # Padding repeats a record of the same user, with weight zero.
        rows = np.concatenate([np.concatenate([g, np.repeat(g[:1], records - len(g))]) for g in groups])
        weights = np.concatenate(
            [
                np.repeat([1.0 / len(g) if self.reduction == "mean" else 1.0, 0.0], [len(g), records - len(g)])
                for g in groups
            ]
        )
        return self._moved(self.source.gather(rows)), Units(records, torch.from_numpy(weights))

    def _moved(self, batch: Batch) -> Batch:
        """To where the model is."""
        device = None if self.objective is None else next((p.device for p in self.objective.module.parameters()), None)
        if device is None or device.type == "cpu":
            return batch
        return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t, batch)


def group_by_user(users: Any, rows: int, cap: int) -> list[Indices]:
    """Row numbers by user, at most `cap` each, in the order of the data."""
    found = user_ids(users)
    if len(found) != rows:
        raise InvalidArgument("users must hold one id per row of the data, as a plain array.")
    groups: dict[Any, list[int]] = {}
    for row, user in enumerate(found):
        groups.setdefault(user, []).append(row)
    return [np.array(group[:cap], dtype=np.int64) for group in groups.values()]
