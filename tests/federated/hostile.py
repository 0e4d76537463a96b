"""Clients that misbehave, around clients that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from sfumato.federated import Answers, Clients, Request


class Misbehaving(Clients):
    """Lets some clients answer otherwise: `behave` gets one client's true answer, and gives what arrives instead."""

    def __init__(self, clients: Clients, behave: Callable[[int, Request, Answers], Sequence[Answers]]) -> None:
        self._clients, self._behave = clients, behave
        self.contacted: list[list[int]] = []

    @property
    def addresses(self) -> Sequence[int]:
        return self._clients.addresses

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        self.contacted.append(list(addresses))
        for answers in self._clients.collect(request, addresses):
            for place, address in enumerate(answers.addresses):
                own: dict[str, Tensor] = {name: t[place : place + 1] for name, t in answers.updates.items()}
                yield from self._behave(address, request, Answers(answers.round, [address], own))
