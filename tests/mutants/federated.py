"""Rounds of users: who answered is private, too."""

from __future__ import annotations

from typing import Any

import torch

from sfumato.audit.canary import flat
from sfumato.audit.doors import DELTA, SIZE, rows_objective
from sfumato.audit.sensitivity import Neighbours, sensitivity
from sfumato.audit.verdict import Verdict
from sfumato.federated import LocalClients, private_users
from sfumato.federated.clients import Request
from sfumato.federated.questions import UpdateMean
from sfumato.federated.rounds import received
from sfumato.gradients import Clip, Gradient
from sfumato.privacy.budget import Budget
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.questions import Exact, Sample
from tests.mutants.doors import PLENTY
from tests.mutants.mutant import Mutant


class OverTheAnswers(UpdateMean):
    """(sum + noise) / answers that came back, as plain federated averaging divides."""

    def exact(self, sample: Sample) -> Exact:
        answered = 0
        for contacts, _ in sample.parts():
            request = Request(params=self.params, work=self.work)
            answered += sum(len(values) for values in received(contacts.clients, request, contacts.addresses))
        object.__setattr__(self, "answered", answered)
        return super().exact(sample)

    def release(self, noisy: Any, expected: float) -> Gradient:
        return super().release(noisy, max(1, self.answered))  # type: ignore[attr-defined]


def by_users(question: type[UpdateMean]) -> list[Verdict]:
    """One user more, of two rows, among nobody... but a door needs somebody, so among users without a gradient."""
    objective = rows_objective()
    unit = torch.eye(24, dtype=torch.float64)
    still, crowd = torch.zeros(2, 24, dtype=torch.float64), unit[:1].repeat(4, 1) * 7

    def answer(rows: Any) -> Any:
        clients = LocalClients(objective, rows, users=[i // 2 for i in range(len(rows))])
        users = private_users(clients, name="mutant", size=SIZE, budget=Budget(PLENTY, DELTA), seed=NotPrivateSeed(3))
        asked = question(objective.parameters(), Clip(1.0))
        return flat([users.ask(asked, noise=0.02, sampler=users.everyone())])

    pairs = [
        Neighbours(name=f"{told} among {len(others) // 2}", one=others, other=torch.cat([others, newcomer]))
        for others in (still, crowd)
        for told, newcomer in (("a still user", still), ("a user far out", 1e6 * unit[1:2].repeat(2, 1)))
    ]
    return [sensitivity(answer, pairs, claimed=1.0 / SIZE, name=question.__name__)]


MUTANTS = (
    Mutant(
        name="M29",
        wrong="a round divided by the number of users who answered",
        right=UpdateMean,
        broken=OverTheAnswers,
        audits=by_users,
    ),
)
