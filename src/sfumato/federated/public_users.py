"""Users who want no protection: what they send may be used as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.federated.clients import Clients, Request
from sfumato.federated.rounds import as_named, bounded_sum, received
from sfumato.federated.work import FED_SGD, LocalWork
from sfumato.gradients import Clip, Gradient


class PublicUsers:
    """Users who declared that they need no privacy, and whose updates are therefore free.

    Only they may be here: nobody becomes public because it suits the training. They are not trusted with more than
    their say: `longest` bounds each of them, so that a hostile one moves the mean by no more than its share of that.
    """

    def __init__(self, clients: Clients, *, seed: int | None = None) -> None:
        self.clients, self._addresses = clients, list(clients.addresses)
        self._rng = np.random.default_rng(seed)
        if not self._addresses:
            raise InvalidArgument("clients has no public users: leave public out instead.")

    def __len__(self) -> int:
        return len(self._addresses)

    def update(
        self,
        params: Mapping[str, Tensor],
        *,
        work: LocalWork = FED_SGD,
        users: int | None = None,
        longest: float = math.inf,
    ) -> Gradient:
        """The mean update of those who answer, out of all or of so many at random; zero if nobody does."""
        if users is not None and users < 1:
            raise InvalidArgument(f"users={users} must be at least 1: it is how many public users are asked.")
        if not longest > 0:
            raise InvalidArgument(f"longest={longest} must be positive: it bounds the update of one public user.")
        asked = self._addresses
        if users is not None and users < len(asked):
            asked = [asked[i] for i in np.sort(self._rng.choice(len(asked), users, replace=False))]
        device = next(iter(params.values())).device
        total = torch.zeros(sum(p.numel() for p in params.values()), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.float64, device=device)
        bound = Clip(longest)
        for values in received(self.clients, Request(params=params, work=work), asked):
            part, valid = bounded_sum(values, bound.factors if bound.bounded else torch.ones_like)
            total += part
            count += valid.sum()
        mean = as_named(total / count.clamp_min(1.0), params)
        return Gradient({name: t.to(params[name].dtype) for name, t in mean.items()})

    @property
    def random_state(self) -> Any:
        """Of the choice among public users; checkpoints keep it."""
        return self._rng.bit_generator.state

    @random_state.setter
    def random_state(self, state: Any) -> None:
        self._rng.bit_generator.state = state
