"""How a training is set up: what its Run says of that, and what must be the same when it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget

_SPEED = {f"optimizer.{name}" for name in ("foreach", "fused", "capturable", "differentiable")}


def setup_of(
    trained: Iterable[Tensor], method: Any, optimizer: torch.optim.Optimizer, *, steps: int, reserve: int
) -> dict[str, Any]:
    """For the Run."""
    return {
        "parameters": sum(p.numel() for p in trained),
        "steps": steps,
        "reserve": reserve,
        "method": _name_of(method),
        "method_options": _options(method),
        "optimizer": type(optimizer).__name__,
        "optimizer_options": _plain(optimizer.defaults),
    }


def as_begun(setup: Mapping[str, Any], budget: Budget | None) -> str:
    """What a training that goes on must keep, such as "method.clip": 1.0; what only makes it fast is left out.

    A text, since a checkpoint holds no numbers but Python's own.
    """
    flat: dict[str, Any] = {"budget": None if budget is None else budget.epsilon}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for part, inner in value.items():
                add(f"{name}.{part}", inner)
        elif name not in _SPEED:
            flat[name] = value

    for name, value in setup.items():
        add(name.removesuffix("_options"), value)
    return json.dumps(flat)


def check_begun(path: Path, saved: Mapping[str, Any] | None, now: str, method: Any) -> None:
    """Refuse, before anything is charged or changed, to go on otherwise than begun: the Run would tell of neither."""
    if saved is None or "begun" not in saved:  # of an earlier version
        return
    old, new = _unsaid(method) | json.loads(saved["begun"]), json.loads(now)
    # Written out nan is nan, and else 1 is 1.0.
    differ = [n for n in {**old, **new} if _told(old, n) != _told(new, n) and old.get(n, ...) != new.get(n, ...)]
    # Another method or optimizer has other options, and so has the same optimizer in another version of torch.
    differ = [n for n in differ if not any(n.startswith(f"{other}.") for other in differ)]
    differ = [n for n in differ if not n.startswith("optimizer.") or (n in old and n in new)]
    if differ:
        told = " and ".join(f"{n}={_told(old, n)}, not {_told(new, n)}" for n in differ)
        raise InvalidArgument(
            f"checkpoint={str(path)!r} was begun with {told}: call train as it was begun, or name another file for "
            "another training."
        )


def _told(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "the default"


def _name_of(method: Any) -> str:
    function = getattr(method, "func", method)  # of a functools.partial
    return str(getattr(function, "__name__", type(method).__name__))


def _options(method: Any) -> dict[str, Any]:
    """How a method was set up, and what it stands on."""
    options = method.keywords if isinstance(method, partial) else {}
    if is_dataclass(method):
        options = {f.name: getattr(method, f.name) for f in fields(method)}
    plain = _plain({name: value for name, value in options.items() if name != "method"})
    if "method" in options:
        plain["method"] = {"name": _name_of(options["method"]), **_options(options["method"])}
    return plain


def _unsaid(method: Any, name: str = "method") -> dict[str, Any]:
    """The defaults of a method's fields: an earlier version, which knew fewer of them, did as they say."""
    if not is_dataclass(method):
        return {}
    own = {f"{name}.{f.name}": f.default for f in fields(method) if f.default is not MISSING and f.name != "method"}
    return _plain(own) | _unsaid(getattr(method, "method", None), f"{name}.method")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON takes it: what is no number, word or switch is written out, but for its place in memory."""

    def written(value: object) -> str:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    return {k: v if isinstance(v, bool | int | float | str | None) else written(v) for k, v in options.items()}
