"""Clients: who can be asked for an update, and how. What they answer is not trusted; `rounds` looks at it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.data.samplers import Indices
from sfumato.data.sources import as_source
from sfumato.errors import InvalidArgument
from sfumato.federated.work import FED_SGD, LocalWork, update_of, updates_of
from sfumato.objective import Objective
from sfumato.sampled import group_by_user

_PROBES = 4  # made-up users; a place that rounds otherwise shows with nearly every one of them


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What is sent to the users of one round. All of it is public."""

    params: Mapping[str, Tensor]
    work: LocalWork = FED_SGD
    round: str = field(default_factory=lambda: token_hex(16))  # an answer names it, so that a late one is known


class Answers(NamedTuple):
    """What came back from some clients: for each parameter one entry per client, stacked. It may be anything."""

    round: str
    addresses: Sequence[int]
    updates: Mapping[str, Any]


class Clients(ABC):
    """A way to reach clients. One client is one person: somebody with three devices must be enrolled once.

    `seconds`: how long the server waits for the answers of one round; None waits until the transport has no more.
    """

    seconds: float | None = None

    @property
    @abstractmethod
    def addresses(self) -> Sequence[int]:
        """Of those who are enrolled, whether they can be reached now or not."""

    @property
    def directory(self) -> object:
        """Whose addresses these are: for two `Clients` with the same one, the same address is the same person."""
        return self

    @abstractmethod
    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        """Ask these and yield what comes back, in any order. Whoever cannot be reached is left out."""


class LocalClients(Clients):
    """Users who live in this process: for simulations of thousands of them, computed together.

    Args:
        objective: what users minimise.
        data: all rows of all users, tensors or arrays with one row per example.
        users: whose row each is. Addresses count users in the order in which they first appear.
        records_per_user: of a user's rows at most so many are used, the first ones.
        at_once: so many users are computed together, where that gives each the same update in every place, to the
            last bit; else one by one. 1 computes them one by one in any case, which also serves models that cannot be
            run under `torch.vmap`.

    *Formal guarantee.* A user's update depends on that user's rows alone, to the last bit: else a newcomer, who moves
    all users behind to other places, would move their updates, too, and on the kink of a ReLU by a whole clip norm.

    >>> from sfumato import cross_entropy
    >>> rows = (torch.rand(6, 3), torch.tensor([0, 1] * 3))
    >>> clients = LocalClients(Objective(torch.nn.Linear(3, 2), cross_entropy), rows, users=[7, 7, 8, 8, 9, 9])
    >>> list(clients.addresses)
    [0, 1, 2]
    """

    def __init__(
        self, objective: Objective, data: Any, users: Any, *, records_per_user: int = 64, at_once: int = 64
    ) -> None:
        if at_once < 1:
            raise InvalidArgument(f"at_once={at_once} must be at least 1: it is how many users are computed together.")
        if records_per_user < 1:
            raise InvalidArgument(f"records_per_user={records_per_user} must be at least 1.")
        self._objective, self._at_once = objective, at_once
        self._source = as_source(data)
        self._groups = group_by_user(users, len(self._source), records_per_user)
        self._places: dict[Any, bool] = {}

    @property
    def addresses(self) -> Sequence[int]:
        return range(len(self._groups))

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        asked = np.asarray(addresses, dtype=np.int64)
        sizes = np.array([len(self._groups[a]) for a in asked], dtype=np.int64)
        # Padded to a power of two, as the door pads: so a user's arithmetic depends on no other user's rows.
        padded = np.array([1 << int(n - 1).bit_length() if self._at_once > 1 else n for n in sizes], dtype=np.int64)
        for records in map(int, np.unique(padded)):
            same = asked[padded == records]
            together = self._at_once if self._alike_everywhere(request, records) else 1
            for start in range(0, len(same), together):
                part = same[start : start + together]
                yield Answers(request.round, part.tolist(), self._updates(request, part, records, together))

    def _alike_everywhere(self, request: Request, records: int) -> bool:
        """Whether a user's update is the same in every place of a pass: made-up users are put into all of them."""
        key = (records, request.work, *((name, p.shape, p.dtype, p.device) for name, p in request.params.items()))
        if key not in self._places:
            self._places[key] = self._at_once > 1 and all(
                self._alike(request, self._made_up(records, number), records) for number in range(_PROBES)
            )
        return self._places[key]

    def _alike(self, request: Request, user: Any, records: int) -> bool:
        device = next(iter(request.params.values())).device
        everywhere = _mapped(lambda t: t.to(device).expand(self._at_once, *t.shape).clone(), user)
        weights = torch.ones(self._at_once, records, device=device)
        found = updates_of(self._objective, request.work, request.params, everywhere, weights)
        return all(torch.equal(t, t[:1].expand_as(t)) for t in found.values())

    def _made_up(self, records: int, number: int) -> Any:
        """Rows of the right shapes: numbers with many digits, and 0 for whatever counts or names something."""

        def filled(t: Tensor) -> Tensor:
            rows = t.new_zeros(records, *t.shape[1:])
            if t.is_floating_point():
                rows.copy_(torch.arange(1 + number, 1 + number + rows.numel()).sin().view(rows.shape))
            return rows

        return _mapped(filled, self._source.gather(np.zeros(1, dtype=np.int64)))

    def _updates(self, request: Request, users: Indices, records: int, together: int) -> dict[str, Tensor]:
        groups = [self._groups[u] for u in users]
        rows = np.concatenate([np.concatenate([g, np.repeat(g[:1], records - len(g))]) for g in groups])
        weights = np.stack([np.arange(records) < len(g) for g in groups]).astype(np.float32)
        device = next(iter(request.params.values())).device
        batch = _mapped(lambda t: t.to(device).reshape(len(users), records, *t.shape[1:]), self._source.gather(rows))
        known = torch.from_numpy(weights).to(device)
        if together > 1:
            # A pass has one shape, however many are asked: kernels may round by that, too.
            filled = _mapped(lambda t: torch.cat([t, t.new_zeros(together - len(t), *t.shape[1:])]), (batch, known))
            found = updates_of(self._objective, request.work, request.params, *filled)
            return {name: t[: len(users)] for name, t in found.items()}
        found = update_of(self._objective, request.work, request.params, *_mapped(lambda t: t[0], (batch, known)))
        return {name: t.unsqueeze(0) for name, t in found.items()}


def _mapped(change: Callable[[Tensor], Tensor], rows: Any) -> Any:
    return tree_map(lambda t: change(t) if isinstance(t, Tensor) else t, rows)
