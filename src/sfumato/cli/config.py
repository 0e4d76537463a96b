"""The TOML file of `sfumato train`, read and checked. Every key is known; an unknown one is an error with a hint."""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sfumato.cli.sections import (
    METHODS,
    USED_BY,
    DataSection,
    MethodSection,
    ModelSection,
    PrivacySection,
    TrainingSection,
    WarmupSection,
)
from sfumato.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole file. Relative paths are relative to it."""

    path: Path
    data: DataSection
    model: ModelSection
    privacy: PrivacySection
    training: TrainingSection
    method: MethodSection
    warmup: WarmupSection | None

    def file(self, name: str) -> Path:
        return self.path.parent / name

    @property
    def out(self) -> Path:
        return self.file(self.training.out)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def iterates(self) -> Path:
        """Where the last weights are kept, if any are."""
        return self.out / "checkpoint.pt.iterates"

    @property
    def ledger(self) -> str:
        ledger = self.privacy.ledger
        return ledger if "://" in ledger else str(self.file(ledger))

    def to_json(self) -> dict[str, dict[str, Any] | None]:
        sections = {name: getattr(self, name) for name in SECTIONS}
        return {name: None if section is None else asdict(section) for name, section in sections.items()}


SECTIONS: dict[str, type[Any]] = {
    "data": DataSection,
    "model": ModelSection,
    "privacy": PrivacySection,
    "training": TrainingSection,
    "method": MethodSection,
    "warmup": WarmupSection,
}

_CHOICES = {
    "data.unit": ("example", "user"),
    "privacy.adjacency": ("add-remove", "replace-one"),
    "training.sampling": ("poisson", "fixed", "full"),
    "training.loss": ("cross-entropy", "squared-error"),
    "training.optimizer": ("sgd", "adamw"),
    "warmup.optimizer": ("sgd", "adamw"),
}
_AT_LEAST_ONE = """
    data.size data.records_per_user model.outputs training.steps training.batch_size training.views
    training.evaluate_every method.public_batch method.offset_batch warmup.steps warmup.batch_size
"""
_POSITIVE = """
    privacy.epsilon privacy.budget training.clip training.learning_rate method.damping method.answer_clip method.radius
    warmup.learning_rate
"""
_POSITIVE_OR_INFINITE = "method.decay_steps method.origin_clip"
_NOT_NEGATIVE = """
    training.reserve training.seed training.checkpoint_every training.crop training.cutout training.keep_last
    warmup.weight_decay warmup.sam_radius warmup.crop warmup.cutout
"""
_SHARES_BELOW_ONE = "training.momentum method.origin_memory method.scale_memory warmup.momentum"
_SHARES = "method.alpha_min"


def load_config(path: Path) -> Config:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    if not path.is_file():
        raise InvalidArgument(f"config={str(path)!r} does not exist: give the path of a TOML file.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config={str(path)!r} is not valid TOML: {error}.") from None
    for name in raw:
        if name not in SECTIONS:
            raise InvalidArgument(f"config={str(path)!r} has an unknown section [{name}]{_hint(name, SECTIONS)}.")
    raw.setdefault("method", {})
    sections: dict[str, Any] = {
        name: None if name == "warmup" and name not in raw else _section(name, kind, raw.get(name))
        for name, kind in SECTIONS.items()
    }
    config = Config(path=path, **sections)
    _check_values(config)
    _check_data(config)
    _check_method(config)
    _check_training(config)
    return config


def _section(name: str, kind: type[Any], raw: Any) -> Any:
    if raw is None:
        raise InvalidArgument(f"[{name}] is missing from the config: add the section.")
    if not isinstance(raw, dict):
        raise InvalidArgument(f"{name}={raw!r} must be a section: write [{name}] on a line, and its keys below.")
    known = {f.name: f for f in fields(kind)}
    for key in raw:
        if key not in known:
            elsewhere = [
                f"[{other}]" for other, section in SECTIONS.items() if key in {f.name for f in fields(section)}
            ]
            hint = f": it belongs to {' or '.join(elsewhere)}" if elsewhere else _hint(key, known)
            raise InvalidArgument(f"[{name}] has no key {key!r}{hint}.")
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        if not _fits(value, hints[key]):
            raise InvalidArgument(f"[{name}] {key}={value!r} must be {_describe(hints[key])}.")
    for key, f in known.items():
        if key not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidArgument(f"[{name}] lacks the key {key!r}: add it.")
    return kind(**raw)


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(names)}"


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)


_WORDS = {int: "a whole number", float: "a number", str: "a string", dict: "a table", bool: "true or false"}


def _describe(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return f"a list of {_describe(typing.get_args(hint)[0]).split(' ', 1)[1]}s"
    return _WORDS[typing.get_origin(hint) or hint]


def _check_values(config: Config) -> None:
    def value(name: str) -> tuple[Any, str]:
        section, key = name.split(".")
        found = getattr(getattr(config, section), key, None)  # a section that may be left out has no values
        return found, f"[{section}] {key}={found!r}"

    for name, choices in _CHOICES.items():
        found, text = value(name)
        if found is not None and found not in choices:
            raise InvalidArgument(f"{text} must be one of {', '.join(map(repr, choices))}.")
    ranges: tuple[tuple[str, Callable[[float], bool], str], ...] = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (_POSITIVE, lambda v: 0 < v < math.inf, "a positive, finite number"),
        (_POSITIVE_OR_INFINITE, lambda v: v > 0, "a positive number, or inf"),
        (_NOT_NEGATIVE, lambda v: 0 <= v < math.inf, "a finite number of at least 0"),
        (_SHARES_BELOW_ONE, lambda v: 0 <= v < 1, "at least 0 and below 1"),
        (_SHARES, lambda v: 0 <= v <= 1, "between 0 and 1"),
    )
    for names, right, remedy in ranges:
        for name in names.split():
            found, text = value(name)
            if isinstance(found, int | float) and not right(found):
                raise InvalidArgument(f"{text} must be {remedy}.")
    if not config.model.hidden or min(config.model.hidden) < 1:
        raise InvalidArgument(f"[model] hidden={config.model.hidden} must list layer widths of at least 1.")
    if config.model.shape is not None and (not config.model.shape or min(config.model.shape) < 1):
        raise InvalidArgument(f"[model] shape={config.model.shape} must list sizes of at least 1.")


def _check_data(config: Config) -> None:
    data, privacy = config.data, config.privacy
    if not 0 < privacy.delta < 1 / data.size:
        raise InvalidArgument(
            f"[privacy] delta={privacy.delta} must lie between 0 and 1/size={1 / data.size:.3g}: a larger delta "
            "permits publishing someone's row outright."
        )
    if privacy.budget is not None and privacy.budget < privacy.epsilon:
        raise InvalidArgument(
            f"[privacy] budget={privacy.budget} must be at least epsilon={privacy.epsilon}, which this training costs."
        )
    if (data.unit == "user") != (data.users is not None) and data.unit is not None:
        raise InvalidArgument(
            f"[data] unit={data.unit!r} needs users to be {'given' if data.unit == 'user' else 'left out'}."
        )
    if (data.lower is None) != (data.upper is None):
        raise InvalidArgument("[data] lower and upper go together: give both, or neither.")
    if data.range is not None:
        if data.lower is not None:
            raise InvalidArgument("[data] range and lower/upper say the same thing: give one of them.")
        if isinstance(data.range, list) and len(data.range) != 2:
            raise InvalidArgument(f"[data] range={data.range} must be [lowest, highest].")
        if isinstance(data.range, str) and data.range != "public":
            raise InvalidArgument(f"[data] range={data.range!r} must be [lowest, highest] or 'public'.")
        if data.range == "public" and data.public is None:
            raise InvalidArgument("[data] range='public' needs public rows: give public, or declare [lowest, highest].")


def _check_method(config: Config) -> None:
    training, given = config.training, config.training.method
    for name in [given] if isinstance(given, str) else given:
        if name not in METHODS:
            raise InvalidArgument(f"[training] method={name!r} is not known{_hint(name, METHODS)}.")
    methods = training.methods
    if isinstance(given, list) and len(set(given)) < max(1, len(given)):
        raise InvalidArgument(f"[training] method={given} must name at least one method, and none of them twice.")
    if {"dope-sgd", "shrunk-origin"} <= set(methods):
        raise InvalidArgument(
            f"[training] method={given} has two origins: keep dope-sgd or shrunk-origin, which is dope-sgd for public "
            "rows of unknown worth."
        )
    for key, users in USED_BY.items():
        value = getattr(config.method, key)
        if value is not None and not set(users) & set(methods):
            raise InvalidArgument(
                f"[method] {key}={value} is not used by method={given!r}: it is of {' and '.join(users)}, so leave it "
                "out."
            )
    if "mirror-descent" in methods and config.method.decay_steps is None:
        raise InvalidArgument(
            "[method] decay_steps is missing: mirror-descent needs it, the number of steps in which the weight of the "
            "private gradient falls from 1 to alpha_min."
        )
    if isinstance(training.clip, str) and training.clip not in ("auto", "public"):
        raise InvalidArgument(f"[training] clip={training.clip!r} must be a number, 'auto' or 'public'.")
    for what, wanted in (
        (f"method={given!r}", methods != ("dp-sgd",)),
        ("extended=true", training.extended),
        ("clip='public'", training.clip == "public"),
    ):
        if wanted and config.data.public is None:
            raise InvalidArgument(f"[training] {what} needs public rows: give [data] public.")


def _check_training(config: Config) -> None:
    training, warmup = config.training, config.warmup
    if training.optimizer == "adamw" and training.momentum:
        raise InvalidArgument("[training] momentum has no meaning for optimizer='adamw': leave it out.")
    if training.loss == "cross-entropy" and config.model.outputs < 2:
        raise InvalidArgument(f"[model] outputs={config.model.outputs} must be at least 2 classes for cross-entropy.")
    alike = not (training.crop or training.flip or training.cutout) and "weight-multiplicity" not in training.methods
    if training.views not in (None, 1) and alike:
        raise InvalidArgument(
            f"[training] views={training.views} would all be alike: give crop, flip or cutout for images, or method "
            "weight-multiplicity."
        )
    if warmup is None:
        return
    if config.data.public is None:
        raise InvalidArgument("[warmup] needs public rows: give [data] public, or leave the section out.")
    if warmup.optimizer == "adamw" and warmup.momentum is not None:
        raise InvalidArgument("[warmup] momentum has no meaning for optimizer='adamw': leave it out.")
    if warmup.adaptive and not warmup.sam_radius:
        raise InvalidArgument("[warmup] adaptive=true needs sam_radius: give it, 0.5 for instance, or leave both out.")
