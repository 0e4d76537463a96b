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


def finished_run(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The run, and the config that `sfumato train` or this command left beside it, if any."""
    from safetensors import SafetensorError

    try:
        run = Run.load(folder)
        path = folder / "config.json"
        trained: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except InvalidArgument:
        raise InvalidArgument(
            f"[model] weights={str(folder)!r} holds no run.json: give the folder of a training."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
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


def scaled_range(config: SelectConfig, trained: dict[str, Any]) -> tuple[float, float] | None:
    """What features were scaled by in the training: the model must see the pool in the same way."""
    given, data = config.pool.range, trained.get("data") or {}
    told = data.get("range")
    if given is None and (told == "public" or data.get("lower") is not None):
        raise InvalidArgument("[pool] range is missing: the training had one that is not in its record, so declare it.")
    if isinstance(told, list) and given is not None and [float(v) for v in given] != [float(v) for v in told]:
        raise InvalidArgument(f"[pool] range={given} was {told} in the training: leave it out.")
    found = told if given is None else given
    return (float(found[0]), float(found[1])) if isinstance(found, list) else None


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
