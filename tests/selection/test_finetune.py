"""Fine-tuning on a few chosen rows: the rest of the pool keeps what the model knew, and the labels still enter."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sfumato import Objective, Public, cross_entropy
from sfumato.errors import InvalidArgument
from sfumato.objective import squared_error
from sfumato.selection import fine_tune
from sfumato.warmup import warm_up


@cache
def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def pool() -> tuple[Tensor, Tensor]:
    return tuple(part[600:1200] for part in digits())  # type: ignore[return-value]


def later_rows() -> tuple[Tensor, Tensor]:
    return tuple(part[1200:] for part in digits())  # type: ignore[return-value]


@cache
def _trained(without: int | None) -> nn.Module:
    inputs, labels = (part[:600] for part in digits())
    known = torch.ones(600, dtype=torch.bool) if without is None else labels != without
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    warm_up(Objective(module, cross_entropy), Public((inputs[known], labels[known]), seed=0), steps=300)
    return module


def trained(without: int | None = None) -> Objective:
    """A model of the first digits, or of all but one of them; dropout goes on from here, whichever test comes first."""
    torch.manual_seed(1)
    return Objective(copy.deepcopy(_trained(without)), cross_entropy)


def accuracy(objective: Objective, kinds: set[int] | None = None) -> float:
    """On rows that were never seen, of these classes."""
    inputs, labels = later_rows()
    wanted = torch.ones(len(labels), dtype=torch.bool) if kinds is None else torch.isin(labels, torch.tensor([*kinds]))
    module = copy.deepcopy(objective.module).eval()
    with torch.no_grad():
        return float((module(inputs[wanted]).argmax(1) == labels[wanted]).double().mean())


def apart(which: Tensor) -> tuple[Public, Public]:
    """These of the pool with their labels, and the others without."""
    inputs, labels = pool()
    return Public((inputs[which], labels[which]), seed=0), Public(inputs[~which])


def first(kind: int, count: int) -> Tensor:
    """So many rows of the pool, all of one class."""
    which = pool()[1] == kind
    return which & (which.cumsum(0) <= count)


def test_a_biased_few_make_a_model_forget_unless_the_rest_is_there() -> None:
    labelled, rest = apart(first(8, 30))
    options: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 20, "epochs": 20}
    begun, alone, both = trained(), trained(), trained()
    fine_tune(alone, labelled, **options)
    fine_tune(both, labelled, unlabelled=rest, **options)
    others = set(range(10)) - {8}
    assert accuracy(begun) > 0.85
    assert accuracy(alone, others) < 0.5
    assert accuracy(both, others) > accuracy(begun, others) - 0.07
    assert accuracy(both, {8}) > accuracy(begun, {8})


def test_what_the_model_has_never_seen_is_learnt_from_its_labels() -> None:
    """Of a class that the rest of the pool has not: what the model says of the rest cannot teach it."""
    inputs, labels = pool()
    nines = first(9, 20)
    without = labels != 9
    begun, tuned = trained(without=9), trained(without=9)
    assert accuracy(begun, {9}) == 0
    fine_tune(
        tuned, Public((inputs[nines], labels[nines])), unlabelled=Public(inputs[without]), learning_rate=0.05, epochs=20
    )
    assert accuracy(tuned, {9}) > 0.7
    assert accuracy(tuned, set(range(9))) > accuracy(begun, set(range(9))) - 0.05


@pytest.mark.parametrize(("share", "repeats"), [(0.5, 9), (0.25, 3), (0.8, 36), (0.01, 1)])
def test_a_share_of_the_training_is_labelled(share: float, repeats: int) -> None:
    """Ten labelled rows and ninety others: each pass has the ninety, with what the model said, and the ten repeated."""
    inputs, labels = (part[:100] for part in pool())
    objective = trained()
    before = copy.deepcopy(objective.module).eval()
    seen: list[tuple[Tensor, Tensor]] = []

    def look(batch: Any) -> Any:
        seen.append(batch)
        return batch

    losses = fine_tune(
        objective,
        Public((inputs[:10], labels[:10])),
        unlabelled=Public(inputs[10:]),
        share=share,
        epochs=2,
        batch_size=10,
        augment=look,
    )
    assert len(losses) == len(seen) == 2 * (90 + 10 * repeats) // 10
    rows, targets = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    same = (rows[:, None] == inputs[None]).all(2)
    assert same.sum(0).tolist() == [2 * repeats] * 10 + [2] * 90
    with torch.no_grad():
        expected = torch.cat([torch.eye(10)[labels[:10]], before(inputs[10:]).softmax(1)])
    torch.testing.assert_close(targets, expected[same.int().argmax(1)], atol=1e-6, rtol=1e-5)


def test_the_seed_is_of_the_order() -> None:
    def weights(seed: int) -> Tensor:
        objective, (labelled, rest) = trained(), apart(first(3, 10))
        objective.module[2].p = 0.0  # type: ignore[index, union-attr]  # dropout draws by torch's own generator
        fine_tune(objective, labelled, unlabelled=rest, epochs=1, seed=seed)
        return torch.cat([p.detach().reshape(-1) for p in objective.module.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    inputs, labels = pool()
    labelled, rest = apart(first(3, 10))
    objective = trained()
    squares = Objective(objective.module, squared_error)
    begun = copy.deepcopy(objective.module.state_dict())
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (objective, labelled, {"share": 0.0}, "share=0.0 must lie between 0 and 1"),
        (objective, labelled, {"share": 1.0}, "share=1.0 must lie between 0 and 1"),
        (objective, labelled, {"share": float("nan")}, "share=nan"),
        (objective, labelled, {"epochs": 0}, "epochs=0"),
        (objective, labelled, {"unlabelled": inputs}, "unlabelled=Tensor must be a Public"),
        (objective, (inputs, labels), {}, "labelled=tuple must be a Public"),
        (objective, None, {}, "labelled=NoneType must be a Public"),
        (objective, labelled, {"unlabelled": Public((inputs, labels))}, "inputs alone"),
        (objective, Public(inputs), {}, "(inputs, labels)"),
        (squares, labelled, {}, "cross_entropy"),
    ]
    for wanted, rows, options, text in cases:
        with pytest.raises(InvalidArgument, match=re.escape(text)):
            fine_tune(wanted, rows, **({"unlabelled": rest} | options))
    assert all(torch.equal(t, begun[name]) for name, t in objective.module.state_dict().items())
