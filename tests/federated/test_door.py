"""The door for users: who is asked, what counts, how much one user can move, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato import Budget, Clip, Gradient, NotPrivateSeed, Objective, Private, cross_entropy
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.federated import Answers, Clients, LocalClients, PublicUsers, Request, UpdateMean, private_users
from sfumato.federated.questions import Users
from sfumato.federated.rounds import bounded_sum
from sfumato.gradients import Performance
from sfumato.sampled import Sampled, group_by_user
from tests.federated.hostile import Misbehaving

USERS, ROWS = 12, 3
C = 0.1  # so short that almost every update is clipped


def made(seed: int = 0, users: int = USERS) -> tuple[Objective, LocalClients]:
    torch.manual_seed(seed)
    objective = Objective(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), cross_entropy)
    rows = (torch.randn(users * ROWS, 4), torch.randint(2, (users * ROWS,)))
    return objective, LocalClients(objective, rows, [i // ROWS for i in range(users * ROWS)])


class Few(Clients):
    """Some of the clients, the same otherwise."""

    def __init__(self, clients: Clients, kept: Sequence[int]) -> None:
        self._clients, self._kept = clients, kept

    @property
    def addresses(self) -> Sequence[int]:
        return self._kept

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        return self._clients.collect(request, addresses)


def exact(clients: Clients, question: UpdateMean) -> Tensor:
    """The sum before noise, of everyone, as one vector: what the door holds inside."""
    source = Users(clients)
    n = len(source)
    groups = group_by_user(np.arange(n), n, 64)
    sample = Sampled(source, groups, np.arange(n), "mean", None, Performance(), 1000)
    found = question.exact(sample)
    assert isinstance(found, dict)
    return torch.cat([t.reshape(-1) for t in found.values()])


def alone(clients: Clients, user: int, question: UpdateMean) -> Tensor:
    return exact(Few(clients, [user]), question)


def questions(objective: Objective) -> dict[str, UpdateMean]:
    params = objective.parameters()
    torch.manual_seed(5)
    origin = Gradient({name: 3.0 * torch.randn_like(p) for name, p in params.items()})
    scale = Gradient({name: torch.rand_like(p) + 0.5 for name, p in params.items()})
    return {
        "plain": UpdateMean(params, Clip(C)),
        "origin": UpdateMean(params, Clip(C, origin=origin)),
        "scaled": UpdateMean(params, Clip(C, origin=origin, scale=scale)),
        "normalised": UpdateMean(params, Clip(C, stability=0.01)),
    }


KINDS = ["plain", "origin", "scaled", "normalised"]


# ------------------------------------------------------------------------------------------------ sensitivity


@pytest.mark.parametrize("kind", KINDS)
def test_removing_a_user_moves_the_sum_by_no_more_than_the_clip_norm(kind: str) -> None:
    objective, clients = made()
    question = questions(objective)[kind]
    whole = exact(clients, question)
    moved = []
    for user in range(USERS):
        others = [u for u in range(USERS) if u != user]
        moved.append(float((whole - exact(Few(clients, others), question)).norm()))
    assert max(moved) <= C * (1 + 1e-9)
    assert max(moved) > 0.9 * C, "nobody is clipped, so the bound was not tried"


def test_the_sum_is_that_of_clipped_differences() -> None:
    """By hand, with autograd for the updates."""
    objective, clients = made()
    params = objective.parameters()
    origin = Gradient({name: torch.full_like(p, 0.01) for name, p in params.items()})
    expected = torch.zeros(sum(p.numel() for p in params.values()), dtype=torch.float64)
    for answers in clients.collect(Request(params=params), list(clients.addresses)):
        for place in range(len(answers.addresses)):
            parts = [answers.updates[n][place].double() - origin[n].double() for n in params]
            x = torch.cat([part.reshape(-1) for part in parts])
            expected += x * min(1.0, C / float(x.norm()))
    torch.testing.assert_close(exact(clients, UpdateMean(params, Clip(C, origin=origin))), expected)


Attack = Callable[[int, Request, Answers], Sequence[Answers]]


def _with(answers: Answers, updates: Any) -> list[Answers]:
    return [answers._replace(updates=updates)]


def _filled(value: float, kind: torch.dtype = torch.float32) -> Attack:
    return lambda _, __, own: _with(own, {n: torch.full_like(t, value, dtype=kind) for n, t in own.updates.items()})


def _one_entry(value: float) -> Attack:
    def behave(_: int, __: Request, own: Answers) -> Sequence[Answers]:
        updates = {n: t.clone() for n, t in own.updates.items()}
        next(iter(updates.values())).reshape(-1)[0] = value
        return _with(own, updates)

    return behave


# What counts as zero.
SILENCED: dict[str, Attack] = {
    "drops out": lambda _, __, ___: [],
    "NaN everywhere": _filled(math.nan),
    "one NaN": _one_entry(math.nan),
    "one infinity": _one_entry(-math.inf),
    "overflows float64": _filled(1e300, torch.float64),
    "whole numbers": lambda _, __, own: _with(own, {n: t.long() for n, t in own.updates.items()}),
    "complex numbers": lambda _, __, own: _with(own, {n: t.to(torch.complex64) for n, t in own.updates.items()}),
    "tiny floats": lambda _, __, own: _with(own, {n: t.to(torch.float8_e4m3fn) for n, t in own.updates.items()}),
    "a name less": lambda _, __, own: _with(own, dict(list(own.updates.items())[1:])),
    "a name more": lambda _, __, own: _with(own, {**own.updates, "more": torch.zeros(1, 1)}),
    "a wrong shape": lambda _, __, own: _with(own, {n: t[..., :1] for n, t in own.updates.items()}),
    "two rows for one": lambda _, __, own: _with(own, {n: torch.cat([t, t]) for n, t in own.updates.items()}),
    "sparse": lambda _, __, own: _with(own, {n: t.to_sparse() for n, t in own.updates.items()}),
    "without content": lambda _, __, own: _with(own, {n: t.to("meta") for n, t in own.updates.items()}),
    "words": lambda _, __, own: _with(own, dict.fromkeys(own.updates, "garbage")),
    "no mapping": lambda _, __, own: _with(own, [1, 2, 3]),
    "nothing": lambda _, __, own: _with(own, None),
    "another round": lambda _, __, own: [own._replace(round="0" * 32)],
    "nobody's name": lambda _, __, own: [own._replace(addresses=[10**9])],
    "a name that is no number": lambda _, __, own: [own._replace(addresses=["0"])],
}
# What counts, but never for more than the clip norm.
BOUNDED: dict[str, Attack] = {
    "far too large": _filled(1e30),
    "as large as floats are": _filled(3e38),
    "answers twice": lambda _, __, own: [own, own],
    "answers a hundred times": lambda _, __, own: [own] * 100,
}


@pytest.mark.parametrize("attack", SILENCED)
@pytest.mark.parametrize("kind", ["plain", "origin"])
def test_whatever_is_no_answer_counts_as_zero(attack: str, kind: str) -> None:
    """Zero, and not clip(0 - origin)."""
    objective, clients = made()
    question = questions(objective)[kind]
    bad = 4

    def behave(user: int, request: Request, own: Answers) -> Sequence[Answers]:
        return SILENCED[attack](user, request, own) if user == bad else [own]

    others = exact(Few(clients, [u for u in range(USERS) if u != bad]), question)
    torch.testing.assert_close(exact(Misbehaving(clients, behave), question), others, atol=1e-12, rtol=0)


@pytest.mark.parametrize("attack", BOUNDED)
def test_whatever_counts_is_bounded(attack: str) -> None:
    objective, clients = made()
    question = questions(objective)["plain"]
    bad = 4

    def behave(user: int, request: Request, own: Answers) -> Sequence[Answers]:
        return BOUNDED[attack](user, request, own) if user == bad else [own]

    others = exact(Few(clients, [u for u in range(USERS) if u != bad]), question)
    theirs = exact(Misbehaving(clients, behave), question) - others
    assert 0.5 * C < float(theirs.norm()) <= C * (1 + 1e-9)
    if attack.startswith("answers"):
        torch.testing.assert_close(theirs, alone(clients, bad, question), atol=1e-12, rtol=0)


def test_no_update_falls_from_the_clip_norm_to_nothing_by_its_last_bit() -> None:
    """How a norm is rounded may be up to other users; squares overflow from 1.3e154 on."""

    def size(norm: float) -> float:
        values = torch.tensor([[0.6 * norm, 0.8 * norm]], dtype=torch.float64)
        return float(bounded_sum(values, Clip(C).factors)[0].norm())

    found = [size(norm) for norm in [*np.linspace(1e153, 4e153, 121), *np.linspace(1.2e154, 1.5e154, 31)]]
    assert found[0] == pytest.approx(C)
    assert found[-1] == 0.0
    assert max(abs(a - b) for a, b in pairwise(found)) < 0.05 * C


def test_a_client_that_speaks_for_others_takes_their_place_and_no_more() -> None:
    """The transport knows who sent what; if it did not, the sum would still move by no more than those asked may."""
    objective, clients = made()
    question = questions(objective)["plain"]

    def behave(user: int, _: Request, own: Answers) -> Sequence[Answers]:
        many = {n: t.expand(USERS, *t.shape[1:]) for n, t in own.updates.items()}
        return [Answers(own.round, list(range(USERS)), many)] if user == 0 else [own]

    assert float(exact(Misbehaving(clients, behave), question).norm()) <= USERS * C * (1 + 1e-9)


def test_an_answer_after_the_deadline_is_dropped() -> None:
    objective, clients = made()
    question = questions(objective)["plain"]
    late = Misbehaving(clients, lambda _, __, own: [own])
    late.seconds = -1.0  # over before it began
    assert float(exact(late, question).norm()) == 0.0


def test_a_late_answer_does_not_count_in_the_next_round() -> None:
    objective, clients = made()
    question = questions(objective)["plain"]
    kept: list[Answers] = []

    def behave(user: int, _: Request, own: Answers) -> Sequence[Answers]:
        if user != 4:
            return [own]
        before, kept[:] = list(kept), [own]
        return before  # what it computed in the round before

    slow = Misbehaving(clients, behave)
    others = exact(Few(clients, [u for u in range(USERS) if u != 4]), question)
    for _ in range(3):
        torch.testing.assert_close(exact(slow, question), others, atol=1e-12, rtol=0)
    assert kept


# ------------------------------------------------------------------------------------------------ the door


def door(clients: Clients, **more: Any) -> Private:
    options = {"name": "users", "size": USERS, "budget": Budget(1e4, 1e-3), **more}
    return private_users(clients, **options)


def test_the_denominator_is_the_declared_one_whoever_answers() -> None:
    objective, clients = made()
    question = questions(objective)["plain"]
    few = Misbehaving(clients, lambda user, _, own: [own] if user < 3 else [])
    users = door(few, size=100, seed=NotPrivateSeed(1), budget=Budget(1e7, 1e-3))
    answer = users.ask(question, noise=1e-3, sampler=users.everyone())
    found = torch.cat([t.reshape(-1) for t in answer.values()]).double()
    expected = exact(Few(clients, [0, 1, 2]), question) / 100
    assert float((found - expected).norm()) < 1e-5 < float(expected.norm())


def test_the_ledger_is_charged_before_anybody_is_contacted() -> None:
    objective, clients = made()
    spent: list[float] = []

    class Watched(Misbehaving):
        def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
            spent.append(users.statement().epsilon)
            return super().collect(request, addresses)

    watched = Watched(clients, lambda _, __, own: [own])
    users = door(watched)
    assert watched.contacted == []
    users.ask(questions(objective)["plain"], noise=1.0, sampler=users.everyone())
    assert spent
    assert spent[0] > 0


def test_what_does_not_fit_is_refused_and_nobody_is_contacted() -> None:
    objective, clients = made()
    watched = Misbehaving(clients, lambda _, __, own: [own])
    users = door(watched, budget=Budget(1.0, 1e-3))
    with pytest.raises(BudgetExceeded):
        users.ask(questions(objective)["plain"], noise=0.5, sampler=users.everyone())
    assert watched.contacted == []
    assert users.statement().epsilon == 0


def test_the_sampler_that_was_charged_draws_the_users() -> None:
    """Poisson: each by itself with the same probability. 200 rounds of 1 in 4; a tenth as often would be seen."""
    objective, clients = made()
    watched = Misbehaving(clients, lambda _, __, ___: [])
    users = door(watched)
    users.plan((UpdateMean, 1.0, users.poisson(USERS / 4), 200))
    for _ in range(200):
        users.ask(questions(objective)["plain"])
    counts = np.bincount([a for asked in watched.contacted for a in asked], minlength=USERS)
    spread = 6 * math.sqrt(200 * 0.25 * 0.75)  # 1e-7 for all of them
    assert np.all(abs(counts - 50) < spread)
    sizes = [len(asked) for asked in watched.contacted]
    assert len(set(sizes)) > 3, "the size of a Poisson sample varies"


def test_nobody_sampled_is_answered_with_noise_like_any_other() -> None:
    objective, clients = made()
    silent = Misbehaving(clients, lambda _, __, ___: [])
    users = door(silent)
    answer = users.ask(questions(objective)["plain"], noise=5.0, sampler=users.poisson(1e-6))
    assert silent.contacted == []
    assert float(answer.norm()) > 0
    assert users.statement().epsilon > 0


def test_noise_is_in_proportion_to_the_clip_norm() -> None:
    """Nobody answers, so all of the answer is noise: std = noise * C / size."""
    objective = Objective(nn.Linear(400, 50), cross_entropy)
    clients = LocalClients(objective, (torch.zeros(2, 400), torch.zeros(2, dtype=torch.long)), [0, 1])
    users = door(Misbehaving(clients, lambda _, __, ___: []), size=10)
    answer = users.ask(UpdateMean(objective.parameters(), Clip(0.3)), noise=2.0, sampler=users.everyone())
    found = torch.cat([t.reshape(-1) for t in answer.values()]).double().std()
    assert abs(float(found) / (2.0 * 0.3 / 10) - 1) < 0.05  # 20,050 entries: ten standard errors


def test_the_statement_speaks_of_users(tmp_path: Path) -> None:
    objective, clients = made()
    users = door(clients, ledger=tmp_path / "ledger.db", budget=Budget(4.0, 1e-3))
    users.ask(questions(objective)["plain"], noise=8.0, sampler=users.poisson(6))
    said = users.statement()
    assert users.unit == "user"
    assert "user" in said.to_text()
    assert 0 < said.epsilon <= 4


def test_what_cannot_be_asked_is_refused_before_it_costs() -> None:
    objective, clients = made()
    users = door(clients)
    params = objective.parameters()
    other = Gradient({"w": torch.zeros(1)})
    for question in (
        UpdateMean(params, Clip(math.inf)),
        UpdateMean(params, Clip(1.0, origin=other)),
        UpdateMean({}, Clip(1.0)),
        UpdateMean((p for p in params.values()), Clip(1.0)),  # type: ignore[arg-type]
        UpdateMean(params, 1.0),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument):
            users.ask(question, noise=1.0, sampler=users.everyone())
    assert users.statement().epsilon == 0
    rows = Private(torch.rand(10, 4), name="rows", size=10, budget=Budget(1.0, 1e-3))
    with pytest.raises(InvalidArgument, match="private_users"):
        rows.ask(UpdateMean(params, Clip(1.0)), noise=9.0, sampler=rows.everyone())


def test_nobody_is_enrolled_twice() -> None:
    _, clients = made()
    with pytest.raises(InvalidArgument, match="twice"):
        door(Few(clients, [0, 1, 1]))


# ------------------------------------------------------------------------------------------------ public users


def test_public_users_are_averaged_over_those_who_answer() -> None:
    objective, clients = made()
    params = objective.parameters()
    question = UpdateMean(params, Clip(1e6))
    some = Misbehaving(clients, lambda user, _, own: [own] if user % 2 else SILENCED["one NaN"](user, _, own))
    found = PublicUsers(some).update(params)
    expected = exact(Few(clients, [u for u in range(USERS) if u % 2]), question) / (USERS / 2)
    torch.testing.assert_close(torch.cat([t.reshape(-1) for t in found.values()]).double(), expected)


def test_a_hostile_public_user_moves_the_mean_by_its_share_only() -> None:
    objective, clients = made()
    params = objective.parameters()
    bad = Misbehaving(clients, lambda user, _, own: BOUNDED["far too large"](user, _, own) if user == 0 else [own])
    fine = PublicUsers(clients).update(params, longest=C)
    found = PublicUsers(bad).update(params, longest=C)
    assert 0 < float((found - fine).norm()) <= 2 * C / USERS * (1 + 1e-6)


def test_silent_public_users_leave_no_origin() -> None:
    objective, clients = made()
    silent = Misbehaving(clients, lambda _, __, ___: [])
    assert float(PublicUsers(silent).update(objective.parameters()).norm()) == 0.0


def test_some_public_users_are_drawn_at_random() -> None:
    objective, clients = made()
    watched = Misbehaving(clients, lambda _, __, own: [own])
    public = PublicUsers(watched, seed=3)
    for _ in range(6):
        public.update(objective.parameters(), users=5)
    assert {len(asked) for asked in watched.contacted} == {5}
    assert len({tuple(asked) for asked in watched.contacted}) > 1
