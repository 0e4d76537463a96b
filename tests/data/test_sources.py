"""Rows by number: what is copied, what is lent, in which form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sfumato.data.sources import _LENT_FROM, TensorSource
from sfumato.errors import SfumatoError

N = 600
X, y = torch.arange(3.0 * N, dtype=torch.float64).view(N, 3), torch.arange(float(N), dtype=torch.float64)
MANY = np.arange(7, 7 + _LENT_FROM)


@pytest.mark.parametrize("data", [X, (X, y), [X, y], {"x": X, "y": (y, X.float())}], ids=["X", "tuple", "list", "dict"])
@pytest.mark.parametrize(
    "indices",
    [np.array([5]), np.array([9, 3, 3]), MANY, MANY[::-1], MANY[[0, *range(len(MANY) - 2, 0, -1), -1]], MANY[:0]],
    ids=["one", "some", "run", "backwards", "shuffled", "none"],
)
def test_rows_come_as_they_are_asked_for_in_the_form_of_the_data(data, indices):
    got = TensorSource(data).gather(indices)
    flat, structure = torch.utils._pytree.tree_flatten(got)
    expected, expected_structure = torch.utils._pytree.tree_flatten(data)
    assert structure == expected_structure
    for rows, all_rows in zip(flat, expected, strict=True):
        assert torch.equal(rows, all_rows[torch.from_numpy(indices.copy())])
        assert rows.dtype == all_rows.dtype


def shares_memory(data, indices):
    rows = torch.utils._pytree.tree_flatten(TensorSource(data).gather(indices))[0]
    mine = torch.utils._pytree.tree_flatten(data)[0]
    return {a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(rows, mine, strict=True)}


def test_only_runs_of_rows_of_a_float64_table_are_lent():
    assert shares_memory((X, y), MANY) == {True}
    for data in (X, [X, y], (X.float(), y.float()), (X, y[:, None]), (X.float(), y.long()), (y, X), (X, y, y)):
        assert shares_memory(data, MANY) == {False}
    for indices in (MANY[:-1], MANY[::-1], MANY + (MANY > 100), np.arange(64)):
        assert shares_memory((X, y), indices) == {False}


def test_who_changes_lent_rows_is_found_out():
    source = TensorSource((X.clone(), y.clone()))
    _, targets = source.gather(MANY)
    source.gather(MANY)
    targets[3:5].mul_(2)
    with pytest.raises(SfumatoError, match="changed in place"):
        source.gather(MANY)
