"""The algorithms that a config names, stacked on DP-SGD, and how they are set up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import as_clip, dp_sgd
from sfumato.algorithms.extended import Extended
from sfumato.algorithms.method import Method, StatefulMethod
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.cli.augmentation import augmentation
from sfumato.cli.config import Config
from sfumato.cli.config_file import only_given
from sfumato.gradients import Clip

AUTO = Clip(1.0, stability=0.01)  # AUTO-S, with the value of its authors
_HANDED_DOWN = {"method", "origin", "scale", "offsets"}
_KEYS = {  # of [method], where methods call different things by one name
    ("shrunk-origin", "memory"): "origin_memory",
    ("ada-dps", "memory"): "scale_memory",
    ("weight-multiplicity", "public_batch"): "offset_batch",
}


@dataclass(frozen=True)
class Layer:
    """One algorithm of the stack: a function, or a class of those that carry state."""

    name: str
    make: Callable[..., Any]
    given: Mapping[str, Any]

    def on(self, below: Any) -> Any:
        options = dict(self.given) if below is None else {**self.given, "method": below}
        return self.make(**options) if isinstance(self.make, type) else partial(self.make, **options)

    def options(self) -> dict[str, Any]:
        """As they will be used, defaults included, by the keys of the config."""
        known = inspect.signature(self.make).parameters.values()
        return {
            _KEYS.get((self.name, p.name), p.name): self.given.get(p.name, p.default)
            for p in known
            if p.kind is p.KEYWORD_ONLY and p.name not in _HANDED_DOWN
        }


def layers(config: Config, clip: float | Clip, batch: tuple[float, int]) -> list[Layer]:
    """Outermost first; `batch` is how many private and how many public rows a step has, if those join it."""
    training, method = config.training, config.method
    views = training.views or (16 if "weight-multiplicity" in training.methods else 1)
    shared = {"public_batch": method.public_batch}
    # Of plain descent in the long run: what momentum makes of one gradient, all steps together.
    rate = training.learning_rate / (1 - training.momentum) if method.line_search else None
    stepping, joining = {**shared, "step_size": rate}, {"public_clip": method.public_clip}
    below = {"clip": clip, "views": views, "augment": augmentation(training)}
    found = [
        Layer("ada-dps", AdaDPS, only_given(damping=method.damping, memory=method.scale_memory, **shared)),
        Layer(
            "mirror-descent",
            MirrorDescent,
            only_given(
                decay_steps=method.decay_steps,
                alpha_min=method.alpha_min,
                answer_clip=method.answer_clip,
                **joining,
                **stepping,
            ),
        ),
        Layer("extended", Extended, only_given(private_batch=batch[0], public_batch=batch[1], **joining)),
        Layer("dope-sgd", dope_sgd, only_given(clip=clip, origin_clip=method.origin_clip, **stepping)),
        Layer(
            "shrunk-origin",
            ShrunkOrigin,
            only_given(origin_clip=method.origin_clip or as_clip(clip).norm, memory=method.origin_memory, **stepping),
        ),
        Layer(
            "weight-multiplicity",
            weight_multiplicity,
            only_given(views=views, radius=method.radius, public_batch=method.offset_batch),
        ),
        Layer("dp-sgd", dp_sgd, below),
    ]
    wanted = {*training.methods, *(("extended",) if training.extended else ())}
    return [layer for layer in found if layer.name in wanted]


def stacked(parts: list[Layer]) -> Method | StatefulMethod:
    made: Any = None
    for layer in reversed(parts):
        made = layer.on(made)
    method: Method | StatefulMethod = made
    return method
