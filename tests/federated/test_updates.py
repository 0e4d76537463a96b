"""What users compute: FedSGD and FedAvg against plain loops and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato import Objective, cross_entropy
from sfumato.errors import InvalidArgument
from sfumato.federated import FED_SGD, LocalClients, LocalWork, Request
from sfumato.federated import clients as clients_module

SIZES = [3, 1, 4, 4, 2]  # rows of each user


def made(seed: int = 0) -> tuple[Objective, tuple[Tensor, Tensor], list[int]]:
    torch.manual_seed(seed)
    objective = Objective(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), cross_entropy)
    owners = [user for user, size in enumerate(SIZES) for _ in range(size)]
    rows = (torch.rand(len(owners), 5), torch.randint(3, (len(owners),)))
    return objective, rows, owners


def collected(clients: LocalClients, request: Request) -> dict[int, dict[str, Tensor]]:
    found = {}
    for answers in clients.collect(request, list(clients.addresses)):
        assert answers.round == request.round
        for place, address in enumerate(answers.addresses):
            found[address] = {name: t[place] for name, t in answers.updates.items()}
    return found


def plain_training(objective: Objective, rows: tuple[Tensor, Tensor], work: LocalWork) -> dict[str, Tensor]:
    """local - global, by a torch optimiser on a copy of the module."""
    begun = objective.parameters()
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    module.load_state_dict(objective.module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=work.learning_rate)
    size = work.batch_size or len(rows[1])
    for _ in range(work.epochs):
        for start in range(0, len(rows[1]), size):
            optimizer.zero_grad()
            part = slice(start, start + size)
            nn.functional.cross_entropy(module(rows[0][part]), rows[1][part]).backward()
            optimizer.step()
    return {name: p.detach() - begun[name] for name, p in module.named_parameters()}


@pytest.mark.parametrize("at_once", [1, 2, 64])
@pytest.mark.parametrize("work", [FED_SGD, LocalWork(epochs=3, batch_size=2, learning_rate=0.3)], ids=["sgd", "avg"])
def test_updates_are_those_of_plain_training(work: LocalWork, at_once: int) -> None:
    objective, rows, owners = made()
    clients = LocalClients(objective, rows, owners, at_once=at_once)
    found = collected(clients, Request(params=objective.parameters(), work=work))
    assert sorted(found) == list(range(len(SIZES)))
    for user in found:
        own = torch.tensor(owners) == user
        expected = plain_training(objective, (rows[0][own], rows[1][own]), work)
        for name, value in expected.items():
            torch.testing.assert_close(found[user][name], value, atol=1e-6, rtol=1e-5)


def test_fed_avg_of_one_step_is_fed_sgd() -> None:
    objective, rows, owners = made()
    clients = LocalClients(objective, rows, owners)
    sgd = collected(clients, Request(params=objective.parameters()))
    avg = collected(clients, Request(params=objective.parameters(), work=LocalWork(batch_size=64, learning_rate=0.5)))
    for user, update in sgd.items():
        for name, value in update.items():
            torch.testing.assert_close(avg[user][name], 0.5 * value)


def test_a_user_depends_on_no_other() -> None:
    """Also in the last bit: users are padded by their own size, whoever else is asked."""
    objective, rows, owners = made()
    everyone = LocalClients(objective, rows, owners)
    request = Request(params=objective.parameters(), work=LocalWork(epochs=2, batch_size=2))
    together = collected(everyone, request)
    changed = (rows[0].clone(), rows[1])
    changed[0][-SIZES[-1] :] = 9.0  # the last user's rows
    others = collected(LocalClients(objective, changed, owners), request)
    for user in range(len(SIZES) - 1):
        assert all(torch.equal(others[user][name], t) for name, t in together[user].items())
    assert not torch.equal(others[len(SIZES) - 1]["0.weight"], together[len(SIZES) - 1]["0.weight"])


@pytest.mark.parametrize("work", [FED_SGD, LocalWork(epochs=2)], ids=["sgd", "avg"])
@pytest.mark.parametrize("width", [3, 50])
def test_a_user_who_leaves_moves_nobody_elses_update(work: LocalWork, width: int) -> None:
    """All behind move to other places, where batched products of users' own weights may round otherwise."""
    torch.manual_seed(0)
    objective = Objective(nn.Sequential(nn.Linear(width, 3), nn.ReLU(), nn.Linear(3, 2)), cross_entropy)
    rows = (torch.randn(1, width).repeat(40, 1), torch.zeros(40, dtype=torch.long))  # one row, in all places
    request = Request(params=objective.parameters(), work=work)
    whole = collected(LocalClients(objective, rows, list(range(40)), at_once=32), request)
    fewer = collected(LocalClients(objective, tuple(t[1:] for t in rows), list(range(39)), at_once=32), request)
    for user in range(39):
        assert all(torch.equal(fewer[user][name], t) for name, t in whole[user + 1].items())
        assert all(torch.equal(whole[0][name], t) for name, t in whole[user + 1].items())


def test_users_are_computed_together_only_where_places_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, rows, owners = made()
    passes: list[int] = []
    honest = clients_module.updates_of

    def by_place(*args: Any) -> dict[str, Tensor]:
        passes.append(len(args[-1]))
        found = honest(*args)
        return {name: t + 1e-9 * torch.arange(len(t)).view(-1, *[1] * (t.ndim - 1)) for name, t in found.items()}

    request = Request(params=objective.parameters())
    expected = collected(LocalClients(objective, rows, owners, at_once=1), request)
    monkeypatch.setattr(clients_module, "updates_of", by_place)
    found = collected(LocalClients(objective, rows, owners, at_once=4), request)
    assert passes == [4] * 3  # rows of 1, 2 and 4: each was tried once, and given up
    for user, update in expected.items():
        assert all(torch.allclose(found[user][name], t, atol=1e-7) for name, t in update.items())


def test_the_module_itself_is_left_alone() -> None:
    objective, rows, owners = made()
    before = {name: p.clone() for name, p in objective.parameters().items()}
    collected(LocalClients(objective, rows, owners), Request(params=objective.parameters(), work=LocalWork(epochs=2)))
    assert all(torch.equal(before[name], p) for name, p in objective.parameters().items())


def test_of_many_rows_the_first_count() -> None:
    objective, rows, _ = made()
    clients = LocalClients(objective, rows, [0] * 14, records_per_user=4)
    found = collected(clients, Request(params=objective.parameters()))[0]
    expected = plain_training(objective, (rows[0][:4], rows[1][:4]), FED_SGD)
    torch.testing.assert_close(found["0.weight"], expected["0.weight"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"epochs": 0}, "epochs=0"), ({"batch_size": 0}, "batch_size=0"), ({"learning_rate": float("nan")}, "nan")],
)
def test_impossible_work_is_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        LocalWork(**options)  # type: ignore[arg-type]
