"""`Run`: what a training leaves behind. Everything in it is public: weights, metrics on public data, the statement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.ensembles import Iterates
from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import at_most

_SCORES = ("test_chosen_accuracy", "test_accuracy", "test_loss", "public_accuracy", "public_loss")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training: weights, configuration, metrics on public or test data, and the privacy statement.

    `ema` is the moving average of the weights, where it was asked for; it holds the trained parameters only, as do the
    `iterates`. `alignment` has [step, cosine, lowest, highest] of every private gradient with the public one.
    `steps_taken` is what the weights have seen; `steps_lost` were paid for but died with an interrupted process, and
    `steps_short` is by how many the training had to be shortened for that.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    ema: Mapping[str, Tensor] | None = None
    iterates: Iterates | None = None
    alignment: list[list[float]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    statement: Mapping[str, Any] = field(default_factory=dict)
    statement_text: str = ""
    steps_taken: int = 0
    steps_lost: int = 0
    steps_short: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        """In one line: what was done, what it cost and what came of it.

        >>> history = [{"step": 3, "test_loss": 0.61, "test_accuracy": 0.84}]
        >>> promise = {"epsilon": 0.99991, "delta": 1e-05, "private": True}
        >>> Run(weights={}, config={"method": "dp_sgd"}, statement=promise, steps_taken=3, history=history)
        Run(method='dp_sgd', epsilon=0.99991, delta=1e-05, steps=3, test_accuracy=0.84)
        """
        shown: dict[str, Any] = {}
        if "method" in self.config:
            shown["method"] = repr(" on ".join(_stack(self.config["method"], self.config.get("method_options", {}))))
        if "epsilon" in self.statement:
            shown["epsilon"] = at_most(self.statement["epsilon"])
            shown["delta"] = f"{self.statement['delta']:g}"
            if not self.statement.get("private", True):
                shown["private"] = False
        shown["steps"] = self.steps_taken
        if (score := self._score()) is not None:
            shown[score] = f"{self.metrics[score]:.4g}"
        return f"Run({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def _score(self) -> str | None:
        """The name of the metric that says most: on test rows before public ones, how often before how far off."""
        found = [name for name in self.metrics if name not in ("step", "epsilon")]
        known = [name for name in _SCORES if name in found]
        return next(iter([*known, *found]), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation."""
        return dict(self.history[-1]) if self.history else {}

    @property
    def before(self) -> dict[str, float]:
        """The evaluation before the first private answer: what public data alone gave, if anything."""
        return dict(self.history[0]) if self.history and self.history[0].get("step") == 0 else {}

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights, and but the seconds, which depend on how many private rows there are."""
        return {
            "config": dict(self.config),
            "metrics": self.metrics,
            "history": self.history,
            "alignment": self.alignment,
            "statement": dict(self.statement),
            "steps_taken": self.steps_taken,
            "steps_lost": self.steps_lost,
            "steps_short": self.steps_short,
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write run.json, weights.safetensors (and ema.safetensors) and statement.txt into a folder."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # Tied weights share storage, which safetensors refuses: every name gets its own copy.
        for name, tensors in (("weights", self.weights), ("ema", self.ema)):
            if tensors is not None:
                copies = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
                save_file(copies, path / f"{name}.safetensors", metadata=self._metadata())
        (path / "run.json").write_text(json.dumps(self.to_json(), indent=2) + "\n")
        (path / "statement.txt").write_text(self.statement_text)
        return path

    def _metadata(self) -> dict[str, str]:
        """What weights that are handed on alone say of themselves."""
        return {"format": "pt", "privacy_statement": json.dumps(dict(self.statement)), "privacy": self.statement_text}

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Run:
        """Read back what `save` wrote."""
        path = Path(folder)
        if not (path / "run.json").exists():
            raise InvalidArgument(f"folder={str(path)!r} holds no run.json: give the folder that a training wrote.")
        try:
            data = json.loads((path / "run.json").read_text())
            data.pop("metrics")
            run = Run(weights={}, **{**data, **{name: dict(data[name]) for name in ("config", "statement")}})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidArgument(
                f"folder={str(path)!r} has a run.json of another kind: give the folder that a training wrote."
            ) from None
        ema = _read_tensors(path, "ema") if (path / "ema.safetensors").exists() else None
        text = (path / "statement.txt").read_text()
        return replace(run, weights=_read_tensors(path, "weights"), ema=ema, statement_text=text)


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / f"{name}.safetensors"
    if not path.exists():
        raise InvalidArgument(f"folder={str(folder)!r} has no {path.name}: give a folder with the weights of a run.")
    try:
        found: dict[str, Tensor] = load_file(path)
    except SafetensorError:
        raise InvalidArgument(
            f"folder={str(folder)!r} has a {path.name} that cannot be read: copy it again from where it was trained."
        ) from None
    return found


def _stack(method: str, options: Mapping[str, Any]) -> list[str]:
    """The names of a method and of those it stands on."""
    below = options.get("method")
    return [method] if not isinstance(below, Mapping) else [method, *_stack(below["name"], below)]
