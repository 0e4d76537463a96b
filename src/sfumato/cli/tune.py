"""`sfumato tune`: a private hyper-parameter search from one TOML file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.config_file import without_password
from sfumato.cli.facts import in_one_line, tell

if TYPE_CHECKING:
    from sfumato.cli.tune_job import SearchJob


def tune(
    config: Annotated[Path, typer.Argument(help="A TOML file with a \\[tune] section; see docs/tuning.md.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it costs; read no private value, touch no ledger.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Search hyper-parameters privately: charge the whole search, run a secret number of trials, keep the best one."""
    from sfumato.cli.tune_config import load_tune

    checked = load_tune(config)

    from sfumato.cli.tune_job import execute_search, prepare_search

    with _status(shown=not as_json) as say:
        search = prepare_search(checked, say)
    if dry_run:
        facts, title = _plan(search), f"Search of {config} (no private value was read, nothing was written)"
        shown = {**facts, "noise_multipliers": _range(facts["noise_multipliers"])}
        tell(facts, title, as_json=as_json, shown=shown)
        return
    if not as_json:
        tell(_cost(search), f"What the search of {config} costs", as_json=False)
    found = execute_search(search)
    if found is None:
        facts = {**_cost(search), "found": False}
        title = "The Poisson law gave no trial, which it may: nothing was found, and the search stays charged"
    else:
        run = found.outcome
        facts = {
            **_cost(search),
            "found": True,
            "out": str(checked.config.out),
            "epsilon": run.statement["epsilon"],
            "private": run.statement["private"],
            "options": dict(found.options),
            "score": found.score,
            "noise_multiplier": run.config["noise_multiplier"],
            "metrics": {k: v for k, v in run.metrics.items() if k not in ("step", "epsilon")},
        }
        title = f"The best trial of {config}"
    tell(facts, title, as_json=as_json)


@contextmanager
def _status(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what is being computed, on a terminal only, and gone afterwards."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("Reading the search") as line:
        yield line.update


def _range(values: Sequence[float]) -> str:
    if len(values) < 3:
        return in_one_line(values)
    return f"{len(values)} different ones from {in_one_line(min(values))} to {in_one_line(max(values))}"


def _cost(search: SearchJob) -> dict[str, Any]:
    cost = search.cost
    return {
        "trial_epsilon": cost.trial,
        "epsilon": cost.epsilon,
        "delta": cost.delta,
        "mean_trials": cost.mean_trials,
        "usually_at_most": cost.usually_at_most,
        "law": search.file.tune.law,
    }


def _plan(search: SearchJob) -> dict[str, Any]:
    tune, config = search.file.tune, search.file.config
    budget = config.privacy.budget
    return {
        "dry_run": True,
        "dataset": config.data.name,
        **_cost(search),
        "budget": budget,
        "fits": None if budget is None else search.cost.epsilon <= budget,
        "candidates": len(search.candidates),
        "kept_after_race": tune.keep,
        "score": tune.score,
        "space": tune.space,
        "noise_multipliers": sorted({candidate.asks[0].noise.scale for candidate in search.candidates}),
        "ledger": without_password(config.ledger),
        "would_write": [
            str(config.out / name)
            for name in ("run.json", "weights.safetensors", "statement.txt", "config.json", "tune.json")
        ],
    }
