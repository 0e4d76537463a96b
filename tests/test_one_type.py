"""What finds one type for all, as numpy does for a list, may not let one person's type change everybody's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sfumato import Budget, Histogram, Private
from sfumato.data.sources import as_source
from sfumato.data.user_ids import is_missing, user_ids
from sfumato.erm import DPSGDClassifier
from sfumato.erm.base import _are_words
from sfumato.erm.rows import column, features, numbers, signs
from sfumato.errors import InvalidArgument


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


# ------------------------------------------------------------------------------------------------ datasets


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ((1.0, 0.1), (1, 0.1)),
        (2**24 + 1, 0.5),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.float32(1), np.float64(1)),
        ({"x": 1.0, "y": 2}, {"x": 1.0}),
        ((1.0, True), (1.0, 1)),
    ],
    ids=["a whole number", "a fraction", "a wider tensor", "a wider number", "a field less", "no switch"],
)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_row_of_another_type_is_refused_instead_of_changing_the_others(usual: Any, odd: Any, place: int) -> None:
    rows = [usual] * 7
    assert len(torch.utils._pytree.tree_flatten(as_source(Rows(rows)).gather(np.arange(7)))[0][0]) == 7
    rows[place] = odd
    with pytest.raises(InvalidArgument, match="unlike types"):
        as_source(Rows(rows)).gather(np.arange(7))


def test_rows_that_come_out_alike_may_be_written_otherwise() -> None:
    source = as_source(Rows([(1.0, 2), (np.float64(3.0), np.int64(4))]))
    first, second = source.gather(np.array([1, 0, 1]))
    assert (first.tolist(), second.tolist()) == ([3.0, 1.0, 3.0], [4, 2, 4])


def test_a_vote_does_not_hang_on_how_somebody_else_wrote_a_number() -> None:
    """torch makes everybody's numbers float32 beside one whole number, and 0.1 > 0.1 is another question then."""

    def votes(rows: tuple[Tensor, Tensor]) -> Tensor:
        return (rows[0] > rows[1]).long()

    def ask(first: Any) -> int:
        rows = Rows([first, *[(0.1, 0.1)] * 300])
        private = Private(rows, name="c", size=301, budget=Budget(2.0, 1e-5))
        return int(private.ask(Histogram(votes, 2), noise=1.0, sampler=private.everyone())[1])

    assert abs(ask((1.0, 0.1)) - 1) < 60
    with pytest.raises(InvalidArgument):
        ask((1, 0.1))


# ------------------------------------------------------------------------------------------------ lists


def test_large_labels_stay_apart_beside_a_fraction() -> None:
    large = 2**60
    classes = np.unique(np.asarray([large, large + 1]))
    usual = [large + 1, large, large + 1, large + 1]
    before, after = (signs(column(y, "y", None), classes) for y in (usual, [*usual[:3], 0.5]))
    assert before.tolist() == [1, -1, 1, 1]
    assert after[:3].tolist() == [1, -1, 1]
    assert np.isnan(after[3])


def test_a_fraction_among_large_labels_does_not_turn_a_model_round() -> None:
    large, rng = 2**60, np.random.default_rng(0)
    X = rng.normal(size=(300, 2)) + 1.0
    y: list[Any] = [large] * 300

    def weight(labels: list[Any]) -> float:
        model = DPSGDClassifier(epsilon=50.0, delta=1e-5, classes=[large, large + 1])
        return float(model.fit(X, labels).coef_.sum())

    assert weight(y) < 0
    assert weight([*y[:-1], 0.5]) < 0


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_word_among_numbers_changes_no_other_number(kind: type) -> None:
    rows = [[kind(0.1), kind(0.3)] for _ in range(5)]
    odd: list[Any] = [*rows[:4], [kind(0.1), "0.25"]]
    before, after = features(rows, "X"), features(odd, "X")
    assert (before[:4] == after[:4]).all()
    assert after[4, 1] == 0.25
    targets = [kind(0.1)] * 4
    changed = numbers(column([*targets, "1"], "y", None), "y")
    assert (changed[:4] == numbers(column(targets, "y", None), "y")).all()


def test_one_strange_label_in_a_list_is_not_announced() -> None:
    X, y = np.zeros((6, 2)), [0, 1, 0, 1, 0, 1]
    for strange in (None, "x", 2**70, 0.5):
        DPSGDClassifier(epsilon=1.0, delta=1e-5, classes=[0, 1]).fit(X, [*y[:5], strange])
    words = ["a", "b", "a", "b", "a"]
    DPSGDClassifier(epsilon=1.0, delta=1e-5, classes=["a", "b"]).fit(X, [*words, 7])
    with pytest.raises(InvalidArgument, match="y has words"):
        DPSGDClassifier(epsilon=1.0, delta=1e-5, classes=[0, 1]).fit(X, [*words, "a"])
    with pytest.raises(InvalidArgument, match="y has numbers"):
        DPSGDClassifier(epsilon=1.0, delta=1e-5, classes=["a", "b"]).fit(X, y)
    assert _are_words(np.array(["a"]), all)


# ------------------------------------------------------------------------------------------------ users


@pytest.mark.parametrize("nobody", ["None", "<NA>", "NaT", "null", "NULL", "NAN", "N/A", np.ma.masked])
def test_nobody_is_no_user_however_it_is_written(nobody: Any) -> None:
    assert is_missing(nobody)
    with pytest.raises(InvalidArgument, match="missing ids"):
        user_ids(["a", nobody, "b"])


@pytest.mark.parametrize(("kind", "bits"), [(np.float16, 11), (np.float32, 24), (np.float64, 53)])
def test_fractions_too_large_to_tell_people_apart_are_refused(kind: type, bits: int) -> None:
    assert user_ids(np.array([1, 2**bits - 1], kind)) == [1, 2**bits - 1]
    with pytest.raises(InvalidArgument, match="so large"):
        user_ids(np.array([1, 2**bits], kind))
