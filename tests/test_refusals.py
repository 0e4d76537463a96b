"""Whether a training is refused must not tell of anybody's row: a refusal costs nothing, and has no noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import Budget, Clip, GradientMean, GradientSum, NoisyMean, Objective, Planned, Private, cross_entropy
from sfumato.errors import InvalidArgument, SfumatoError, UnsupportedModel
from sfumato.gradients import clipped_sum
from sfumato.gradients.made_up import TriedOnCpu, made_up_rows
from sfumato.gradients.probe import Probe
from sfumato.gradients.probed_rows import spread_over
from sfumato.objective import Loss


def door(data: Any, objective: Objective) -> Private:
    return Private(data, name="people", size=200, objective=objective, budget=Budget(8.0, 1e-5))


def said(data: Any, module: nn.Module, loss: Loss) -> str:
    """What an analyst learns without paying."""
    objective = Objective(module, loss)
    private = door(data, objective)
    try:
        private.ask(GradientSum(objective.parameters(), Clip(1.0)), noise=5.0, sampler=private.poisson(10))
    except SfumatoError as refusal:
        assert private.account.epsilon_spent() == 0
        return str(refusal)
    return "answered"


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


# --- rows that are not finite where the model is ---------------------------------------------------------------------


def poisson(module: nn.Module, batch: Any) -> Tensor:
    z = module(batch[0]).squeeze(1)
    return z.exp() - batch[1] * z


def of_roots(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch[0].sqrt()).squeeze(1) - batch[1]).square()


WILD: dict[str, tuple[Loss, float]] = {
    "overflows": (poisson, 300.0),
    "overflows by far": (poisson, 1e30),
    "overflows in its gradient": (poisson, 88.0),
    "hardly finite": (poisson, 30.0),
    "a root at zero": (of_roots, 0.0),
}


@pytest.mark.parametrize("others", [0, 1, 60])
@pytest.mark.parametrize("name", WILD)
def test_a_row_that_is_not_finite_does_not_refuse_a_sound_model(name: str, others: int) -> None:
    loss, value = WILD[name]
    x, y = torch.rand(others, 2) + 1, torch.rand(others)
    wild = torch.cat([torch.full((1, 2), value), x]), torch.cat([torch.zeros(1), y])
    module = line()
    nn.init.ones_(module.weight)  # type: ignore[arg-type]
    assert said((x, y), module, loss) == said(wild, module, loss) == "answered"


def pulled_to(label: int) -> Loss:
    """A centre loss: rows are pulled to the mean of those with one label, where there are any."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        z = module(x)
        own, of_label = F.cross_entropy(z, y, reduction="none"), (y == label).unsqueeze(1)
        if not bool(of_label.any()):
            return own
        return own + (z - (z * of_label).sum(0) / of_label.sum()).square().sum(1) + 0 * z.exp().sum(1)

    return loss


def labelled(rows: int, classes: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.arange(rows) % classes


@pytest.mark.parametrize("place", [0, 7])
def test_a_row_that_is_not_finite_hides_no_mixing_that_others_show(place: int) -> None:
    """Only a label that no made-up row has betrays the loss: other rows of it are looked at instead."""
    x, y = labelled(40, 8)
    x[place] = 1e4
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(o := Objective(nn.Linear(3, 8), pulled_to(7)), o.parameters(), (x, y), clip=Clip(1.0))


def test_where_no_row_says_anything_every_unit_is_computed_by_itself() -> None:
    """Then whether rows act on each other is not known, and need not be."""
    sizes: list[int] = []

    def loss(module: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return pulled_to(7)(module, batch)

    x, y = torch.full((40, 3), 1e4), torch.full((40,), 7)
    torch.manual_seed(0)
    objective = Objective(nn.Linear(3, 8), loss)
    params = objective.parameters()
    assert Probe.of(objective).trace(params, (x, y)).alone
    x[:20] = torch.randn(20, 3)
    sizes.clear()
    whole = clipped_sum(objective, params, (x, y), clip=Clip(0.1))
    assert set(sizes) == {1}
    for row in (0, 30):
        rest = torch.arange(40) != row
        without = clipped_sum(objective, params, (x[rest], y[rest]), clip=Clip(0.1))
        moved = sum(float((whole[n] - without[n]).double().square().sum()) for n in whole) ** 0.5
        assert moved <= 0.1 * (1 + 1e-5)


class Words(nn.Module):
    """Cut to the longest row, and weighed by a mask: sound."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : int((tokens != 0).sum(1).max())]
        nll = F.cross_entropy(self.head(self.table(tokens)).transpose(1, 2), tokens, reduction="none")
        return (nll * (tokens != 0)).sum(1) / (tokens != 0).sum(1)


@pytest.mark.parametrize("place", range(8))
def test_the_longest_row_does_not_decide_by_where_it_is_looked_at(place: int) -> None:
    """Among the last of seven, it made those differ from the first five in more than their number."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 9, (10, 6))
    tokens[:, 3:] = 0
    tokens[spread_over(tokens)[place], 3:5] = 1
    assert said(tokens, Words(), lambda module, rows: module(rows)) == "answered"


# --- no rows ---------------------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x[:, None])[0][:, -1])


UNSOUND: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "batch norm": (normalised, cross_entropy),
    "a mean": (lambda: nn.Linear(2, 2), lambda m, b: cross_entropy(m, b).mean()),
    "no rule": (Recurrent, cross_entropy),
    "half precision": (lambda: nn.Linear(2, 2).bfloat16(), lambda m, b: cross_entropy(m, (b[0].bfloat16(), b[1]))),
    "a tiny penalty": (
        lambda: nn.Linear(2, 2),
        lambda m, b: cross_entropy(m, b) + 1e-12 * m(b[0]).mean(0).square().sum(),
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_whether_there_is_anybody_is_not_told_by_a_refusal(name: str) -> None:
    make, loss = UNSOUND[name]
    answers = []
    for rows in (0, 1, 30):
        torch.manual_seed(0)
        answers.append(said((torch.rand(rows, 2), torch.zeros(rows).long()), make(), loss))
    assert answers[0] == answers[1] == answers[2] != "answered"


ROW_MAPS: dict[str, Callable[[Any], Tensor]] = {
    "centred": lambda rows: rows - rows.mean(0),
    "too wide": lambda rows: torch.cat([rows, rows], 1),
}


@pytest.mark.parametrize("name", ROW_MAPS)
def test_nor_by_that_of_a_row_map_or_an_augmentation(name: str) -> None:
    answers = []
    for rows in (0, 1, 30):
        objective = Objective(nn.Linear(2, 2), cross_entropy)
        private = door((torch.rand(rows, 2), torch.zeros(rows).long()), objective)
        asked = NoisyMean(lambda b: ROW_MAPS[name](b[0]), bound=1.0, width=2)
        mixed = GradientSum(objective.parameters(), Clip(1.0), augment=lambda b: (ROW_MAPS["centred"](b[0]), b[1]))
        for question in (asked, mixed):
            with pytest.raises(InvalidArgument, match=r"row_map|augment") as refusal:
                private.ask(question, noise=5.0, sampler=private.poisson(10))
            answers.append(str(refusal.value))
    assert len(set(answers)) == 2


@pytest.mark.parametrize("rare", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 20])
def test_what_mixes_rows_by_their_labels_is_refused_whatever_labels_there_are(rows: int, rare: int) -> None:
    def is_largest(batch: Any) -> Tensor:
        return (batch[1] == batch[1].max()).float()[:, None]

    labels = torch.zeros(rows, dtype=torch.long)
    labels[rows - 1 :] = rare
    objective = Objective(nn.Linear(2, 2), cross_entropy)
    private = door((torch.ones(rows, 2), labels), objective)
    augmented = GradientSum(objective.parameters(), Clip(1.0), augment=lambda b: (b[0] * is_largest(b), b[1]))
    for question in (NoisyMean(is_largest, bound=1.0), augmented):
        with pytest.raises(InvalidArgument, match="another value when other rows change"):
            private.ask(question, noise=5.0, sampler=private.poisson(10))


@pytest.mark.parametrize("worth", [math.nan, 1e17])
def test_rows_that_are_not_finite_are_not_left_out_where_they_act_on_others(worth: float) -> None:
    """Beside one of a label that no made-up row has, all losses change their sign: one row more moves a sum by many."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        own, odd = cross_entropy(module, batch), batch[1] == 5
        own = own * torch.where(odd, worth, 1.0) if math.isfinite(worth) else own + torch.where(odd, worth, 0.0)
        return torch.where(odd.any(), -own, own)

    x, y = labelled(40, 2)
    y[-1] = 5
    assert "act on each other" in said((x, y), nn.Linear(3, 8), loss)


class Pickled(nn.Module):
    """Has an error for rows that nobody has: tokens beyond a table, numbers that are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if float(x.min()) < 2:
            raise ValueError("too small")
        return self.head(torch.cat([self.table(tokens).mean(1), x], 1))


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_a_model_is_not_refused_for_made_up_rows_that_it_has_an_error_for(rows: int) -> None:
    data = torch.rand(rows, 2) + 5, torch.zeros(rows, 4).long(), torch.zeros(rows).long()
    loss: Loss = lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2], reduction="none")  # noqa: E731
    assert said(data, Pickled(), loss) == "answered"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("rows", [0, 30])
def test_images_are_answered_whether_there_are_any_or_not(dtype: torch.dtype, rows: int) -> None:
    """For ten seeds, since made-up rows that lie on a kink would be refused for some."""
    for seed in range(10):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
        data = (torch.rand(rows, 3, 8, 8) * 255).to(dtype), torch.arange(rows) % 2
        module = nn.Sequential(*layers)
        assert said(data, module, lambda m, b: cross_entropy(m, (b[0].float() / 255, b[1]))) == "answered"


# --- integers that one person has ------------------------------------------------------------------------------------


def steps_of(rare: bool, label: int, classes: int) -> list[str]:
    """Until a refusal, whatever is drawn."""
    objective = Objective(nn.Linear(3, classes), pulled_to(label))
    x, y = labelled(100, 1)
    y[51] = label if rare else 0
    private = door((x, y), objective)
    private.plan(Planned(GradientMean, 50.0, private.poisson(10), 40))
    steps: list[str] = []
    while len(steps) < 40 and steps[-1:] in ([], ["answered"]):
        try:
            private.ask(GradientMean(objective.parameters(), Clip(1.0)))
            steps.append("answered")
        except UnsupportedModel as refusal:
            steps.append(str(refusal))
    return steps


@pytest.mark.parametrize(("label", "classes"), [(1, 2), (1, 3), (1, 10), (4, 10)])
def test_a_label_that_one_person_has_is_not_told_by_when_a_loss_is_refused(label: int, classes: int) -> None:
    """A loss that only then looks at other rows was refused when that person was first drawn."""
    torch.manual_seed(0)
    common, rare = steps_of(False, label, classes), steps_of(True, label, classes)
    assert len(common) == len(rare) == 1
    assert "act on each other" in common[0]
    assert "act on each other" in rare[0]


def test_made_up_integers_differ_from_row_to_row() -> None:
    first, *_, last = made_up_rows((torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0, 5).int()), 5)
    x, labels, tokens = first
    assert ((x > 0) & (x < 1)).all()
    assert sorted(labels.tolist()) == [0, 1, 2, 3, 4]
    assert len(torch.unique(tokens, dim=0)) == 5
    assert tokens.dtype == torch.int32
    assert not any(bool(t.any()) for t in last[1:])


def test_what_a_gpu_has_no_place_for_is_found_on_a_copy_of_the_model() -> None:
    """Which is the same model, weights that share memory included, and leaves the model as it was."""
    torch.manual_seed(0)

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lstm, self.head = nn.Embedding(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)
            self.head.weight = nn.Parameter(self.table.weight.detach())

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.lstm(self.table(tokens))[0][:, -1])

    objective = Objective(Read(), cross_entropy)
    params, rows = objective.parameters(), (torch.randint(0, 3, (6, 5)), torch.arange(6) % 3)
    tried = TriedOnCpu(objective, params)
    assert not tried.fails(rows)
    moved = tried.moved()
    assert torch.equal(moved.losses(params, rows), objective.losses(params, rows))
    assert not any(p is q for p in moved.module.parameters() for q in objective.module.parameters())
    with pytest.raises(IndexError):
        moved.losses(params, (rows[0] + 1, rows[1]))


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_a_model_that_cuts_rows_to_the_longest_is_answered_again_and_again(rows: int) -> None:
    """Also when made-up rows are looked at again: they are padded as words are, at the end."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 9, (rows, 7))
    tokens[torch.arange(7) >= torch.randint(1, 8, (rows, 1))] = 0
    objective = Objective(Words(), lambda module, batch: module(batch))
    private = door(tokens, objective)
    for _ in range(5):
        question = GradientSum(objective.parameters(), Clip(1.0))
        assert private.ask(question, noise=50.0, sampler=private.poisson(10)) is not None


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=0)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x, there = self.table(tokens), tokens != 0
        x = self.attention(x, x, x, key_padding_mask=~there, need_weights=False)[0]
        return self.head((x * there[..., None]).sum(1) / there.sum(1, keepdim=True))


class OfLength(nn.Module):
    """The state after as many words as a row says that it has: never none."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, length = batch
        return self.head(self.lstm(x)[0][torch.arange(len(x)), length - 1])


def ignoring(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="none", ignore_index=-100)


SOUND: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[int], Any]]] = {
    "attention under a mask": (
        Attentive,
        cross_entropy,
        lambda n: (torch.randint(1, 30, (n, 7)) * (torch.arange(7) < torch.randint(1, 8, (n, 1))), torch.arange(n) % 2),
    ),
    "lengths": (
        OfLength,
        cross_entropy,
        lambda n: ((torch.randn(n, 5, 4), torch.randint(1, 6, (n,))), torch.arange(n) % 2),
    ),
    "labels that are ignored": (
        lambda: nn.Linear(4, 3),
        ignoring,
        lambda n: (torch.randn(n, 4), torch.where(torch.arange(n) % 2 > 0, torch.arange(n) % 3, -100)),
    ),
    "codes of two columns": (
        lambda: nn.Linear(5, 2),
        lambda m, b: F.cross_entropy(
            m(torch.cat([F.one_hot(b[0][:, 0], 3), F.one_hot(b[0][:, 1], 2)], 1).float()), b[1], reduction="none"
        ),
        lambda n: (torch.randint(0, 2, (n, 2)), torch.arange(n) % 2),
    ),
    "dropout and yes or no": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)),
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0])[:, 0], b[1].float(), reduction="none"),
        lambda n: (torch.randn(n, 4), torch.rand(n) > 0.5),
    ),
}


@pytest.mark.parametrize("rows", [0, 1, 30])
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_is_answered_whoever_is_there(name: str, rows: int) -> None:
    make, loss, data = SOUND[name]
    torch.manual_seed(0)
    objective = Objective(make(), loss)
    private = door(data(rows), objective)
    for _ in range(5):  # made-up rows are looked at again at the fourth
        question = GradientSum(objective.parameters(), Clip(1.0))
        assert private.ask(question, noise=50.0, sampler=private.poisson(10)) is not None
