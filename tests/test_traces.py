"""Code that sees private rows leaves nothing behind but the noisy answer: no warning, no buffer, no error, no seed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import Budget, Clip, GradientSum, NoisyMean, Objective, Private
from sfumato.errors import InvalidArgument, SfumatoError, UnsupportedModel
from sfumato.gradients import Performance
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.traces import no_traces

RowMap = Callable[[Any], Tensor]


def door(rows: Any, **options: Any) -> Private:
    return Private(rows, name="people", size=1000, budget=Budget(8.0, 1e-5), **options)


def mean(private: Private, row_map: RowMap, **options: Any) -> Any:
    return private.ask(NoisyMean(row_map, bound=1.0, **options), noise=30.0, sampler=private.everyone())


@pytest.fixture
def shown() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


# ------------------------------------------------------------------------------------------------ warnings


def logarithm(rows: Tensor) -> Tensor:
    return torch.from_numpy(np.log(rows.numpy()))


def test_a_warning_that_one_row_causes_is_not_shown(shown: list[warnings.WarningMessage]) -> None:
    incomes = torch.rand(1000, 1) + 1
    incomes[500] = 0.0
    mean(door(incomes), logarithm)
    assert not shown
    mean(door(incomes, seed=NotPrivateSeed(0)), logarithm)  # to find out what is wrong
    assert any("divide by zero" in str(w.message) for w in shown)
    before = len(shown)
    warnings.warn("of the user's own", stacklevel=1)
    assert len(shown) == before + 1


@pytest.mark.parametrize("action", ["default", "module", "once"])
def test_public_code_still_warns_of_what_a_private_row_warned_of_before(action: Any) -> None:
    """Python shows such a warning once: silence afterwards would tell that one person's row was the first."""
    for income in (1.0, 0.0):
        incomes = torch.full((1000, 1), 2.0)
        incomes[500] = income
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            mean(door(incomes), logarithm)
            assert not caught
            logarithm(torch.zeros(2, 1))
            logarithm(torch.zeros(2, 1))
        assert [str(w.message) for w in caught] == ["divide by zero encountered in log"]


def test_a_warning_that_counts_a_batch_is_not_shown(shown: list[warnings.WarningMessage]) -> None:
    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(module(rows), torch.zeros(1), reduction="none").flatten()

    objective = Objective(nn.Linear(3, 1), loss)
    private = door(torch.rand(1000, 3), objective=objective)
    question = GradientSum(objective.parameters(), Clip(1.0))
    private.ask(question, noise=5.0, sampler=private.poisson(50))
    assert not shown


def test_another_threads_warnings_outlive_the_door() -> None:
    before = warnings.showwarning
    with no_traces(known=(), silent=True):
        elsewhere = warnings.catch_warnings()
        elsewhere.__enter__()
    elsewhere.__exit__(None, None, None)  # after the door was shut
    heard: list[Any] = []
    try:
        warnings.showwarning.before = lambda *args, **_: heard.append(args)  # type: ignore[attr-defined]
        warnings.showwarning("late", UserWarning, "here.py", 1)
    finally:
        warnings.showwarning = before
    assert heard


# ------------------------------------------------------------------------------------------------ buffers


class Drifting(nn.Module):
    """Keeps a running mean, and replaces it instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen = self.seen + rows.mean((0, 2, 3))
        return rows


class Sly(nn.Module):
    """Writes past what autograd counts, and has a buffer more after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.data.copy_(rows.mean((0, 2, 3)))
        self.register_buffer("last", rows[:1].clone())
        return rows


KEEPERS = {"norm": nn.InstanceNorm2d(3, track_running_stats=True), "own": Drifting(), "sly": Sly()}


@pytest.mark.parametrize("keeper", list(KEEPERS.values()), ids=list(KEEPERS))
def test_a_network_in_a_row_map_keeps_its_buffers(keeper: nn.Module) -> None:
    net = nn.Sequential(keeper, nn.Flatten(), nn.Linear(48, 1))
    before = {name: b.clone() for name, b in net.named_buffers()}
    assert before
    mean(door(torch.randn(1000, 3, 4, 4) + 7), lambda rows: net(rows).detach())
    assert {name for name, _ in net.named_buffers()} == set(before)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.layer = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        wanted: Tensor = self.layer(rows - self.mean)
        return wanted


def inferred() -> nn.Module:
    with torch.inference_mode():
        return Scaled().requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "in inference mode"])
def test_teachers_of_other_kinds_are_accepted(kind: str) -> None:
    teacher = inferred() if kind != "scripted" else torch.jit.script(Scaled().requires_grad_(False))

    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(rows)
        return (module(rows) - wanted).square().sum(1)

    objective = Objective(nn.Linear(4, 2), loss)
    private = door(torch.randn(1000, 4), objective=objective)
    private.ask(GradientSum(objective.parameters(), Clip(1.0)), noise=5.0, sampler=private.everyone())


class Loaded(torch.utils.data.Dataset[Tensor]):
    """Passes a network while it is read, in a thread of the library's own."""

    def __init__(self) -> None:
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Tensor:
        out: Tensor = self.norm(torch.randn(1, 3, 4) + row)[0, :, 0].detach()
        return out


def test_a_network_in_a_dataset_keeps_its_buffers() -> None:
    rows = Loaded()
    private = door(rows, performance=Performance(load_rows=4))
    mean(private, lambda rows: rows, width=3)
    assert float(rows.norm.running_mean.abs().sum()) == 0


def test_a_teacher_in_a_loss_keeps_its_buffers_and_must_be_in_evaluation() -> None:
    teacher = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: b.clone() for name, b in teacher.named_buffers()}

    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(rows)
        return (module(rows) - wanted).square().sum(1)

    objective = Objective(nn.Linear(4, 2), loss)
    private = door(torch.randn(1000, 4) + 7, objective=objective)
    question = GradientSum(objective.parameters(), Clip(1.0))
    with pytest.raises(UnsupportedModel, match=r"eval\(\)"):
        private.ask(question, noise=5.0, sampler=private.everyone())
    assert all(torch.equal(b, before[name]) for name, b in teacher.named_buffers())
    assert private.account.epsilon_spent() == 0
    teacher.eval()
    private.ask(question, noise=5.0, sampler=private.everyone())
    assert all(torch.equal(b, before[name]) for name, b in teacher.named_buffers())


def test_batch_norm_in_a_row_map_is_refused_wherever_it_is() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(UnsupportedModel, match="BatchNorm2d"):
        mean(door(torch.randn(1000, 3, 4, 4)), lambda rows: (net(rows).argmax(1) == 0).double())


def test_what_other_threads_compute_meanwhile_stays() -> None:
    module, norm = nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True)
    with no_traces(known=module.modules(), silent=True):
        elsewhere = threading.Thread(target=norm, args=(torch.ones(2, 3, 4),))
        elsewhere.start()
        elsewhere.join()
    assert float(norm.running_mean.abs().sum()) > 0


# ------------------------------------------------------------------------------------------------ errors


def test_the_error_of_private_rows_hangs_on_to_nothing() -> None:
    def fails(rows: Tensor) -> Tensor:
        if float(rows.abs().max()) > 1e5:  # rows that maps are checked with are cut, and made-up ones are small
            raise ValueError(f"cannot parse {float(rows[0, 0])}")
        return rows

    with pytest.raises(SfumatoError, match="ValueError") as refusal:
        mean(door(torch.full((1000, 1), 123456.0)), fails)
    error: BaseException | None = refusal.value
    assert error is not None
    assert error.__context__ is None
    assert error.__cause__ is None


def test_no_error_quotes_a_width_that_a_row_decides() -> None:
    ages = torch.randint(18, 90, (1000, 1))
    with pytest.raises(InvalidArgument, match=r"100 value\(s\) per row") as refusal:
        mean(door(ages), lambda rows: F.one_hot(rows[:, 0]).double(), width=100)
    assert not any(str(k) in str(refusal.value).replace("100", "") for k in range(18, 91))

    objective = Objective(nn.Linear(1, 1), lambda m, rows: F.one_hot(rows[:, 0]) + m(rows.float()))
    private = door(ages, objective=objective)
    with pytest.raises(InvalidArgument, match="one value per example") as refusal:
        private.ask(GradientSum(objective.parameters(), Clip(1.0)), noise=5.0, sampler=private.everyone())
    assert not any(str(k) in str(refusal.value) for k in range(18, 91))


# ------------------------------------------------------------------------------------------------ seeds


def test_two_threads_leave_no_secret_seed_behind() -> None:
    """Each waits inside for the other: it comes only after the first has left."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    inside = [threading.Event(), threading.Event()]

    def asked(own: int) -> None:
        def slow(rows: Tensor) -> Tensor:
            if len(rows) > 8:
                inside[own].set()
                torch.rand(3)
                inside[1 - own].wait(0.3)
            return rows

        mean(door(torch.zeros(1000, 1)), slow)

    threads = [threading.Thread(target=asked, args=(own,)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ numbers of others


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    rows = torch.rand(1000, 2)
    private = Private(rows, name="people", size=np.int64(1000), budget=Budget(8.0, 1e-5))  # type: ignore[arg-type]
    for bound in (np.float32(0.5), torch.tensor(0.5)):
        question = NoisyMean(lambda rows: rows, bound=bound, width=2)  # type: ignore[arg-type]
        assert private.ask(question, noise=50.0, sampler=private.everyone()).shape == (2,)
    assert type(Clip(torch.tensor(1.0)).norm) is float  # type: ignore[arg-type]
