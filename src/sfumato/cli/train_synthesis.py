"""[synthesis] of `sfumato train`: its public rows as a generator takes them, and more of them made, once."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.cli.config import Config
from sfumato.cli.device import find_device
from sfumato.cli.interruption import interruptible, kept
from sfumato.cli.model import row_shape
from sfumato.cli.synthesize_config import SynthesisConfig
from sfumato.cli.synthesize_facts import plan
from sfumato.cli.synthesize_job import Job, execute, finished, prepare_rows, training_settings
from sfumato.cli.synthesize_rows import ImageRows, Scale, TableRows, refuse_private, split, taken
from sfumato.cli.synthesize_speed import speed_of
from sfumato.cli.train_public import Layouts, judges, own_rows
from sfumato.data.tables import Layout, Table, class_labels
from sfumato.errors import InvalidArgument
from sfumato.reading import suggestion

_TRIAL = 1.0  # seconds, to say how long it will take
_TRIED = 8  # images in a step of it on a CPU, where a whole one of a large network takes minutes
_ELSE = ""  # how a word is written that is none of its column's categories: it is read as none of them again


def prepare_synthesis(config: Config, making: SynthesisConfig, layouts: Layouts) -> Job:
    """Check all that can be checked, also what an earlier start has left; nothing is written.

    The generator sees neither the rows that judge afterwards, since what it makes of them would tell them to the model,
    nor those that are held out to measure its own rows with.
    """
    refuse_private(making, config.file(making.data.public), "[data] public")
    own = own_rows(config, layouts)
    rows = _rows(config, making, layouts, own)
    _, others = judges(config, len(own.labels))
    seen = _seen(making, rows, others.sort().values)
    held = torch.from_numpy(np.setdiff1d(np.arange(len(own.labels)), seen.numpy()))
    job = prepare_rows(making, rows, (seen, held), find_device("auto"))
    finished(job)
    return job


def make(job: Job, *, progress: bool) -> dict[str, Any]:
    """The provenance of the rows, which are made unless an earlier start has made them.

    How far it is gets told in any case, since it may take hours: without `progress` on stderr, as stdout is no terminal
    then, or JSON.
    """
    place = nullcontext() if progress else redirect_stdout(sys.stderr)
    with interruptible(kept(job.config.folder, again=False)), place:
        return finished(job) or execute(job, again=False, progress=True)


def planned(job: Job) -> dict[str, Any]:
    """What a dry run says of it; a copy of the network is tried out for a moment."""
    options, done = job.config.generator, finished(job) is not None
    seconds = options.seconds
    if options.images is not None and job.network is not None and not done:
        settings = training_settings(job)
        if job.device.type == "cpu":
            settings["batch_size"] = min(_TRIED, options.batch_size)
        speed = speed_of(_TRIAL, taken(job.rows, job.kept), job.network, settings)
        seconds = float(f"{options.images / speed:.3g}")
    facts = {name: value for name, value in plan(job, again=False).items() if name not in ("public", "seconds")}
    return {**facts, "finished": done, "training_seconds_estimate": 0.0 if done else seconds}


def _seen(making: SynthesisConfig, rows: ImageRows | TableRows, among: Tensor) -> Tensor:
    data, labels = making.data, rows.labels
    assert labels is not None
    part = replace(rows, rows=rows.rows[among], labels=labels[among])
    by_class = data.target == "class"
    seen, _ = split(part, data.held_out, data.seed, by_class=by_class, section=making.called("data"))
    return among[seen]


def _rows(config: Config, making: SynthesisConfig, layouts: Layouts, own: Table) -> ImageRows | TableRows:
    """Images, if the model sees rows of three dimensions or the file has two; else a table."""
    known = layouts["private"]
    shape = row_shape(config.model, known.shape)
    classes = making.data.target == "class"
    if classes:
        labels = torch.from_numpy(class_labels(own.labels, config.model.outputs, "public"))
    else:
        labels = torch.from_numpy(own.labels.astype(np.float32))
    if len(shape) == 1:
        return _table(config, making, known, own, labels)
    shape = (1, *shape) if len(shape) == 2 else shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InvalidArgument(
            f"[synthesis] is for tables and for images of 1 or 3 channels, and rows have the shape {list(shape)}: give "
            "[model] shape = [channels, height, width], or leave the section out."
        )
    if not classes:
        raise InvalidArgument(
            "[synthesis] makes images of classes, and [training] loss='squared-error' predicts a number: leave the "
            "section out."
        )
    return _images(config, own, labels, shape)


def _images(config: Config, own: Table, labels: Tensor, shape: tuple[int, ...]) -> ImageRows:
    """Black and white as declared, and cut there as the training cuts them; else the lowest and highest of all."""
    data, values = config.data, own.features
    if not np.isfinite(values).all():
        raise InvalidArgument(
            f"[synthesis] needs whole images, and public={data.public!r} has pixels that are no number."
        )
    if isinstance(data.range, list):
        low, high = data.range
    elif isinstance(data.lower, int | float) and isinstance(data.upper, int | float):
        low, high = data.lower, data.upper
    else:
        low, high = float(values.min()), float(values.max())
    if not low < high:
        raise InvalidArgument(f"[synthesis] finds no images in public={data.public!r}: all pixels are {low:g}.")
    values = values.clip(low, high)
    whole = (low, high) == (0, 255) and bool((values == np.rint(values)).all())
    pixels = values.astype(np.uint8) if whole else ((values - low) / (high - low)).astype(np.float32).clip(0, 1)
    return ImageRows(
        rows=torch.from_numpy(pixels).reshape(len(values), *shape),
        labels=labels,
        names=tuple(data.classes or ()),
        scale=Scale(row_shape=values.shape[1:], limits=(low, high), dtype="uint8" if whole else "float32"),
    )


def _table(config: Config, making: SynthesisConfig, known: Layout, own: Table, labels: Tensor) -> TableRows:
    """Columns of words as codes, one for all that is no declared category: the copula draws what it has seen."""
    data, code, categorical = config.data, known.encoding, making.data.categorical
    if strange := [name for name in categorical if name not in known.columns or name in code.categories]:
        names = [name for name in known.columns if name not in code.categories]
        hint = suggestion(strange[0], names)
        raise InvalidArgument(f"[synthesis] categorical names {strange[0]!r}, no column of numbers{hint}")
    if not known.columns:
        _check_known(own.features, "the arrays")
        return TableRows(rows=torch.from_numpy(own.features), labels=labels)
    parts, start = [], 0
    for name in known.columns:
        part = own.features[:, start : start + code.width(name)]
        start += code.width(name)
        if name in code.categories:
            parts.append(part.argmax(1).astype(np.float32))
        else:
            _check_known(part, f"column {name!r}")
            parts.append(part[:, 0])
    return TableRows(
        rows=torch.from_numpy(np.stack(parts, 1)),
        labels=labels,
        columns=known.columns,
        label=str(data.label),
        names=tuple(data.classes or ()),
        words={name: (*words, _ELSE) for name, words in code.categories.items() if name in known.columns},
    )


def _check_known(values: Any, what: str) -> None:
    if not np.isfinite(values).all():
        raise InvalidArgument(
            f"[synthesis] learns from whole rows, and {what} of [data] public has cells without a number: fill them "
            "in, ignore the column, or leave the section out."
        )
