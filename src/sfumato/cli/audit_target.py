"""What `sfumato audit` examines of a user: the model of a config file, or whatever a function of theirs returns.

No private value is read. A config's model sees made-up rows of the shape that the files' headers say; a function hands
over the rows itself, public or made-up ones.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.audit.doctor import doctor, examples_apart
from sfumato.audit.verdict import Verdict
from sfumato.cli.config import Config, load_config
from sfumato.cli.job import layout_of, prepare
from sfumato.cli.model import make_module, row_shape
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.generators import own_generators
from sfumato.objective import Objective, cross_entropy, squared_error

_ROWS = 16


def examined_config(path: Path) -> list[Verdict]:
    """The model, loss and sampling of a config file."""
    config = load_config(path)
    header = layout_of(config, "private", config.data.private)
    shape = row_shape(config.model, header.shape)
    with own_generators(config.training.seed):
        module = make_module(config, config.model, shape)
    loss = cross_entropy if config.training.loss == "cross-entropy" else squared_error
    objective = Objective(module.train(), loss)
    rows, name = _made_up(config, shape), config.model.kind
    apart = examples_apart(objective, rows, name=name)
    if not apart.holds:  # which `prepare` would refuse, and say no more
        return [apart]
    return doctor(objective, rows, name=name, sampler=prepare(config).sampler)


def _made_up(config: Config, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    rows = torch.rand(_ROWS, *shape, generator=draws)
    if config.training.loss == "squared-error":
        return rows, torch.rand(_ROWS, generator=draws)
    return rows, torch.arange(_ROWS) % config.model.outputs


def examined_function(target: str) -> list[Verdict]:
    """`module:function`, found beside the working directory; it returns (module, loss, rows)."""
    place, _, name = target.partition(":")
    with _importable(Path.cwd()):
        try:
            function = getattr(importlib.import_module(place), name)
            if _needs_arguments(function):
                raise InvalidArgument(
                    f"target={target!r} needs arguments, and is called without any: name a function that takes none "
                    "and returns (module, loss, rows)."
                )
            made = function()
        except SfumatoError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise InvalidArgument(f"target={target!r} cannot be called ({type(error).__name__}: {said}).") from error
    return doctor(_objective(target, made), made[2], name=target)


def _needs_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:  # also of what is no function
        return callable(function)
    except ValueError:  # of some functions in C nothing is known
        return False
    return False


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _objective(target: str, made: Any) -> Objective:
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise InvalidArgument(
            f"target={target!r} returned {type(made).__name__}: return (module, loss, rows), where loss(module, rows) "
            "has one value per row."
        )
    return Objective(made[0], made[1])
