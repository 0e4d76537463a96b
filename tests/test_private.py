"""The door: charged before it answers, noise in proportion to the unit, and nothing else comes out."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato.data.samplers import FullBatch, Poisson
from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError, SfumatoError, UnsupportedAccounting
from sfumato.gradients import Clip, Performance, Units
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.mechanisms import Gaussian, Noise
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.questions import (
    Exact,
    GradientMean,
    GradientSum,
    Gram,
    Histogram,
    Joint,
    NoisyArgmin,
    NoisyMean,
    Question,
    Sample,
    Sealed,
)
from tests.statistics import FALSE_ALARM, binomial_p, correlation_p, normal_p, smallest, variance_p

BUDGET = Budget(2.0, 1e-6)
SEED = NotPrivateSeed(1)


def objective(inputs: int = 3, outputs: int = 2) -> Objective:
    torch.manual_seed(0)
    return Objective(nn.Linear(inputs, outputs, bias=False), lambda module, x: module(x).square().sum(1))


def rows(count: int = 20) -> Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(0))


def door(data: Any = None, **options: Any) -> Private:
    options = {"name": "clinic", "size": 1000, "objective": objective(), "budget": BUDGET, **options}
    return Private(rows() if data is None else data, **options)


def gradient(private: Private, clip: float = 1.0) -> GradientMean:
    assert private.objective is not None
    return GradientMean(private.objective.parameters(), Clip(clip))


def same(x: Tensor) -> Tensor:
    return x


def total(x: Any) -> float:
    return float(sum(t.double().sum() for t in x.values()))


class Failing(Question):
    """Fails after it was charged, with private text."""

    @property
    def unit(self) -> float:
        return 1.0

    def exact(self, sample: Sample) -> Exact:
        raise IndexError("Target 12 is out of bounds.")

    def release(self, noisy: Any, expected: float) -> Any:
        return noisy


class Spy(Question):
    """Keeps what it is shown, which only a test may do."""

    def __init__(self) -> None:
        self.__dict__["batches"] = []

    @property
    def unit(self) -> float:
        return 1.0

    def exact(self, sample: Sample) -> Exact:
        self.__dict__["batches"].append(list(sample.parts()))
        return torch.zeros(1)

    def release(self, noisy: Any, expected: float) -> Any:
        return noisy


# ------------------------------------------------------------------------------------------------ charged first


def test_the_charge_comes_before_the_answer() -> None:
    private = door()
    with pytest.raises(SfumatoError):
        private.ask(Failing(), noise=50.0, sampler=private.everyone())
    spent = private.account.epsilon_spent()
    assert spent > 0
    private.ask(gradient(private), noise=50.0, sampler=private.everyone())
    assert private.account.epsilon_spent() == pytest.approx(2 * spent)


def test_a_planned_answer_that_fails_stays_counted() -> None:
    private = door()
    plan = private.plan(Planned(Failing, 50.0, private.everyone(), 2))
    for _ in range(2):
        with pytest.raises(SfumatoError):
            private.ask(Failing())
    assert plan.taken == 2
    with pytest.raises(BudgetExceeded, match="no answer to 'Failing' left"):
        private.ask(Failing())


def test_the_ledger_is_written_before_private_rows_are_read(tmp_path: Path) -> None:
    """Seen from inside: when the question is computed, a second reader of the ledger already finds it counted."""
    found = []

    class Looking(Failing):
        def exact(self, sample: Sample) -> Exact:
            account = Ledger(tmp_path / "ledger.db").account("clinic")
            found.append(account.epsilon_spent())
            return torch.zeros(1)

    private = door(ledger=tmp_path / "ledger.db")
    private.ask(Looking(), noise=50.0, sampler=private.everyone())
    assert found[0] > 0
    assert found[0] == private.account.epsilon_spent()


REFUSALS: dict[str, tuple[Callable[[Private], Any], type[SfumatoError]]] = {
    "over budget": (lambda p: p.ask(gradient(p), noise=0.01, sampler=p.everyone()), BudgetExceeded),
    "plan over budget": (lambda p: p.plan(Planned(GradientMean, 0.01, p.poisson(100), 10)), BudgetExceeded),
    "fixed size under add/remove": (
        lambda p: p.ask(gradient(p), noise=50.0, sampler=p.fixed(5)),
        UnsupportedAccounting,
    ),
    "no plan": (lambda p: p.ask(gradient(p)), InvalidArgument),
    "empty plan": (lambda p: p.plan(), InvalidArgument),
    "no such plan": (lambda p: p.resume("nothing"), LedgerError),
    "noise without sampler": (lambda p: p.ask(gradient(p), noise=5.0), InvalidArgument),
    "sampler without noise": (lambda p: p.ask(gradient(p), sampler=p.everyone()), InvalidArgument),
    "sampler of another size": (
        lambda p: p.ask(gradient(p), noise=50.0, sampler=Poisson(size=999, batch_size=5)),
        InvalidArgument,
    ),
    "sampler of one's own": (
        lambda p: p.ask(gradient(p), noise=50.0, sampler=Everybody(size=1000, batch_size=1)),
        InvalidArgument,
    ),
    "no sampler": (lambda p: p.ask(gradient(p), noise=50.0, sampler=3), InvalidArgument),  # type: ignore[arg-type]
    "batch larger than the data": (lambda p: p.poisson(1001), InvalidArgument),
    "batch of nothing": (lambda p: p.poisson(0), InvalidArgument),
    "batch in words": (lambda p: p.poisson("5"), InvalidArgument),  # type: ignore[arg-type]
    "batch of a half": (lambda p: p.fixed(2.5), InvalidArgument),  # type: ignore[arg-type]
    "times": (lambda p: p.plan(Planned(GradientMean, 50.0, p.everyone(), 0)), InvalidArgument),
    "no question": (lambda p: p.ask(3, noise=50.0, sampler=p.everyone()), InvalidArgument),  # type: ignore[arg-type]
    "no planned question": (lambda p: p.plan((int, 50.0, p.everyone())), InvalidArgument),
    "clip inf": (lambda p: p.ask(gradient(p, math.inf), noise=50.0, sampler=p.everyone()), InvalidArgument),
    "clip 0": (lambda p: p.ask(gradient(p, 0.0), noise=50.0, sampler=p.everyone()), InvalidArgument),
    "clip nan": (lambda p: p.ask(gradient(p, math.nan), noise=50.0, sampler=p.everyone()), InvalidArgument),
    **{
        f"noise {noise}": (
            lambda p, noise=noise: p.ask(gradient(p), noise=noise, sampler=p.everyone()),
            InvalidArgument,
        )
        for noise in (0, 0.0, -1.0, math.nan, math.inf, "5", Noise(50.0))
    },
    "not the planned question": (
        lambda p: (p.plan(Planned(Gram, 500.0, p.everyone())), p.ask(gradient(p))),
        InvalidArgument,
    ),
}


class Everybody(Poisson):
    """Charged like a Poisson sample, drawn otherwise."""

    def draw(self, present: int, rng: np.random.Generator) -> Any:
        return np.arange(present)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_sentence_and_costs_and_draws_nothing(name: str) -> None:
    """With a repeatable seed the next answer shows whether anything was drawn in between."""
    refused, error = REFUSALS[name]
    answers = []
    for first in (None, refused):
        private = door(seed=SEED)
        if first is not None:
            with pytest.raises(error) as caught:
                first(private)
            assert "\n" not in str(caught.value)
            assert str(caught.value).endswith(".")
            assert all(line.answers == 0 for line in private.statement().asked)
        if name != "not the planned question":
            assert private.account.epsilon_spent() == 0
        private._plan = None
        noise = 500.0 if name == "not the planned question" else 50.0
        answers.append(private.ask(gradient(private), noise=noise, sampler=private.poisson(500)))
    assert torch.equal(answers[0]["weight"], answers[1]["weight"]) or name == "not the planned question"


class Gram2(Gram):
    """Another question that goes by a planned one's name, with a larger factor."""

    replace_factor: ClassVar[float] = 2.0

    @classmethod
    def kind(cls) -> str:
        return "Gram"


class Counts2(NoisyMean):
    @classmethod
    def kind(cls) -> str:
        return "Histogram"


def test_a_question_that_only_shares_a_planned_name_is_refused() -> None:
    private = door(size=20, adjacency="replace-one", budget=Budget(2.0, 1e-3))
    plan = private.plan(Planned(Gram, 50.0, private.everyone(), 3), Planned(Histogram, 50.0, private.everyone(), 3))
    for question in (Gram2(same, 1.0, width=3), Counts2(same, 1.0, width=3)):
        with pytest.raises(InvalidArgument, match="is planned with another"):
            private.ask(question)
    assert plan.taken == 0
    private.ask(Gram(same, 1.0, width=3))


# ------------------------------------------------------------------------------------------------ construction

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"size": None}, "size is missing"),
    "size 0": ({"size": 0}, "size=0"),
    "size nan": ({"size": math.nan}, "size=nan"),
    "size 10.5": ({"size": 10.5}, "size=10.5"),
    "delta too large": ({"budget": Budget(1.0, 1e-3)}, "delta=0.001 must be below"),
    "adjacency": ({"adjacency": "zero-out"}, "adjacency='zero-out'"),
    "size not exact under replace-one": ({"adjacency": "replace-one"}, "exact number of units"),
    "unit": ({"unit": "household"}, "unit='household'"),
    "reduction": ({"reduction": "max"}, "reduction='max'"),
    "users without unit": ({"users": [0] * 20}, "users must be given"),
    "unit without users": ({"unit": "user"}, "users must be given"),
    "too few users": ({"unit": "user", "users": [0, 1]}, "one id per row"),
    "users in two dimensions": ({"unit": "user", "users": np.zeros((20, 2))}, "one id per row"),
    "missing ids": ({"unit": "user", "users": [math.nan] * 20}, "missing ids"),
    "ids that are None": ({"unit": "user", "users": np.array(["a"] * 19 + [None], dtype=object)}, "missing ids"),
    "records": ({"unit": "user", "users": [0] * 20, "records_per_user": 0}, "records_per_user=0"),
    "seed": ({"seed": 3}, "seed=3"),
    "budget": ({"budget": (2.0, 1e-6)}, "budget=tuple must be a Budget"),
    "no budget": ({"budget": None}, "new to this ledger: give budget, or"),
    "name": ({"name": ""}, "name=''"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    options, message = WRONG[name]
    with pytest.raises(InvalidArgument, match=message) as caught:
        door(ledger=tmp_path / "ledger.db", **options)
    assert "\n" not in str(caught.value)
    if (tmp_path / "ledger.db").exists():
        assert all(
            not Ledger(tmp_path / "ledger.db").account(n).statement().asked for n in ["clinic"] if name == "seed"
        )


def test_a_delta_that_is_already_in_the_ledger_is_checked_too(tmp_path: Path) -> None:
    door(size=10, budget=Budget(1.0, 0.01), ledger=tmp_path / "ledger.db")
    with pytest.raises(InvalidArgument, match="must be below 1/size"):
        door(size=1000, budget=None, ledger=tmp_path / "ledger.db")


@pytest.mark.parametrize(
    "options",
    [{"unit": "user", "users": range(20)}, {"adjacency": "replace-one", "size": 20}, {"budget": Budget(3.0, 1e-6)}],
)
def test_a_ledger_of_another_unit_adjacency_or_budget_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    door(ledger=tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match="was made with"):
        door(ledger=tmp_path / "ledger.db", **options)


def test_datasets_in_one_ledger_have_accounts_of_their_own(tmp_path: Path) -> None:
    one, other = (door(ledger=tmp_path / "ledger.db", name=name) for name in ("one", "other"))
    one.ask(gradient(one), noise=50.0, sampler=one.everyone())
    assert one.account.epsilon_spent() > 0
    assert other.account.epsilon_spent() == 0
    again = door(ledger=tmp_path / "ledger.db", name="one", budget=None)
    assert again.account.epsilon_spent() == one.account.epsilon_spent()


# ------------------------------------------------------------------------------------------------ and nothing else


def test_it_cannot_be_looked_into() -> None:
    private = door(rows(37))
    for look in (
        list,
        len,
        iter,
        reversed,
        bool,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda p: p[0],
        lambda p: 0 in p,
        lambda p: [*p],
    ):
        with pytest.raises((SfumatoError, TypeError)):
            look(private)
    assert "37" not in repr(private)
    assert repr(private) == str(private) == repr(door(rows(36)))


def test_the_statement_tells_nothing_of_the_data() -> None:
    texts = []
    for count in (0, 37, 41):
        private = door(rows(count))
        private.ask(gradient(private), noise=50.0, sampler=private.poisson(100))
        data = private.statement().to_json()
        for line in data["mechanisms"]:
            del line["created"]  # a clock, not the data
        texts.append({k: v for k, v in data.items() if k in ("epsilon", "delta", "mechanisms", "unit", "adjacency")})
    assert texts[0] == texts[1] == texts[2]


def labelled(labels: list[int]) -> Private:
    model = Objective(nn.Linear(3, 2), cross_entropy)
    return door((rows(len(labels)), torch.tensor(labels)), objective=model)


@pytest.mark.parametrize("where", [0, 150])
def test_errors_do_not_quote_private_rows(where: int) -> None:
    """torch names the label that is out of bounds; whether it is met while checking or after the charge."""
    labels = [0, 1] * 100
    labels[where] = 12
    private = labelled(labels)
    for _ in range(2):
        with pytest.raises(SfumatoError, match="inside the door with IndexError") as caught:
            private.ask(gradient(private), noise=50.0, sampler=private.everyone())
        assert "12" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
    shown = door((rows(200), torch.tensor(labels)), objective=private.objective, seed=SEED)
    with pytest.raises(IndexError, match="12"):
        shown.ask(gradient(shown), noise=50.0, sampler=shown.everyone())


@pytest.mark.parametrize("value", [1e30, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 7])
def test_a_wild_row_is_answered_like_any_other(value: float, where: int) -> None:
    data = rows()
    data[where] = value
    private, without = door(data, seed=SEED), door(torch.cat([data[:where], data[where + 1 :]]), seed=SEED)
    answers = [p.ask(gradient(p), noise=50.0, sampler=p.everyone())["weight"] for p in (private, without)]
    assert torch.isfinite(answers[0]).all()
    assert float((answers[0] - answers[1]).norm()) <= 1.01 / 1000


def test_rows_of_one_class_first_do_not_hide_a_loss_that_mixes() -> None:
    """Data is often sorted by class: checks look at rows from all over it."""

    def balanced(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share = torch.bincount(y, minlength=2).to(x) / len(y)
        return nn.functional.cross_entropy(module(x), y, reduction="none") / share[y]

    data = (rows(400), torch.tensor([0] * 300 + [1] * 100))
    private = door(data, objective=Objective(nn.Linear(3, 2), balanced))
    with pytest.raises(SfumatoError, match="act on each other"):
        private.ask(gradient(private), noise=50.0, sampler=private.everyone())
    assert private.account.epsilon_spent() == 0


# ------------------------------------------------------------------------------------------------ denominators


def test_no_denominator_is_read_off_the_data() -> None:
    """Rows without gradient: whatever their number, the answer is bit by bit the same noise over the same constant."""
    answers = []
    for count in (0, 1, 50, 60):
        private = door(torch.zeros(count, 3), seed=SEED)
        answers.append(
            [
                private.ask(gradient(private), noise=50.0, sampler=private.everyone())["weight"],
                private.ask(gradient(private), noise=50.0, sampler=private.poisson(100))["weight"],
                private.ask(NoisyMean(same, 1.0, width=3), noise=50.0, sampler=private.everyone()),
                private.ask(Gram(same, 1.0, width=3), noise=50.0, sampler=private.everyone()),
            ]
        )
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


def test_a_mean_is_the_sum_over_the_declared_batch() -> None:
    data = rows(10)
    for expected in (100.0, 1000.0):
        sums, means = (door(data, seed=SEED) for _ in range(2))
        sampler = sums.poisson(expected) if expected < 1000 else sums.everyone()
        params = sums.objective.parameters()  # type: ignore[union-attr]
        whole = sums.ask(GradientSum(params, Clip(1.0)), noise=50.0, sampler=sampler)
        mean = means.ask(GradientMean(params, Clip(1.0)), noise=50.0, sampler=sampler)
        assert torch.allclose(whole["weight"] / expected, mean["weight"], rtol=1e-5)


@pytest.mark.parametrize("present", [0, 3])
def test_empty_data_and_empty_samples_are_answered_and_charged(present: int) -> None:
    private = door(rows(present))
    costs = []
    for _ in range(20):  # of the expected hundredth of a unit, nearly all samples are empty
        answer = private.ask(gradient(private), noise=1.0, sampler=private.poisson(0.01))
        assert float(answer["weight"].abs().sum()) > 0
        costs.append(private.account.epsilon_spent())
    assert all(a < b for a, b in itertools.pairwise([0.0, *costs]))
    asked = [line.answers for line in private.statement().asked]
    assert sum(asked) == 20
    whole = door(torch.zeros(0, 3))
    for question in (NoisyMean(same, 1.0, width=3), Gram(same, 1.0, width=3), NoisyArgmin(same, 3, 1.0)):
        assert whole.ask(question, noise=50.0, sampler=whole.everyone()) is not None


# ------------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("kind", [GradientSum, GradientMean])
def test_the_noise_has_the_law_that_was_charged(kind: type[GradientSum]) -> None:
    """Rows without gradient, so that the answer is the noise; drawn from real entropy."""
    model = objective(250, 200)
    private = door(torch.zeros(6, 250), objective=model, budget=Budget(8.0, 1e-6))
    clip, scale, expected = 0.3, 4.0, 125.0
    answers = [
        private.ask(kind(model.parameters(), Clip(clip)), noise=scale, sampler=private.poisson(expected))["weight"]
        for _ in range(3)
    ]
    std = scale * clip / (expected if kind is GradientMean else 1.0)
    x = torch.cat([a.reshape(-1) for a in answers])
    assert smallest([variance_p(x, std), normal_p(x, std)]) > FALSE_ALARM
    assert variance_p(x, 0.95 * std) < FALSE_ALARM
    assert variance_p(x, 1.05 * std) < FALSE_ALARM
    assert smallest(correlation_p(a, b) for a, b in itertools.combinations(answers, 2)) > FALSE_ALARM


def test_joint_noise_has_the_unit_of_each_part() -> None:
    model = objective(200, 200)
    params = model.parameters()
    private = door(torch.zeros(6, 200), objective=model, budget=Budget(8.0, 1e-6))
    question = Joint((GradientSum(params, Clip(0.3)), GradientSum(params, Clip(50.0))))
    small, large = private.ask(question, noise=4.0, sampler=private.poisson(125))
    for answer, unit in ((small, 0.3), (large, 50.0)):
        std = 4.0 * unit * math.sqrt(2)
        assert variance_p(answer["weight"], std) > FALSE_ALARM
        assert variance_p(answer["weight"], 0.95 * std) < FALSE_ALARM
        assert variance_p(answer["weight"], 1.05 * std) < FALSE_ALARM


def test_doors_do_not_share_noise_and_seeds_are_stamped() -> None:
    one, other = door(), door()
    answers = [p.ask(gradient(p), noise=50.0, sampler=p.everyone())["weight"] for p in (one, other, one)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(answers, 2))
    assert "repeatable seed" not in one.statement().to_text()
    seeded = [door(seed=SEED) for _ in range(2)]
    same_answers = [p.ask(gradient(p), noise=50.0, sampler=p.poisson(500))["weight"] for p in seeded]
    assert torch.equal(*same_answers)
    assert "not private" in seeded[0].statement().to_text().lower()
    assert "repeatable seed 1" in seeded[0].statement().to_text()


def test_the_stamp_of_a_seed_stays_in_the_ledger(tmp_path: Path) -> None:
    door(ledger=tmp_path / "ledger.db", seed=SEED)
    assert "repeatable seed" in door(ledger=tmp_path / "ledger.db").statement().to_text()


# ------------------------------------------------------------------------------------------------ plans


def answered(ask: Callable[[], Any], *errors: type[SfumatoError]) -> int:
    """How many answers there are until the door refuses."""
    for count in range(200):
        try:
            ask()
        except errors:
            return count
    return 200


def test_a_plan_is_used_in_order_and_resumed_with_fresh_noise(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first = door(ledger=path)
    lines = [Planned(GradientMean, 40.0, first.poisson(100), 2), (GradientMean, 60.0, first.everyone(), 3)]
    first.plan(*lines, resume_key="run")
    before = [first.ask(gradient(first))["weight"] for _ in range(2)]
    second = door(ledger=path)
    plan = second.resume("run", seen=2)
    assert plan.remaining() == 5 - plan.taken
    after = [second.ask(gradient(second))["weight"] for _ in range(plan.remaining())]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(before + after, 2))
    with pytest.raises(BudgetExceeded):
        second.ask(gradient(second))
    assert answered(lambda: first.ask(gradient(first)), LedgerError, BudgetExceeded) <= 1  # its plan was taken over


def test_adaptive_questions_stop_at_the_budget() -> None:
    private = door(budget=Budget(0.5, 1e-6))
    answers = answered(lambda: private.ask(gradient(private), noise=20.0, sampler=private.everyone()), BudgetExceeded)
    assert 2 <= answers < 199
    assert private.account.epsilon_spent() <= 0.5
    assert sum(line.answers for line in private.statement().asked) == answers


def test_asking_beyond_a_plan_is_composed_with_it_by_the_filter() -> None:
    """Together they are within the budget, and the statement promises no less than that for the two of them."""
    private = door()
    private.plan(Planned(GradientMean, 100.0, private.everyone(), 2))
    left = private.account.left()
    private.ask(Histogram(lambda x: (x[:, 0] > 0.5).long(), 2), noise=50.0, sampler=private.everyone())
    assert 0 < private.account.left() < left
    assert private.statement().epsilon == BUDGET.epsilon
    private.ask(gradient(private))


# ------------------------------------------------------------------------------------------------ sealed


class RidgeMean(Sealed):
    """The minimiser of sum |w - x|^2 / 2 + (lambda / 2) |w|^2 over bounded rows, by output perturbation.

    w = sum x / (n + lambda), with n declared: a row of norm <= bound moves it by bound / (n + lambda).
    """

    def __init__(self, bound: float, size: int, weight: float) -> None:
        self.__dict__.update(bound=bound, size=size, weight=weight)

    @property
    def unit(self) -> float:
        return float(self.__dict__["bound"] / (self.__dict__["size"] + self.__dict__["weight"]))

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        bound = self.__dict__["bound"]
        w = torch.zeros(3, dtype=torch.float64)
        for batch, _ in sample.parts():
            x = batch.double()
            w += (x * (bound / x.norm(dim=1, keepdim=True)).clamp_max(1.0)).sum(0)
        return noisy(w / (self.__dict__["size"] + self.__dict__["weight"]))


def exchanging(x: Tensor) -> Private:
    """The door that sealed methods are asked at."""
    return door(x, size=len(x), adjacency="replace-one", budget=Budget(8.0, 1e-6))


def test_a_sealed_method_gets_the_noise_that_was_charged() -> None:
    private = exchanging(torch.zeros(5, 3))
    question = RidgeMean(2.0, 1000, 10.0)
    x = torch.stack([private.ask(question, noise=200.0, sampler=private.everyone()) for _ in range(400)])
    std = 200.0 * 2.0 / 1010
    assert variance_p(x, std) > FALSE_ALARM
    assert variance_p(x, 0.7 * std) < FALSE_ALARM
    assert variance_p(x, 1.4 * std) < FALSE_ALARM
    assert sum(line.answers for line in private.statement().asked) == 400
    with pytest.raises(InvalidArgument, match="unit=inf"):
        private.ask(RidgeMean(math.inf, 1000, 10.0), noise=50.0, sampler=private.everyone())


@pytest.mark.parametrize("inside", [0, 1])
def test_only_what_a_sealed_method_keeps_inside_is_off_the_grid(inside: int) -> None:
    class Two(RidgeMean):
        releases: ClassVar[int] = 2

        def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
            return [noisy(torch.zeros(50, dtype=torch.float64)) for _ in range(2)]

    Two.inside = inside
    private = exchanging(torch.zeros(5, 3))
    draws = private.ask(Two(2.0, 1000, 10.0), noise=200.0, sampler=private.everyone())
    grid = 2.0 ** (math.floor(math.log2(200.0 * 2.0 / 1010)) - 20)
    on_grid = [bool((draw / grid == (draw / grid).round()).all()) for draw in draws]
    assert on_grid == [False] * inside + [True] * (2 - inside)


def test_whoever_writes_a_sealed_method_says_more_only_where_its_proof_does() -> None:
    """By default no draw is kept inside, any Gaussian will do, and one of all rows is exchanged."""
    question, private, other = RidgeMean(2.0, 1000, 10.0), exchanging(torch.zeros(5, 3)), door()
    assert (question.inside, question.charged) == (0, None)
    for asked, sampler in ((private, private.poisson(2)), (private, private.fixed(2)), (other, other.everyone())):
        with pytest.raises(InvalidArgument, match="proven for the exchange of one of all rows"):
            asked.ask(question, noise=50.0, sampler=sampler)
        assert not asked.statement().asked
    for noise in (50.0, 70.0):
        assert private.ask(question, noise=noise, sampler=private.everyone()).shape == (3,)


def test_a_sealed_method_moves_by_at_most_its_unit() -> None:
    question = RidgeMean(0.5, 1000, 10.0)
    data = [rows(8), torch.cat([rows(8), 1e6 * torch.ones(1, 3)])]
    exact = []
    for x in data:
        question.run(door(x)._sample(np.arange(len(x))), exact.append)
    assert 0.99 * question.unit <= float((exact[0] - exact[1]).norm()) <= question.unit * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------ users


def of_users(records: list[int], **options: Any) -> tuple[Private, np.ndarray[Any, Any]]:
    """Users with so many records each, in mixed order; column 0 says whose a row is, column 1 its number."""
    users = np.repeat(np.arange(len(records)), records)
    numbers = np.concatenate([np.arange(n) for n in records])
    order = np.random.default_rng(0).permutation(len(users))
    order = order[np.argsort(numbers[order], kind="stable")]  # a user's records keep their order
    data = torch.tensor(np.stack([users, numbers, users * 0], 1)[order], dtype=torch.float32)
    return door(data, unit="user", users=users[order], **options), users[order]


def seen(spy: Spy) -> list[dict[int, list[tuple[int, float]]]]:
    """For every answer: whose records, which, with which weights."""
    found = []
    for parts in spy.__dict__["batches"]:
        whose: dict[int, list[tuple[int, float]]] = {}
        for batch, units in parts:
            weights = units.weights.tolist()
            assert len(batch) % units.records == 0
            for row, weight in zip(batch.tolist(), weights, strict=True):
                whose.setdefault(int(row[0]), []).append((int(row[1]), weight))
        found.append(whose)
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_records_of_a_user_take_part_up_to_the_cap(reduction: str) -> None:
    records = [1, 2, 3, 4, 5, 9, 17]
    private, _ = of_users(records, records_per_user=6, reduction=reduction)
    spy = Spy()
    private.ask(spy, noise=50.0, sampler=private.everyone())
    (whose,) = seen(spy)
    assert sorted(whose) == list(range(len(records)))
    for user, rows_ in whose.items():
        used = min(records[user], 6)
        counted = [(n, w) for n, w in rows_ if w > 0]
        assert [n for n, _ in counted] == list(range(used)), "the first ones, in the order of the data"
        assert all(w == (1 / used if reduction == "mean" else 1.0) for _, w in counted)
        # Padded to a power of two of its own, so that nobody else's records decide how it is computed.
        assert len(rows_) == 2 ** math.ceil(math.log2(used))


def test_how_a_user_is_computed_does_not_depend_on_others() -> None:
    """Ghost norms are inflated: if a large user switched all others to them, the sum would move by more than C."""
    torch.manual_seed(0)
    model = Objective(nn.Linear(40, 30, bias=False), lambda m, x: m(x).square().sum(1))
    params, count, norm = model.parameters(), 3000, 1.0
    data = torch.ones(count, 40) + 0.01 * torch.randn(count, 40)
    large = -torch.ones(64, 40)
    sums = []
    for x, users in (
        (data, np.arange(count)),
        (torch.cat([data, large]), np.r_[np.arange(count), np.full(64, count)]),
    ):
        private = door(x, unit="user", users=users, objective=model, size=count, budget=Budget(1.0, 1e-6))
        sums.append(GradientSum(params, Clip(norm)).exact(private._sample(np.arange(private._present))))
    moved = float((sums[0]["weight"].double() - sums[1]["weight"].double()).norm())  # type: ignore[index]
    assert 0.9 * norm <= moved <= norm * (1 + 1e-3)


def test_users_are_sampled_as_a_whole_and_at_the_declared_rate() -> None:
    private, _ = of_users([3] * 200, budget=Budget(1.0, 1e-6))
    spy = Spy()
    private.plan(Planned(Spy, 30.0, private.poisson(250), 50))
    for _ in range(50):
        private.ask(spy)
    joined = seen(spy)
    assert all(len([r for r in rows_ if r[1] > 0]) == 3 for whose in joined for rows_ in whose.values())
    assert binomial_p(sum(map(len, joined)), 50 * 200, 0.25) > FALSE_ALARM
    assert binomial_p(sum(map(len, joined)), 50 * 200, 0.3) < FALSE_ALARM


def test_replace_one_takes_the_size_from_the_data_and_samples_exactly() -> None:
    private = door(size=None, adjacency="replace-one", budget=Budget(2.0, 1e-3))
    assert private.size == 20
    spy = Spy()
    private.ask(spy, noise=50.0, sampler=private.fixed(7))
    assert [sum(len(b) for b, _ in parts) for parts in spy.__dict__["batches"]] == [7]


def test_replace_one_costs_more_than_add_remove() -> None:
    costs = []
    for adjacency in ("add-remove", "replace-one"):
        private = door(size=20, adjacency=adjacency, budget=Budget(2.0, 1e-3))
        private.ask(gradient(private), noise=50.0, sampler=private.everyone())
        costs.append(private.account.epsilon_spent())
    assert costs[1] > 1.8 * costs[0]


# ------------------------------------------------------------------------------------------------ sources


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.loaded: list[int] = []
        self.beyond_the_first = threading.Event()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.loaded.append(i)
        if i >= 4:
            self.beyond_the_first.set()
        return self.x[i], int(self.y[i])


def test_a_dataset_gives_the_same_answers_as_tensors() -> None:
    x, y = rows(30), torch.arange(30) % 2
    model = Objective(nn.Linear(3, 2), cross_entropy)
    answers = []
    for data in ((x, y), Rows(x, y), (x.numpy(), y.numpy()), {"x": x, "y": y}):
        used = model
        if isinstance(data, dict):
            used = Objective(model.module, lambda m, b: cross_entropy(m, (b["x"], b["y"])))
        for performance in (Performance(), Performance(load_rows=4)):
            private = door(data, objective=used, seed=SEED, performance=performance)
            answers.append(
                [
                    private.ask(gradient(private, 0.1), noise=50.0, sampler=private.poisson(800)),
                    private.ask(gradient(private, 0.1), noise=50.0, sampler=private.everyone()),
                ]
            )
    for one, *_ in zip(answers[0], strict=True):
        assert float(one.norm()) > 0
    for other in answers[1:]:
        for a, b in zip(answers[0], other, strict=True):
            assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-8) for n in a)


class Slow(Spy):
    """Computes on the first part until rows of a later one have been loaded."""

    def exact(self, sample: Sample) -> Exact:
        parts = sample.parts()
        next(parts)
        assert self.__dict__["loading"].wait(10), "nothing was loaded meanwhile"
        for _ in parts:
            pass
        return torch.zeros(1)


def test_loading_overlaps_with_computing() -> None:
    data = Rows(rows(30), torch.arange(30))
    private = door(data, objective=None, performance=Performance(load_rows=4))
    data.beyond_the_first.clear()
    question = Slow()
    question.__dict__["loading"] = data.beyond_the_first
    private._rows_to_check_with()
    data.beyond_the_first.clear()
    data.loaded.clear()
    private.ask(question, noise=50.0, sampler=private.everyone())
    assert sorted(set(data.loaded)) == list(range(30))
    assert threading.active_count() < 10


def test_rows_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        door((torch.zeros(3, 2), torch.zeros(4)))
    with pytest.raises(InvalidArgument, match="is not understood"):
        door(3)


def test_units_are_the_default() -> None:
    spy = Spy()
    private = door()
    private.ask(spy, noise=50.0, sampler=FullBatch(size=1000))
    (((batch, units),),) = spy.__dict__["batches"]
    assert isinstance(units, Units)
    assert (units.records, units.weights, len(batch)) == (1, None, 20)
    assert private._mechanism(Planned(Spy, 2.0, private.everyone())).noise == Gaussian(2.0)


# ------------------------------------------------------------------------------------------------ reservations


def small_table(**options: Any) -> Private:
    rows = torch.linspace(0, 1, 400, dtype=torch.float64)[:, None]
    return Private(rows, name="table", size=400, budget=Budget(2.0, 1e-5), **options)


MEAN = NoisyMean(lambda rows: rows, bound=1.0)


def test_reserved_answers_are_paid_for_at_once_and_drawn_with_the_reserved_noise() -> None:
    private = small_table()
    plan = private.reserve(Planned(NoisyMean, 50.0, private.everyone(), 3))
    (line,) = private.statement().asked
    assert (line.answers, line.mechanism.noise.scale) == (3, 50.0)
    for _ in range(3):
        private.ask(MEAN)
    assert plan.remaining() == 0
    with pytest.raises(BudgetExceeded):
        private.ask(MEAN)


def test_a_new_reservation_of_the_same_kind_gives_back_the_rest_of_the_one_before() -> None:
    private = small_table()
    private.reserve(Planned(NoisyMean, 20.0, private.everyone(), 50))
    private.ask(MEAN)
    full = private.account.left()
    private.reserve(Planned(NoisyMean, 40.0, private.everyone(), 1))
    first, second = private.statement().asked
    assert (first.answers, first.open, second.answers) == (1, False, 1)
    assert private.account.left() > full
    # What is given back can be used: 50 more would not have fitted beside the 50 that were reserved.
    private.reserve(Planned(NoisyMean, 20.0, private.everyone(), 50))
    both = small_table()
    twice = both._mechanism(Planned(NoisyMean, 20.0, both.everyone(), 50))
    both.account.charge(twice)
    with pytest.raises(BudgetExceeded):
        both.account.charge(twice)


def test_reservations_of_different_kinds_and_a_plan_stand_side_by_side() -> None:
    private = small_table()
    everyone = private.everyone()
    gram = Gram(lambda rows: rows, bound=1.0, width=1)
    with private.plan(Planned(NoisyMean, 60.0, everyone, 2)) as plan:
        private.ask(MEAN)
        reserved = private.reserve(Planned(Gram, 70.0, everyone, 2))
        private.ask(gram)
        private.ask(MEAN)
        assert (plan.remaining(), reserved.remaining()) == (0, 1)
        reserved.close()
    assert [line.answers for line in private.statement().asked] == [2, 1]


def test_what_does_not_fit_is_not_reserved() -> None:
    private = small_table()
    with pytest.raises(BudgetExceeded):
        private.reserve(Planned(NoisyMean, 1.0, private.everyone(), 1000))
    assert private.statement().asked == ()
    with pytest.raises(InvalidArgument, match="No plan covers"):
        private.ask(MEAN)


def test_a_plan_made_later_replaces_reservations() -> None:
    private = small_table()
    private.reserve(Planned(NoisyMean, 80.0, private.everyone(), 2))
    plan = private.plan(Planned(NoisyMean, 60.0, private.everyone(), 2))
    private.ask(MEAN)
    assert plan.remaining() == 1
