"""Whose rows are whose: nobody's id changes what another's means."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sfumato import Budget, NoisyMean, NotPrivateSeed, Private
from sfumato.data.user_ids import user_ids
from sfumato.errors import InvalidArgument

BIG = [2**60 + i for i in range(200)]  # as account numbers are


def total(users: Any) -> float:
    """The sum over users of 1, but for hardly any noise."""
    door = Private(
        torch.ones(len(users), 1),
        name="accounts",
        size=200,
        unit="user",
        users=users,
        budget=Budget(1e9, 1e-6),
        seed=NotPrivateSeed(0),
    )
    return 200 * float(door.ask(NoisyMean(lambda rows: rows, bound=1.0), noise=1e-4, sampler=door.everyone()))


@pytest.mark.parametrize("newcomer", [0.5, -1, "ann", 2**70, True], ids=repr)
@pytest.mark.parametrize("form", [list, tuple, lambda ids: np.array(ids, dtype=object)], ids=["list", "tuple", "array"])
def test_one_persons_id_merges_no_others(newcomer: Any, form: Callable[[list[Any]], Any]) -> None:
    assert total(form(BIG)) == pytest.approx(200, abs=0.01)
    assert total(form([*BIG, newcomer])) == pytest.approx(201, abs=0.01)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 3.0, np.int32(3), np.float32(3.0), torch.tensor(3)],
        [1, True, np.bool_(True)],
        [np.str_("ann"), "ann"],
        np.array([7, 7]),
        torch.tensor([7, 7]),
    ],
    ids=["numbers", "truth", "words", "array", "tensor"],
)
def test_one_person_is_one_however_the_id_is_written(ids: Any) -> None:
    found = user_ids(ids)
    assert len({repr(user) for user in found}) == len(set(found)) == 1


def test_words_that_numpy_would_make_alike_stay_apart() -> None:
    assert len(set(user_ids(["a", "a\0"]))) == 2


@pytest.mark.parametrize(
    "ids", [[[1], [2, 3]], [1, [2]], [{}], deque([[1], [2, 3]]), np.zeros((2, 2)), np.ma.masked_array([1, 2])]
)
def test_what_is_no_id_is_refused_unquoted(ids: Any) -> None:
    with pytest.raises(InvalidArgument, match="one id per row") as error:
        user_ids(ids)
    assert error.value.__cause__ is None
    assert "[2" not in str(error.value)
