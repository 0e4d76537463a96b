"""Rows generated from the public ones, made once for all cells and seeds that have the same settings.

Only the public rows of an experiment come here: generators and what they make are public.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.experiments.data import CLASSES, Batch, Rows, joined
from sfumato.experiments.settings import Data, Settings, Synthesis, digest, stated
from sfumato.generators import own_generators
from sfumato.public import Public
from sfumato.synthesis.ddpm import Ddpm
from sfumato.synthesis.discriminator import Guidance, discriminator, train_guidance
from sfumato.synthesis.edm import Edm
from sfumato.synthesis.generator import Generator
from sfumato.synthesis.nonleaking import AUGMENT_LABELS
from sfumato.synthesis.training import train_generator
from sfumato.synthesis.unet import cifar_unet, ddpmpp_unet, digits_unet

_NETWORKS = {"digits": digits_unet, "cifar": cifar_unet, "ddpmpp": ddpmpp_unet}
_PROCESSES = {"edm": Edm, "ddpm": Ddpm}
_SEED = 0  # of generator and samples: cells and seeds share them, so that rows of a table differ in what they say


def with_synthetic(rows: Rows, settings: Settings, *, folder: Path, progress: bool) -> tuple[Rows, dict[str, Any]]:
    """The rows with synthetic public ones, and what is to be said of those; as they are where there are none."""
    synthesis, data = settings.synthesis, settings.data
    if synthesis is None:
        return rows, {}
    made, facts = _made(rows.public, data, synthesis, folder, progress)
    both = made if synthesis.alone else joined(rows.public, made)
    return replace(rows, public=both), facts


def synthesis_key(data: Data, synthesis: Synthesis | None) -> str | None:
    """Of all that the synthetic rows depend on; the private rows are not among it."""
    return None if synthesis is None else digest([_generator_key(data, synthesis), stated(synthesis)])


def _made(
    public: Batch, data: Data, synthesis: Synthesis, folder: Path, progress: bool
) -> tuple[Batch, dict[str, Any]]:
    # The same rows, whether they are trained on alone or with the public ones.
    path = folder / f"{synthesis_key(data, replace(synthesis, alone=False))}.npz"
    if not path.exists():
        generator, trained = _generator(public, data, synthesis, folder, progress)
        start = time.perf_counter()
        guide = _guide(generator, public, synthesis, progress) if synthesis.guidance else None
        guided = time.perf_counter()
        images, labels = generator.sample(
            synthesis.rows, steps=synthesis.steps, seed=_SEED, guide=guide, progress=progress
        )
        facts = {
            **trained,
            "guidance_seconds": round(guided - start, 1),
            "sampling_seconds": round(time.perf_counter() - guided, 1),
        }
        _save(path, images, labels, facts)
    images, labels, facts = _load(path)
    if public[0].is_floating_point():
        images = images / 255
    return (images.to(public[0].device), labels.to(public[1].device)), facts


def _generator(
    public: Batch, data: Data, synthesis: Synthesis, folder: Path, progress: bool
) -> tuple[Generator, dict[str, Any]]:
    device = public[0].device
    at = folder / f"generator-{_generator_key(data, synthesis)}"
    if (at / "generator.json").exists():
        generator = Generator.load(at, device=device)
    else:
        labels = AUGMENT_LABELS if synthesis.augment_p else 0
        with own_generators(_SEED):
            network = _NETWORKS[synthesis.network](image=_shape(public), classes=CLASSES, augment_labels=labels).to(
                device
            )
        start = time.perf_counter()
        generator = train_generator(
            Public(public),
            process=_PROCESSES[synthesis.process](),
            network=network,
            images=synthesis.images,
            batch_size=synthesis.batch_size,
            learning_rate=synthesis.learning_rate,
            augment_p=synthesis.augment_p,
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            seed=_SEED,
            checkpoint=at / "checkpoint.safetensors",
            progress=progress,
        )
        seconds = round(time.perf_counter() - start, 1)
        generator = replace(generator, provenance={**generator.provenance, "seconds": seconds})
        generator.save(at)
        (at / "checkpoint.safetensors").unlink()
    facts = generator.provenance
    return generator, {
        "generator_seconds": facts["seconds"],
        "generator_images": facts["images_seen"],
        "generator_rows": facts["rows"],
        "generator_sha256": facts["sha256"],
    }


def _guide(generator: Generator, public: Batch, options: Synthesis, progress: bool) -> Guidance:
    """A discriminator of the public rows and of unguided samples, other ones than those that it will guide."""
    with own_generators(_SEED):
        network = discriminator(_shape(public), classes=CLASSES).to(generator.device)
    return train_guidance(
        generator,
        Public(public, seed=_SEED),
        network=network,
        weight=options.guidance,
        steps=options.guide_steps,
        rows=options.guide_rows,
        seed=_SEED + 1,
        progress=progress,
    )


def _generator_key(data: Data, synthesis: Synthesis) -> str:
    """Guided or not, and however many rows are wanted, it is one generator."""
    public = {name: value for name, value in stated(data).items() if name not in ("private", "test")}
    later = ("rows", "steps", "guidance", "guide_rows", "guide_steps", "alone")
    return digest([public, {name: value for name, value in stated(synthesis).items() if name not in later}])


def _shape(public: Batch) -> tuple[int, int, int]:
    """Of one image."""
    colours, height, width = public[0].shape[1:]
    return colours, height, width


def _save(path: Path, images: Tensor, labels: Tensor, facts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        np.savez(file, images=images.numpy(), labels=labels.numpy(), facts=np.array(json.dumps(facts)))
    draft.replace(path)


def _load(path: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    try:
        with np.load(path) as held:
            facts: dict[str, Any] = json.loads(str(held["facts"]))
            return torch.from_numpy(held["images"]), torch.from_numpy(held["labels"]), facts
    except Exception as error:
        raise InvalidArgument(f"{str(path)!r} cannot be read ({type(error).__name__}): delete it.") from error
