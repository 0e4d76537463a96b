"""A checked config of `sfumato select`, carried out: choose and write the sheet, or fine-tune on what came back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sfumato.cli.near_private import close_half_asked, counted, held_reservation
from sfumato.cli.sections import ModelSection
from sfumato.cli.select_apart import POOL_ARRAYS, TEST_ARRAYS, PrivateRows, check_apart, private_rows
from sfumato.cli.select_config import PrivateSection, SelectConfig
from sfumato.cli.select_ledger import advice, check_delta_of, ledger_of, refusal, reserved
from sfumato.cli.select_model import (
    Limits,
    finished_run,
    model_section,
    pool_range,
    released_module,
    training_limits,
    weights_sha256,
)
from sfumato.cli.select_pool import Pool, check_within, pictures, read_pool
from sfumato.cli.select_statement import check_size, statement_about, with_latest
from sfumato.data.arrays import Array
from sfumato.data.tables import Scaling, layout, read_table
from sfumato.errors import BudgetExceeded, InvalidArgument
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget, at_most
from sfumato.privacy.ledger_plan import Plan
from sfumato.private import Private
from sfumato.public import Public
from sfumato.questions import Gram
from sfumato.run import Run
from sfumato.selection.advice import QuestionAdvice
from sfumato.selection.baselines import Entropy, KCenter, Margin, Random
from sfumato.selection.diverse_public import DiversePublic
from sfumato.selection.near_private import NearPrivate
from sfumato.selection.released import Released
from sfumato.selection.sheet import IMAGES, LABELS, RECORD, SHEET, Sheet, check_classes
from sfumato.selection.strategy import Strategy, entropy, margin
from sfumato.selection.support import Threshold, TopK
from sfumato.training import plan_key

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
    between: tuple[float, float] | None  # what is mapped to 0..1 in the pool
    limits: Limits | None  # and in the files that the training knew
    classes: tuple[str, ...]
    strategy: Strategy
    asked: QuestionAdvice | None
    private: tuple[PrivateRows, ...]  # which no other file may be

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
            "private": None if private is None else {k: v for k, v in asdict(private).items() if k != "ledger"},
        }

    def rows(self) -> Tensor:
        """The pool as the model takes it."""
        return self._scaled(self.pool.rows, self.between)

    def trained_rows(self, values: Array) -> Tensor:
        """Rows of a file that is like that of the training."""
        return self._scaled(values, self.limits)

    def _scaled(self, values: Array, limits: Limits | None) -> Tensor:
        floats = values.astype(np.float32)
        scaled = floats if limits is None else Scaling.declared(*limits, values.shape[1:])(floats)
        return torch.from_numpy(np.ascontiguousarray(scaled)).reshape(len(values), *self.shape)


def prepare(config: SelectConfig) -> Job:
    """Read what is public and check all of it; no private value, no ledger, nothing written."""
    folder = config.file(config.model.weights)
    run, trained = finished_run(folder)
    model = model_section(config, trained)
    if config.private is not None:
        check_size(config.private.size, statement_about(run, config.private.name))
    private = private_rows(config, folder, trained)
    images = config.file(config.pool.images)
    check_apart("[pool] images", images, private, POOL_ARRAYS)
    if config.finetune.test is not None:
        check_apart("[finetune] test", config.file(config.finetune.test), private, TEST_ARRAYS)
    pool = read_pool(images, model.shape[0] if model.shape and len(model.shape) == 3 else None)
    between = pool_range(config, trained, image_files=pool.names is not None)
    check_within(config.pool.images, pool, between)
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
        limits=training_limits(config, trained),
        classes=classes,
        strategy=strategy,
        asked=advice(strategy, config.private) if config.private and isinstance(strategy, NearPrivate) else None,
        private=private,
    )


# ------------------------------------------------------------------------------------------------ choosing


def choose(job: Job) -> tuple[dict[str, Any], bool]:
    """Write the folder to label, and return its record and whether it is new; it is chosen, and paid for, once."""
    out = job.config.out
    if not (out / RECORD).exists() and out.exists() and any(p.name != f".{RECORD}.lock" for p in out.iterdir()):
        raise InvalidArgument(f"[select] out={str(out)!r} holds other files: choose another folder.")
    with _own_folder(out), held_checkpoint(out / RECORD):
        record = read_record(job) if (out / RECORD).exists() else None
        if record is not None and _whole(out, record["indices"]):
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
                "Read back": f"sfumato select {job.config.path.name} --labels labels.csv, by the path at which the "
                "browser saved it, such as Downloads/labels.csv",
            },
            names=names,
            title=f"{len(indices)} images to label",
        ).write(out)
    return made, record is None


def _whole(out: Path, indices: Sequence[int]) -> bool:
    """Whether nothing that can be made again is missing from the folder."""
    shown = {int(path.stem) for path in (out / IMAGES).glob("*.png") if path.stem.isdigit()}
    return shown.issuperset(indices) and (out / SHEET).exists() and (out / LABELS).exists()


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
        if before.get(key) != (now := json.loads(json.dumps(value))):
            name, old, new = _changed(key, before.get(key), now)
            raise InvalidArgument(
                f"{name} is not what it was when out={str(path.parent)!r} was chosen ({_short(old)} then, "
                f"{_short(new)} now): put it back, or choose another out."
            )
    if not indices or min(indices) < 0 or max(indices) >= len(job.pool.rows):
        raise InvalidArgument(f"{str(path)!r} is damaged: choose again into another out.")
    return record


def _chosen(job: Job) -> dict[str, Any]:
    model = Released(job.objective.module, embedding=job.config.model.embedding)
    pool = Public(job.rows())
    n, private = job.config.select.n, job.config.private
    statement: dict[str, Any] = dict(job.run.statement)
    if private is None:
        found, text, cost = job.strategy(model, pool, n), FREE, 0.0
        statement_text = job.run.statement_text
    else:
        model.of(pool)  # a model that has diverged is told of before anything is asked
        found, latest, prepaid = _near_private(job, private, model, pool)
        statement, statement_text = with_latest(job.run, {**latest.to_json(), "text": latest.to_text()})
        assert job.asked is not None
        cost = 0.0 if prepaid else job.asked.together
        price = f"for at most epsilon={at_most(cost)} at delta={private.delta:g}"
        text = (
            f"Two questions were asked of the dataset {private.name!r}, "
            f"{'which the training had reserved and paid for' if prepaid else price}; all that was ever asked of it "
            f"costs at most epsilon={at_most(latest.epsilon)}."
        )
        if "statements" in statement:
            text += " The model rests on other private data too, which has a statement of its own."
        if not statement["private"]:
            text = f"NOT PRIVATE: see the warning in the statement. {text}"
    return {
        "settings": job.settings(),
        "indices": found.tolist(),
        "privacy": {"epsilon": cost, "text": text, "statement": statement, "statement_text": statement_text},
        "sfumato": sfumato.__version__,
    }


def _near_private(job: Job, options: PrivateSection, model: Released, pool: Public) -> tuple[Tensor, Any, bool]:
    """The choice, the statement after it, and whether it was paid for with the training."""
    config, strategy, folder = job.config, job.strategy, job.config.file(job.config.model.weights)
    assert isinstance(strategy, NearPrivate)
    rows = _private_rows(job, options)
    with ledger_of(config, options, job.run) as ledger:
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
        check_delta_of(private.account, options)
        with held_reservation(private.account, folder):
            return _answered(job, options, private, model, pool)


def _answered(
    job: Job, options: PrivateSection, private: Private, model: Released, pool: Public
) -> tuple[Tensor, Any, bool]:
    config, strategy = job.config, job.strategy
    assert isinstance(strategy, NearPrivate)
    key = f"select {config.out.resolve()} "
    opened = {line.resume_key or "" for line in private.statement().asked if line.open}
    for left in (name for name in opened if name.startswith(key)):
        private.account.resume(left).close()  # of a process that was killed: what it did not take comes back
    close_half_asked(private.account, job.run, config.file(config.model.weights))
    prepaid = reserved(config, options, private.account, strategy)
    plan = _plan(job, private, key, prepaid=prepaid)
    try:
        with interruptible(CHARGED):
            found = strategy(model, pool, config.select.n, private.ask)
    except BaseException:
        if prepaid and plan.remaining(Gram.kind()):
            plan.pause()  # nothing was asked: what the training has reserved stays so
        raise
    finally:
        plan.close()
    return found, private.statement(), prepaid


def _plan(job: Job, private: Private, key: str, *, prepaid: bool) -> Plan:
    """What the training has reserved, or a plan of its own."""
    strategy, asked, options = job.strategy, job.asked, job.config.private
    assert isinstance(strategy, NearPrivate)
    assert asked is not None
    assert options is not None
    if prepaid:
        folder = job.config.file(job.config.model.weights)
        return private.resume(plan_key(folder / "checkpoint.pt"), seen=counted(job.run, options.name, folder))
    lines = strategy.lines(private, pca=asked.pca, support=asked.support)
    try:
        return private.plan(*lines, resume_key=key + secrets.token_hex(8), note="selection")
    except BudgetExceeded as error:
        raise refusal(error, private.account, strategy, options) from None


def _private_rows(job: Job, options: PrivateSection) -> tuple[Tensor, Array | None]:
    table = layout(job.config.file(options.data), "private", label=None, users=options.users)
    if [n for n in table.shape if n > 1] != [n for n in job.pool.rows.shape[1:] if n > 1]:
        raise InvalidArgument(
            f"[private] data={options.data!r} has rows of {list(table.shape)} and the pool of "
            f"{list(job.pool.rows.shape[1:])}: give images of one size."
        )
    read = read_table(table, label=None, users=options.users)
    return job.trained_rows(read.features), read.users


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


def _changed(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """What of the config it is, where that is known, and what it was and is."""
    if key not in ("private", "options", "model") or not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return key, old, new
    inner = next(name for name in [*new, *old] if new.get(name) != old.get(name))
    if inner == "sha256":
        return key, old, new
    return f"[{'select' if key == 'options' else key}] {inner}", old.get(inner), new.get(inner)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
