"""The ledger of a near-private selection: whether it is the right one, and how much of epsilon still fits into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sfumato.cli.near_private import is_same, mechanisms, open_reservation
from sfumato.cli.select_config import PrivateSection, SelectConfig
from sfumato.cli.select_statement import check_ledger, check_size, not_the_ledger, statement_about
from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Account, Ledger
from sfumato.run import Run
from sfumato.selection.advice import QuestionAdvice, advise_questions
from sfumato.selection.near_private import NearPrivate

_HALVINGS = 8  # to find the largest epsilon that fits, to less than a hundredth of what was wished for


@contextmanager
def ledger_of(config: SelectConfig, options: PrivateSection, run: Run, *, make: bool = True) -> Iterator[Ledger]:
    """The ledger, if it knows all that the model began with."""
    place, began = config.place(options.ledger), statement_about(run, options.name)
    if began is not None and "://" not in place and not Path(place).exists():
        raise not_the_ledger(options.name)
    with Ledger(place, make=make and began is None) as ledger:
        if options.name in ledger.account_names():
            now = ledger.account(options.name).statement().to_json()
            if began is not None:
                check_ledger(began, now)
            check_size(options.size, now)
        elif began is not None:
            raise not_the_ledger(options.name)
        yield ledger


def advice(strategy: NearPrivate, options: PrivateSection, epsilon: float | None = None) -> QuestionAdvice:
    """Noise for both questions, so that they cost epsilon together; decided before anything is asked."""
    return advise_questions(
        strategy,
        budget=Budget(epsilon or options.epsilon, options.delta),
        size=options.size,
        support=options.support,
        adjacency=options.adjacency,
    )


def room(config: SelectConfig, options: PrivateSection, run: Run, strategy: NearPrivate) -> dict[str, Any]:
    """What a dry run says of the ledger, which is read and left as it is."""
    place = config.place(options.ledger)
    if statement_about(run, options.name) is None and "://" not in place and not Path(place).exists():
        return {"fits": True, "ledger": "would be made; nothing was asked before"}
    try:
        with ledger_of(config, options, run, make=False) as ledger:
            if options.name not in ledger.account_names():
                return {"fits": True, "ledger": f"was read and left as it is; it does not know {options.name!r} yet"}
            account = ledger.account(options.name)
            check_delta_of(account, options)
            if reserved(config, options, account, strategy):
                return {"fits": True, "reserved": True, "ledger": "was read and left as it is"}
            fits = _fits(account, strategy, options, options.epsilon)
            facts: dict[str, Any] = {"fits": fits, "left": account.left(), "budget": account.budget.epsilon}
            facts |= {} if fits else {"epsilon_that_fits": _largest(account, strategy, options)}
            return {**facts, "ledger": "was read and left as it is"}
    except LedgerError as error:
        return {"fits": None, "ledger": str(error)}


def reserved(config: SelectConfig, options: PrivateSection, account: Account, strategy: NearPrivate) -> bool:
    """Whether the training of the model has reserved these questions; raises if it has reserved others."""
    found = open_reservation(account.statement(), config.file(config.model.weights))
    if found and not is_same(mechanisms(strategy, advice(strategy, options), options.size), found):
        raise InvalidArgument(
            f"[private] epsilon={options.epsilon:g} with support={options.support:g} is not what [afterwards] of the "
            "training has reserved: give its epsilon, support and voters here, which costs nothing more."
        )
    return bool(found)


def check_delta_of(account: Account, options: PrivateSection) -> None:
    if account.budget.delta != options.delta:
        raise InvalidArgument(
            f"[private] delta={options.delta:g} is not the {account.budget.delta:g} of the account {options.name!r} in "
            "the ledger: give that, since one dataset has one delta."
        )


def refusal(error: BudgetExceeded, account: Account, strategy: NearPrivate, options: PrivateSection) -> BudgetExceeded:
    """In words of the config, with what would fit."""
    view = account.view()
    if view.waiting:
        return error
    largest = _largest(account, strategy, options)
    remedy = f"at most epsilon={largest:g} fits" if largest else "nothing more can be asked of it"
    return BudgetExceeded(
        f"[private] epsilon={options.epsilon:g} does not fit into the budget of the dataset {options.name!r}, "
        f"epsilon={view.budget.epsilon:g}, of which about {view.left:.3g} is left: {remedy}; room for more is made "
        "before the training, by its [privacy] budget."
    )


def _fits(account: Account, strategy: NearPrivate, options: PrivateSection, epsilon: float) -> bool:
    return account.quote(mechanisms(strategy, advice(strategy, options, epsilon), options.size)).fits


def _largest(account: Account, strategy: NearPrivate, options: PrivateSection) -> float | None:
    """The largest epsilon below the wished one that fits, two digits of it; None if there is none to speak of."""
    low, high = 0.0, options.epsilon
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(account, strategy, options, middle) else (low, middle)
    if low <= 0:
        return None
    unit = 10.0 ** (math.floor(math.log10(low)) - 1)
    return float(f"{math.floor(low / unit) * unit:.2g}")
