"""A checked config of `sfumato select`, carried out: choose and write the sheet, or fine-tune on what came back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sfumato
from sfumato.checkpoint import held_checkpoint
from sfumato.cli.augmentation import check_augmentation
from sfumato.cli.config_file import only_given
from sfumato.cli.interruption import CHARGED, interruptible
from sfumato.cli.model import row_shape
from sfumato.cli.sections import ModelSection
from sfumato.cli.select_config import PrivateSection, SelectConfig
from sfumato.cli.select_model import finished_run, model_section, released_module, scaled_range, weights_sha256
from sfumato.cli.select_pool import Pool, pictures, read_pool
from sfumato.data.arrays import Array
from sfumato.data.tables import Scaling, layout, read_table
from sfumato.errors import InvalidArgument
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger
from sfumato.private import Private
from sfumato.public import Public
from sfumato.run import Run
from sfumato.selection.advice import QuestionAdvice, advise_questions
from sfumato.selection.baselines import Entropy, KCenter, Margin, Random
from sfumato.selection.diverse_public import DiversePublic
from sfumato.selection.near_private import NearPrivate
from sfumato.selection.released import Released
from sfumato.selection.sheet import RECORD, SHEET, Sheet, check_classes
from sfumato.selection.strategy import Strategy, entropy, margin
from sfumato.selection.support import Threshold, TopK

FREE = "Chosen from public images and released weights alone, which costs no privacy."


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Everything that is known before a private value is read."""

    config: SelectConfig
    model: ModelSection
    objective: Objective
    run: Run
    pool: Pool
    shape: tuple[int, ...]  # of one row as the model sees it
    between: tuple[float, float] | None  # what is mapped to 0..1
    classes: tuple[str, ...]
    strategy: Strategy
    asked: QuestionAdvice | None

    def settings(self) -> dict[str, Any]:
        """What the choice depends on: the same again gives the same sheet."""
        config, private = self.config, self.config.private
        return {
            "strategy": config.select.strategy,
            "n": config.select.n,
            "seed": config.select.seed,
            "options": config.options,
            "classes": list(self.classes),
            "range": None if self.between is None else list(self.between),
            "pool": {"rows": len(self.pool.rows), "row": list(self.pool.rows.shape[1:]), "sha256": self.pool.sha256()},
            "model": {
                **asdict(self.model),
                "embedding": config.model.embedding,
                "sha256": weights_sha256(self.objective.module),
            },
            "private": None if private is None else asdict(private),
        }

    def rows(self, values: Array) -> Tensor:
        """As the model takes them."""
        floats = values.astype(np.float32)
        scaled = floats if self.between is None else Scaling.declared(*self.between, self.shape)(floats)
        return torch.from_numpy(np.ascontiguousarray(scaled)).reshape(len(values), *self.shape)


def prepare(config: SelectConfig) -> Job:
    """Read what is public and check all of it; no private value, no ledger, nothing written."""
    folder = config.file(config.model.weights)
    run, trained = finished_run(folder)
    model = model_section(config, trained)
    between = scaled_range(config, trained)
    pool = read_pool(config.file(config.pool.images), model.shape[0] if model.shape and len(model.shape) == 3 else None)
    shape = row_shape(model, pool.rows.shape[1:])
    if not 1 <= config.select.n <= len(pool.rows):
        raise InvalidArgument(f"[select] n={config.select.n} must be at most {len(pool.rows)}, the images of the pool.")
    classes = tuple(config.pool.classes or map(str, range(model.outputs)))
    if len(classes) != model.outputs:
        raise InvalidArgument(
            f"[pool] classes={list(classes)} has {len(classes)} names, and the model has outputs={model.outputs}: name "
            "each of them."
        )
    check_classes(classes)
    check_augmentation("finetune", config.finetune, shape)
    pictures(pool, np.arange(1), tuple(model.shape or ()), between)  # what cannot be shown is told of now
    objective = Objective(released_module(config, model, shape, run), cross_entropy)
    strategy = _strategy(config)
    return Job(
        config=config,
        model=model,
        objective=objective,
        run=run,
        pool=pool,
        shape=shape,
        between=between,
        classes=classes,
        strategy=strategy,
        asked=_advice(strategy, config.private),
    )


# ------------------------------------------------------------------------------------------------ choosing


def choose(job: Job) -> tuple[dict[str, Any], bool]:
    """Write the folder to label, and return its record and whether it is new; it is chosen, and paid for, once."""
    out = job.config.out
    if not (out / RECORD).exists() and out.exists() and any(p.name != f".{RECORD}.lock" for p in out.iterdir()):
        raise InvalidArgument(f"[select] out={str(out)!r} holds other files: choose another folder.")
    with _own_folder(out), held_checkpoint(out / RECORD):
        record = read_record(job) if (out / RECORD).exists() else None
        if record is not None and (out / SHEET).exists():
            return record, False
        made = record or _chosen(job)
        indices = np.array(made["indices"])
        names = None if job.pool.names is None else [job.pool.names[i] for i in indices]
        Sheet(
            images=pictures(job.pool, indices, tuple(job.model.shape or ()), job.between),
            indices=made["indices"],
            classes=job.classes,
            provenance=made,
            facts={
                "Chosen": f"{len(indices)} of {len(job.pool.rows)} public images, by {job.config.select.strategy}",
                "Privacy": made["privacy"]["text"],
                "Read back": f"sfumato select {job.config.path.name} --labels labels.csv",
            },
            names=names,
            title=f"{len(indices)} images to label",
        ).write(out)
    return made, record is None


@contextmanager
def _own_folder(out: Path) -> Iterator[None]:
    """Leaves no new folder behind if nothing could be chosen."""
    new = [path for path in (out, *out.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if new and not (out / RECORD).exists():
            (out / f".{RECORD}.lock").unlink(missing_ok=True)
            for path in new:
                with suppress(OSError):  # not empty
                    path.rmdir()
        raise


def read_record(job: Job) -> dict[str, Any]:
    """What is in `out`, if it was chosen as the config says now."""
    path = job.config.out / RECORD
    if not path.is_file():
        raise InvalidArgument(f"[select] out={str(path.parent)!r} holds no {RECORD}: choose first, without --labels.")
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before = record["settings"]
        indices = [int(i) for i in record["indices"]]
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(f"{str(path)!r} is damaged: choose again into another out.") from None
    for key, value in job.settings().items():
        if before.get(key) != json.loads(json.dumps(value)):
            raise InvalidArgument(
                f"{key} is not what it was when out={str(path.parent)!r} was chosen ({_short(before.get(key))} then, "
                f"{_short(value)} now): put it back, or choose another out."
            )
    if not indices or min(indices) < 0 or max(indices) >= len(job.pool.rows):
        raise InvalidArgument(f"{str(path)!r} is damaged: choose again into another out.")
    return record


def _chosen(job: Job) -> dict[str, Any]:
    model = Released(job.objective.module, embedding=job.config.model.embedding)
    pool = Public(job.rows(job.pool.rows))
    n, private = job.config.select.n, job.config.private
    statement: dict[str, Any] = dict(job.run.statement)
    if private is None:
        found, text, cost = job.strategy(model, pool, n), FREE, 0.0
        statement_text = job.run.statement_text
    else:
        model.of(pool)  # a model that has diverged is told of before anything is asked
        found, latest = _near_private(job, private, model, pool)
        statement, statement_text = latest.to_json(), latest.to_text()
        assert job.asked is not None
        cost = job.asked.together
        text = (
            f"Two questions were asked of the dataset {private.name!r}, for epsilon={cost:.4g} at "
            f"delta={private.delta:g}; all that was ever asked of it costs at most epsilon={latest.epsilon:.4g}."
        )
    return {
        "settings": job.settings(),
        "indices": found.tolist(),
        "privacy": {"epsilon": cost, "text": text, "statement": statement, "statement_text": statement_text},
        "sfumato": sfumato.__version__,
    }


def _near_private(job: Job, options: PrivateSection, model: Released, pool: Public) -> tuple[Tensor, Any]:
    config, asked, strategy = job.config, job.asked, job.strategy
    assert isinstance(strategy, NearPrivate)
    assert asked is not None
    rows = _private_rows(job, options)
    with Ledger(config.place(options.ledger)) as ledger:
        known = options.budget is None and options.name in ledger.account_names()
        private = Private(
            rows[0],
            name=options.name,
            size=options.size,
            ledger=ledger,
            budget=None if known else Budget(options.budget or options.epsilon, options.delta),
            unit="example" if options.users is None else "user",
            users=rows[1],
            records_per_user=options.records_per_user,
            adjacency=options.adjacency,
        )
        if private.account.budget.delta != options.delta:
            raise InvalidArgument(
                f"[private] delta={options.delta:g} is not the {private.account.budget.delta:g} of the account "
                f"{options.name!r} in the ledger: give that, since one dataset has one delta."
            )
        key = f"select {config.out.resolve()} "
        opened = {line.resume_key or "" for line in private.statement().asked if line.open}
        for left in (name for name in opened if name.startswith(key)):
            private.account.resume(left).close()  # of a process that was killed: what it did not take comes back
        lines = strategy.lines(private, pca=asked.pca, support=asked.support)
        plan = private.plan(*lines, resume_key=key + secrets.token_hex(8), note="selection")
        try:
            with interruptible(CHARGED):
                found = strategy(model, pool, config.select.n, private.ask)
        finally:
            plan.close()
        return found, private.statement()


def _private_rows(job: Job, options: PrivateSection) -> tuple[Tensor, Array | None]:
    table = layout(job.config.file(options.data), "private", label=None, users=options.users)
    if [n for n in table.shape if n > 1] != [n for n in job.pool.rows.shape[1:] if n > 1]:
        raise InvalidArgument(
            f"[private] data={options.data!r} has rows of {list(table.shape)} and the pool of "
            f"{list(job.pool.rows.shape[1:])}: give images of one size."
        )
    read = read_table(table, label=None, users=options.users)
    return job.rows(read.features), read.users


def _advice(strategy: Strategy, options: PrivateSection | None) -> QuestionAdvice | None:
    """Noise for both questions, so that they cost epsilon together; decided before anything is asked."""
    if options is None or not isinstance(strategy, NearPrivate):
        return None
    return advise_questions(
        strategy,
        budget=Budget(options.epsilon, options.delta),
        size=options.size,
        support=options.support,
        adjacency=options.adjacency,
    )


def _strategy(config: SelectConfig) -> Strategy:
    select, given = config.select, config.options
    shared: dict[str, Any] = {key: given[key] for key in ("uncertain", "components") if key in given}
    if "uncertainty" in given:
        shared["uncertainty"] = {"entropy": entropy, "margin": margin}[given["uncertainty"]]
    if select.strategy == "near-private":
        top = select.voters == "top-k"
        voters = TopK(k=select.top) if top else Threshold(**only_given(quantile=select.quantile))
        return NearPrivate(voters=voters, bound=select.bound, **shared)
    if select.strategy == "diverse-public":
        return DiversePublic(seed=select.seed, **only_given(each=select.each), **shared)
    made: dict[str, Callable[[], Strategy]] = {
        "random": partial(Random, seed=select.seed),
        "entropy": Entropy,
        "margin": Margin,
        "k-center": partial(KCenter, seed=select.seed),
    }
    return made[select.strategy]()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
