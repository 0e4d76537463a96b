"""Warm starts, one for all cells that have the same: public weights, kept in the output folder."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.errors import InvalidArgument
from sfumato.experiments.build import make_augment
from sfumato.experiments.data import Rows
from sfumato.experiments.scores import quality
from sfumato.experiments.settings import Settings, WarmUp, digest, stated
from sfumato.experiments.synthetic import synthesis_key
from sfumato.generators import own_generators
from sfumato.objective import Objective
from sfumato.public import Public
from sfumato.warmup import Sam, warm_up


def warm_start(
    objective: Objective, settings: Settings, rows: Rows, *, seed: int, folder: Path, progress: bool
) -> dict[str, Any] | None:
    """Put the objective's module where the public rows bring it, and say how good that is; None for a cold start."""
    if settings.warm_up is None:
        return None
    path = folder / f"{_key(settings, settings.warm_up)}-seed{seed}.safetensors"
    if path.exists():
        return _load(path, objective.module)
    start = time.perf_counter()
    losses = _train(objective, settings.warm_up, rows, seed, progress)
    facts = {
        "test": quality(objective, rows.test),
        "hold_out": None if rows.hold_out is None else quality(objective, rows.hold_out),
        "last_loss": losses[-1],
        "seconds": round(time.perf_counter() - start, 1),
    }
    _save(path, objective.module, facts)
    return facts


def _key(settings: Settings, options: WarmUp) -> str:
    """Of all that a warm-up depends on: the private rows are not among it."""
    data = {name: value for name, value in stated(settings.data).items() if name != "private"}
    made = synthesis_key(settings.data, settings.synthesis)
    return digest(
        [data, stated(settings.model), stated(options), *([] if made is None else [made]), *_of_text(settings)]
    )


def _of_text(settings: Settings) -> list[Any]:
    """A vocabulary that is counted in all the text depends on how much of it is private, too."""
    text = settings.text
    if text is None:
        return []
    return [stated(text), *([settings.data.private] if text.vocabulary != "public" else [])]


def _train(objective: Objective, options: WarmUp, rows: Rows, seed: int, progress: bool) -> list[float]:
    with own_generators(seed):  # views come from torch's own
        return warm_up(
            objective,
            Public(rows.public, seed=seed),
            steps=options.steps,
            batch_size=options.batch_size,
            optimizer=partial(
                torch.optim.SGD,
                lr=options.learning_rate,
                momentum=options.momentum,
                weight_decay=options.weight_decay,
            ),
            augment=make_augment(options.augment),
            sharpness=Sam(radius=options.sharpness) if options.sharpness else None,
            ema=options.ema,
            progress=progress,
        )


def _save(path: Path, module: nn.Module, facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    state = {name: t.detach().cpu().clone().contiguous() for name, t in module.state_dict().items()}
    save_file(state, draft, metadata={"facts": json.dumps(facts)})
    draft.replace(path)


def _load(path: Path, module: nn.Module) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            module.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except Exception as error:
        raise InvalidArgument(f"{str(path)!r} cannot be read ({type(error).__name__}): delete it.") from error
    return facts
