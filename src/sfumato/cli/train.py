"""`sfumato train`: a private training from one TOML file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sfumato.cli.job import Job


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file with sections data, model, privacy and training.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; read no private value, touch no ledger, write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue the training in `out`, or refuse to.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train a model privately as a config file says, and save the run, its weights and its privacy statement."""
    from sfumato.cli.config import load_config

    checked = load_config(config)  # before torch is loaded: a misspelt key is told at once

    from sfumato.cli.account import print_facts
    from sfumato.cli.job import execute, prepare

    job = prepare(checked)
    if dry_run:
        facts, title = _plan(job), f"Plan of {config} (no private value was read, nothing was written)"
    else:
        run = execute(job, resume=resume, progress=not as_json and sys.stdout.isatty())
        title = f"Trained as {config} says"
        facts = {
            "out": str(checked.out),
            "epsilon": run.statement["epsilon"],
            "delta": run.statement["delta"],
            "private": run.statement["private"],
            "noise_multiplier": run.config["noise_multiplier"],
            "steps_taken": run.steps_taken,
            "steps_lost": run.steps_lost,
            "steps_short": run.steps_short,
            "metrics": {k: v for k, v in run.metrics.items() if k not in ("step", "epsilon")},
            "seconds": round(run.seconds, 3),
        }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        print_facts({name.replace("_", " "): value for name, value in _flat(facts).items()}, title)


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """For people: metrics as lines of their own, lists in one line, and no line for what is not there."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= value
        elif value is not None:
            flat[name] = ", ".join(value) if isinstance(value, list) else value
    return flat


def _plan(job: Job) -> dict[str, Any]:
    config, cost = job.config, job.cost
    training, privacy = config.training, config.privacy
    files = ("run.json", "weights.safetensors", "statement.txt", "checkpoint.pt", "config.json")
    return {
        "dry_run": True,
        "dataset": config.data.name,
        "size": config.data.size,
        "unit": "example" if config.data.users is None else "user",
        "noise_multiplier": job.noise,
        "epsilon": cost.epsilon,
        "delta": privacy.delta,
        "adjacency": privacy.adjacency,
        "accountant": cost.accountant,
        "method": training.method,
        "steps": training.steps,
        "reserve": training.reserve,
        "batch_size": job.sampler.expected,
        "sampling": training.sampling,
        "parameters": job.parameters,
        "features": list(job.layouts["private"].columns) or None,
        "continues": job.checkpoint.exists(),
        "ledger": config.ledger,
        "would_write": [str(config.out / name) for name in files],
    }
