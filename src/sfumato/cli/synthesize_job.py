"""A synthesis from a checked config: a generator is trained, guided, sampled and measured, and says what it saw."""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.cli.config_file import only_given
from sfumato.cli.synthesize_config import NETWORK, SynthesisConfig, check_of_use
from sfumato.cli.synthesize_measures import check_measures, measured
from sfumato.cli.synthesize_record import Folder, Record, check_unchanged, is_unchanged
from sfumato.cli.synthesize_rows import ImageRows, Scale, TableRows, npz, read_rows, split, taken
from sfumato.cli.synthesize_speed import images_in
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.patience import Patience
from sfumato.synthesis import (
    AUGMENT_LABELS,
    Churn,
    Ddpm,
    Edm,
    Generator,
    Guidance,
    Synthetic,
    TableGenerator,
    cifar_unet,
    ddpmpp_unet,
    digits_unet,
    discriminator,
    fit_table,
    grid,
    store,
    train_generator,
    train_guidance,
    unet,
)
from sfumato.synthesis.discriminator import Discriminator, load_discriminator, save_discriminator
from sfumato.synthesis.grid import write_png
from sfumato.synthesis.images import PublicImages
from sfumato.synthesis.unet import UNet

_SIZES = {"digits": digits_unet, "cifar": cifar_unet, "ddpmpp": ddpmpp_unet}
_PROCESSES = {"edm": Edm, "ddpm": Ddpm}
_STATEMENT = (
    "No private data was touched: these rows were made by a generator that saw the public rows named here and nothing "
    "else; that those rows are public is the word of who declared them."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """All that is known before the work begins."""

    config: SynthesisConfig
    rows: ImageRows | TableRows
    kept: Tensor  # numbers of the rows that the generator sees
    held: Tensor  # and of the others
    device: torch.device
    network: UNet | None  # with its first weights; a table's generator has none
    discriminator: Discriminator | None
    aside: bool = False  # while a finished synthesis is made anew

    @property
    def folder(self) -> Folder:
        columns = isinstance(self.rows, TableRows) and self.rows.columns
        whole = Folder(self.config.folder, "synthetic.csv" if columns else None)
        return whole.aside if self.aside else whole

    @property
    def autocast(self) -> torch.dtype | None:
        wanted = self.config.generator.precision or ("bfloat16" if self.device.type == "cuda" else "float32")
        return torch.bfloat16 if wanted == "bfloat16" else None

    def would_write(self) -> list[Path]:
        folder = self.folder
        paths = [folder.rows, folder.provenance, folder.began]
        if self.network is not None:
            paths += [folder.grid, folder.generator / "generator.json", folder.generator / "weights.safetensors"]
        return paths if self.discriminator is None else [*paths, folder.discriminator]


def prepare(config: SynthesisConfig, device: torch.device, *, again: bool) -> Job:
    """Read the public rows and check all that can be checked; nothing is written."""
    rows = read_rows(config)
    kept, held = split(rows, config.data.held_out, config.data.seed, by_class=config.data.target == "class")
    return prepare_rows(config, rows, (kept, held), device, again=again)


def prepare_rows(
    config: SynthesisConfig,
    rows: ImageRows | TableRows,
    parts: tuple[Tensor, Tensor],
    device: torch.device,
    *,
    again: bool = False,
) -> Job:
    """The same for rows that are read already; `parts` are numbers of those the generator sees, and of the others."""
    kept, held = parts
    check_of_use(config, tables=isinstance(rows, TableRows))
    check_measures(config, rows, kept, held)
    network = guide = None
    if isinstance(rows, ImageRows):
        network = _network(config, rows).to(device)
        _check_classes(rows, kept)
        _churn(config)
        if config.guidance is not None:
            guide = _discriminator(config, rows).to(device)
            Guidance(guide, weight=config.guidance.weight)
    job = Job(config=config, rows=rows, kept=kept, held=held, device=device, network=network, discriminator=guide)
    job.folder.check(config, again=again)
    return job


def finished(job: Job) -> dict[str, Any] | None:
    """The provenance of what is made already, by the same config and of the same rows; raises if it is of others."""
    if not job.folder.provenance.exists():
        return None
    provenance = job.folder.finished()
    check_unchanged(job.config, provenance)
    now = _table_generator(job).provenance if isinstance(job.rows, TableRows) else _facts(job)
    _check_rows(job.config, now, provenance)
    _before(job.config, job.folder, provenance)
    return provenance


def execute(job: Job, *, again: bool, progress: bool) -> dict[str, Any]:
    """Make the rows, and return their provenance. Interrupted, the same again goes on where it was."""
    folder = job.folder
    if not (again and folder.provenance.exists()):
        if again:
            folder.clear()
        return _made(job, progress=progress)
    draft = folder.aside
    if draft.began.exists() and not is_unchanged(job.config, draft.read()):
        draft.clear()
    try:
        provenance = _made(replace(job, aside=True), progress=progress)
    except InvalidArgument:  # such as other rows than the draft was begun with
        draft.clear()
        draft.path.rmdir()
        raise
    folder.settle()
    return provenance


def _made(job: Job, *, progress: bool) -> dict[str, Any]:
    config, folder = job.config, job.folder
    record = Record(folder, config)
    if isinstance(job.rows, TableRows):
        with record.timed("training"):
            table = _table_generator(job)
        made, trained, guided = table.public(config.sample.n, seed=config.sample.seed), table.provenance, None
        store.put(folder.rows, job.rows.written(*made.batch()))
        about: dict[str, Any] = {"kind": "table"}
    else:
        generator = _generator(job, record, progress=progress)
        guide = _guide(job, record, generator, progress=progress)
        trained, guided = generator.provenance, None if config.guidance is None else asdict(config.guidance)
        with record.timed("sampling"):
            made = _samples(config, generator, guide, config.sample.n, config.sample.seed, progress=progress)
            images, labels = _parts(made)
            store.put(folder.rows, npz(job.rows.scale.written(images, labels)))
            write_png(folder.grid, grid(images, labels))
        about = {"kind": "images", "scale": asdict(job.rows.scale)}
    with record.timed("measuring"):
        measures = measured(config, job.rows, job.kept, job.held, made, job.device, shown=progress)
    provenance = {
        "statement": _STATEMENT,
        **about,
        "public": {
            "file": config.data.public,
            "rows": len(job.rows.rows),
            "trained_on": len(job.kept),
            "held_out": len(job.held),
            "classes": list(job.rows.names) or _numbers(job.rows),
        },
        "generator": dict(trained),
        "guidance": guided,
        "rows": len(made),
        "sha256": _digest(folder.rows),
        "draws": [_draw(made)],
        "measures": measures,
        "seconds": record.seconds,
        "config": config.to_json(),
    }
    _keep(folder, provenance)
    return provenance


def add_more(config: SynthesisConfig, n: int, device: torch.device, *, progress: bool) -> dict[str, Any]:
    """n more rows after those that are there, without training; returns the new provenance."""
    if n < 1:
        raise InvalidArgument(f"--more={n} must be at least 1: it is how many rows to add.")
    provenance = Folder(config.folder).finished()
    check_unchanged(config, provenance)
    # The next stream of the same seed, so that no draw repeats another.
    seed = int(np.random.SeedSequence([config.sample.seed, len(provenance["draws"])]).generate_state(1)[0])
    start = time.perf_counter()
    if provenance["kind"] == "table":
        job = prepare(config, device, again=True)
        assert isinstance(job.rows, TableRows)
        folder, table = job.folder, _table_generator(job)
        _check_rows(config, table.provenance, provenance)
        made = table.public(n, seed=seed)
        before = _before(config, folder, provenance)
        content = _appended(before, job.rows.written(*made.batch()), text=bool(job.rows.columns))
    else:
        folder = Folder(config.folder)
        before = _before(config, folder, provenance)
        generator = Generator.load(folder.generator, device=device)
        guide = None
        if config.guidance is not None:
            guide = _guidance(config, load_discriminator(folder.discriminator, device))
        made = _samples(config, generator, guide, n, seed, progress=progress)
        facts = provenance["scale"]
        scale = Scale(row_shape=tuple(facts["row_shape"]), limits=tuple(facts["limits"]), dtype=facts["dtype"])
        content = _appended(before, npz(scale.written(*_parts(made))), text=False)
    store.put(folder.rows, content)
    seconds = provenance["seconds"]
    provenance |= {
        "rows": provenance["rows"] + n,
        "sha256": _digest(folder.rows),
        "draws": [*provenance["draws"], _draw(made)],
        "seconds": {**seconds, "sampling": round(seconds.get("sampling", 0.0) + time.perf_counter() - start, 3)},
    }
    _keep(folder, provenance)
    return provenance


# ------------------------------------------------------------------------------------------------ the pieces


def _numbers(rows: ImageRows | TableRows) -> list[int]:
    """Of the classes that have no names; none where there are no classes."""
    labels = rows.labels
    return [] if labels is None or labels.is_floating_point() else sorted(set(labels.tolist()))


def _check_classes(rows: ImageRows, kept: Tensor) -> None:
    """Of a class that it has never seen, a generator would make anything."""
    seen = set() if rows.labels is None else set(rows.labels[kept].tolist())
    if missing := sorted(set(range(rows.classes)) - seen):
        raise InvalidArgument(
            f"[data] public leaves no row of class {missing[0]} to train on, of {rows.classes} classes: number them "
            "from 0 without gaps, or hold fewer rows out."
        )


def _network(config: SynthesisConfig, rows: ImageRows) -> UNet:
    generator = config.generator
    common: dict[str, Any] = {
        "image": rows.image,
        "classes": rows.classes,
        "augment_labels": AUGMENT_LABELS if generator.augment_p else 0,
    }
    with own_generators(generator.seed):
        if generator.size is not None:
            return _SIZES[generator.size](**common)
        return unet(**common, **only_given(**{name: getattr(generator, name) for name in NETWORK}))


def _discriminator(config: SynthesisConfig, rows: ImageRows) -> Discriminator:
    guidance = config.guidance
    assert guidance is not None
    with own_generators(guidance.seed):
        return discriminator(
            rows.image,
            classes=rows.classes,
            channels=guidance.channels,
            multipliers=guidance.multipliers,
            blocks=guidance.blocks,
        )


def training_settings(job: Job) -> dict[str, Any]:
    """Of `train_generator`, but for how long."""
    options = job.config.generator
    return {
        "process": _PROCESSES[options.process](),
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "rate_ramp": options.rate_ramp,
        "ema_halflife": options.ema_halflife,
        "augment_p": options.augment_p,
        "autocast": job.autocast,
        "seed": options.seed,
    }


def _facts(job: Job) -> dict[str, Any]:
    """Of the images that the generator sees."""
    return PublicImages.of(taken(job.rows, job.kept)).facts()


def _generator(job: Job, record: Record, *, progress: bool) -> Generator:
    """As it was left, finished or not."""
    folder, public = job.folder, taken(job.rows, job.kept)
    if (folder.generator / "generator.json").exists():
        generator = Generator.load(folder.generator, device=job.device)
        _check_rows(job.config, _facts(job), {"generator": generator.provenance})
        return generator
    assert job.network is not None
    options = job.config.generator
    settings = training_settings(job)
    with record.timed("training"), Patience() as patience:
        images = record.images or options.images or images_in(options.seconds or 0, public, job.network, settings)
        record.images = images
        generator = train_generator(
            public,
            network=job.network,
            images=images,
            checkpoint=folder.checkpoint,
            checkpoint_every=options.checkpoint_every,
            stop=lambda: patience.ended,
            progress=progress,
            **settings,
        )
        if patience.ended:
            raise KeyboardInterrupt
    generator.save(folder.generator)
    folder.checkpoint.unlink(missing_ok=True)
    return generator


def _guide(job: Job, record: Record, generator: Generator, *, progress: bool) -> Guidance | None:
    options, path = job.config.guidance, job.folder.discriminator
    if options is None or job.discriminator is None:
        return None
    if path.exists():
        return _guidance(job.config, load_discriminator(path, job.device))
    with record.timed("guidance"):
        train_guidance(
            generator,
            taken(job.rows, job.kept, seed=options.seed),
            network=job.discriminator,
            weight=options.weight,
            steps=options.steps,
            rows=options.rows,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=options.seed,
            progress=progress,
        )
    save_discriminator(job.discriminator, path)
    return _guidance(job.config, job.discriminator)


def _guidance(config: SynthesisConfig, network: Discriminator) -> Guidance:
    options = config.guidance
    assert options is not None
    highest = math.inf if options.highest is None else options.highest
    return Guidance(network, weight=options.weight, between=(options.lowest, highest))


def _churn(config: SynthesisConfig) -> Churn | None:
    wanted = config.sample.stochastic
    if isinstance(wanted, bool):
        return Churn() if wanted else None
    return Churn(**asdict(wanted))


def _samples(
    config: SynthesisConfig, generator: Generator, guide: Guidance | None, n: int, seed: int, *, progress: bool
) -> Synthetic:
    sample = config.sample
    return generator.public(
        n,
        seed=seed,
        steps=sample.steps,
        batch_size=sample.batch_size,
        guide=guide,
        stochastic=_churn(config),
        progress=progress,
    )


def _table_generator(job: Job) -> TableGenerator:
    data, rows = job.config.data, job.rows
    assert isinstance(rows, TableRows)
    return fit_table(
        taken(rows, job.kept),
        categorical=[rows.columns.index(name) for name in (*data.categorical, *rows.words)],
        classes=data.target == "class",
        shrinkage=job.config.generator.shrinkage,
    )


def _parts(made: Synthetic) -> tuple[Tensor, Tensor | None]:
    batch = made.batch()
    return (batch[0], batch[1]) if isinstance(batch, tuple | list) else (batch, None)


def _draw(made: Synthetic) -> dict[str, Any]:
    return {name: value for name, value in made.provenance.items() if name not in ("generator", "statement")}


def _check_rows(config: SynthesisConfig, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    if now["sha256"] == before["generator"]["sha256"]:
        return
    if config.within is None:
        raise InvalidArgument(
            "[data] public has other rows than those that the generator in [output] folder was made from: put them "
            "back, use --again, or choose another folder."
        )
    raise InvalidArgument(
        f"[data] public, and what [training] choose and [{config.within}] leave of it, has other rows than those that "
        f"the generator in {str(config.folder)!r} was made from: put them back, {config.otherwise}."
    )


def _before(config: SynthesisConfig, folder: Folder, provenance: Mapping[str, Any]) -> bytes:
    if not folder.rows.exists() or _digest(folder.rows) != provenance["sha256"]:
        remedy = "make it anew with --again" if config.within is None else f"put it back, {config.otherwise}"
        raise InvalidArgument(f"{str(folder.rows)!r} is not what provenance.json beside it tells of: {remedy}.")
    return folder.rows.read_bytes()


def _appended(before: bytes, more: bytes, *, text: bool) -> bytes:
    if text:
        return before + more.split(b"\n", 1)[1]  # without the second header
    with np.load(io.BytesIO(before)) as old, np.load(io.BytesIO(more)) as new:
        return npz({name: np.concatenate([old[name], new[name]]) for name in old.files})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _keep(folder: Folder, provenance: Mapping[str, Any]) -> None:
    store.put(folder.provenance, (json.dumps(provenance, indent=2) + "\n").encode())
