"""What the ledger says to a training before it begins, by looking alone: nothing is charged, made or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sfumato.cli.config import Config
from sfumato.cli.job import Job
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.mechanisms import Adjacency


@dataclass(frozen=True, kw_only=True)
class Room:
    """Whether the training may begin now, and what is promised of the dataset once it has."""

    fits: bool
    promise: float  # epsilon of all that was ever asked
    left: float  # of the budget, as a share, before it
    budget: float

    def refusal(self, config: Config) -> str | None:
        """Why it may not begin, and what to do."""
        if self.fits:
            return None
        what, whom = f"[privacy] epsilon={config.privacy.epsilon:g} does not fit", f"the dataset {config.data.name!r}"
        if not self.left:
            return f"{what}: the budget of {whom}, {self.budget:g}, is spent; see sfumato budget."
        return (
            f"{what} into what the ledger has left for {whom}, about {100 * self.left:.3g} % of its budget of "
            f"{self.budget:g}: lower it, or see sfumato budget."
        )


def room(job: Job) -> Room | None:
    """None where the training goes on with what was paid for; InvalidArgument where the account has other terms."""
    config = job.config
    if config.checkpoint.exists():
        return None
    place, whole = str(config.ledger), config.privacy.budget or config.privacy.epsilon
    new = Room(fits=True, promise=job.cost.epsilon, left=1.0, budget=whole)
    if "://" not in place and not Path(place).exists():
        return new  # with a budget that the config was checked against
    with Ledger(place, make=False) as ledger:
        if config.data.name not in ledger.account_names():
            return new
        account = opened(ledger, config)
        quote, whole = account.quote(job.planned()), account.budget.epsilon
        promise = quote.alone if quote.first else whole
        return Room(fits=quote.fits, promise=promise, left=account.view().left / whole, budget=whole)


def opened(ledger: Ledger, config: Config) -> Account:
    """The account of the dataset, which is there: what the config says of it must be what the ledger knows."""
    privacy, data = config.privacy, config.data
    account = ledger.account(
        data.name,
        unit="example" if data.users is None else "user",
        adjacency=Adjacency(privacy.adjacency),
        budget=None if privacy.budget is None else Budget(privacy.budget, privacy.delta),
    )
    if privacy.delta != account.budget.delta:
        raise InvalidArgument(
            f"[privacy] delta={privacy.delta:g} is not {account.budget.delta:g}, which the account {data.name!r} has: "
            "give the same, since one dataset has one delta."
        )
    return account


def check_room(job: Job) -> None:
    """Raise before rows are made, or read, for a training that the ledger would not let begin."""
    found = room(job)
    refused = None if found is None else found.refusal(job.config)
    if refused is not None:
        raise BudgetExceeded(refused)
