"""What must be refused, by name and before anything is asked, and what must be accepted and be right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from sfumato.errors import InvalidArgument, SfumatoError, UnsupportedModel
from sfumato.gradients import Clip, clipped_sum, probe
from sfumato.gradients.probed_rows import probe_rows
from sfumato.objective import Loss, Objective, cross_entropy
from tests.gradients import oracle

ROWS = 6
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def squares(module: nn.Module, batch: Any) -> Tensor:
    out = module(*batch) if isinstance(batch, tuple) else module(batch)
    return out.reshape(len(out), -1).square().mean(1)


def features(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, *(shape or (5,)))


# ------------------------------------------------------------------------------------------------ refused


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.hidden, self.first(x), use_reentrant=self.reentrant)
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class Packed(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]


class RowByRow(nn.Module):
    """Every row chooses its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(self.left if row[0] > 0 else self.right)(row) for row in x])


class AttendsToBatch(nn.Module):
    """Attention over the batch: rows are queries and keys of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.project(x)
        return (z @ z.T).softmax(1) @ z


class Sorted(nn.Module):
    """A row's place among the others decides what becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x[:, 0].argsort().argsort().to(x.dtype)[:, None]


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x


class Hidden(nn.Module):
    """A parameter that only a function of one's own sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return OwnFunction.apply(x, self.layer.weight)  # type: ignore[no-any-return,no-untyped-call]


def contrastive(module: nn.Module, x: Tensor) -> Tensor:
    z = F.normalize(module(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)), reduction="none")


def over_batch_size(module: nn.Module, x: Tensor) -> Tensor:
    return squares(module, x) / len(x)


def over_batch_sum(module: nn.Module, x: Tensor) -> Tensor:
    losses = squares(module, x)
    return losses / losses.sum()


def with_dropout(module: nn.Module, x: Tensor) -> Tensor:
    return over_batch_size(module, F.dropout(x, 0.3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any], type[SfumatoError], str]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)),
        squares,
        features,
        UnsupportedModel,
        r"module '1' normalises over the batch",
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)),
        squares,
        features,
        UnsupportedModel,
        r"module '1' normalises",
    ),
    "mean loss": (
        lambda: nn.Linear(5, 4),
        lambda m, x: squares(m, x).mean(),
        features,
        InvalidArgument,
        r"loss.* 0 dim",
    ),
    "loss per output": (lambda: nn.Linear(5, 4), lambda m, x: m(x), features, InvalidArgument, r"loss.* 2 dim"),
    "in-batch negatives": (
        lambda: nn.Linear(5, 4),
        contrastive,
        features,
        UnsupportedModel,
        "act on each other.*weight",
    ),
    "divided by the batch size": (lambda: nn.Linear(5, 4), over_batch_size, features, UnsupportedModel, "act on each"),
    "divided, with dropout between layers": (
        lambda: nn.Sequential(nn.LSTM(5, 4, 2, batch_first=True, dropout=0.3)),
        lambda m, x: m[0](x)[0].square().mean((1, 2)) / len(x),
        lambda: features(3, 5),
        UnsupportedModel,
        "act on each other",
    ),
    "divided, with dropout": (lambda: nn.Linear(5, 4), with_dropout, features, UnsupportedModel, "act on each other"),
    "normalised over the batch": (lambda: nn.Linear(5, 4), over_batch_sum, features, UnsupportedModel, "act on each"),
    "attention over the batch": (AttendsToBatch, squares, features, UnsupportedModel, "each other|mixes examples"),
    "ranks within the batch": (Sorted, squares, features, UnsupportedModel, "act on each other"),
    "scripted": (
        lambda: nn.Sequential(nn.Linear(5, 4), torch.jit.script(nn.Linear(4, 4))),
        squares,
        features,
        UnsupportedModel,
        "'1|parameter",
    ),
    "checkpointed": (lambda: Checkpointed(False), squares, features, UnsupportedModel, "'first'|'hidden"),
    "checkpointed, reentrant": (lambda: Checkpointed(True), squares, features, UnsupportedModel, "Checkpointed.*check"),
    "own autograd function": (Hidden, squares, features, UnsupportedModel, "'layer'|parameter"),
    "no parameter is used": (
        lambda: nn.Linear(5, 4),
        lambda m, x: m(x).detach().square().sum(1),
        features,
        UnsupportedModel,
        "'Linear' cannot be differentiated",
    ),
    "GRU": (lambda: Recurrent(nn.GRU), squares, lambda: features(3, 5), UnsupportedModel, "gru in 'recurrent'"),
    "RNN": (lambda: Recurrent(nn.RNN), squares, lambda: features(3, 5), UnsupportedModel, "rnn_tanh in 'recurrent'"),
    "packed sequence": (lambda: Packed(nn.LSTM), squares, lambda: features(3, 5), UnsupportedModel, "PackedSequence"),
    "several copies per row": (
        lambda: Direct(lambda x, p: x * p.repeat_interleave(len(x), 0).view(len(x), 2, 5).sum(1), (2, 5)),
        squares,
        features,
        UnsupportedModel,
        "repeat_interleave in 'held'",
    ),
    "a branch per row": (RowByRow, squares, features, UnsupportedModel, "depends on|control flow"),
    "embedding with max_norm": (
        lambda: nn.Embedding(9, 4, max_norm=0.5),
        squares,
        lambda: torch.randint(0, 9, (ROWS, 3)),
        UnsupportedModel,
        "'weight'.*max_norm",
    ),
    "half precision": (
        lambda: nn.Linear(5, 4).bfloat16(),
        squares,
        lambda: features().bfloat16(),
        UnsupportedModel,
        "'weight' is torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_left_as_it_was(name: str) -> None:
    make, loss, data, error, message = REFUSED[name]
    torch.manual_seed(0)
    module = make()
    state = {n: t.clone() for n, t in module.state_dict().items()}
    attributes = {n: sorted(vars(m)) for n, m in module.named_modules()}
    objective = Objective(module, loss)
    with pytest.raises(error, match=message) as caught:
        clipped_sum(objective, objective.parameters(), data(), clip=Clip(1.0))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())
    assert {n: sorted(vars(m)) for n, m in module.named_modules()} == attributes
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(("flips", "accepted"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_flip_in_bfloat16_is_no_refusal_but_the_same_in_all_rows_is(
    monkeypatch: pytest.MonkeyPatch, flips: int, accepted: bool
) -> None:
    """In a narrow network a ReLU that rounding flips is more than a quarter of the gradient."""
    looks: list[int] = []

    def distance(*given: Any) -> tuple[float, str]:
        looks.append(1)
        return (0.3, "weight") if len(looks) <= flips else (0.0, "weight")

    monkeypatch.setattr(probe, "distance_of_engine", distance)
    objective = Objective(nn.Linear(5, 4), squares, autocast=torch.bfloat16)
    with contextlib.nullcontext() if accepted else pytest.raises(UnsupportedModel, match="does not agree"):
        probe.Probe.of(objective).trace(objective.parameters(), features())


CHANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x * torch.rand(len(x), 1),
    "normal": lambda x: torch.normal(x, torch.ones(5)) + x,
    "normal of a size": lambda x: x + torch.normal(0.0, 1.0, size=(len(x), 5)),
    "normal in place": lambda x: x + torch.empty(len(x), 5).normal_(),
    "uniform in place": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.9)),
    "bernoulli in place": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.9),
    "whole numbers": lambda x: x * torch.randint(1, 9, (len(x), 1)),
    "places": lambda x: x + torch.eye(5)[torch.randint(5, (len(x),))],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: x + torch.multinomial(torch.ones(len(x), 3), 1),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "order": lambda x: x + torch.stack([torch.randperm(5) for _ in x]),
}


@pytest.mark.parametrize("name", CHANCE)
def test_the_size_of_the_batch_is_seen_through_chance(name: str) -> None:
    """A random number anywhere once switched that comparison off: nobody could say what had been drawn for a row."""
    for loss in (squares, over_batch_size):
        torch.manual_seed(0)
        objective = Objective(nn.Linear(5, 4), lambda module, x, loss=loss: loss(module, CHANCE[name](x)))
        refused = pytest.raises(UnsupportedModel, match="act on each other")
        with refused if loss is over_batch_size else contextlib.nullcontext():
            clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


def test_a_refusal_is_not_forgotten() -> None:
    objective = Objective(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), squares)
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


def test_a_module_exchanged_later_is_looked_at_again() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4, affine=False))
    objective = Objective(module, squares)
    clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))
    module[1] = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(UnsupportedModel, match="'1' normalises"):
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


def test_batch_norm_is_judged_by_its_mode() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    objective = Objective(module.eval(), squares)
    clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))
    module.train()
    with pytest.raises(UnsupportedModel, match="'1' normalises"):
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


def balanced(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Class weights from the counts in the batch."""
    x, labels = batch
    share = torch.bincount(labels, minlength=2).to(x) / len(labels)
    return F.cross_entropy(module(x), labels, reduction="none") / share[labels]


def test_class_weights_from_the_batch_are_refused_although_the_first_rows_are_alike() -> None:
    """Integers cannot be jittered: rows are chosen so that they differ."""
    labels = torch.cat([torch.zeros(40, dtype=torch.long), torch.ones(1, dtype=torch.long)])
    objective = Objective(nn.Linear(5, 2), balanced)
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, objective.parameters(), (torch.randn(41, 5), labels), clip=Clip(1.0))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens).mean(1)))


def test_batch_norm_over_tokens_is_refused_although_the_first_rows_are_alike() -> None:
    tokens = torch.zeros(20, 3, dtype=torch.long)
    tokens[15:] = torch.arange(15).reshape(5, 3) % 9
    objective = Objective(Tokens(), squares)
    with pytest.raises(UnsupportedModel, match="'norm' normalises"):
        clipped_sum(objective, objective.parameters(), tokens, clip=Clip(1.0))


@pytest.mark.parametrize("value", [1e30, 1e38, -1e38, float("inf"), float("nan")])
def test_one_wild_row_does_not_decide_whether_a_model_is_accepted(value: float) -> None:
    """Else a refusal would tell that such a row is there."""
    x = features()
    x[0] = value
    objective = Objective(nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 2)), cross_entropy)
    labels = torch.zeros(ROWS, dtype=torch.long)
    sums = clipped_sum(objective, objective.parameters(), (x, labels), clip=Clip(1.0))
    assert all(torch.isfinite(t).all() for t in sums.values())


def test_probed_rows_are_finite_and_differ() -> None:
    wild = torch.tensor([[torch.nan, 1e38], [torch.inf, -1e38], [0.0, 0.0]])
    first, second = probe_rows(wild, 3, 0), probe_rows(wild, 3, 1)
    assert torch.isfinite(first).all()
    assert first.abs().max() < 1e5
    assert not torch.equal(first, second)
    assert len(torch.unique(probe_rows(torch.ones(1, 4), 5, 0), dim=0)) == 5


# What each row is worth decides where it lies. With rows that are alike, all of these leave every row where it was.


def written(h: Tensor, order: Tensor) -> Tensor:
    place = torch.zeros(*h.shape)
    place.view(-1, h.shape[-1])[order] = h
    return place


MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by mask": lambda h, key: h[key > 0],
    "by merged mask": lambda h, key: h[None].flatten(0, 1)[key > 0],
    "by order": lambda h, key: h[key.argsort(stable=True)],
    "by order, counted from the end": lambda h, key: h.T[..., key.argsort(stable=True)].T,
    "by a list": lambda h, key: h[key.argsort(stable=True).tolist()],
    "by places": lambda h, key: h[(key > 0).nonzero()[:, 0]],
    "by where": lambda h, key: h[torch.where(key > 0)],
    "sort": lambda h, key: (h * 0 + key[:, None]).sort(0).values + h,
    "index_select": lambda h, key: h.index_select(0, key.argsort(stable=True)),
    "gather": lambda h, key: h.gather(0, key.argsort(stable=True)[:, None].expand_as(h)),
    "take_along_dim": lambda h, key: torch.take_along_dim(h, key.argsort(stable=True)[:, None], 0),
    "masked_select": lambda h, key: h.masked_select(key[:, None] > 0).reshape(-1, h.shape[1]),
    "repeat_interleave": lambda h, key: h.repeat_interleave(key.clamp(1, 1), 0),
    "written": lambda h, key: written(h, key.argsort(stable=True)),
    "index_copy": lambda h, key: torch.zeros_like(h).index_copy(0, key.argsort(stable=True), h),
    "scatter": lambda h, key: torch.zeros_like(h).scatter(0, key.argsort(stable=True)[:, None].expand_as(h), h),
    "shuffled": lambda h, key: h[torch.randperm(len(h)) * 0 + torch.arange(len(h))],
}


class Moved(nn.Module):
    def __init__(self, move: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.move = nn.Linear(5, 4), nn.Linear(4, 3), move

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        return self.second(self.move(torch.tanh(self.first(x)), key))


@pytest.mark.parametrize("name", MOVED)
def test_rows_that_their_contents_move_are_refused_although_none_moves_yet(name: str) -> None:
    """A gradient is attributed by place: a row that moves into another's place would be clipped as that one's."""
    objective = Objective(Moved(MOVED[name]), squares)
    with pytest.raises(UnsupportedModel, match="'second' is given rows that were chosen or put in order"):
        clipped_sum(objective, objective.parameters(), (features(), torch.ones(ROWS).long()), clip=Clip(1.0))


STAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one token of each row": lambda h, key: h.reshape(-1, 2, 2)[torch.arange(len(h)), key % 2].repeat(1, 2),
    "the same, of its type": lambda h, key: h.view(-1, 2, 2)[torch.arange(len(h)).to(key), key % 2].repeat(1, 2),
    "gathered within rows": lambda h, key: h.gather(1, (key % 2)[:, None] + torch.arange(3)).repeat(1, 2)[:, :4],
    "sorted within rows": lambda h, key: h.sort(1).values,
    "masked in place": lambda h, key: (y := h.clone(), y.__setitem__(key > 2, 0.0))[0],
    "a table": lambda h, key: h + torch.eye(9)[key][:, :4],
    "time first": lambda h, key: h.view(-1, 2, 2).transpose(0, 1)[key % 2, torch.arange(len(h))].repeat(1, 2),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_chosen_within_rows_is_accepted_and_right(name: str) -> None:
    torch.manual_seed(0)
    objective = Objective(Moved(STAYS[name]), squares)
    params, batch = objective.parameters(), (features(), torch.arange(ROWS))
    rows = oracle.one_by_one(objective, params, batch, ROWS)
    truth = {n: g.sum(0) for n, g in oracle.clipped(rows, Clip(1e-2)).items()}
    assert oracle.relative_error(clipped_sum(objective, params, batch, clip=Clip(1e-2)), truth) <= 1e-5


# Losses that look at other rows, but not so that three ordinary rows would show it.

Logits = Callable[[Tensor, Tensor], Tensor]


def softmax_by_hand(z: Tensor, labels: Tensor) -> Tensor:
    """Stabilised by the largest logit of all rows: one row of 300 silences everybody."""
    e = (z - z.max()).exp()
    return -(e / e.sum(1, keepdim=True)).gather(1, labels[:, None])[:, 0].log()


def ramped(z: Tensor, labels: Tensor, weight: float = 0.0) -> Tensor:
    """In-batch negatives, with a weight that is still zero."""
    f = F.normalize(z, dim=1)
    apart = F.cross_entropy(f @ f.T, torch.arange(len(z)), reduction="none")
    return F.cross_entropy(z, labels, reduction="none") + weight * apart


def without_outliers(z: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(z, labels, reduction="none")
    return losses.clamp(max=float((losses.mean() + 3 * losses.std()).detach()))


def below_quantile(z: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(z, labels, reduction="none")
    return losses * (losses <= losses.detach().quantile(0.9))


def hardest(z: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(z, labels, reduction="none")
    return losses * torch.zeros_like(losses).scatter(0, losses.topk(int(0.7 * len(z))).indices, 1.0)


UNSEEN: dict[str, Logits] = {
    "softmax by hand": softmax_by_hand,
    "a small penalty": lambda z, y: F.cross_entropy(z, y, reduction="none") + 1e-4 * z.mean(0).square().sum(),
    "a tiny penalty": lambda z, y: F.cross_entropy(z, y, reduction="none") + 1e-12 * z.mean(0).square().sum(),
    "ramped up later": ramped,
    "without outliers": without_outliers,
    "below a quantile": below_quantile,
    "the hardest": hardest,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_other_rows_are_seen_by_what_spoils_them(name: str) -> None:
    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return UNSEEN[name](module(batch[0]), batch[1])

    for seed in range(4):
        torch.manual_seed(seed)
        objective = Objective(nn.Linear(5, 3), loss)
        batch = torch.randn(9, 5), torch.randint(0, 3, (9,))
        with pytest.raises(UnsupportedModel, match="act on each other"):
            clipped_sum(objective, objective.parameters(), batch, clip=Clip(1.0))


INTEGERS: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "a table": lambda table, t: (z := table(t).sum(1)).square().sum(1) + 1e-9 * z.mean(0).square().sum(),
    "a frozen table": lambda table, t: squares(table, t) + 1e-9 * F.embedding(t, torch.eye(9)).mean(),
    "merged with time": lambda table, t: squares(table, t) + 1e-9 * F.embedding(t.T.flatten(), torch.eye(9)).mean(),
    "a cast": lambda table, t: squares(table, t) + 1e-9 * t.float().mean(),
    "counts": lambda table, t: squares(table, t) + 1e-9 * (torch.bincount(t[:, 0], minlength=9) / len(t)).max(),
    "one-hot": lambda table, t: squares(table, t) + 1e-9 * F.one_hot(t, 9).to(table.weight).mean(),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_spoiled_where_numbers_are_made_of_them(name: str) -> None:
    tokens = torch.arange(ROWS * 4).reshape(ROWS, 4) % 9
    objective = Objective(nn.Embedding(9, 4).double(), INTEGERS[name])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, objective.parameters(), tokens, clip=Clip(1.0))


class PackedAttention(nn.Module):
    """All rows in one long sequence, with a mask: nothing is attended to across rows, except times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat, row = self.project(x.flatten(0, 1)), torch.arange(len(x)).repeat_interleave(x.shape[1])
        apart = (flat @ flat.T).masked_fill(row[:, None] != row[None], -torch.inf)
        return (apart.softmax(1) @ flat).reshape(x.shape)


def test_packed_attention_is_refused_since_zero_times_nan_is_nan() -> None:
    """A row that is not finite would make everybody's gradient so: they would all be dropped."""
    objective = Objective(PackedAttention(), squares)
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, objective.parameters(), features(3, 4), clip=Clip(1.0))


class Variational(nn.Module):
    """`torch.distributions` has an error for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 4), nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encode(x).chunk(2, 1)
        return self.decode(torch.distributions.Normal(mean, F.softplus(scale) + 1e-3, validate_args=True).mean) - x


class TimeAndRows(nn.Module):
    """A table read at rows and time in one dimension, the rows varying fastest."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4).requires_grad_(False), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.table(tokens.T.flatten()).reshape(*tokens.T.shape, 4)
        return self.head(found.sum(0))


def test_models_with_an_error_for_nan_are_shown_large_numbers() -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return squares(module, x) + 1e-6 * module(x).mean()

    clipped_sum(o := Objective(Variational(), squares), o.parameters(), features(), clip=Clip(1.0))
    objective = Objective(nn.Linear(5, 2), loss)
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


# Integers cannot be jittered: what depends on them is looked for among the longest, the shortest and rows cut short.


class Words(nn.Module):
    """As long as the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens[:, : int((tokens != 0).sum(1).max())]
        return tokens, F.cross_entropy(self.head(self.table(tokens)).transpose(1, 2), tokens, reduction="none")


def over_longest(module: nn.Module, tokens: Tensor) -> Tensor:
    tokens, nll = module(tokens)
    return (nll * (tokens != 0)).mean(1)


def over_own_length(module: nn.Module, tokens: Tensor) -> Tensor:
    """A row without any token is worth 0 / 0."""
    tokens, nll = module(tokens)
    return (nll * (tokens != 0)).sum(1) / (tokens != 0).sum(1)


def of_length(rows: int, length: int) -> Tensor:
    tokens = torch.zeros(rows, 8, dtype=torch.long)
    tokens[:, :length] = torch.randint(1, 9, (rows, length))
    return tokens


def test_the_longest_row_is_no_measure_for_others_although_all_are_of_one_length() -> None:
    torch.manual_seed(0)
    objective = Objective(Words(), over_longest)
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, objective.parameters(), of_length(40, 4), clip=Clip(1.0))


@pytest.mark.parametrize("lengths", [[4] * 40, [4, 2, 7, 5] * 10, [4] * 5 + [0] + [4] * 34])
def test_rows_may_be_cut_to_the_longest_and_one_that_is_empty_does_not_decide(lengths: list[int]) -> None:
    torch.manual_seed(0)
    objective = Objective(Words(), over_own_length)
    params, tokens = objective.parameters(), torch.cat([of_length(1, length) for length in lengths])
    there = tokens[(tokens != 0).any(1)]
    rows = oracle.one_by_one(objective, params, there, len(there))
    truth = {n: g.sum(0) for n, g in oracle.clipped(rows, Clip(0.1)).items()}
    assert oracle.relative_error(clipped_sum(objective, params, tokens, clip=Clip(0.1)), truth) <= 1e-5


def test_integers_that_were_alike_are_looked_at_again_when_they_differ() -> None:
    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(module, batch[0]) * (batch[1] == int(batch[1].max()))

    objective = Objective(nn.Linear(5, 4), loss)
    params, lengths = objective.parameters(), torch.full((ROWS,), 3)
    clipped_sum(objective, params, (features(), lengths), clip=Clip(1.0))
    lengths[2] = 4
    with pytest.raises(UnsupportedModel, match="act on each other"):
        clipped_sum(objective, params, (features(), lengths), clip=Clip(1.0))


def test_batch_norm_over_tokens_is_refused_although_all_rows_are_alike() -> None:
    objective = Objective(Tokens(), squares)
    with pytest.raises(UnsupportedModel, match="'norm' normalises"):
        clipped_sum(objective, objective.parameters(), torch.tensor([[1, 2, 3]] * 8), clip=Clip(1.0))


# ------------------------------------------------------------------------------------------------ accepted


class Branching(nn.Module):
    """Control flow that depends on the batch as a whole: right as long as it goes the way it was probed."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left if x.sum() > 0 else self.right)(x)


def test_another_branch_than_the_probed_one_is_refused() -> None:
    objective = Objective(Branching(), squares)
    clipped_sum(objective, objective.parameters(), torch.rand(ROWS, 5), clip=Clip(1.0))
    with pytest.raises(UnsupportedModel, match="control flow"):
        clipped_sum(objective, objective.parameters(), -torch.rand(ROWS, 5) - 1, clip=Clip(1.0))


class Detached(nn.Module):
    """`.data` and numpy on the way: no gradient where autograd has none, and no use that goes unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.second(torch.tanh(self.first(x.data)))
        also = self.second(torch.from_numpy(x[:, :4].numpy()))
        return seen + also + F.linear(x[:, 1:], self.second.weight.data)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).requires_grad_(False).eval()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x))


class Counting(nn.Module):
    """A buffer that counts calls, and one that is used."""

    calls: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(4))
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) + self.shift


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4), nn.Linear(5, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.table(batch["tokens"]).mean(1) * self.layer(batch["x"])


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(0, 1))[0]).transpose(0, 1)


class OwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.linear(x, self.layer.weight, self.layer.bias)
        return out


class Adversarial(nn.Module):
    """Trained on inputs that are moved along the sign of their own gradient (FGSM)."""

    def __init__(self, *, attacks: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        self.attacks = attacks

    def forward(self, x: Tensor) -> Tensor:
        if not self.attacks:
            return self.layers(x) + 0 * self.layers(x)
        moving = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(moving).sum(), moving)
        return self.layers(x + 0.1 * gradient.sign())


def test_a_gradient_that_the_model_takes_itself_is_no_contribution() -> None:
    """Switched on after the probe, which would have seen that it is not the whole one."""
    torch.manual_seed(0)
    module = Adversarial(attacks=False)
    objective = Objective(module, squares)
    params = objective.parameters()
    clipped_sum(objective, params, features(), clip=Clip(1e-2))
    module.attacks = True
    rows = oracle.one_by_one(objective, params, features(), ROWS)
    truth = {n: g.sum(0) for n, g in oracle.clipped(rows, Clip(1e-2)).items()}
    assert oracle.relative_error(clipped_sum(objective, params, features(), clip=Clip(1e-2)), truth) <= 1e-5


class Loop(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(5, 5), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def test_a_parameter_that_is_used_more_often_later_is_refused_then() -> None:
    """By an error of the library, not by an assertion, which `python -O` leaves out."""
    objective = Objective(module := Loop(1), squares)
    clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))
    module.times = 2
    with pytest.raises(UnsupportedModel, match=r"'layer' uses 'layer.*' more often than when it was probed"):
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


class GradientPenalty(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.layers(x)
        if self.weight:
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            out = out + self.weight * gradient.square().sum(1, keepdim=True)
        return out + 0 * self.layers(x)


@pytest.mark.parametrize("later", [False, True])
def test_a_gradient_of_a_gradient_is_refused_whenever_it_begins(later: bool) -> None:
    module = GradientPenalty(0.0 if later else 1.0)
    objective = Objective(module, squares)
    if later:
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))
        module.weight = 1.0
    with pytest.raises(UnsupportedModel, match="create_graph"):
        clipped_sum(objective, objective.parameters(), features(), clip=Clip(1.0))


class Direct(nn.Module):
    """Parameters of some shapes, and what is done with them."""

    def __init__(self, forward: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.does = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x, *self.held)


def scaled_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        norm = weight.norm()
    return F.linear(x, weight / norm)


DIRECT: dict[str, Callable[[], nn.Module]] = {
    "a flat vector": lambda: Direct(lambda x, p: F.linear(x, p[:20].view(4, 5), p[20:]), (24,)),
    "a matrix twice": lambda: Direct(lambda x, w: torch.einsum("bi,ij,jk->bk", x, w, w), (5, 5)),
    "a scale that is the shift": lambda: Direct(lambda x, v: F.layer_norm(x, (5,), v, v), (5,)),
    "a norm without gradient": lambda: Direct(scaled_without_gradient, (4, 5)),
    "repeated": lambda: Direct(lambda x, p: x * p.repeat_interleave(len(x), 0), (1, 5)),
    "tiled": lambda: Direct(lambda x, p: x * torch.tile(p, (len(x), 1)), (1, 5)),
    "tiled vector": lambda: Direct(lambda x, p: x * p.tile(len(x), 1), (5,)),
}


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    module(features())
    return module


def from_dict(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(batch).square().mean(1)


ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any]]] = {
    "detached": (Detached, squares, features),
    "tied": (Tied, squares, features),
    "frozen": (Frozen, squares, features),
    "lazy": (lazy, squares, features),
    "buffers": (Counting, squares, features),
    "dict": (FromDict, from_dict, lambda: {"tokens": torch.arange(18).reshape(ROWS, 3) % 9, "x": features()}),
    "tuple": (lambda: nn.Bilinear(5, 3, 2), squares, lambda: (features(), torch.randn(ROWS, 3))),
    "labels": (lambda: nn.Linear(5, 3), cross_entropy, lambda: (features(), torch.arange(ROWS) % 3)),
    "sequence first": (SequenceFirst, squares, lambda: features(3, 5)),
    "aten operator": (OwnOperator, squares, features),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval(), squares, features),
    "dropout in eval mode": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)).eval(), squares, features),
    "all alike": (lambda: nn.Linear(5, 4), squares, lambda: torch.ones(ROWS, 5)),
    "adversarial": (Adversarial, squares, features),
    **{name: (make, squares, features) for name, make in DIRECT.items()},
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), squares, features),
    "distribution": (Variational, squares, features),
    "rows vary fastest": (TimeAndRows, squares, lambda: torch.arange(ROWS * 4).reshape(ROWS, 4) % 9),
    "one row": (lambda: nn.Linear(5, 4), squares, lambda: features()[:1]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_and_right(name: str) -> None:
    make, loss, data = ACCEPTED[name]
    torch.manual_seed(0)
    module, batch = make(), data()
    objective = Objective(module, loss)
    params = objective.parameters()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    attributes = {n: sorted(vars(m)) for n, m in module.named_modules()}
    ours = clipped_sum(objective, params, batch, clip=Clip(1e-2))
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers())
    assert {n: sorted(vars(m)) for n, m in module.named_modules()} == attributes
    rows = oracle.one_by_one(objective, params, batch, 1 if name == "one row" else ROWS)
    truth = {n: g.sum(0) for n, g in oracle.clipped(rows, Clip(1e-2)).items()}
    assert oracle.relative_error(ours, truth) <= 1e-5


def test_dropout_in_train_mode_is_accepted_and_unbiased() -> None:
    """Dropout is random per row, so a mean over many draws is compared with the gradient of the mean loss."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    objective = Objective(module, lambda m, x: m(x)[:, 0])  # linear, so that the mean gradient has no dropout in it
    x = features().double()[:1].expand(4000, 5).contiguous()
    params = objective.parameters()
    mean = {n: t / len(x) for n, t in clipped_sum(objective, params, x, clip=Clip(1e9)).items()}
    module.eval()
    truth = clipped_sum(objective, params, x[:1], clip=Clip(1e9))
    assert oracle.relative_error(mean, truth) <= 0.1


def test_running_statistics_never_see_private_rows() -> None:
    """Instance norm keeps running statistics in train mode; they are lent as copies."""
    module = nn.Sequential(nn.Conv2d(2, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    objective = Objective(module, squares)
    before = {n: b.clone() for n, b in module.named_buffers()}
    with contextlib.suppress(UnsupportedModel):
        clipped_sum(objective, objective.parameters(), features(2, 3, 3), clip=Clip(1.0))
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


def test_a_longer_sequence_than_the_probed_one_is_right() -> None:
    """Every length is probed: how often a parameter is used depends on it."""
    torch.manual_seed(0)
    objective = Objective(SequenceFirst().double(), squares)
    params = objective.parameters()
    for length in (1, 4, 2):
        x = torch.randn(ROWS, length, 5, dtype=torch.float64)
        rows = oracle.one_by_one(objective, params, x, ROWS)
        truth = {n: g.sum(0) for n, g in oracle.clipped(rows, Clip(0.1)).items()}
        assert oracle.relative_error(clipped_sum(objective, params, x, clip=Clip(0.1)), truth) <= 1e-10


class Trimmed(nn.Module):
    """As long as the longest row, with rows and time in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : int((x[:, :, 0] > 0).sum(1).max())]
        return self.layer(x.reshape(-1, 5)).reshape(*x.shape[:2], 4).sum(1)


def test_another_size_per_row_than_the_probed_one_is_refused() -> None:
    """It may divide by the number of rows and be something else than rows x time."""
    objective = Objective(Trimmed(), squares)
    x = torch.rand(ROWS, 4, 5) + 1
    clipped_sum(objective, objective.parameters(), x, clip=Clip(1.0))
    x[:, 2:] = -1
    with pytest.raises(UnsupportedModel, match="another size per example"):
        clipped_sum(objective, objective.parameters(), x, clip=Clip(1.0))
