"""`sfumato select`: which public images to label, a sheet to label them on, and fine-tuning on the labels."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.facts import tell
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.cli.select_job import Job


def select(
    config: Annotated[Path, typer.Argument(help="A TOML file; docs/labelling.md lists its keys.")],
    labels: Annotated[
        Path | None, typer.Option(help="labels.csv as the sheet saved it: fine-tune the model on them.")
    ] = None,
    oracle: Annotated[
        Path | None,
        typer.Option(help="For experiments: a file with the labels of the whole pool, in place of a person."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace the fine-tuned model of an earlier time.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan, and what of it fits; no private value is read, nothing is written."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Choose public images to be labelled by hand, and train a released model further on the labels."""
    from sfumato.cli.select_config import load_select_config

    if labels is not None and oracle is not None:
        raise InvalidArgument("--labels and --oracle both give the labels: leave one of them out.")
    checked = load_select_config(config)  # before torch is loaded: a misspelt key is told at once

    from sfumato.cli.select_job import prepare

    job = prepare(checked)
    progress = not as_json and sys.stdout.isatty()
    if labels is None and oracle is None:
        if again:
            raise InvalidArgument("--again is for fine-tuning: give --labels too, or choose another [select] out.")
        facts, title = _chosen(job, config, dry_run)
    else:
        facts, title = _finetuned(job, labels, oracle, again=again, dry_run=dry_run, progress=progress)
    tell(facts, title, as_json=as_json)


def _chosen(job: Job, path: Path, dry_run: bool) -> tuple[dict[str, Any], str]:
    from sfumato.cli.select_job import FREE, choose, read_record
    from sfumato.cli.select_ledger import room
    from sfumato.cli.select_statement import epsilons
    from sfumato.selection.near_private import NearPrivate
    from sfumato.selection.sheet import LABELS, RECORD, SHEET

    config, private, asked = job.config, job.config.private, job.asked
    facts: dict[str, Any] = {
        "strategy": config.select.strategy,
        "options": config.options or None,
        "images": config.select.n,
        "of": len(job.pool.rows),
        "classes": list(job.classes),
        "sheet": str(config.out / SHEET),
    }
    if dry_run:
        exists = (config.out / RECORD).exists()
        if exists:
            read_record(job)  # or it says what has changed
        noise = None if asked is None else {"pca": asked.pca, "support": asked.support}
        facts |= {
            "dry_run": True,
            "chosen_already": exists,
            "epsilon_spent": 0.0 if asked is None else asked.together,
            "noise_multipliers": noise,
            "privacy": FREE if private is None else f"Two questions to the dataset {private.name!r}.",
        }
        if private is not None and isinstance(job.strategy, NearPrivate) and not exists:
            facts |= room(config, private, job.run, job.strategy)
        return facts, f"Plan of {path} (no private value was read, nothing was written)"
    record, new = choose(job)
    privacy = record["privacy"]
    facts |= {"new": new, "epsilon_spent": privacy["epsilon"], "epsilon_in_all": epsilons(privacy["statement"])}
    facts |= {"privacy": privacy["text"]}
    here = os.path.relpath(config.out / LABELS)
    facts |= {
        "next": f"open the sheet, label, save (the browser puts labels.csv into its Downloads: move it to {here}), and "
        f"run sfumato select {path} --labels {here}"
    }
    return facts, f"Chosen as {path} says" if new else f"Chosen before, as {path} says: nothing was asked again"


def _finetuned(
    job: Job, labels: Path | None, oracle: Path | None, *, again: bool, dry_run: bool, progress: bool
) -> tuple[dict[str, Any], str]:
    from sfumato.cli.select_apart import ORACLE_ARRAYS, check_apart
    from sfumato.cli.select_finetune import finetune, unlabelled
    from sfumato.cli.select_job import read_record
    from sfumato.cli.select_pool import read_oracle
    from sfumato.cli.select_statement import epsilons
    from sfumato.selection.labels import oracle_labels, read_labels

    record = read_record(job)
    chosen = record["indices"]
    if labels is not None:
        check_apart("--labels", labels, job.private)
        labelled, source = read_labels(labels, chosen=chosen, classes=job.classes), "by hand"
    else:
        assert oracle is not None
        check_apart("--oracle", oracle, job.private, ORACLE_ARRAYS)
        known = read_oracle(oracle)
        if len(known) != len(job.pool.rows):
            raise InvalidArgument(
                f"--oracle={str(oracle)!r} has {len(known)} labels for {len(job.pool.rows)} images: give as many."
            )
        labelled, source = oracle_labels(known, chosen=chosen, classes=len(job.classes)), "by an oracle"
    facts: dict[str, Any] = {
        "labels": len(labelled.indices),
        "missing": len(labelled.missing),
        "per_class": dict(zip(job.classes, labelled.labels.bincount(minlength=len(job.classes)).tolist(), strict=True)),
        "source": source,
        "unlabelled": len(unlabelled(job, record)),
        "out": str(job.config.model_out),
        "epsilon_spent": 0.0,
        "epsilon_in_all": epsilons(record["privacy"]["statement"]),
    }
    if dry_run:
        return {"dry_run": True, **facts}, "Labels that were read; nothing was written"
    run = finetune(job, record, labelled, source=source, again=again, progress=progress)
    facts |= {name: value for name, value in run.metrics.items() if name != "step"}
    if facts.get("test_accuracy", 1.0) < facts.get("test_accuracy_before", 0.0):
        facts["warning"] = (
            f"The test accuracy fell from {facts['test_accuracy_before']:.4g} to {facts['test_accuracy']:.4g}: lower "
            "[finetune] learning_rate or epochs, label more images, or keep the model as it was."
        )
    facts["privacy"] = "Trained on public images and labels alone, which costs no privacy."
    return facts, f"Trained on {facts['labels']} labels ({facts['missing']} of the chosen images have none)"
