"""Rows by number: what is copied, what is lent, in which form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sfumato.data.sources import TensorSource

N = 600
X, y = torch.arange(3.0 * N, dtype=torch.float64).view(N, 3), torch.arange(float(N), dtype=torch.float64)
MANY = np.arange(7, 300)


@pytest.mark.parametrize("data", [X, (X, y), [X, y], {"x": X, "y": (y, X.float())}], ids=["X", "tuple", "list", "dict"])
@pytest.mark.parametrize(
    "indices",
    [np.array([5]), np.array([9, 3, 3]), MANY, MANY[::-1], MANY[[0, *range(len(MANY) - 2, 0, -1), -1]], MANY[:0]],
    ids=["one", "some", "run", "backwards", "shuffled", "none"],
)
@pytest.mark.parametrize("lend", [False, True])
def test_rows_come_as_they_are_asked_for_in_the_form_of_the_data(data, indices, lend):
    got = TensorSource(data).gather(indices, lend=lend)
    flat, structure = torch.utils._pytree.tree_flatten(got)
    expected, expected_structure = torch.utils._pytree.tree_flatten(data)
    assert structure == expected_structure
    for rows, all_rows in zip(flat, expected, strict=True):
        assert torch.equal(rows, all_rows[torch.from_numpy(indices.copy())])
        assert rows.dtype == all_rows.dtype


@pytest.mark.parametrize("data", [X, (X, y), {"x": X, "y": y}], ids=["X", "tuple", "dict"])
def test_consecutive_rows_are_lent_to_who_asks_for_that_and_copied_for_all_others(data):
    def shared(indices, **options):
        rows = torch.utils._pytree.tree_leaves(TensorSource(data).gather(indices, **options))
        own = torch.utils._pytree.tree_leaves(data)
        return {
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(rows, own, strict=True)
        }

    assert shared(MANY, lend=True) == {True}
    assert shared(MANY) == {False}
    for indices in (MANY[::-1], MANY + (MANY > 100), MANY[:0]):
        assert shared(indices, lend=True) == {False}


def test_lent_rows_lie_one_behind_the_other_however_the_table_does():
    """Sums over the columns of a table that lies in memory column by column are rounded by a row's place."""
    table = np.random.default_rng(0).normal(size=(N, 4))
    for laid_out in (table, np.asfortranarray(table), np.repeat(table, 2, 1)[:, ::2], np.repeat(table, 2, 0)[::2]):
        lent = TensorSource(laid_out).gather(MANY, lend=True)
        assert lent.is_contiguous()
        assert torch.equal(lent, torch.from_numpy(table[MANY]))


def test_a_file_mapped_for_reading_is_not_copied(tmp_path):
    np.save(tmp_path / "rows.npy", X.numpy())
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    source = TensorSource(mapped)
    assert source.gather(MANY, lend=True).data_ptr() == mapped[MANY[0] :].ctypes.data
    assert torch.equal(source.gather(MANY[::-1]), X[MANY[::-1].copy()])
