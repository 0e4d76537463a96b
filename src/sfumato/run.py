"""`Run`: what a training leaves behind. Everything in it is public: weights, metrics on public data, the statement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.ensembles import Iterates
from sfumato.errors import InvalidArgument


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

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation."""
        return dict(self.history[-1]) if self.history else {}

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {
            "config": dict(self.config),
            "metrics": self.metrics,
            "history": self.history,
            "alignment": self.alignment,
            "statement": dict(self.statement),
            "steps_taken": self.steps_taken,
            "steps_lost": self.steps_lost,
            "steps_short": self.steps_short,
            "seconds": round(self.seconds, 3),
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
        from safetensors.torch import load_file

        path = Path(folder)
        if not (path / "run.json").exists():
            raise InvalidArgument(f"folder={str(path)!r} holds no run.json: give the folder that a training wrote.")
        data = json.loads((path / "run.json").read_text())
        data.pop("metrics")
        text = (path / "statement.txt").read_text()
        averaged = path / "ema.safetensors"
        ema = load_file(averaged) if averaged.exists() else None
        return Run(weights=load_file(path / "weights.safetensors"), ema=ema, statement_text=text, **data)
