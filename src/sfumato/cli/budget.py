"""`sfumato budget`: what a ledger holds, who spent what and when, what is left, and what waits."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sfumato.cli.account import Sampling, make_sampler
from sfumato.cli.facts import in_one_line, tell
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.privacy.ledger import Account, Ledger
    from sfumato.privacy.ledger_view import AccountView, PlanView, Quote
    from sfumato.privacy.spender import Spender

SHOWN = 20  # plans of one dataset; --json has all of them


def budget(
    ledger: Annotated[str, typer.Argument(help="The ledger: a file, or the URL of a database.")],
    dataset: Annotated[str | None, typer.Option(help="The declared name of one dataset; by default all.")] = None,
    statement: Annotated[
        Literal["markdown", "json"] | None, typer.Option(help="Print the dataset's privacy statement instead.")
    ] = None,
    dataset_size: Annotated[
        int | None, typer.Option(min=1, help="Of a planned training: the declared number of privacy units.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of a planned training; not for full.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of a planned training.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Of a planned training.")] = None,
    sampling: Annotated[Sampling, typer.Option(help="Of a planned training.")] = "poisson",
    roles: Annotated[
        bool, typer.Option("--roles", help="Print SQL that makes a role for spenders and one for readers.")
    ] = False,
    schema: Annotated[str, typer.Option(help="The schema of the ledger's tables, for --roles.")] = "public",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show who spent what of a dataset's budget, what is left, who waits for it, and what a training would cost."""
    if roles:
        from sfumato.privacy.ledger_postgres import role_statements

        if "://" not in ledger or ledger.startswith("sqlite"):
            raise InvalidArgument(
                f"--roles is for databases and ledger={ledger!r} is a file: there, the rights of the file decide."
            )
        typer.echo(role_statements(schema))
        return
    from sfumato.privacy.ledger import Ledger

    with Ledger(ledger, make=False) as opened:
        accounts = _accounts(opened, dataset)
        if statement is not None:
            _state(_only(accounts, "--statement"), statement)
            return
        views = [account.view() for account in accounts]
        planned = (dataset_size, batch_size, steps, noise_multiplier)
        quote = None
        if planned != (None, None, None, None):
            quote = _quote(
                _only(accounts, "A planned training"), dataset_size, batch_size, steps, noise_multiplier, sampling
            )
    facts: dict[str, Any] = {"datasets": [view.to_json() for view in views]}
    if quote is not None:
        facts["planned"] = asdict(quote)
    if as_json:
        tell(facts, as_json=True)
        return
    if not views:
        typer.echo("The ledger holds no dataset yet.")
    for view in views:
        _show(view, closely=dataset is not None)
    if quote is not None:
        shown = _shown_quote(quote, views[0].budget.epsilon)
        tell(facts["planned"], "The planned training", as_json=False, shown=shown)


def _accounts(ledger: Ledger, dataset: str | None) -> list[Account]:
    names = ledger.account_names()
    if dataset is not None and dataset not in names:
        known = f"it holds {', '.join(map(repr, names))}" if names else "it holds none"
        raise InvalidArgument(f"--dataset={dataset!r} is not in this ledger: {known}.")
    return [ledger.account(name) for name in names if dataset in (None, name)]


def _only(accounts: list[Account], what: str) -> Account:
    if len(accounts) != 1:
        raise InvalidArgument(f"{what} is for one dataset and the ledger holds {len(accounts)}: give --dataset.")
    return accounts[0]


def _state(account: Account, form: str) -> None:
    if form == "json":
        tell(account.statement().to_json(), as_json=True)
    else:
        typer.echo(account.statement().to_markdown(), nl=False)


def _quote(
    account: Account,
    size: int | None,
    batch_size: int | None,
    steps: int | None,
    noise: float | None,
    sampling: str,
) -> Quote:
    from sfumato.privacy.mechanisms import Gaussian, Mechanism

    if size is None or steps is None or noise is None:
        raise InvalidArgument("A planned training needs --dataset-size, --steps and --noise-multiplier: add them.")
    if not 0 < noise < float("inf"):
        raise InvalidArgument(f"--noise-multiplier={noise} must be a positive, finite number.")
    sampler = make_sampler(sampling, size, batch_size)
    return account.quote([Mechanism(question="gradients", noise=Gaussian(noise), sampler=sampler, times=steps)])


def _shown_quote(quote: Quote, budget: float) -> dict[str, Any]:
    apart = quote.share is not None and not quote.first  # from what it costs alone
    return {
        "epsilon alone": f"{quote.alone:.4g} ({quote.accountant})",
        "takes up": f"about {_percent(quote.share or 0.0, budget)} of the budget" if apart else None,
        "fits now": "yes" if quote.fits else "no",
        "left after it": f"about {_percent(quote.left, budget)} of the budget" if quote.fits else None,
    }


def _percent(epsilon: float, budget: float) -> str:
    return f"{100 * epsilon / budget:.3g} %"


def _show(view: AccountView, *, closely: bool) -> None:
    # Shares, not epsilons: what several reservations take up of a budget does not add up to what each costs alone. So
    # does the first one: its promise is its own cost, what it takes away from later ones is another number.
    whole = view.budget.epsilon
    used = whole - (0.0 if view.sealed else view.left)
    part = used / view.spent if view.spent and not view.sealed else 1.0

    def share(epsilon: float) -> str:
        return _percent(epsilon, whole)

    left = f"about {share(view.left)}"
    if view.sealed:
        left = "nothing: the first reservation took it all, and a budget cannot be raised afterwards"
    promise = view.spent if len(view.plans) < 2 else view.budget.epsilon
    facts = {
        "budget": f"epsilon {view.budget.epsilon:g}, delta {view.budget.delta:g}",
        "promise so far": f"epsilon {promise:.4g}{', the whole budget' if len(view.plans) > 1 else ''}",
        "unit": f"{view.unit}, {view.adjacency}",
        "spent or reserved": f"about {share(used)} of the budget",
        "left": left,
        "open plans": sum(plan.open for plan in view.plans),
        "warnings": list(view.warnings) or None,
    }
    tell(facts, view.dataset, as_json=False)
    _table(
        "Who",
        ("user", "reservations", "answers", "of the budget", "last change, UTC"),
        [
            (
                s.user if s.database_user in (None, s.user) else f"{s.user} as {s.database_user}",
                s.plans,
                s.answers,
                share(part * s.epsilon),
                _minute(s.last),
            )
            for s in view.shares
        ],
    )
    if closely:
        earlier = len(view.plans) - SHOWN
        _table(
            f"Reservations, the last {SHOWN} of {len(view.plans)}" if earlier > 0 else "Reservations",
            ("plan", "made, UTC", "by", "answers", "of the budget", "state", "note"),
            [
                (
                    plan.plan,
                    _minute(plan.created),
                    _person(plan.made_by),
                    ", ".join(f"{q} {counted}/{times}" for q, (counted, times) in plan.questions.items()),
                    share(part * plan.epsilon),
                    _state_of(plan),
                    plan.note,
                )
                for plan in view.plans[-SHOWN:]
            ],
        )
    _table(
        "Waiting, first come first served",
        ("place", "since, UTC", "by", "asks", "of the budget", "note"),
        [
            (
                w.place,
                _minute(w.created),
                _person(w.made_by),
                in_one_line(w.questions),
                "" if w.asks is None else share(w.asks),
                w.note,
            )
            for w in view.waiting
        ],
    )


def _person(who: Spender | None) -> str:
    return "unknown" if who is None else f"{who.user}@{who.host}"


def _state_of(plan: PlanView) -> str:
    state = "open" if plan.open else "closed"
    same = plan.held_by is None or plan.made_by is None or _person(plan.held_by) == _person(plan.made_by)
    return state if same else f"{state}, held by {_person(plan.held_by)}"


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else in_one_line(value)


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        # Names and notes are what people wrote: shown as they are, brackets and all.
        table.add_row(*(Text("" if value is None else _cell(value)) for value in row))
    Console().print(table)
