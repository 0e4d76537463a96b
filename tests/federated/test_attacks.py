"""Attacks on what is promised to users: of their deadlines, their neighbours in a round, their errors; LSTMs by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sfumato import Budget, Clip, Objective, cross_entropy
from sfumato.errors import InvalidArgument, UnsupportedModel
from sfumato.federated import (
    Answers,
    Clients,
    LocalClients,
    PublicUsers,
    Request,
    UpdateMean,
    dope_sgd,
    federate,
    private_users,
)
from sfumato.federated.rounds import received
from sfumato.gradients import Performance, clipped_sum
from tests.gradients import oracle

USERS = 6


def made() -> tuple[Objective, LocalClients]:
    torch.manual_seed(0)
    objective = Objective(nn.Linear(3, 2), cross_entropy)
    rows = torch.rand(4 * USERS, 3), torch.arange(4 * USERS) % 2
    return objective, LocalClients(objective, rows, np.arange(4 * USERS) // 4, at_once=1)


class Recorded(Clients):
    """Answers that are there already, each as `change` leaves it."""

    def __init__(self, clients: Clients, change: Callable[[int, Answers], Any], seconds: float | None = None) -> None:
        self._clients, self._change, self.seconds = clients, change, seconds

    @property
    def addresses(self) -> Sequence[int]:
        return self._clients.addresses

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        found = list(self._clients.collect(request, addresses))
        yield from (self._change(int(answers.addresses[0]), answers) for answers in found)


class Some(Clients):
    """Some of those whom others can reach."""

    def __init__(self, clients: Clients, addresses: Sequence[int]) -> None:
        self._clients, self._some = clients, addresses

    @property
    def addresses(self) -> Sequence[int]:
        return self._some

    @property
    def directory(self) -> object:
        return self._clients

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        return self._clients.collect(request, addresses)


# ------------------------------------------------------------------------------------------------ rounds


def test_the_work_on_one_answer_makes_no_other_late() -> None:
    """Else how heavy one user's answer is would decide whether others count, and the sum would move by all of them."""
    objective, clients = made()
    request = Request(params=objective.parameters())
    ready = list(clients.collect(request, range(USERS)))

    class Ready(Clients):
        addresses = range(USERS)
        seconds = 0.5

        def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
            return iter(ready)

    counted = 0
    for values in received(Ready(), request, range(USERS)):
        if not counted:
            time.sleep(0.6)
        counted += len(values)
    assert counted == USERS


STRANGE: dict[str, Callable[[Answers], Any]] = {
    "a round that is an array": lambda own: own._replace(round=np.zeros(3)),
    "no addresses": lambda own: own._replace(addresses=None),
    "a number for addresses": lambda own: own._replace(addresses=2),
    "a truth value for an address": lambda own: own._replace(addresses=[True]),
    "nested": lambda own: own._replace(updates={n: torch.nested.nested_tensor([t[0]]) for n, t in own.updates.items()}),
    "nothing at all": lambda own: None,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_even_be_compared_stops_nobody_else(kind: str) -> None:
    objective, clients = made()
    strange = Recorded(clients, lambda user, own: STRANGE[kind](own) if user == 2 else own)
    found = torch.cat(list(received(strange, Request(params=objective.parameters()), range(USERS))))
    others = [u for u in range(USERS) if u != 2]
    assert torch.equal(found, torch.cat(list(received(clients, Request(params=objective.parameters()), others))))


def test_numpys_whole_numbers_are_addresses() -> None:
    """Else every answer would be dropped without a word, and a training be noise alone."""
    objective, clients = made()
    numpys = Recorded(clients, lambda _, own: own._replace(addresses=np.array(own.addresses)))
    asked = list(np.arange(USERS))
    assert sum(len(v) for v in received(numpys, Request(params=objective.parameters()), asked)) == USERS


def test_nobody_is_public_and_private_at_once() -> None:
    objective, clients = made()
    private = private_users(Some(clients, [0, 1, 2, 3]), name="users", size=4, budget=Budget(50.0, 1e-3))
    terms: dict[str, Any] = {"rounds": 1, "users_per_round": 2, "noise": 2.0, "method": partial(dope_sgd, clip=0.1)}
    with pytest.raises(InvalidArgument, match="public has users who are private"):
        federate(objective, private=private, public=PublicUsers(Some(clients, [3, 4])), **terms)
    assert not private.statement().asked, "nothing was charged"
    assert federate(objective, private=private, public=PublicUsers(Some(clients, [4, 5])), **terms).steps_taken == 1


# ------------------------------------------------------------------------------------------------ Flower


def flower() -> Any:
    pytest.importorskip("flwr", reason="flwr is not installed here: make federated has an environment with it")
    from tests.federated import test_flower

    return test_flower


def test_a_message_that_flower_cannot_read_takes_no_other_with_it() -> None:
    """As Flower's own SuperLink does: what is pulled together is handed out, and gone, before the first is read."""
    tests = flower()

    class Claiming(tests.Here):  # type: ignore[misc, name-defined]
        def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
            wanted = list(message_ids)
            unreadable = any(m.metadata.src_node_id == 103 for i in wanted for m in self._replies.get(i, []))
            found: list[Any] = super().pull_messages(wanted)
            if unreadable:
                raise ValueError("cannot be inflated")
            return found

    objective = tests.simulation.objective()
    grid = Claiming(tests.app(), 6)
    clients = tests.FlowerClients(grid, grid.get_node_ids(), seconds=5.0, poll=0.01)
    question = UpdateMean(objective.parameters(), Clip(0.3))
    others = tests.exact(tests.local(objective, [0, 1, 2, 4, 5]), question)
    torch.testing.assert_close(tests.exact(clients, question), others, atol=1e-6, rtol=1e-5)


def test_how_many_are_asked_shortens_nobodys_time() -> None:
    tests = flower()

    class Slow(tests.Here):  # type: ignore[misc, name-defined]
        def push_messages(self, messages: Iterable[Any]) -> list[str]:
            time.sleep(0.06)
            sent: list[str] = super().push_messages(messages)
            return sent

    objective = tests.simulation.objective()
    grid = Slow(tests.app(), 6)
    clients = tests.FlowerClients(grid, grid.get_node_ids(), seconds=0.3, poll=0.01)
    asked = list(grid.get_node_ids())
    assert sum(len(v) for v in received(clients, Request(params=objective.parameters()), asked)) == 6


def test_an_error_of_a_client_does_not_quote_its_rows() -> None:
    """Flower sends the text of what a client app raises to the server."""
    tests = flower()

    def broken(_: Any) -> Any:
        raise ValueError("my salary is 1234")

    objective = tests.simulation.objective()
    grid = tests.Here(tests.client_app(broken), 1)
    clients = tests.FlowerClients(grid, grid.get_node_ids(), seconds=1.0, poll=0.01)
    with pytest.raises(RuntimeError, match="ValueError") as found:
        list(clients.collect(Request(params=objective.parameters()), [100]))
    assert "1234" not in str(found.value)


# ------------------------------------------------------------------------------------------------ LSTM


class Sequences(nn.Module):
    """An LSTM in one of the ways that are not the usual one."""

    def __init__(self, use: str, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, **options)
        states = self.lstm.num_layers * (2 if self.lstm.bidirectional else 1)
        self.first = nn.Parameter(torch.randn(2, states, 1, 4) / 2)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        N = len(x)
        if self.use == "learned first state":
            h, c = (part.expand(-1, N, -1) for part in self.first)
            return self.lstm(x, (h.contiguous(), c.contiguous()))[0]
        if self.use == "twice, from its own last state":
            states, last = self.lstm(x)
            return states + self.lstm(x.flip(1), last)[0]
        if self.use == "step by step":
            state, found = None, []
            for t in range(x.shape[1]):
                states, state = self.lstm(x[:, t : t + 1], state)
                found.append(states)
            return torch.cat(found, 1)
        if self.use == "last cell only":
            return self.lstm(x)[1][1].transpose(0, 1)
        if self.use == "windows merged with rows":
            windows = x.unfold(1, 2, 1).transpose(2, 3)
            return self.lstm(windows.reshape(-1, 2, 3))[0].reshape(N, -1)
        return self.lstm(x)[0]


def squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).reshape(len(x), -1).square().mean(1)


def frozen(*names: str) -> Callable[[nn.LSTM], object]:
    return lambda lstm: [lstm.get_parameter(name).requires_grad_(False) for name in names]


DEEP = {"num_layers": 2, "bidirectional": True}
USES: dict[str, tuple[str, dict[str, Any], Callable[[nn.LSTM], object]]] = {
    "learned first state": ("learned first state", DEEP, frozen()),
    "twice": ("twice, from its own last state", {"num_layers": 2}, frozen()),
    "step by step": ("step by step", {"bias": False}, frozen()),
    "last cell only": ("last cell only", DEEP, frozen()),
    "windows": ("windows merged with rows", {}, frozen()),
    "recurrent weight frozen": ("plain", {}, frozen("weight_hh_l0")),
    "all but the recurrent bias frozen": ("plain", {}, frozen("weight_hh_l0", "weight_ih_l0", "bias_ih_l0")),
    "recurrent bias frozen": ("plain", DEEP, frozen("bias_hh_l0", "bias_hh_l1_reverse")),
    "weight norm": ("plain", {}, lambda lstm: weight_norm(lstm, "weight_hh_l0")),
}


@pytest.mark.parametrize("name", USES)
def test_unusual_uses_of_an_lstm_by_row(name: str) -> None:
    use, options, change = USES[name]
    torch.manual_seed(1)
    module = Sequences(use, **options).double()
    change(module.lstm)
    objective = Objective(module, squares)
    params = objective.parameters()
    x = torch.randn(5, 4, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0, 10.0, 1.0]).double()[:, None, None]
    gradients = oracle.one_by_one(objective, params, x, len(x))
    norms = torch.stack([g.reshape(len(x), -1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    clip = Clip(float(norms.median()), origin=oracle.like(params, 1))
    truth = {n: g.sum(0) for n, g in oracle.clipped(gradients, clip).items()}
    for performance in (Performance(ghost=True), Performance(ghost=False)):
        ours = clipped_sum(objective, params, x, clip=clip, performance=performance)
        assert oracle.relative_error(ours, truth) < 1e-9


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2}])
def test_projections_are_refused_in_every_form(options: dict[str, Any]) -> None:
    objective = Objective(Sequences("plain", proj_size=2, **options).double(), squares)
    with pytest.raises(UnsupportedModel, match="proj_size"):
        clipped_sum(objective, objective.parameters(), torch.randn(5, 4, 3).double(), clip=Clip(1.0))
