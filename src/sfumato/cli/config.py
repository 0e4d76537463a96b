"""The TOML file of `sfumato train`, read and checked. Every key is known; an unknown one is an error with a hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.cli.config_file import (
    ConfigFile,
    check_budget,
    check_delta,
    check_sizes,
    check_values,
    read_sections,
    sections_of,
)
from sfumato.cli.sections import (
    METHODS,
    USED_BY,
    AfterwardsSection,
    DataSection,
    MethodSection,
    ModelSection,
    PrivacySection,
    SynthesisSection,
    TrainingSection,
    WarmupSection,
)
from sfumato.cli.synthesize_config import DataSection as PublicSection
from sfumato.cli.synthesize_config import (
    GeneratorSection,
    MeasureSection,
    OutputSection,
    SynthesisConfig,
    check_held_out,
    check_synthesis,
)
from sfumato.errors import InvalidArgument
from sfumato.reading import read_toml, suggestion


@dataclass(frozen=True, kw_only=True)
class Config(ConfigFile):
    """A whole file."""

    data: DataSection
    model: ModelSection
    privacy: PrivacySection
    training: TrainingSection
    method: MethodSection
    synthesis: SynthesisSection | None
    warmup: WarmupSection | None
    afterwards: AfterwardsSection | None

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
        return self.place(self.privacy.ledger)

    @property
    def making(self) -> SynthesisConfig | None:
        """[synthesis] as `sfumato synthesize` knows it, with a folder in `out`."""
        own, public = self.synthesis, self.data.public
        if own is None or public is None:
            return None
        below = {name.removeprefix("synthesis.") for name in self.given if name.startswith("synthesis.")}
        return SynthesisConfig(
            path=self.path,
            given=frozenset(name if "." in name else f"data.{name}" for name in below),
            data=PublicSection(
                public=public,
                target="class" if self.training.loss == "cross-entropy" else "number",
                categorical=tuple(own.categorical),
                held_out=own.held_out,
                seed=own.seed,
            ),
            generator=own.generator or GeneratorSection(),
            guidance=own.guidance,
            sample=own.sample,
            measure=own.measure or MeasureSection(),
            output=OutputSection(folder=str(Path(self.training.out) / "synthetic")),
            within="synthesis",
        )


SECTIONS = sections_of(Config)

_CHOICES = {
    "data.unit": ("example", "user"),
    "privacy.adjacency": ("add-remove", "replace-one"),
    "training.sampling": ("poisson", "fixed", "full"),
    "training.loss": ("cross-entropy", "squared-error"),
    "training.optimizer": ("sgd", "adamw"),
    "warmup.optimizer": ("sgd", "adamw"),
    "afterwards.voters": ("threshold", "top-k"),
}
_RANGES = {
    "at least 1": """
        data.size data.records_per_user model.outputs training.steps training.batch_size training.views
        training.evaluate_every method.public_batch method.offset_batch warmup.steps warmup.batch_size
    """,
    "a positive, finite number": """
        privacy.epsilon privacy.budget training.clip training.learning_rate method.damping method.answer_clip
        method.public_clip method.radius warmup.learning_rate afterwards.epsilon
    """,
    "a positive number, or inf": "method.decay_steps method.origin_clip",
    "a finite number of at least 0": """
        training.reserve training.seed training.checkpoint_every training.crop training.cutout training.keep_last
        warmup.weight_decay warmup.sam_radius warmup.crop warmup.cutout
    """,
    "at least 0 and below 1": """
        training.momentum training.choose method.origin_memory method.scale_memory warmup.momentum
    """,
    "above 0 and below 1": "afterwards.support",
    "between 0 and 1": "method.alpha_min",
}


def load_config(path: Path) -> Config:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    return check_config(path, read_toml(path))


def check_config(path: Path, raw: Mapping[str, Any]) -> Config:
    """The same for what was read from `path` already."""
    config = read_sections(Config, path, raw)
    check_values(config, _CHOICES, _RANGES)
    check_sizes("model", "hidden", config.model.hidden)
    check_sizes("model", "shape", config.model.shape)
    _check_data(config)
    _check_columns(config.data)
    _check_method(config)
    _check_training(config)
    _check_synthesis(config)
    return config


def _check_data(config: Config) -> None:
    data, privacy = config.data, config.privacy
    check_delta("privacy", privacy.delta, data.size)
    check_budget("privacy", privacy.budget, privacy.epsilon, "training")
    if (data.unit == "user") != (data.users is not None) and data.unit is not None:
        raise InvalidArgument(
            f"[data] unit={data.unit!r} needs users to be {'given' if data.unit == 'user' else 'left out'}."
        )
    if data.synthetic is not None and data.public is None:
        raise InvalidArgument("[data] synthetic rows join public ones: give public, too, or name them as public.")
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


def _check_columns(data: DataSection) -> None:
    tables: dict[str, Mapping[str, Any]] = {"categories": data.categories, "ranges": data.ranges}
    for key, table in tables.items():
        for name, found in table.items():
            kind = str if key == "categories" else int | float
            if not isinstance(found, list) or not found or not all(isinstance(v, kind) for v in found):
                remedy = "a list of words" if key == "categories" else "[lowest, highest]"
                raise InvalidArgument(f"[data.{key}] {name}={found!r} must be {remedy}.")
            if name in (data.label, data.users, *data.ignore):
                raise InvalidArgument(f"[data.{key}] {name} is no feature: it is the label, a user id or ignored.")
            if data.columns is not None and name not in data.columns:
                raise InvalidArgument(f"[data.{key}] {name} is no column{suggestion(name, data.columns)}")
            if key == "categories" and len(set(found)) < len(found):
                raise InvalidArgument(f"[data.categories] {name} has a word twice: remove one of them.")
            if key == "ranges" and (name in data.categories or len(found) != 2 or not found[0] < found[1]):
                raise InvalidArgument(
                    f"[data.ranges] {name}={found!r} must be [lowest, highest] of a column that holds numbers."
                )
    if data.columns is not None and len(set(data.columns)) < len(data.columns):
        raise InvalidArgument("[data] columns has a name twice: rename one of them.")
    if data.ranges and (data.range, data.lower) != (None, None):
        raise InvalidArgument("[data] ranges and range or lower/upper say the same thing: give one of them.")


def _check_method(config: Config) -> None:
    training, given = config.training, config.training.method
    for name in [given] if isinstance(given, str) else given:
        if name not in METHODS:
            raise InvalidArgument(f"[training] method={name!r} is not known{suggestion(name, METHODS)}")
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
        if value is not None and not set(users) & {*methods, *(("extended",) if training.extended else ())}:
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
        ("alignment=true", training.alignment),
        (f"choose={training.choose}", training.choose > 0),
    ):
        if wanted and config.data.public is None:
            raise InvalidArgument(f"[training] {what} needs public rows: give [data] public.")


def _check_training(config: Config) -> None:
    training, warmup = config.training, config.warmup
    if training.optimizer == "adamw" and config.method.line_search:
        raise InvalidArgument(
            "[method] line_search needs optimizer='sgd', whose steps have the length of the learning rate times the "
            "gradient: leave it out."
        )
    if training.optimizer == "adamw" and training.momentum:
        raise InvalidArgument("[training] momentum has no meaning for optimizer='adamw': leave it out.")
    if training.loss == "cross-entropy" and config.model.outputs < 2:
        raise InvalidArgument(f"[model] outputs={config.model.outputs} must be at least 2 classes for cross-entropy.")
    if training.choose and (training.loss != "cross-entropy" or not (training.ema or training.keep_last)):
        raise InvalidArgument(
            f"[training] choose={training.choose} is between the last weights and averages of a classifier: give "
            "ema or keep_last, too, or leave it out."
        )
    alike = not (training.crop or training.flip or training.cutout) and "weight-multiplicity" not in training.methods
    if training.views not in (None, 1) and alike:
        raise InvalidArgument(
            f"[training] views={training.views} would all be alike: give crop, flip or cutout for images, or method "
            "weight-multiplicity."
        )
    _check_afterwards(config)
    if warmup is None:
        return
    if config.data.public is None:
        raise InvalidArgument("[warmup] needs public rows: give [data] public, or leave the section out.")
    if warmup.optimizer == "adamw" and warmup.momentum is not None:
        raise InvalidArgument("[warmup] momentum has no meaning for optimizer='adamw': leave it out.")
    if warmup.adaptive and not warmup.sam_radius:
        raise InvalidArgument("[warmup] adaptive=true needs sam_radius: give it, 0.5 for instance, or leave both out.")


def _check_afterwards(config: Config) -> None:
    wished, epsilon = config.afterwards, config.privacy.epsilon
    if wished is None:
        return
    if wished.epsilon >= epsilon:
        raise InvalidArgument(
            f"[afterwards] epsilon={wished.epsilon:g} must be below [privacy] epsilon={epsilon:g}, of which it is a "
            "part: lower it, or raise the other."
        )
    if config.training.loss != "cross-entropy":
        raise InvalidArgument(
            f"[afterwards] is for sfumato select, which is of classifiers, and [training] has "
            f"loss={config.training.loss!r}: leave the section out."
        )


def _check_synthesis(config: Config) -> None:
    if config.synthesis is None:
        return
    making = config.making
    if making is None:
        raise InvalidArgument("[synthesis] needs public rows: give [data] public, or leave the section out.")
    if config.data.synthetic is not None:
        raise InvalidArgument(
            f"[synthesis] makes public rows, and [data] synthetic={config.data.synthetic!r} names some that are made: "
            "leave one of them out."
        )
    check_synthesis(making)
    check_held_out(making, config.synthesis.held_out + config.training.choose)  # the generator sees neither
