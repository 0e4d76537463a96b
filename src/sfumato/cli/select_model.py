"""The released model of `sfumato select`: a finished run's weights, in the module that they were trained in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.cli.model import check_outputs, make_module
from sfumato.cli.sections import ModelSection
from sfumato.cli.select_config import SelectConfig
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.run import Run

Limits = tuple[float | list[float], float | list[float]]  # of every value, or of each


def finished_run(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The run, and the config that `sfumato train` or this command left beside it, if any."""
    from safetensors import SafetensorError

    if not (folder / "run.json").exists():
        raise InvalidArgument(f"[model] weights={str(folder)!r} holds no run.json: give the folder of a training.")
    try:
        run = Run.load(folder)
        path = folder / "config.json"
        trained: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except (InvalidArgument, OSError, ValueError, KeyError, TypeError, SafetensorError):
        raise InvalidArgument(
            f"[model] weights={str(folder)!r} holds a run that is damaged: give another one."
        ) from None
    return run, trained


def model_section(config: SelectConfig, trained: dict[str, Any]) -> ModelSection:
    known = {f.name for f in fields(ModelSection)}
    told = {key: value for key, value in (trained.get("model") or {}).items() if key in known}
    given = {key: value for key, value in asdict(config.model).items() if key in known and value is not None}
    for key in ("kind", "outputs"):
        if key not in told | given:
            raise InvalidArgument(
                f"[model] {key} is missing, and weights={config.model.weights!r} has no config.json: add it."
            )
    return ModelSection(**(told | given))


def pool_range(config: SelectConfig, trained: dict[str, Any], *, image_files: bool) -> tuple[float, float] | None:
    """What becomes 0..1 in the pool: as declared, 0..255 in image files, or what the training declared."""
    given, data = config.pool.range, trained.get("data") or {}
    told = data.get("range")
    if given is None and (told == "public" or data.get("lower") is not None):
        raise InvalidArgument("[pool] range is missing: the training had one that is not in its record, so declare it.")
    found = given or ([0.0, 255.0] if image_files else told)
    return (float(found[0]), float(found[1])) if isinstance(found, list) else None


def training_limits(config: SelectConfig, trained: dict[str, Any]) -> Limits | None:
    """What became 0..1 in the rows of the training; where its record does not say, what is declared for the pool."""
    data = trained.get("data")
    if data is None or data.get("range") == "public":
        return None if config.pool.range is None else (config.pool.range[0], config.pool.range[1])
    if isinstance(data.get("range"), list):
        return data["range"][0], data["range"][1]
    return None if data.get("lower") is None else (data["lower"], data["upper"])


def released_module(config: SelectConfig, model: ModelSection, shape: tuple[int, ...], run: Run) -> nn.Module:
    folder = str(config.file(config.model.weights))
    with own_generators(0):
        module = make_module(config, model, shape)
    if config.model.ema and run.ema is None:
        raise InvalidArgument(
            f"[model] ema=true, and the run in weights={folder!r} kept no moving average: leave it out."
        )
    weights = {**run.weights, **(run.ema or {} if config.model.ema else {})}
    wanted = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if wanted != found:
        name = next(name for name in [*wanted, *found] if wanted.get(name) != found.get(name))
        raise InvalidArgument(
            f"[model] kind={model.kind!r} has {name!r} of shape {wanted.get(name)} and the run in "
            f"weights={folder!r} of {found.get(name)}: describe the model that was trained."
        )
    module.load_state_dict(weights)
    check_outputs(module, model, torch.zeros(2, *shape))
    module.train()
    return module


def weights_sha256(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
