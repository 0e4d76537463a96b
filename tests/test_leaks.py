"""Ways to leak that a reviewer found once: each stays shut."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import Budget, Clip, Gradient, GradientMean, NoisyMean, Objective, Planned, Private, cross_entropy
from sfumato.errors import InvalidArgument, SfumatoError, UnsupportedModel
from sfumato.gradients import Performance, clipped_sum
from sfumato.nn import WSConv2d
from sfumato.privacy.mechanisms import Gaussian, Mechanism
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.questions import Gram, Histogram, NoisyArgmin, Sealed
from sfumato.selection.support import TopKHistogram


def private(data: Any, objective: Objective | None = None, **options: Any) -> Private:
    return Private(data, name="people", size=200, objective=objective, budget=Budget(1.0, 1e-6), **options)


def pairs(rows: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 4), torch.randint(0, 2, (rows,))


def ask_once(door: Private, objective: Objective, **options: Any) -> Gradient:
    question = GradientMean(objective.parameters(), Clip(1.0), **options)
    answer: Gradient = door.ask(question, noise=50.0, sampler=door.everyone())
    return answer


def test_a_trainable_tensor_outside_the_model_gets_no_private_gradient() -> None:
    temperature = nn.Parameter(torch.ones(2))
    objective = Objective(nn.Linear(4, 2), lambda m, b: F.cross_entropy(m(b[0]) * temperature, b[1], reduction="none"))
    ask_once(private(pairs(), objective), objective)
    assert temperature.grad is None


def test_a_frozen_table_is_not_rewritten_by_private_tokens() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4, max_norm=0.1).requires_grad_(False)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(tokens).mean(1))

    module = Bag()
    before = module.table.weight.clone()
    objective = Objective(module, cross_entropy)
    door = private((torch.randint(0, 50, (200, 3)), torch.randint(0, 2, (200,))), objective)
    with pytest.raises(UnsupportedModel, match=r"table.*max_norm"):
        ask_once(door, objective)
    assert torch.equal(module.table.weight, before)
    assert door.account.epsilon_spent() == 0


def test_half_precision_inside_the_model_is_refused() -> None:
    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(batch[0])
        return F.cross_entropy(out.float(), batch[1], reduction="none")

    objective = Objective(nn.Linear(4, 2), loss)
    with pytest.raises(SfumatoError):
        ask_once(private(pairs(), objective), objective)


@pytest.mark.parametrize("ghost", [None, True, False])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_the_callers_autocast_ends_at_the_engine(ghost: bool | None, compute: torch.dtype | None) -> None:
    """A training loop wrapped in autocast is an everyday habit: norms and sums must not be bfloat16 for it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    objective = Objective(module, cross_entropy, autocast=compute)
    batch = torch.randn(50, 20), torch.randint(0, 3, (50,))
    options: dict[str, Any] = {"clip": Clip(0.1), "performance": Performance(ghost=ghost)}
    plain = clipped_sum(objective, objective.parameters(), batch, **options)
    with torch.autocast("cpu", torch.bfloat16):
        inside = clipped_sum(objective, objective.parameters(), batch, **options)
    for name, value in plain.items():
        assert inside[name].dtype in (torch.float32, torch.float64)
        assert torch.equal(inside[name], value)


def test_an_augmentation_that_begins_to_mix_rows_later_is_refused_then() -> None:
    class Curriculum:
        mixing = False

        def __call__(self, batch: Any) -> Any:
            x, y = batch
            return (x + x.mean(0) if self.mixing else x), y

    augment = Curriculum()
    objective = Objective(nn.Linear(4, 2), cross_entropy)
    door = private(pairs(), objective)
    ask_once(door, objective, augment=augment)
    augment.mixing = True
    with pytest.raises(InvalidArgument, match="augment"):
        ask_once(door, objective, augment=augment)


def test_a_loss_that_begins_to_mix_rows_later_is_refused_before_long() -> None:
    mixing = False

    def loss(module: nn.Module, batch: Any) -> Tensor:
        out = module(batch[0])
        own = F.cross_entropy(out, batch[1], reduction="none")
        return own + out @ out.detach().mean(0) if mixing else own

    objective = Objective(nn.Linear(4, 2), loss)
    door = private(pairs(), objective)
    ask_once(door, objective)
    mixing = True
    for _ in range(2):  # looked at again at the fourth: until then it is answered
        ask_once(door, objective)
    with pytest.raises(UnsupportedModel, match=r"example|row"):
        ask_once(door, objective)
    assert len(door.statement().asked) == 3


def test_how_wide_a_sum_is_does_not_tell_how_many_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part adds up in float32, several in float64: quotients of the two are different floats."""
    seen: list[set[torch.dtype]] = []
    release = GradientMean.release

    def watched(question: GradientMean, noisy: Any, expected: float) -> Gradient:
        seen.append({t.dtype for t in noisy.values()})
        return release(question, noisy, expected)

    monkeypatch.setattr(GradientMean, "release", watched)
    for rows in (0, 1, 4, 5, 200):
        objective = Objective(nn.Linear(4, 2), cross_entropy)
        ask_once(private(pairs(rows), objective, performance=Performance(micro_batch=4)), objective)
    assert seen == [{torch.float64}] * 5


def test_made_up_rows_on_a_kink_do_not_end_a_training() -> None:
    """They are all zeros here, so rounding, which goes by how many rows there are, decides for all of them at once."""

    class Kinked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, rows: Tensor) -> Tensor:
            h: Tensor = self.layer(rows.to(self.layer.weight.dtype))
            rounding = torch.finfo(h.dtype).eps / 10
            out: Tensor = self.head(F.relu(h + (rounding if len(rows) == 3 else -rounding)))
            return out

    x, y = pairs()
    objective = Objective(Kinked(), cross_entropy)
    door = private(((10 * x).byte(), y), objective)
    for _ in range(4):
        ask_once(door, objective)
        nn.init.constant_(objective.module.layer.bias, 1e-9)  # type: ignore[union-attr,arg-type]


def test_no_row_ends_a_training_by_overflowing_later() -> None:
    def poisson(module: nn.Module, batch: Any) -> Tensor:
        eta = module(batch[0])[:, 0]
        return eta.exp() - batch[1] * eta

    x, y = torch.rand(200, 1), torch.zeros(200, dtype=torch.long)
    x[17], y[17] = 600.0, 1  # the only one of its kind: it is among those that are looked at
    objective = Objective(nn.Linear(1, 1, bias=False), poisson)
    nn.init.zeros_(objective.module.weight)  # type: ignore[arg-type]
    door = private((x, y), objective)
    ask_once(door, objective)
    nn.init.ones_(objective.module.weight)  # type: ignore[arg-type]
    for _ in range(4):
        ask_once(door, objective)


def test_a_loop_until_something_converges_ends() -> None:
    class Implicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = self.layer(rows)
            z = torch.zeros_like(out)
            while True:
                z, before = 0.5 * torch.tanh(z) + out, z
                if bool(((z - before).abs() < 1e-4).all()):
                    return z

    objective = Objective(Implicit(), cross_entropy)
    with contextlib.suppress(UnsupportedModel):  # how often it goes round depends on the other rows
        ask_once(private(pairs(), objective), objective)


@pytest.mark.parametrize("norm", [1.0, 1e-3, 1e-7])
def test_factors_next_to_zero_do_not_lengthen_what_they_shorten(norm: float) -> None:
    objective = Objective(nn.Linear(4, 4, bias=False), lambda m, b: (m(b[0]) * b[1]).sum(1))
    params = objective.parameters()
    clipped_sum(objective, params, (torch.randn(3, 4), torch.randn(3, 4)), clip=Clip(norm))
    for size in (1e9, 1e15, 4.4e18, 1e19):
        huge = torch.full((1, 4), size), torch.full((1, 4), 1.6 * size)
        added = Gradient(clipped_sum(objective, params, huge, clip=Clip(norm))).norm()
        assert float(added) <= norm * (1 + 1e-6)


def test_what_goes_wrong_is_shown_on_made_up_rows_and_nothing_private_is_quoted() -> None:
    objective = Objective(nn.Linear(4, 2), cross_entropy)
    x, _ = pairs()
    door = private((x, torch.full((200,), 1234.5)), objective)
    with pytest.raises(SfumatoError, match=r"made-up rows of torch\.float32") as refusal:
        ask_once(door, objective)
    assert "1234" not in str(refusal.value)
    assert door.account.epsilon_spent() == 0


def test_autocast_around_standardised_convolutions_is_refused_too() -> None:
    net = nn.Sequential(WSConv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 6, 6))
    net[2].requires_grad_(False)  # only the convolution is trained

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(batch[0])
        return F.cross_entropy(out.float(), batch[1], reduction="none")

    objective = Objective(net, loss)
    with pytest.raises(UnsupportedModel, match="autocast"):
        ask_once(private((torch.rand(200, 3, 6, 6), torch.randint(0, 2, (200,))), objective), objective)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1.0, np.nan] * 100, dtype=object),
        np.array(["2020-01-01", "NaT"] * 100, dtype="datetime64[D]"),
        np.ma.array([1, 2] * 100, mask=[0, 1] * 100),
        np.array([1.0, np.nan] * 100),
        ["a", float("nan")] * 100,  # which numpy takes for the words "a" and "nan"
        ["a", None] * 100,
        np.array(["a", "nan"] * 100),
        np.array(["a", ""] * 100),
        np.array([b"a", b" "] * 100),
    ],
    ids=["object", "dates", "masked", "floats", "list", "list with None", "words", "empty words", "bytes"],
)
def test_missing_user_ids_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidArgument, match="users"):
        Private(pairs(), name="people", size=2, unit="user", users=ids, budget=Budget(1.0, 1e-6))


def test_equal_ids_are_one_user_in_any_order() -> None:
    ids = np.array(["a", "b", 3, "a", 3, "c"], dtype=object)
    door = Private(
        torch.ones(6, 1), name="people", size=4, unit="user", users=ids, reduction="sum", budget=Budget(500.0, 1e-6)
    )
    total = door.ask(NoisyMean(lambda rows: rows, bound=1.0), noise=0.1, sampler=door.everyone()) * 4
    assert abs(float(total) - 4) < 0.7  # four users of at most 1 each, not six rows; seven standard deviations
    assert len(door._groups or []) == 4


@pytest.mark.parametrize("rows", [1, 2500])
def test_a_good_and_large_origin_does_not_drown_the_sum_in_rounding(rows: int) -> None:
    """All gradients lie near a huge origin: taking one row away moves the sum by its own small addend only.

    In one float32 sum of 2500 rows it is 0.013 above that.
    """
    torch.manual_seed(0)
    centre = torch.randn(64) * 60
    x = centre + 0.001 * torch.randn(rows + 1, 64)
    objective = Objective(nn.Linear(64, 10, bias=False), lambda m, b: m(b).sum(1))
    params = objective.parameters()
    origin = Gradient({"weight": centre.expand(10, 64).contiguous()})
    clip = Clip(1.0, origin=origin)
    with_row = clipped_sum(objective, params, x, clip=clip)["weight"].double()
    without = clipped_sum(objective, params, x[:-1], clip=clip)["weight"].double()
    own = (x[-1] - centre).double().norm() * 10**0.5
    assert float((with_row - without).norm()) <= float(own) + 0.005


def test_a_million_rows_are_not_one_float32_sum() -> None:
    torch.manual_seed(0)
    x = torch.rand(300_000, 4) + 0.5
    objective = Objective(nn.Linear(4, 2, bias=False), lambda m, b: m(b).sum(1))
    params = objective.parameters()
    difference = clipped_sum(objective, params, x, clip=Clip(1.0))["weight"].double()
    difference -= clipped_sum(objective, params, x[1:], clip=Clip(1.0))["weight"].double()
    assert float(difference.norm()) <= 1.01


def test_part_of_an_answer_cannot_be_bought() -> None:
    door = private(pairs())
    for times in (1.0001, 2.0, 0):
        with pytest.raises(InvalidArgument, match="times"):
            Mechanism(question="GradientMean", noise=Gaussian(1.0), sampler=door.everyone(), times=times)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="times"):
            door.plan(Planned(NoisyMean, 50.0, door.everyone(), times))  # type: ignore[arg-type]


def test_a_sealed_question_draws_noise_as_often_as_it_declares() -> None:
    class Repeated(Sealed):
        releases: ClassVar[int] = 2
        draws = 2

        @property
        def unit(self) -> float:
            return 1.0

        def run(self, sample: Any, noisy: Any) -> Any:
            return [noisy(torch.zeros(1, dtype=torch.float64)) for _ in range(type(self).draws)]

    door = private(pairs(), adjacency="replace-one")
    answers = door.ask(Repeated(), noise=20.0, sampler=door.everyone())
    assert len({float(a) for a in answers}) == 2
    Repeated.draws = 3
    with pytest.raises(SfumatoError, match="releases"):
        door.ask(Repeated(), noise=20.0, sampler=door.everyone())


@pytest.mark.parametrize("source", ["numpy", "own generator"])
def test_mixing_by_other_generators_is_refused(source: str) -> None:
    generator = torch.Generator()

    def mix_up(batch: Any) -> Any:
        rows = len(batch[0])
        order = (
            torch.from_numpy(np.random.permutation(rows))  # noqa: NPY002
            if source == "numpy"
            else torch.randperm(rows, generator=generator)
        )
        return (batch[0] + batch[0][order]) / 2, batch[1]

    objective = Objective(nn.Linear(4, 2), cross_entropy)
    with pytest.raises(InvalidArgument, match="augment"):
        ask_once(private(pairs(), objective), objective, augment=mix_up)


def test_a_tiny_private_mean_is_still_a_private_mean() -> None:
    door = private(torch.rand(200, 3) * 1e-8)
    question = NoisyMean(lambda rows: rows - rows.mean(0), bound=1e-8, width=3)
    with pytest.raises(InvalidArgument, match="row_map"):
        door.ask(question, noise=50.0, sampler=door.everyone())


def test_low_precision_products_are_switched_off_and_back_on() -> None:
    objective = Objective(nn.Linear(64, 10), lambda m, b: m(b).square().sum((1, 2)))
    x = torch.randn(6, 5, 64)
    exact = clipped_sum(objective, objective.parameters(), x, clip=Clip(1.0))
    torch.set_float32_matmul_precision("medium")
    try:
        again = clipped_sum(objective, objective.parameters(), x, clip=Clip(1.0))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(exact[n], again[n]) for n in exact)


def test_a_missing_rule_is_named_without_quoting_torch() -> None:
    """Torch's own text may hold sizes or values of private rows."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(x)[0][:, -1])

    objective = Objective(Recurrent(), cross_entropy)
    door = private((torch.randn(200, 5, 4), torch.randint(0, 2, (200,))), objective)
    with pytest.raises(UnsupportedModel) as caught:
        ask_once(door, objective)
    assert str(caught.value).startswith("gru in 'gru' has no rule")
    assert "aten" not in str(caught.value)
    assert caught.value.__suppress_context__


# --- what private rows draw ------------------------------------------------------------------------------------------


def jitter(batch: Any) -> Any:
    """A random view of each row for itself."""
    x, y = batch
    return x * (1 + 0.5 * torch.randn(len(x), 1)), y


def drawing(rows: int, *, dropout: bool = False, sampler: str = "poisson") -> tuple[Private, GradientMean]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)] if dropout else [nn.Linear(4, 2)]
    objective = Objective(nn.Sequential(*layers), cross_entropy)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, 4, generator=generator), torch.arange(rows) % 2
    private = Private(data, name="d", size=400, objective=objective, budget=Budget(9.0, 1e-4), seed=NotPrivateSeed(3))
    line = private.poisson(40) if sampler == "poisson" else private.everyone()
    private.plan(Planned(GradientMean, 5.0, line, 20))
    question = GradientMean(objective.parameters(), Clip(1.0), views=2, augment=None if dropout else jitter)
    return private, question


@pytest.mark.parametrize("dropout", [False, True], ids=["views", "dropout"])
def test_an_answer_leaves_no_trace_in_the_global_generators(dropout: bool) -> None:
    """They would tell how many rows were sampled, and public views drawn from them would depend on it."""
    private, question = drawing(400, dropout=dropout)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    for _ in range(3):
        private.ask(question)
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]


@pytest.mark.parametrize("dropout", [False, True], ids=["views", "dropout"])
def test_views_do_not_come_from_a_seed_that_others_know(dropout: bool) -> None:
    """With a known seed, one row more would shift everybody's views by more than the noise covers."""
    answers = []
    for seed in (0, 0, 1):
        private, question = drawing(400, dropout=dropout)
        torch.manual_seed(seed)
        answers.append(torch.cat([t.flatten() for t in private.ask(question).values()]))
    # Noise and samples repeat under NotPrivateSeed, and so do the views; torch's own seed has no part in them.
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_each_answer_has_views_of_its_own() -> None:
    private, question = drawing(400, sampler="everyone")
    drawn: list[float] = []

    def spied(batch: Any) -> Any:
        drawn.append(float(torch.rand(len(batch[0]))[0]))
        return batch

    spied_on = GradientMean(question.params, Clip(1.0), views=2, augment=spied)
    seen = []
    for _ in range(3):
        drawn.clear()
        private.ask(spied_on)
        seen.append(drawn[-1])
    assert len(set(seen)) == 3


def test_a_clip_that_decides_its_own_factors_is_refused() -> None:
    class Lax(Clip):
        def factors(self, norms: Tensor) -> Tensor:
            return torch.ones_like(norms)

    private, question = drawing(400)
    with pytest.raises(InvalidArgument, match="Lax"):
        private.ask(GradientMean(question.params, Lax(1.0)))
    assert private.statement().asked[0].answers == 0


def test_a_stability_that_overflows_is_refused() -> None:
    for norm, stability in ((1e20, 1e-30), (1.0, 1e-320), (1e37, 0.01)):
        with pytest.raises(InvalidArgument, match="stability"):
            Clip(norm, stability=stability)
    objective = Objective(nn.Linear(3, 1, bias=False), lambda module, x: module(x)[:, 0])
    rows = torch.cat([torch.zeros(1, 3), torch.ones(3, 3)])
    total = clipped_sum(objective, objective.parameters(), rows, clip=Clip(1e27, stability=0.01))
    assert bool(torch.isfinite(total["weight"]).all())


# --- rows that move each other ---------------------------------------------------------------------------------------


class Unpadded(nn.Module):
    """Only tokens that are there go through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        there, h = tokens != 0, self.table(tokens)
        out = h.new_zeros(*tokens.shape, 50)
        out[there] = self.head(h[there])
        return out


def test_tokens_of_one_row_are_not_clipped_as_another_rows() -> None:
    """Probed with full rows, where `h[there]` is rows x length. Then one long row stood in everybody's place: 44 C."""

    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        nll = -module(tokens).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        return (nll * (tokens != 0)).sum(1)

    torch.manual_seed(0)
    objective = Objective(Unpadded().double(), loss)
    with pytest.raises(UnsupportedModel, match="'head' is given rows that were chosen"):
        clipped_sum(objective, objective.parameters(), torch.randint(1, 50, (16, 64)), clip=Clip(0.1))


# ------------------------------------------------------------------------------------------------ rounding by place


def softplus(rows: Tensor) -> Tensor:
    return F.softplus(rows[:, 0])


def the_last_rounded_otherwise(rows: Tensor) -> Tensor:
    """As vectorised functions do it: what does not fill a whole vector is computed by other instructions."""
    whole = len(rows) - len(rows) % 32
    return rows[:, 0] * torch.where(torch.arange(len(rows)) < whole, 1.0, 1 - 2.0**-20)


def odd_rounded_otherwise(rows: Tensor) -> Tensor:
    return rows[:, 0] * torch.where(torch.arange(len(rows)) % 2 == 0, 1.0, 1 - 2.0**-20)


def in_numpy(rows: Tensor) -> Tensor:
    """Out of the sight of torch."""
    x = rows[:, 0].numpy()
    return torch.from_numpy(np.where(np.arange(len(x)) % 2, x * np.float32(1 - 2.0**-20), x))


def on_a_threshold(score: Any) -> tuple[Tensor, float]:
    """A number whose score is rounded otherwise among others, and the larger one of its two scores."""
    x = torch.linspace(0.5, 3, 4096)[:, None]
    alone, among = torch.cat([score(v) for v in x.split(1)]), score(x)
    differ = (alone != among).nonzero()
    i = int(differ[0]) if len(differ) else 0
    return x[i], float(torch.maximum(alone[i], among[i]))


ROW_QUESTIONS: dict[str, Any] = {
    "Histogram": lambda votes: Histogram(votes, 2),
    "TopKHistogram": lambda votes: TopKHistogram(lambda r: torch.stack([votes(r), votes(r)], 1).double(), 2, 1000),
    "NoisyMean": lambda votes: NoisyMean(lambda r: votes(r).double(), 1.0),
    "Gram": lambda votes: Gram(lambda r: votes(r).double()[:, None], 1.0, 1),
    "NoisyArgmin": lambda votes: NoisyArgmin(lambda r: torch.stack([votes(r), 1 - votes(r)], 1).double(), 2, 1.0),
}


@pytest.mark.parametrize("micro_batch", [None, 1, 33])
@pytest.mark.parametrize("score", [softplus, the_last_rounded_otherwise, odd_rounded_otherwise, in_numpy])
@pytest.mark.parametrize("name", ROW_QUESTIONS)
def test_a_row_more_changes_nobody_elses_vote(name: str, score: Any, micro_batch: int | None) -> None:
    """A row on a threshold, again and again: votes are exactly as many as rows, or none at all, also next to 64."""
    x, threshold = on_a_threshold(score)
    question = ROW_QUESTIONS[name](lambda rows: (score(rows) >= threshold).long())

    def exact(count: int) -> Tensor:
        door = private(x.repeat(count)[:, None], performance=Performance(micro_batch=micro_batch))
        return torch.as_tensor(question.exact(door._sample(np.arange(count), largest=200))).double()

    found = {count: exact(count) for count in (1, 32, 63, 64, 65, 127, 128, 129, 501)}
    for count, answer in found.items():
        assert torch.allclose(answer, count * found[1], rtol=0.0, atol=1e-9), count


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_row_maps_pass_in_shapes_that_do_not_tell_how_many_rows_there_are(micro_batch: int | None) -> None:
    shapes: list[int] = []

    def watched(rows: Tensor) -> Tensor:
        shapes.append(len(rows))
        return rows[:, 0]

    kinds = set()
    for count in (1, 31, 64, 65, 190):
        door = private(torch.rand(count, 4), performance=Performance(micro_batch=micro_batch))
        shapes.clear()
        NoisyMean(watched, 1.0).exact(door._sample(np.arange(count), largest=200))
        kinds.add(frozenset(shapes))
    assert kinds == {frozenset({256 if micro_batch is None else micro_batch})}


@pytest.mark.parametrize("question", [NoisyMean(lambda r: r, 1.0, 2), Gram(lambda r: r, 1.0, 2)], ids=["mean", "gram"])
def test_no_norm_falls_from_the_bound_to_nothing_by_its_last_bit(question: Any) -> None:
    """Squares overflow from a norm of 1.3e154 on: rows fade out before that."""

    def size(norm: float) -> float:
        rows = torch.tensor([[0.6 * norm, 0.8 * norm]], dtype=torch.float64)
        return float(torch.as_tensor(question.exact(private(rows)._sample(np.arange(1)))).norm())

    found = [size(norm) for norm in [*np.linspace(1e153, 4e153, 121), *np.linspace(1.2e154, 1.5e154, 31)]]
    assert found[0] == pytest.approx(1.0)
    assert found[-1] == 0.0
    assert max(abs(a - b) for a, b in pairwise(found)) < 0.05
