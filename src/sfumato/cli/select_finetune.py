"""Fine-tuning on the labels that came back to `sfumato select`: post-processing, which costs no privacy."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.cli.augmentation import augmentation
from sfumato.cli.select_apart import RECORDED, as_record
from sfumato.cli.select_job import Job
from sfumato.data.tables import class_labels, layout, read_table
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.nn.modes import in_mode
from sfumato.objective import Objective
from sfumato.public import Public
from sfumato.run import Run
from sfumato.selection.finetune import fine_tune
from sfumato.selection.labels import Labelled


def unlabelled(job: Job, record: Mapping[str, Any]) -> Tensor:
    """Numbers of the images that keep what the model knew: all that were not chosen, or none if labels are alone."""
    rest = torch.ones(len(job.pool.rows), dtype=torch.bool)
    rest[record["indices"]] = False
    return rest.nonzero()[:, 0][: 0 if job.config.finetune.labels_alone else None]


def finetune(
    job: Job, record: Mapping[str, Any], labelled: Labelled, *, source: str, again: bool, progress: bool
) -> Run:
    """Train on the labels, which costs no privacy, and save the model; nothing is written unless all went well."""
    config, options, out = job.config, job.config.finetune, job.config.model_out
    if (out.exists() and any(out.iterdir())) and not again:
        raise InvalidArgument(f"[finetune] out={str(out)!r} holds files already: choose another out, or use --again.")
    if again and out.exists() and any(out.iterdir()) and not _is_finetuned(out):
        raise InvalidArgument(
            f"[finetune] out={str(out)!r} holds something else than a fine-tuned model: choose another."
        )
    test = _test(job)
    before = None if test is None else _accuracy(job.objective, test)
    images, rest, seed = job.rows(), unlabelled(job, record), config.select.seed
    with own_generators(seed):  # views are drawn by torch's own
        losses = fine_tune(
            job.objective,
            labelled.public(images, objective=job.objective, seed=seed),
            unlabelled=Public(images[rest]) if len(rest) else None,
            share=options.share,
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            augment=augmentation(options),
            seed=seed,
            progress=progress,
        )
    weights = {name: t.detach().clone() for name, t in job.objective.module.state_dict().items()}
    if not (math.isfinite(losses[-1]) and all(bool(t.isfinite().all()) for t in weights.values())):
        raise InvalidArgument(f"[finetune] learning_rate={options.learning_rate} makes the training diverge: lower it.")
    metrics = {"step": float(len(losses)), "loss": losses[-1]}
    if before is not None and test is not None:
        metrics |= {"test_accuracy_before": before, "test_accuracy": _accuracy(job.objective, test)}
    others = f", and on {len(rest)} others towards what it said of them before" if len(rest) else ""
    told = (
        f"Afterwards the model was trained on {len(labelled.indices)} public images, labelled {source}{others}: at no "
        "cost."
    )
    used = {"labels": len(labelled.indices), "unlabelled": len(rest), "source": source}
    run = Run(
        weights=weights,
        config={"finetuned": {**asdict(options), **used}},
        history=[metrics],
        statement=record["privacy"]["statement"],
        statement_text=f"{record['privacy']['statement_text']}\n{told}\n",
        steps_taken=len(losses),
    )
    _save(run, job, out)
    return run


def _save(run: Run, job: Job, out: Path) -> None:
    """Beside its place first, so that neither an old nor a new model is ever half there."""
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        run.save(draft)
        lower, upper = job.limits or (None, None)
        per_value = isinstance(lower, list) or isinstance(upper, list)
        limits = {"lower": lower, "upper": upper} if per_value else {"range": job.limits and [lower, upper]}
        described = {"model": asdict(job.model), "data": limits, RECORDED: as_record(job.private, out)}
        (draft / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        if out.exists():
            old = out.with_name(f"{draft.name}.old")
            out.rename(old)
            draft.rename(out)
            shutil.rmtree(old)
        else:
            draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_finetuned(out: Path) -> bool:
    try:
        return "finetuned" in json.loads((out / "run.json").read_text())["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _test(job: Job) -> Public | None:
    name = job.config.finetune.test
    if name is None:
        return None
    table = read_table(layout(job.config.file(name), "test", label=None), label=None)
    if math.prod(table.features.shape[1:]) != math.prod(job.shape):
        raise InvalidArgument(
            f"[finetune] test={name!r} has rows of {list(table.features.shape[1:])}, unlike the pool."
        )
    labels = torch.from_numpy(class_labels(table.labels, job.model.outputs, "test"))
    return Public((job.trained_rows(table.features), labels))


@torch.no_grad()
def _accuracy(objective: Objective, test: Public) -> float:
    module = objective.module
    with in_mode(module, training=False):
        hits = [(module(inputs).argmax(1) == labels) for inputs, labels in test.batches(1024)]
    return float(torch.cat(hits).double().mean())
