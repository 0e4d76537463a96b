"""Checks that a user's function treats rows one by one, made on a few jittered rows before anything is charged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.generators import own_generators, seed_torch
from sfumato.gradients.made_up import made_up_rows
from sfumato.gradients.passes import Augment
from sfumato.gradients.probed_rows import mixed, probe_rows
from sfumato.gradients.shared_chance import shares_chance
from sfumato.objective import Batch

_ROWS = 8


class MixesRows(InvalidArgument):
    """A user's function lets a row act on another."""


def check_on(rows: Batch | None, like: Batch | None, check: Callable[[Batch], None]) -> None:
    """check(made-up rows), and check(rows) where there are any.

    What mixes made-up rows is refused whoever is in the data, if anybody: else a refusal would tell. That a function
    fails for them otherwise says something only where there are no others.
    """
    refuses = SfumatoError if rows is None else MixesRows
    for made_up in () if like is None else made_up_rows(like, _ROWS):
        try:
            check(made_up)
        except refuses:
            raise
        except Exception:  # of the user's function, which has no place for such rows
            continue
        break
    if rows is not None:
        check(rows)


def check_row_map(row_map: Callable[[Batch], Tensor], rows: Batch) -> None:
    """Raise if the map mixes rows, as centring by their mean would: other rows must not change a row's value."""
    first, second = probe_rows(rows, _ROWS, 0), probe_rows(rows, _ROWS, 1)
    values = row_map(tree_map(_copy, first))
    for keep in (0, 3, _ROWS - 1):
        # The others exchanged, then all equal to one of them (a mean moves furthest then), then none.
        same_others = [_picked(first, [(keep + shift) % _ROWS] * _ROWS) for shift in (1, 4)]
        changed = [row_map(mixed(first, others, keep))[keep] for others in (second, *same_others)]
        if not all(_same(values[keep], v) for v in (*changed, row_map(_picked(first, [keep]))[0])):
            raise MixesRows(
                "row_map gives a row another value when other rows change (centring, normalising or batch norm over "
                "the rows?): make it a function of each row alone."
            )


def checked_values(values: Any, rows: Batch, width: int) -> Tensor:
    """(rows,) or (rows, width), or it is refused. How wide it is instead is not said: rows may decide that."""
    count = len(tree_flatten(rows)[0][0])
    if not isinstance(values, Tensor) or values.ndim not in (1, 2) or len(values) != count or values.is_complex():
        raise InvalidArgument("row_map must return a tensor of real numbers with one row of values per row.")
    if width != (1 if values.ndim == 1 else values.shape[1]):
        raise InvalidArgument(f"row_map must return {width} value(s) per row, whatever the rows hold.")
    return values.detach()


def check_augment(augment: Augment, rows: Batch) -> None:
    """Raise if it mixes rows, as MixUp and CutMix do: a person would enter other people's gradients.

    With the same random numbers a row must come out the same, whatever the other rows hold. So its randomness must come
    from the global generators of torch, numpy or Python, which can be seeded; anything else is refused. What mixes rows
    only once in a while may pass this: an augmentation that says `mixes_rows` of itself is taken at its word.
    """
    if getattr(augment, "mixes_rows", False):
        raise InvalidArgument(f"augment={augment!r} mixes rows: mix public rows only, and use it in the warm-up.")
    first, second = probe_rows(rows, _ROWS, 0), probe_rows(rows, _ROWS, 1)

    def seeded(batch: Batch, seed: int) -> list[Tensor]:
        seed_torch(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        out = [v for v in tree_flatten(augment(tree_map(_copy, batch)))[0] if isinstance(v, Tensor)]
        if not out or any(v.ndim == 0 or len(v) != _ROWS for v in out):
            raise InvalidArgument("augment must map row to row: it returned another number of rows than it was given.")
        return out

    with own_generators():
        for seed in range(2):
            before = seeded(first, seed)
            if not all(map(_same, before, seeded(first, seed))):
                raise InvalidArgument(
                    "augment draws randomness that no global seed fixes, so that it cannot be checked: draw from "
                    "torch's global generator."
                )
            for keep in (0, _ROWS - 1):
                # The others exchanged, and all equal to one of them: a longest or largest one may be among either.
                for others in (second, *(_picked(first, [(keep + shift) % _ROWS] * _ROWS) for shift in (1, 4))):
                    after = seeded(mixed(first, others, keep), seed)
                    if not all(_same(a[keep], b[keep]) for a, b in zip(before, after, strict=True)):
                        raise MixesRows(
                            "augment gives a row another value when other rows change (MixUp or CutMix between private "
                            "rows?): mix with public rows only."
                        )

    if shares_chance(lambda batch: augment(tree_map(_copy, batch)), first):
        raise MixesRows(
            "augment draws random numbers that rows share, such as one coin for a whole batch, and who shares it would "
            "depend on who else is there: draw for every row, as those of sfumato.augment do."
        )


def _picked(batch: Batch, rows: list[int]) -> Batch:
    return tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, batch)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    finite = torch.nan_to_num(torch.cat([a.double().reshape(-1), b.double().reshape(-1)]), 0.0, 0.0, 0.0)
    near = 1e-5 * float(finite.abs().amax()) if finite.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=near, equal_nan=True)
