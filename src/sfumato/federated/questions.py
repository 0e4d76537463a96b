"""What is asked of users: the noisy mean of their clipped updates. The server is trusted: it sees each of them.

The users are the rows of a `Private`, but nothing of theirs is behind it: a row is whom to ask. So the door works as
for any data, in the same order: the ledger is charged, its own sampler draws the users, and only then, in `exact`,
are they contacted; what they send is clipped and summed, and the door adds the noise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.samplers import Indices
from sfumato.data.sources import Source
from sfumato.errors import InvalidArgument
from sfumato.federated.clients import Clients, Request
from sfumato.federated.rounds import as_named, bounded_sum, received, side_by_side
from sfumato.federated.work import FED_SGD, LocalWork
from sfumato.gradients import Clip, Gradient
from sfumato.objective import Objective
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Private
from sfumato.questions import Exact, Question, Sample


@dataclass(frozen=True, eq=False)
class Contacts:
    """Some of the clients, not contacted yet."""

    clients: Clients
    addresses: Sequence[int]


class Users(Source):
    """Clients as rows of a dataset: what is gathered is whom to ask, and nobody is contacted by that."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self._addresses = clients, list(clients.addresses)
        if len(set(self._addresses)) < len(self._addresses):
            raise InvalidArgument("clients has an address twice, whose owner would count twice: enrol everyone once.")

    def __len__(self) -> int:
        return len(self._addresses)

    def gather(self, indices: Indices, *, lend: bool = False) -> Contacts:
        return Contacts(self._clients, [self._addresses[i] for i in indices])

    def has_any_of(self, clients: Clients) -> bool:
        """Whether somebody can be reached through both."""
        same = clients.directory is self._clients.directory
        return same and not set(self._addresses).isdisjoint(clients.addresses)

    @property
    def row_bytes(self) -> int:
        return 8  # of an address


def private_users(
    clients: Clients,
    *,
    name: str,
    size: int,
    objective: Objective | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    budget: Budget | None = None,
    filter: Filter | None = None,
    seed: NotPrivateSeed | None = None,
) -> Private:
    """Users behind the door; each of them is the privacy unit, with all that it has.

    Args:
        clients: how they are reached.
        name: the declared name under which the ledger knows them. The same users must keep the same name.
        size: the declared number of users, a public constant, which may be approximate: who is enrolled is private.

    The others are those of `Private`. Sampling is Poisson over users, and neighbours differ by all of one user.

    >>> from sfumato import cross_entropy
    >>> from sfumato.federated import LocalClients
    >>> objective = Objective(torch.nn.Linear(3, 2), cross_entropy)
    >>> rows = (torch.rand(40, 3), torch.randint(2, (40,)))
    >>> clients = LocalClients(objective, rows, users=[i // 4 for i in range(40)])
    >>> users = private_users(clients, name="phones", size=10, budget=Budget(8.0, 1e-3))
    >>> question = UpdateMean(objective.parameters(), Clip(1.0))
    >>> sorted(users.ask(question, noise=4.0, sampler=users.poisson(5)))
    ['bias', 'weight']
    """
    source = Users(clients)
    return Private(
        source,
        name=name,
        size=size,
        objective=objective,
        ledger=ledger,
        budget=budget,
        unit="user",
        users=np.arange(len(source)),
        filter=filter,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=False, eq=False)
class UpdateMean(Question):
    """The noisy mean of clipped updates over the *declared* number of users of a round, whoever answers.

    *Formal guarantee.* A user contributes clip(scale * (update - origin), norm), so at most `norm`, in the exact
    arithmetic of what is stored: the norm is taken in float64 and rounded up. One who does not answer, or answers with
    anything but one finite update of the right shapes, contributes exactly zero. What a user contributes depends on no
    other user.
    """

    params: Mapping[str, Tensor]
    clip: Clip
    work: LocalWork = FED_SGD

    @property
    def unit(self) -> float:
        return self.clip.norm

    def check(self, sample: Sample) -> None:
        Clip.check_is_one(self.clip)
        if not 1e-100 < self.clip.norm < 1e100:  # far inside float64, whose squares must neither vanish nor overflow
            raise InvalidArgument(f"clip norm={self.clip.norm} must be positive and finite: noise is drawn by it.")
        named = isinstance(self.params, Mapping) and self.params
        if not named or not all(p.is_floating_point() for p in self.params.values()):
            raise InvalidArgument("params must be the trainable parameters by name, in floating point.")
        self.clip.check(self.params)
        rows = sample.first_rows()
        if not (rows is None or isinstance(rows, Contacts)):
            raise InvalidArgument("UpdateMean asks users, and this dataset has rows: make it by private_users(...).")

    def exact(self, sample: Sample) -> Exact:
        origin, scale = (
            None if value is None else side_by_side(value, self.params) for value in (self.clip.origin, self.clip.scale)
        )
        device = next(iter(self.params.values())).device
        total = torch.zeros(sum(p.numel() for p in self.params.values()), dtype=torch.float64, device=device)
        for contacts, units in sample.parts():
            # Were several clients declared one user, the first of them would speak for it.
            asked = contacts.addresses[:: units.records]
            for values in received(contacts.clients, Request(params=self.params, work=self.work), asked):
                if origin is not None:
                    values -= origin  # before the norm is taken: an expanded square would cancel
                if scale is not None:
                    values *= scale
                total += bounded_sum(values, self.clip.factors)[0]
        return as_named(total, self.params)

    def release(self, noisy: Any, expected: float) -> Gradient:
        return Gradient({n: (t / expected).to(self.params[n].dtype) for n, t in noisy.items()})
