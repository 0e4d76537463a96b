"""PPSGD: without noise it is gradient descent, its rules do what the paper says, and its traps are shut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor

from sfumato import Budget, Private
from sfumato.data.samplers import FullBatch
from sfumato.erm import DPSGDClassifier, Hinge, Logistic, PPSGDClassifier, PPSGDRegressor, Square
from sfumato.erm.budgets import Allowance, filtered_noise
from sfumato.erm.descent import Average
from sfumato.erm.losses import Loss
from sfumato.erm.minimise import minimise
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.rows import Rows
from sfumato.errors import BudgetExceeded, InvalidArgument, UnsupportedAccounting
from sfumato.privacy import accounting, tcdp
from sfumato.privacy.mechanisms import Adjacency, Mechanism
from sfumato.privacy.statement import Statement


def table(n: int = 2000, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, d)) / math.sqrt(d)
    return X, X @ np.arange(1, d + 1) + 0.2 * rng.uniform(-1, 1, n)


class Exact(Allowance):
    """Answers without noise, for tests: the question's own exact sum over everyone, over the number of rows."""

    epsilon = math.inf

    def __init__(self, rows: Rows, *, noise: float = 1.0, shares: float = 0.0) -> None:
        self.noise, self._shares, self.asked = noise, shares, []  # type: ignore[var-annotated]
        self._private = Private(tuple(rows), name="t", adjacency="replace-one", budget=Budget(1.0, 1e-5))

    def share(self, noise: float) -> float:
        return self._shares

    def ask(self, question: Any, noise: float) -> Tensor:
        self.asked.append((noise, question.clip))
        everyone = self._private._sample(np.arange(self._private.size))
        answer: Tensor = question.exact(everyone) / self._private.size
        return answer

    def close(self) -> None:
        pass


def descended(model: Any, loss: Loss, rows: Rows, public: Rows | None = None) -> tuple[Tensor, Exact]:
    allowance = Exact(rows)
    return stage_1(model, allowance, loss, rows, public), allowance


def stage_1(model: Any, allowance: Exact, loss: Loss, rows: Rows, public: Rows | None) -> Tensor:
    n, width = rows.X.shape
    recipe = replace(model._recipe(n, width, loss), sampler=FullBatch(size=n))
    w: Tensor = model._stage_1(allowance, recipe, public, loss, torch.zeros(width, dtype=torch.float64))[0]
    return w


def test_without_noise_and_clip_stage_1_finds_scikit_learns_minimum() -> None:
    X, score = table(400)
    y = np.where(score > 0, 1.0, -1.0)
    rows, l2, n = Rows(torch.from_numpy(X), torch.from_numpy(y)), 0.01, 400
    options: dict[str, Any] = {"l2": l2, "clip": 1e6, "max_iter": 400}
    w, _ = descended(PPSGDClassifier(learning_rate=8.0, **options), Logistic(), rows)
    oracle = LogisticRegression(C=1 / (n * l2), fit_intercept=False, tol=1e-10).fit(X, y)
    assert np.allclose(w, oracle.coef_[0], rtol=1e-4)
    w, _ = descended(PPSGDRegressor(learning_rate=1.0, **options), Square(), rows)
    assert np.allclose(w, Ridge(alpha=n * l2 / 2, fit_intercept=False).fit(X, y).coef_, rtol=1e-4)


def test_the_noise_grows_by_alpha_and_the_clip_norm_shrinks_by_beta_down_to_its_floor() -> None:
    X, score = table(50)
    rows = Rows(torch.from_numpy(X), torch.from_numpy(np.sign(score)))
    # Ratios of zero: both rules fire at every step.
    model = PPSGDClassifier(growth=0.3, shrink=0.3, growth_ratio=0.0, shrink_ratio=0.0, max_iter=30)
    _, allowance = descended(model, Hinge(), rows, public=rows)
    noises, clips = zip(*allowance.asked, strict=True)
    assert noises == pytest.approx([1.3 ** (-t / 2) for t in range(30)])
    assert clips == pytest.approx([max(0.7**t, 0.05) for t in range(30)])
    # Ratios without end: neither ever does.
    model = PPSGDClassifier(growth=0.3, shrink=0.3, growth_ratio=1e30, shrink_ratio=1e30, max_iter=30)
    _, allowance = descended(model, Hinge(), rows, public=rows)
    assert set(allowance.asked) == {(1.0, 1.0)}


def test_lines_12_and_13_compare_the_public_gradient_with_the_noise_of_the_mean() -> None:
    X, score = table(50)
    rows = Rows(torch.from_numpy(X), torch.from_numpy(np.sign(score)))
    eta, d, s = 1e-9, X.shape[1], 50  # so small a step that the gradient stays that of w = 0
    slope = float((Hinge().slope(torch.zeros(50), rows.y).double() @ rows.X / 50).norm())
    border = math.sqrt(d) * 1.0 * 1.0 / s / slope  # phi at which phi |g| = sqrt(p) z C / s
    for phi, grows in ((border * 1.01, False), (border * 0.99, True)):
        model = PPSGDClassifier(growth=0.3, growth_ratio=phi, max_iter=2, learning_rate=eta)
        _, allowance = descended(model, Hinge(), rows, public=rows)
        assert (allowance.asked[1][0] < 1.0) == grows


def test_a_step_does_not_grow_beyond_a_fiftieth_of_the_budget() -> None:
    X, score = table(50)
    rows = Rows(torch.from_numpy(X), torch.from_numpy(np.sign(score)))
    for share, grows in ((0.0199, True), (0.0201, False)):
        allowance = Exact(rows, shares=share)
        stage_1(PPSGDClassifier(growth=0.3, growth_ratio=0.0, max_iter=3), allowance, Hinge(), rows, rows)
        assert (allowance.asked[-1][0] < 1.0) == grows


def test_model_reuse_minimises_line_25() -> None:
    X, score = table()
    y = score > 0
    fits: dict[str, Any] = {"epsilon": 1.0, "max_iter": 20, "fit_intercept": False, "not_private_seed": 0}
    fits |= {"loss": Hinge(), "head_start": False}
    public = Rows(torch.from_numpy(X[:30]), torch.from_numpy(np.where(y[:30], 1.0, -1.0)))
    data = (X[30:], y[30:], X[:30], y[:30])
    w_T = PPSGDClassifier(reuse=0.0, **fits).fit(*data).coef_[0]
    for reuse, l2 in ((0.1, 0.0), (0.1, 0.3)):
        found = PPSGDClassifier(reuse=reuse, l2=l2, **fits).fit(*data).coef_[0]
        start = w_T if l2 == 0 else PPSGDClassifier(reuse=0.0, l2=l2, **fits).fit(*data).coef_[0]

        def line_25(w: np.ndarray, start: np.ndarray = start, reuse: float = reuse, l2: float = l2) -> float:
            losses = Hinge().value(public.X @ torch.from_numpy(w), public.y)
            return float(losses.mean()) + reuse * ((w - start) ** 2).sum() + l2 / 2 * (w**2).sum()

        rng = np.random.default_rng(0)
        nearby = [found + size * rng.uniform(-1, 1, 4) for size in (1e-3, 1e-2, 0.1) for _ in range(30)]
        assert line_25(found) <= min(map(line_25, nearby)) + 1e-8
        assert line_25(found) < line_25(start)
    far = PPSGDClassifier(reuse=1e7, **fits).fit(*data).coef_[0]
    assert np.allclose(far, w_T, atol=1e-5)
    near = PPSGDClassifier(reuse=1e-3, **fits).fit(*data)
    alone = minimise(Hinge(), public, strength=2e-3, centre=torch.zeros(4, dtype=torch.float64)).w
    assert near.score(X[:30], y[:30]) >= np.mean((X[:30] @ alone.numpy() > 0) == y[:30]) - 0.1


# ------------------------------------------------------------------------------------------------ privacy


def spent(statement: Statement, order: float, adjacency: Adjacency) -> float:
    """The divergence of everything that was asked, added up answer by answer."""
    total = 0.0
    for line in statement.asked:
        once = Mechanism(question="g", noise=line.mechanism.noise, sampler=line.mechanism.sampler)
        total += line.answers * float(accounting.renyi([once], [order], adjacency)[0])
    return total


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_run_whose_growth_rule_fires_every_step_stays_within_budget(adjacency: str, tmp_path: Path) -> None:
    X, score = table()
    y = score > 0
    model = PPSGDClassifier(
        epsilon=0.5,
        max_iter=400,
        batch_size=40,
        growth=0.3,
        growth_ratio=0.0,
        adjacency=adjacency,
        ledger=tmp_path / "ledger.db",
    )
    if adjacency == "add-remove":
        model.set_params(size=2000)
    model.fit(X[30:], y[30:], X[:30], y[:30])
    statement = model.ledger_
    assert statement.private
    assert statement.durable
    assert model.epsilon_ == 0.5
    assert model.n_iter_ == sum(line.answers for line in statement.asked) < 400
    noises = [line.mechanism.noise.scale for line in statement.asked]
    assert max(noises) / min(noises) > 1.3
    budget, sampler = Budget(0.5, 1e-6), statement.asked[0].mechanism.sampler
    _, filter = filtered_noise(budget, sampler, 400, Adjacency(adjacency))
    (order,) = filter.orders
    limit = accounting.renyi_budget(0.5, 1e-6, order)
    assert 0.9 * limit < spent(statement, order, Adjacency(adjacency)) <= limit * (1 + 1e-9)
    for line in statement.asked:  # no grown step takes more than a fiftieth
        once = Mechanism(question="g", noise=line.mechanism.noise, sampler=sampler)
        assert float(accounting.renyi([once], [order], Adjacency(adjacency))[0]) <= limit / 50


def test_a_tcdp_run_whose_growth_rule_fires_every_step_stays_within_theorem_4() -> None:
    X, score = table()
    y = score > 0
    model = PPSGDClassifier(
        epsilon=0.5, max_iter=300, batch_size=80, growth_ratio=0.0, accounting="tcdp", sampling="fixed"
    )
    model.fit(X[30:], y[30:], X[:30], y[:30])
    total, q = tcdp.budget(0.5, 1e-6), 80 / 1970
    rho = 0.0
    for line in model.ledger_.asked:
        # `subsample` refuses outside Theorem 4; the order that it gives must reach omega_total (item 19).
        step = tcdp.subsample(tcdp.TCDP(rho=2 / line.mechanism.noise.scale**2, omega=math.inf), q)
        assert step.omega >= total.omega * (1 - 1e-9)
        assert step.rho <= total.rho / 50
        rho += line.answers * step.rho
    assert 0.9 * total.rho < rho <= total.rho * (1 + 1e-9)
    assert model.n_iter_ < 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "poisson"}, "sampling='fixed'"),
        ({"adjacency": "add-remove", "size": 2000}, "adjacency='replace-one'"),
        ({"batch_size": 300}, "q=0.15"),
        ({"batch_size": 16, "max_iter": 50}, "use at least"),
    ],
)
def test_the_tcdp_mode_refuses_what_is_not_covered(options: dict[str, Any], message: str) -> None:
    X, score = table()
    model = PPSGDClassifier(epsilon=0.5, **{"accounting": "tcdp", "sampling": "fixed", "max_iter": 1000, **options})
    with pytest.raises(UnsupportedAccounting, match=message):
        model.fit(X, score > 0)
    assert not hasattr(model, "ledger_")


def test_where_nothing_grows_all_steps_are_planned_and_composed_by_pld() -> None:
    X, score = table()
    y = score > 0
    public = (X[:30], y[:30])
    for model, rows in (
        (PPSGDClassifier(max_iter=30), public),
        (PPSGDClassifier(growth=0.0, shrink=0.3, max_iter=30), public),
        (PPSGDClassifier(growth=0.3, max_iter=30), (None, None)),
        (DPSGDClassifier(max_iter=30), (None, None)),
    ):
        model.fit(X[30:], y[30:], *rows)
        assert "planned, PLD" in model.ledger_.composition
        assert 0.99 < model.epsilon_ <= 1.0
        assert model.n_iter_ == 30


def test_without_public_rows_it_is_dp_sgd() -> None:
    X, score = table()
    options: dict[str, Any] = {"max_iter": 30, "not_private_seed": 3, "l2": 0.01, "learning_rate": 1.0}
    ours = PPSGDClassifier(**options).fit(X, score > 0)
    plain = DPSGDClassifier(**options).fit(X, score > 0)
    assert np.array_equal(ours.coef_, plain.coef_)


def test_public_rows_beat_the_noise_where_the_budget_is_small() -> None:
    X, score = table(3000, 4)
    y = score > 0
    scores = []
    for seed in range(5):
        options: dict[str, Any] = {"epsilon": 0.1, "max_iter": 100, "not_private_seed": seed, "reuse": 0.01}
        model = PPSGDClassifier(**options).fit(X[100:], y[100:], X[:100], y[:100])
        scores.append(model.score(X, y))
    assert np.mean(scores) > 0.85


def test_the_second_fit_on_a_spent_account_is_refused(tmp_path: Path) -> None:
    X, score = table()
    y = score > 0
    model = PPSGDClassifier(epsilon=0.5, max_iter=50, ledger=tmp_path / "ledger.db")
    model.fit(X[30:], y[30:], X[:30], y[:30])
    with pytest.raises(BudgetExceeded):
        model.fit(X[30:], y[30:], X[:30], y[:30])


def test_several_fits_share_a_larger_account(tmp_path: Path) -> None:
    from sfumato import Ledger

    X, score = table()
    y = score > 0
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.account("table", unit="example", adjacency=Adjacency.REPLACE_ONE, budget=Budget(1.0, 1e-6))
    model = PPSGDClassifier(epsilon=0.5, max_iter=20, growth=0.3, ledger=ledger)
    for _ in range(3):  # Rényi divergences add up better than epsilons
        model.fit(X[30:], y[30:], X[:30], y[:30])
    assert model.epsilon_ == 0.5
    model.set_params(epsilon=0.99)
    with pytest.raises(BudgetExceeded):
        model.fit(X[30:], y[30:], X[:30], y[:30])
    assert ledger.account("table").statement().epsilon == 1.0


@pytest.mark.parametrize(("share", "steps"), [(0.5, 40), (0.25, 2000), (1.0, 7), (0.0, 9)])
def test_the_last_iterates_are_averaged(share: float, steps: int) -> None:
    iterates = np.random.default_rng(0).uniform(-1, 1, (steps, 3))
    average = Average(share)
    for w in iterates:
        average.add(torch.from_numpy(w))
    if share == 0:
        assert np.array_equal(average.result(), iterates[-1])
        return
    got = average.result().numpy()
    # Long runs keep only some places, so that the window may begin a little early.
    window = range(round(steps * share), round(steps * share) + (1 if steps < 500 else 9))
    assert min(np.abs(got - iterates[-k:].mean(0)).max() for k in window) < 1e-12


def test_weights_are_projected() -> None:
    X, score = table(500)
    model = DPSGDClassifier(max_iter=20, radius=0.5, learning_rate=50.0, fit_intercept=False).fit(X, score > 0)
    assert np.linalg.norm(model.coef_) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accounting": "rdp"}, "accounting='rdp'"),
        ({"growth": -0.1}, "growth=-0.1"),
        ({"shrink": 1.0}, "shrink=1.0"),
        ({"growth_ratio": math.inf}, "growth_ratio=inf"),
        ({"reuse": -1.0}, "reuse=-1.0"),
        ({"shrink_ratio": math.nan}, "shrink_ratio=nan"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"clip": math.inf}, "clip=inf"),
        ({"radius": 0.0}, "radius=0.0"),
        ({"sampling": "shuffle"}, "sampling='shuffle'"),
        ({"average": 2.0}, "average=2.0"),
        ({"l2": -1.0}, "l2=-1.0"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"adjacency": "zero-out"}, "adjacency='zero-out'"),
        ({"loss": "hinge"}, "loss='hinge'"),
    ],
)
def test_parameters_are_checked_before_anything_is_charged(options: dict[str, Any], message: str) -> None:
    X, score = table(50)
    with pytest.raises(InvalidArgument, match=message):
        PPSGDClassifier(**options).fit(X, score > 0)


def test_the_question_is_the_one_that_is_charged() -> None:
    X, score = table(300)
    model = PPSGDRegressor(max_iter=5, batch_size=30).fit(X, score)
    (line,) = model.ledger_.asked
    assert line.mechanism.question == LinearGradientMean.kind()
    assert (line.mechanism.sampler.size, line.answers) == (300, 5)
