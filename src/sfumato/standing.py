"""Where a training stands between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato.averages import Ema
from sfumato.diagnostics import Alignments
from sfumato.ensembles import Iterates
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public


@dataclass(kw_only=True)
class Standing:
    """Where a training stands after its last whole step: what a checkpoint holds, and nothing else does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    public: Public | None
    state: Any  # the method's
    step: int = 0
    answers: int  # of the plan, that led here
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    average: Ema | None = None
    iterates: Iterates | None = None
    alignments: Alignments | None = None
    kept: list[int] = field(default_factory=list)  # steps whose iterates belong to this training, of a checkpoint
    whole: bool = True  # False while an update is half done
    drawn: Any = None  # of the public batches: a step that fails half-way may have drawn more

    def __post_init__(self) -> None:
        self.drawn = None if self.public is None else self.public.random_state

    def advance(self, update: Gradient, state: Any, *, answers: int) -> None:
        update.write_to(self.model)
        self.whole = False
        self.optimizer.step()
        self.state, self.step, self.answers = state, self.step + 1, answers
        if self.average is not None:
            self.average.update(dict(self.model.named_parameters()), self.step)
        self.drawn = None if self.public is None else self.public.random_state
        self.whole = True
        if self.iterates is not None:  # a full disk loses this iterate, not the step
            self.iterates.keep({n: p for n, p in self.model.named_parameters() if p.requires_grad}, self.step)

    def to_save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "public": self.drawn,
            "ema": None if self.average is None else self.average.weights,
            "alignments": [] if self.alignments is None else self.alignments.up_to(self.step),
            "iterates": self.kept if self.iterates is None else self.iterates.steps,
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def restore(self, path: Path, saved: Mapping[str, Any]) -> None:
        if (saved.get("ema") is None) != (self.average is None):
            raise InvalidArgument(
                f"checkpoint={str(path)!r} was made with ema={self.average is None}: continue with that, or name "
                "another file."
            )
        try:
            plain = {name: saved[name] for name in _PLAIN}
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.average is not None:
                for name, average in self.average.weights.items():
                    average.copy_(saved["ema"][name])
            if self.alignments is not None:
                self.alignments.found = list(saved["alignments"])
            if self.public is not None and saved["public"] is not None:
                self.public.random_state = self.drawn = saved["public"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(
                f"checkpoint={str(path)!r} is of another model, optimizer or program: continue with those it was made "
                "with, or name another file."
            ) from error
        vars(self).update(plain)
        self.kept = saved.get("iterates", [])
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.state = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, self.state)


_PLAIN = ("state", "step", "answers", "history", "seconds")
