"""The TOML file of `sfumato tune`: that of `sfumato train` with a [tune] section; docs/tuning.md says what it means."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sfumato.cli.config import SECTIONS, Config, check_config
from sfumato.errors import InvalidArgument
from sfumato.reading import field_types, read, read_toml, suggestion

LAWS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
# What the data, the promise and the place of the results are is not for a search to decide.
_WHOLE = ("data", "privacy", "synthesis", "afterwards")
_FIXED = {
    *(f"{section}.{key}" for section in _WHOLE for key in field_types(SECTIONS[section])),
    *(f"training.{key}" for key in ("out", "loss", "reserve", "keep_last", "checkpoint_every", "evaluate_every")),
    "model.outputs",
    "model.shape",
}


@dataclass(frozen=True, kw_only=True)
class TuneSection:
    """What to search, how often in the mean, and by which score to choose."""

    space: dict[str, Any]  # "section.key" -> a list of values, or {low, high, log, whole}
    mean: float = 10.0  # trials
    law: str | float = "logarithmic"  # of their number; or "geometric", "poisson", or a shape
    candidates: int = 20  # points of the space, drawn in public
    keep: int | None = None  # of them, after a race on the public rows; by default there is none
    score: str = "private"  # accuracy on the private rows, as a noisy answer; or "public": on the test rows
    score_share: float = 0.1  # of a trial's epsilon, for the private score
    seed: int = 0  # of the points


@dataclass(frozen=True, kw_only=True)
class TuneFile:
    """A whole file, and every candidate as a config of its own."""

    path: Path
    tune: TuneSection
    points: tuple[dict[str, Any], ...]
    configs: tuple[Config, ...]

    @property
    def config(self) -> Config:
        """Where the candidates do not differ, any will do."""
        return self.configs[0]

    @property
    def shape(self) -> float:
        return LAWS[self.tune.law] if isinstance(self.tune.law, str) else self.tune.law


def load_tune(path: Path) -> TuneFile:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    raw = dict(read_toml(path))
    if "tune" not in raw:
        raise InvalidArgument(
            f"config={str(path)!r} has no [tune] section: add one with the space to search, see docs/tuning.md."
        )
    tune = read(TuneSection, raw.pop("tune"), "[tune]")
    _check(tune)
    from sfumato.tuning import Range, candidates  # torch is loaded here, when the section is known to be right

    space: dict[str, Any] = {}
    for name, values in tune.space.items():
        _check_name(name)
        if isinstance(values, Mapping):
            space[name] = read(Range, values, f"[tune.space] {name}")
        elif isinstance(values, list) and values:
            space[name] = values
        else:
            raise InvalidArgument(
                f"[tune.space] {name}={values!r} must list values, or be a range like {{low = 0.1, high = 10}}."
            )
    points = candidates(space, tune.candidates, seed=tune.seed)
    configs = tuple(check_config(path, _with(raw, point)) for point in points)
    config = configs[0]
    if config.synthesis is not None:
        raise InvalidArgument(
            "[synthesis] is of `sfumato train`: make the rows with `sfumato synthesize` first, and name its folder as "
            "[data] synthetic."
        )
    if config.afterwards is not None:
        raise InvalidArgument(
            "[afterwards] is of `sfumato train`, since a search is charged as a whole: leave the section out."
        )
    if tune.keep is not None and (tune.keep > len(points) or config.data.public is None):
        raise InvalidArgument(
            f"[tune] keep={tune.keep} needs public rows, and at least as many candidates (there are {len(points)})."
        )
    if tune.score == "public" and config.data.test is None:
        raise InvalidArgument("[tune] score='public' needs rows to choose by: give [data] test, or score='private'.")
    if tune.score == "private" and config.training.loss != "cross-entropy":
        raise InvalidArgument("[tune] score='private' is the accuracy of a classifier: use score='public' here.")
    return TuneFile(path=path, tune=tune, points=tuple(points), configs=configs)


def _check(tune: TuneSection) -> None:
    known = isinstance(tune.law, str) and tune.law in LAWS
    if not (known or (isinstance(tune.law, int | float) and tune.law >= 0)):
        raise InvalidArgument(f"[tune] law={tune.law!r} must be one of {', '.join(map(repr, LAWS))}, or a shape >= 0.")
    if not (math.isfinite(tune.mean) and tune.mean >= 1):
        raise InvalidArgument(f"[tune] mean={tune.mean} must be a finite number of at least 1: it is of trials.")
    if tune.candidates < 1 or (tune.keep is not None and tune.keep < 1):
        raise InvalidArgument(f"[tune] candidates={tune.candidates} and keep={tune.keep} must be at least 1.")
    if tune.score not in ("private", "public"):
        raise InvalidArgument(f"[tune] score={tune.score!r} must be 'private' or 'public'.")
    if not 0 < tune.score_share < 1:
        raise InvalidArgument(f"[tune] score_share={tune.score_share} must be above 0 and below 1.")
    if not tune.space:
        raise InvalidArgument('[tune.space] is empty: name at least one key, such as "training.learning_rate".')


def _check_name(name: str) -> None:
    known = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in fields(kind)} - _FIXED
    if name in _FIXED:
        raise InvalidArgument(f"[tune.space] {name} is fixed for the whole search: set it in its own section.")
    if name not in known:
        raise InvalidArgument(f"[tune.space] {name!r} is no key of `sfumato train`{suggestion(name, sorted(known))}")


def _with(raw: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(raw))
    for name, value in point.items():
        section, key = name.split(".")
        merged.setdefault(section, {})[key] = value
    return merged
