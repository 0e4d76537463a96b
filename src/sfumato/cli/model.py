"""The model that a config names, checked on made-up rows before any private row is near it."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.cli.config import Config
from sfumato.cli.config_file import ConfigFile
from sfumato.cli.pretrained import from_timm, from_transformers
from sfumato.cli.sections import CNN_SIDE, ModelSection
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.generators import own_generators
from sfumato.gradients.probe import Probe
from sfumato.models import basic
from sfumato.nn.modes import in_mode
from sfumato.objective import Loss, Objective, cross_entropy, squared_error

_LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def make_objective(config: Config, shape: tuple[int, ...]) -> Objective:
    """The module, initialised from the public seed, with its loss; InvalidArgument if it cannot be trained."""
    with own_generators(config.training.seed):
        module = make_module(config, config.model, shape)
    objective = Objective(module, _LOSSES[config.training.loss])
    _check_model(config, objective, shape)
    return objective


def make_module(config: ConfigFile, model: ModelSection, shape: tuple[int, ...]) -> nn.Module:
    """A new one, its weights drawn by torch's own generator; it is called with rows of this shape."""
    library, _, name = model.kind.partition(":")
    if library == "transformers" and name:
        return _made(model.kind, lambda: from_transformers(config.file(name), model.outputs, model.options))
    if library == "timm" and name:
        return _made(model.kind, lambda: from_timm(name, model.outputs, model.options))
    with _importable(config.path.parent):
        return _module(model, shape)


def check_outputs(module: nn.Module, model: ModelSection, rows: Tensor) -> None:
    """Raise unless the module, in eval mode, gives as many numbers per row as the config says it does."""
    with own_generators(), torch.no_grad(), in_mode(module, training=False):
        answer = _try(model.kind, lambda: module(rows))
    if tuple(answer.shape) != (len(rows), model.outputs):
        raise InvalidArgument(
            f"[model] kind={model.kind!r} gives {tuple(answer.shape)[1:]} values per row instead of "
            f"outputs={model.outputs}."
        )


def row_shape(model: ModelSection, found: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one row as the model sees it."""
    if model.shape is None:
        if model.kind == "cnn":
            raise InvalidArgument("[model] shape is missing: the cnn needs [channels, height, width].")
        return found
    if math.prod(model.shape) != math.prod(found):
        raise InvalidArgument(f"[model] shape={model.shape} does not hold the {math.prod(found)} features of a row.")
    return tuple(model.shape)


def _module(model: ModelSection, shape: tuple[int, ...]) -> nn.Module:
    inputs = math.prod(shape)
    if model.kind == "linear":
        return basic.linear(inputs, model.outputs)
    if model.kind == "mlp":
        return basic.mlp(inputs, model.outputs, model.hidden)
    if model.kind == "cnn":
        if len(shape) != 3:
            raise InvalidArgument(f"[model] shape={list(shape)} must be [channels, height, width] for the cnn.")
        if min(shape[1:]) < CNN_SIDE:
            raise InvalidArgument(
                f"[model] shape={list(shape)} is too small for the cnn, which needs images of {CNN_SIDE} x "
                f"{CNN_SIDE} pixels at least: give kind='mlp', or a network of your own as 'module:function'."
            )
        module = basic.cnn(shape[0], model.outputs)
        _try(model.kind, lambda: module(torch.zeros(1, *shape)))  # its lazy layer learns its size here
        return module
    if ":" not in model.kind:
        raise InvalidArgument(
            f"[model] kind={model.kind!r} must be 'linear', 'mlp', 'cnn', 'transformers:folder', 'timm:name' or "
            "'module:function'."
        )
    return _own_module(model, inputs)


def _own_module(model: ModelSection, inputs: int) -> nn.Module:
    module_name, _, function_name = model.kind.partition(":")
    function = _try(model.kind, lambda: getattr(importlib.import_module(module_name), function_name))
    return _made(model.kind, lambda: function(inputs, model.outputs, **model.options))


def _made(kind: str, call: Callable[[], Any]) -> nn.Module:
    made = _try(kind, call)
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"[model] kind={kind!r} returned {type(made).__name__}: return a torch module.")
    return made


def _try(kind: str, call: Callable[[], Any]) -> Any:
    """A user's own code, or a shape that does not work: no private value is near, so the message may be shown."""
    try:
        return call()
    except SfumatoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise InvalidArgument(f"[model] kind={kind!r} cannot be made ({type(error).__name__}: {said}).") from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules beside the config file can be named in it."""
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _check_model(config: Config, objective: Objective, shape: tuple[int, ...]) -> None:
    """What the door would refuse after the plan is made is refused here, on made-up rows, before anything is."""
    rows = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    outputs = config.model.outputs
    check_outputs(objective.module, config.model, rows)
    objective.module.train()
    classes = torch.arange(4) % outputs
    targets = classes if config.training.loss == "cross-entropy" else torch.rand(4)
    if targets.is_floating_point() and outputs != 1:
        raise InvalidArgument(f"[model] outputs={outputs} must be 1 for loss='squared-error'.")
    Probe.of(objective).trace(objective.parameters(), (rows, targets))
