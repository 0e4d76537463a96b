"""`sfumato train`: a private training from one TOML file."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.config_file import without_password
from sfumato.cli.facts import in_one_line, tell

if TYPE_CHECKING:
    from sfumato.cli.config import Config
    from sfumato.cli.job import Job


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; docs/config.md lists its keys.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, cost, time and memory; read no private value, write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue the training in `out`, or refuse to.")
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help="Also write report.html into the folder of the run, to open in a browser.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train a model privately as a config file says, and save the run, its weights and its privacy statement."""
    from sfumato.cli.config import load_config

    checked = load_config(config)  # before torch is loaded: a misspelt key is told at once

    from sfumato.cli.job import execute, prepare

    job = prepare(checked)
    if dry_run:
        facts, title = _plan(job), f"Plan of {config} (no private value was read, nothing was written)"
    else:
        from sfumato.cli.estimates import warning

        warned = warning(job)
        if warned is not None and not as_json:  # before anything is charged
            typer.echo(f"sfumato: {warned}", err=True)
        from sfumato.cli.train_ledger import check_room

        begun, finished = checked.checkpoint.exists(), (checked.out / "run.json").exists()
        check_room(job)
        run = execute(job, resume=resume, progress=not as_json and sys.stdout.isatty())
        title = f"Trained as {config} says{', from the checkpoint on' if begun else ''}"
        if finished:
            title = f"Trained as {config} says, earlier: nothing was asked or charged now"
        facts = {
            "out": str(checked.out),
            "epsilon": run.statement["epsilon"],
            "delta": run.statement["delta"],
            "private": run.statement["private"],
            "noise_multiplier": run.config["noise_multiplier"],
            "clip": run.config["clip"],
            "steps_taken": run.steps_taken,
            "steps_lost": run.steps_lost,
            "steps_short": run.steps_short,
            "synthesis": _made(job),
            "before": {k: v for k, v in run.before.items() if k not in ("step", "epsilon")},
            "metrics": {k: v for k, v in run.metrics.items() if k not in ("step", "epsilon")},
            "seconds": round(run.seconds, 3),
            "report": _report(checked.out) if report else None,
            "warning": warned,
        }
    # JSON is kept and handed on, and how long a training took depends on how many private rows there were.
    kept = {name: value for name, value in facts.items() if name != "seconds"}
    tell(kept, title, as_json=as_json, shown=_shown(facts))


def _report(out: Path) -> str:
    from sfumato.report import report

    return str(report([out]).write(out / "report.html"))


def _shown(facts: dict[str, Any]) -> dict[str, Any]:
    """For people: metrics, and the methods with their options, as lines of their own."""
    shown: dict[str, Any] = {}
    for name, value in facts.items():
        if name == "before":
            shown |= {f"{metric}_before": number for metric, number in value.items() if metric.startswith("test_")}
        elif name == "metrics":
            shown |= value
        elif name == "synthesis" and value is not None:
            shown["synthesis"] = {k: v for k, v in value.items() if v != []}
        elif name == "method":
            shown["method"] = " on ".join(value)
            shown |= {f"  {layer}": in_one_line(options) for layer, options in value.items()}
        else:
            shown[name] = value
    return shown


def _plan(job: Job) -> dict[str, Any]:
    from sfumato.cli.estimates import estimates, ratio_of, warning
    from sfumato.cli.train_ledger import room
    from sfumato.cli.train_synthesis import planned

    config, cost, found = job.config, job.cost, room(job)
    refused = None if found is None else found.refusal(config)
    training, privacy = config.training, config.privacy
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
        "setting": _setting(config),
        "method": _method(job),
        "synthesis": None if job.making is None else planned(job.making),
        "warmup": None if config.warmup is None else vars(config.warmup),
        "afterwards": _afterwards(job),
        "optimizer": training.optimizer,
        "learning_rate": training.learning_rate,
        "momentum": training.momentum or None,
        "steps": training.steps,
        "answers": job.answers,
        "reserve": training.reserve,
        "batch_size": job.sampler.expected + job.joining,
        "private_in_batch": job.sampler.expected,
        "public_in_batch": job.joining,
        "sampling": training.sampling,
        "parameters": job.parameters,
        "noise_over_signal": float(f"{ratio_of(job):.3g}"),
        **estimates(job),
        "features": list(job.layouts["private"].columns) or None,
        "continues": config.checkpoint.exists(),
        "fits_the_ledger": None if found is None else found.fits,
        "promise_afterwards": found.promise if found is not None and found.fits else None,
        "ledger": without_password(config.ledger),
        "would_write": [str(path) for path in job.would_write()],
        "warning": " ".join(filter(None, (refused, warning(job)))) or None,
    }


def _afterwards(job: Job) -> dict[str, Any] | None:
    """What is reserved for `sfumato select`, and with how much noise."""
    wished = job.config.afterwards
    if wished is None:
        return None
    return {**vars(wished), "noise_multipliers": {line.question: line.noise.scale for line in job.later}}


def _made(job: Job) -> dict[str, Any] | None:
    """Of the rows that were made, what `sfumato synthesize` says of them."""
    from sfumato.cli.synthesize_facts import result
    from sfumato.cli.synthesize_job import finished

    making = job.making
    provenance = None if making is None else finished(making)
    if making is None or provenance is None:
        return None
    wanted = ("folder", "rows", "trained_on", "held_out", "measures", "seconds")
    return {name: value for name, value in result(making.config, provenance).items() if name in wanted}


def _setting(config: Config) -> str:
    """As the papers call it."""
    warmup = config.warmup
    augmented = warmup is not None and (warmup.crop or warmup.flip or warmup.cutout)
    start = "cold" if warmup is None else "warm-aug" if augmented else "warm"
    return f"{start}, extended" if config.training.extended else start


def _method(job: Job) -> dict[str, dict[str, Any]]:
    """The stack, outermost first, with every option as it will be used."""
    from sfumato.cli.method import AUTO

    given = job.config.training.clip
    found = {layer.name: layer.options() for layer in job.layers(given if isinstance(given, int | float) else AUTO)}
    as_given = {"clip": given, "origin_clip": job.config.method.origin_clip}  # without a number: the clip norm
    return {name: {key: _plain(as_given.get(key, value)) for key, value in o.items()} for name, o in found.items()}


def _plain(value: Any) -> Any:
    """As JSON has it, which has no infinity."""
    return value if value is None or (isinstance(value, int | float) and value != math.inf) else str(value)
