"""Rounds in a row: the methods in their limits, learning among clients that drop out or attack, and resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato import Budget, Clip, Gradient, NotPrivateSeed, Objective, Public, cross_entropy
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.federated import (
    Answers,
    Clients,
    LocalClients,
    LocalWork,
    PublicUsers,
    Request,
    UpdateMean,
    dope_sgd,
    dp_sgd,
    dp_sgd_beside_public,
    federate,
    private_users,
)
from tests.federated.hostile import Misbehaving

USERS, ROWS, CENTRES = 100, 4, 3.0 * torch.eye(3, 8)
LOUD = Budget(1e6, 1e-4)  # of tests in which noise would be in the way


def drawn(seed: int, users: int) -> tuple[Tensor, Tensor]:
    """Three clouds, which a linear model tells apart."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (users * ROWS,), generator=draws)
    return CENTRES[y] + torch.randn(len(y), 8, generator=draws), y


def made(seed: int = 0, users: int = USERS) -> tuple[Objective, LocalClients, Public]:
    torch.manual_seed(seed)
    objective = Objective(nn.Linear(8, 3), cross_entropy)
    clients = LocalClients(objective, drawn(seed, users), [i // ROWS for i in range(users * ROWS)])
    return objective, clients, Public(drawn(99, 250))


def of_everyone(clients: Clients, users: int = USERS) -> Any:
    """A door for one noiseless question at a time."""
    door = private_users(clients, name="users", size=users, budget=LOUD, seed=NotPrivateSeed(0))
    return lambda question: door.ask(question, noise=0.1, sampler=door.everyone())


def flat(gradient: Gradient) -> Tensor:
    return torch.cat([t.reshape(-1) for t in gradient.values()])


# ------------------------------------------------------------------------------------------------ limits


def test_methods_collapse_into_one_where_nothing_is_clipped() -> None:
    """Around any origin: the clip moves nothing, so the origin cancels."""
    objective, clients, _ = made()
    params = objective.parameters()
    public = PublicUsers(LocalClients(objective, drawn(7, 5), [i // ROWS for i in range(20)]))
    ask = of_everyone(clients)
    mean = PublicUsers(clients).update(params)
    assert float(mean.norm()) > 0.5
    for method in (dp_sgd, partial(dope_sgd, public_clip=1e3)):
        found = method(params, public, ask, clip=20.0)
        torch.testing.assert_close(flat(found), flat(mean), atol=0.12, rtol=0)  # six times the noise


def test_dope_with_a_short_clip_is_the_public_update() -> None:
    objective, clients, _ = made()
    params = objective.parameters()
    public = PublicUsers(LocalClients(objective, drawn(7, 5), [i // ROWS for i in range(20)]))
    found = dope_sgd(params, public, of_everyone(clients), clip=1e-6, origin_clip=0.3, public_clip=1e3)
    expected = public.update(params).clipped(0.3)
    assert float(expected.norm()) == pytest.approx(0.3, rel=1e-5)
    torch.testing.assert_close(flat(found), flat(expected), atol=1e-5, rtol=0)


def test_beside_public_users_the_mean_is_weighed_by_their_share() -> None:
    objective, clients, _ = made()
    params = objective.parameters()
    public = PublicUsers(clients)
    zero: Callable[[UpdateMean], Gradient] = lambda q: 0.0 * Gradient(q.params)  # noqa: E731
    found = dp_sgd_beside_public(params, public, zero, share=0.25, public_clip=1e3)
    torch.testing.assert_close(flat(found), 0.25 * flat(public.update(params)))


def test_methods_need_what_they_need() -> None:
    objective, clients, _ = made()
    params, ask = objective.parameters(), of_everyone(clients)
    for call in (
        partial(dope_sgd, params, None, ask),
        partial(dp_sgd_beside_public, params, None, ask, share=0.1),
        partial(dp_sgd_beside_public, params, PublicUsers(clients), ask, share=1.0),
        partial(dope_sgd, params, PublicUsers(clients), ask, origin_clip=0.0),
    ):
        with pytest.raises(InvalidArgument):
            call()


# ------------------------------------------------------------------------------------------------ learning

Behaviour = Callable[[int, Request, Answers], Sequence[Answers]]


def trained(clients: Clients, objective: Objective, test: Public, **more: Any) -> Any:
    users = private_users(clients, name="users", size=USERS, budget=Budget(8.0, 1e-4), seed=NotPrivateSeed(3))
    options: dict[str, Any] = {"rounds": 30, "users_per_round": 40, "method": partial(dp_sgd, clip=0.5), **more}
    return federate(objective, private=users, test=test, **options)


METHODS: dict[str, Callable[..., Gradient]] = {
    "dp-sgd": partial(dp_sgd, clip=0.5),
    "beside-public": partial(dp_sgd_beside_public, clip=0.5, share=0.05),
    "dope": partial(dope_sgd, clip=0.5),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "work", [LocalWork(), LocalWork(epochs=2, batch_size=2, learning_rate=0.3)], ids=["sgd", "avg"]
)
def test_every_method_learns(method: str, work: LocalWork) -> None:
    objective, clients, test = made()
    public = PublicUsers(LocalClients(objective, drawn(7, 5), [i // ROWS for i in range(20)]))
    run = trained(clients, objective, test, method=partial(METHODS[method], work=work), public=public)
    assert run.metrics["test_accuracy"] > 0.85
    assert 0 < run.statement["epsilon"] <= 8.0
    assert run.config["noise_multiplier"] > 0.3


def test_a_hundred_clients_that_drop_out_at_random() -> None:
    """The price and the denominators are what was declared; the training goes on with those who answer."""
    objective, clients, test = made()
    weights = {name: p.clone() for name, p in objective.parameters().items()}
    run = trained(clients, objective, test)
    objective.module.load_state_dict(weights)
    chance = Random(0)
    dropping = Misbehaving(clients, lambda _, __, own: [own] if chance.random() > 0.5 else [])
    hurt = trained(dropping, objective, test)
    assert sum(map(len, dropping.contacted)) > 30 * 30
    assert hurt.statement["epsilon"] == run.statement["epsilon"]
    assert hurt.config["noise_multiplier"] == run.config["noise_multiplier"]
    assert hurt.metrics["test_accuracy"] > 0.85


def test_all_drop_out_and_the_round_is_noise() -> None:
    objective, clients, test = made()
    run = trained(Misbehaving(clients, lambda _, __, ___: []), objective, test)
    assert run.steps_taken == 30
    assert run.statement["epsilon"] > 1


def _three(hostile: Sequence[Callable[[Answers], list[Answers]]]) -> Behaviour:
    return lambda user, _, own: hostile[user](own) if user < len(hostile) else [own]


def test_three_hostile_clients_move_a_round_by_three_clip_norms() -> None:
    """NaN, far too large, and garbage a hundred times. Same seeds, so the difference is theirs alone."""

    def all_of(value: float) -> Callable[[Answers], list[Answers]]:
        return lambda own: [own._replace(updates={n: torch.full_like(t, value) for n, t in own.updates.items()})]

    def garbage(own: Answers) -> list[Answers]:
        return [own._replace(updates={n: torch.zeros(7) for n in own.updates})] * 100

    objective, clients, test = made()
    begun = {name: p.clone() for name, p in objective.parameters().items()}
    attacked = Misbehaving(clients, _three([all_of(float("nan")), all_of(1e30), garbage]))
    answers = []
    for asked in (clients, attacked):
        users = private_users(asked, name="users", size=USERS, budget=LOUD, seed=NotPrivateSeed(4))
        question = UpdateMean(begun, Clip(0.5))
        answers.append(flat(users.ask(question, noise=1.0, sampler=users.everyone())))
    moved = float((answers[0] - answers[1]).norm())
    # One is silenced, one garbage: each takes its own C away; the third is C in another direction, 2 C in all.
    assert 0 < moved <= 4 * 0.5 / USERS * (1 + 1e-5)
    run = trained(attacked, objective, test)
    assert run.metrics["test_accuracy"] > 0.85


# ------------------------------------------------------------------------------------------------ the ledger


def test_rounds_that_do_not_fit_are_refused_before_the_first() -> None:
    objective, clients, test = made()
    watched = Misbehaving(clients, lambda _, __, own: [own])
    users = private_users(watched, name="users", size=USERS, budget=Budget(1.0, 1e-4))
    with pytest.raises(BudgetExceeded):
        federate(objective, private=users, test=test, rounds=30, users_per_round=40, noise=0.5)
    assert watched.contacted == []


class _Died(Exception):
    pass


class _Half(torch.optim.SGD):
    """Changes weights, and fails."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise _Died


def test_half_a_round_is_not_saved(tmp_path: Path) -> None:
    objective, clients, test = made()
    users = private_users(clients, name="users", size=USERS, ledger=tmp_path / "ledger.db", budget=Budget(8.0, 1e-4))
    with pytest.raises(_Died):
        federate(
            objective,
            private=users,
            test=test,
            method=partial(dp_sgd, clip=0.5),
            rounds=5,
            users_per_round=40,
            optimizer=partial(_Half, lr=1.0),
            checkpoint=tmp_path / "now.pt",
        )
    assert not (tmp_path / "now.pt").exists()
    assert sum(line.answers for line in users.statement().asked) == 1  # and it is paid for


def test_a_server_that_dies_goes_on_with_the_ledger_true(tmp_path: Path) -> None:
    objective, clients, test = made()
    calls = 0

    def dies(_: int, __: Request, own: Answers) -> list[Answers]:
        nonlocal calls
        calls += 1
        if calls == 300:
            raise _Died
        return [own]

    def go(asked: Clients) -> Any:
        users = private_users(
            asked,
            name="users",
            size=USERS,
            ledger=tmp_path / "ledger.db",
            budget=Budget(8.0, 1e-4),
            seed=NotPrivateSeed(3),
        )
        more = {"checkpoint": tmp_path / "now.pt", "rounds": 20, "users_per_round": 40, "ema": True}
        return federate(objective, private=users, test=test, method=partial(dp_sgd, clip=0.5), **more)

    with pytest.raises(_Died):
        go(Misbehaving(clients, dies))
    run = go(clients)
    assert run.steps_lost >= 1, "the round that died was asked, so it is paid for"
    assert run.steps_taken + run.steps_lost == 20
    assert run.steps_short == run.steps_lost
    assert run.statement["epsilon"] <= 8.0
    again = go(clients)
    assert again.steps_taken == run.steps_taken, "it is finished: nothing is asked twice"
    assert all(torch.equal(again.weights[n], t) for n, t in run.weights.items())


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rounds": 0}, "rounds=0"), ({"noise": 1.0, "budget": Budget(1.0, 1e-4)}, "either"), ({"keep_last": -1}, "-1")],
)
def test_impossible_trainings_are_refused(options: dict[str, Any], named: str) -> None:
    objective, clients, test = made()
    with pytest.raises(InvalidArgument, match=named):
        trained(clients, objective, test, **options)
