"""The TOML file of `sfumato train`, as data. Every key is known; an unknown one is an error with a suggestion."""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which rows are private, public and for testing, and what is declared about them."""

    private: str
    name: str  # under which the ledger knows the private data: the same data must keep the same name
    size: int  # declared number of units; approximate under add-remove, exact under replace-one
    label: str | None = None  # the column to predict (CSV)
    public: str | None = None
    test: str | None = None
    unit: str | None = None  # "example" or "user"; by default "user" if `users` is given
    users: str | None = None  # the column (CSV) or array (NPZ) with a user id per row
    records_per_user: int = 64
    range: list[float] | str | None = None  # [lowest, highest] of every feature, or "public": from the public rows
    lower: float | list[float] | None = None
    upper: float | list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model; the number of outputs is declared, never counted from private labels."""

    kind: str  # "linear", "mlp", "cnn", or "module:function" called with (inputs, outputs, **options)
    outputs: int
    hidden: list[int] = field(default_factory=lambda: [64])  # mlp
    shape: list[int] | None = None  # of one row, for instance [1, 28, 28]; the cnn needs it
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrivacySection:
    """What this training may cost, and where it is written down."""

    epsilon: float
    delta: float
    ledger: str  # a file, or a database URL
    adjacency: str = "add-remove"
    budget: float | None = None  # epsilon of everything ever asked of this dataset; by default this training's


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """How to train."""

    out: str
    steps: int
    batch_size: int | None = None
    sampling: str = "poisson"
    method: str = "dp-sgd"
    loss: str = "cross-entropy"
    clip: float = 1.0
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.0
    reserve: int = 0  # further steps that are paid for, to do again what a crash loses
    seed: int = 0  # of public randomness only: initial weights and public batches
    pretrain_steps: int = 0  # plain steps on the public rows first, for a warm start
    pretrain_learning_rate: float = 0.01
    checkpoint_every: float = 30.0  # seconds
    evaluate_every: int | None = None  # steps


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole file. Relative paths are relative to it."""

    path: Path
    data: DataSection
    model: ModelSection
    privacy: PrivacySection
    training: TrainingSection

    def file(self, name: str) -> Path:
        return self.path.parent / name

    @property
    def out(self) -> Path:
        return self.file(self.training.out)

    @property
    def ledger(self) -> str:
        ledger = self.privacy.ledger
        return ledger if "://" in ledger else str(self.file(ledger))

    def to_json(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(getattr(self, name)) for name in _SECTIONS}


_SECTIONS: dict[str, type[Any]] = {
    "data": DataSection,
    "model": ModelSection,
    "privacy": PrivacySection,
    "training": TrainingSection,
}

_CHOICES = {
    "data.unit": ("example", "user"),
    "privacy.adjacency": ("add-remove", "replace-one"),
    "training.sampling": ("poisson", "fixed", "full"),
    "training.method": ("dp-sgd",),
    "training.loss": ("cross-entropy", "squared-error"),
    "training.optimizer": ("sgd", "adamw"),
}
_AT_LEAST_ONE = (
    "data.size data.records_per_user model.outputs training.steps training.batch_size training.evaluate_every"
)
_POSITIVE = "privacy.epsilon privacy.budget training.clip training.learning_rate training.pretrain_learning_rate"
_NOT_NEGATIVE = "training.reserve training.seed training.pretrain_steps training.checkpoint_every training.momentum"


def load_config(path: Path) -> Config:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    if not path.is_file():
        raise InvalidArgument(f"config={str(path)!r} does not exist: give the path of a TOML file.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config={str(path)!r} is not valid TOML: {error}.") from None
    for name in raw:
        if name not in _SECTIONS:
            raise InvalidArgument(f"config={str(path)!r} has an unknown section [{name}]{_hint(name, _SECTIONS)}.")
    sections = {name: _section(name, kind, raw.get(name)) for name, kind in _SECTIONS.items()}
    config = Config(path=path, **sections)
    _check_values(config)
    _check_combinations(config)
    return config


def _section(name: str, kind: type[Any], raw: Any) -> Any:
    if not isinstance(raw, dict):
        raise InvalidArgument(f"[{name}] is missing from the config: add the section.")
    known = {f.name: f for f in fields(kind)}
    for key in raw:
        if key not in known:
            raise InvalidArgument(f"[{name}] has no key {key!r}{_hint(key, known)}.")
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        if not _fits(value, hints[key]):
            raise InvalidArgument(f"[{name}] {key}={value!r} must be {_describe(hints[key])}.")
    for key, f in known.items():
        if key not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidArgument(f"[{name}] lacks the key {key!r}: add it.")
    return kind(**raw)


def _hint(name: str, known: typing.Iterable[str]) -> str:
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


_WORDS = {int: "a whole number", float: "a number", str: "a string", dict: "a table"}


def _describe(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return f"a list of {_describe(typing.get_args(hint)[0]).split(' ', 1)[1]}s"
    return _WORDS[typing.get_origin(hint) or hint]


def _check_values(config: Config) -> None:
    def value(name: str) -> tuple[Any, str]:
        section, key = name.split(".")
        found = getattr(getattr(config, section), key)
        return found, f"[{section}] {key}={found!r}"

    for name, choices in _CHOICES.items():
        found, text = value(name)
        if found is not None and found not in choices:
            raise InvalidArgument(f"{text} must be one of {', '.join(map(repr, choices))}.")
    for names, lowest, itself, remedy in (
        (_AT_LEAST_ONE, 1, True, "at least 1"),
        (_POSITIVE, 0, False, "a positive, finite number"),
        (_NOT_NEGATIVE, 0, True, "a finite number of at least 0"),
    ):
        for name in names.split():
            found, text = value(name)
            if found is None:
                continue
            if not math.isfinite(found) or found < lowest or (found == lowest and not itself):
                raise InvalidArgument(f"{text} must be {remedy}.")
    if not config.model.hidden or min(config.model.hidden) < 1:
        raise InvalidArgument(f"[model] hidden={config.model.hidden} must list layer widths of at least 1.")
    if config.model.shape is not None and (not config.model.shape or min(config.model.shape) < 1):
        raise InvalidArgument(f"[model] shape={config.model.shape} must list sizes of at least 1.")
    if not config.training.momentum < 1:
        raise InvalidArgument(f"[training] momentum={config.training.momentum} must be below 1.")


def _check_combinations(config: Config) -> None:
    data, privacy, training = config.data, config.privacy, config.training
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
    if training.pretrain_steps and data.public is None:
        raise InvalidArgument(f"[training] pretrain_steps={training.pretrain_steps} needs [data] public: give it.")
    if training.optimizer == "adamw" and training.momentum:
        raise InvalidArgument("[training] momentum has no meaning for optimizer='adamw': leave it out.")
    if training.loss == "cross-entropy" and config.model.outputs < 2:
        raise InvalidArgument(f"[model] outputs={config.model.outputs} must be at least 2 classes for cross-entropy.")
