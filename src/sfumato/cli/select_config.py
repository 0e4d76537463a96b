"""The TOML file of `sfumato select`, read and checked; docs/labelling.md says what its keys mean."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sfumato.cli.config import _hint, _section
from sfumato.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class ReleasedSection:
    """The released model: the folder of a finished run, and what its config.json does not say."""

    weights: str
    ema: bool = False  # the moving average of the weights, where the run kept one
    embedding: str | None = None  # the layer whose input is the embedding; the last linear one
    kind: str | None = None  # as in [model] of `sfumato train`, like the rest
    outputs: int | None = None
    hidden: list[int] | None = None
    shape: list[int] | None = None
    options: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PoolSection:
    """Public images without labels."""

    images: str  # an NPZ file, or a folder of image files
    classes: list[str] | None = None  # what the person who labels sees; by default 0, 1, ...
    range: list[float] | None = None  # as in [data] of `sfumato train`, whose value is the default


@dataclass(frozen=True, kw_only=True)
class SelectSection:
    """Which of them to label."""

    strategy: str
    n: int
    out: str
    seed: int = 0  # of public randomness only
    uncertain: float | None = None
    components: int | None = None
    each: int | None = None
    uncertainty: str | None = None
    voters: str | None = None
    quantile: float | None = None
    top: int | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivateSection:
    """Whom near-private asks, and what that may cost."""

    data: str
    name: str
    size: int
    epsilon: float  # of the two questions together
    delta: float
    ledger: str
    support: float = 0.5  # the share of epsilon for counting votes; the rest is for the principal directions
    budget: float | None = None  # of everything ever asked; by default what the ledger has, or epsilon
    adjacency: str = "add-remove"
    users: str | None = None
    records_per_user: int = 64


@dataclass(frozen=True, kw_only=True)
class FinetuneSection:
    """Training on the labels that came back."""

    out: str | None = None
    test: str | None = None
    epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 0.01
    crop: int = 0
    flip: bool = False
    cutout: int = 0


SECTIONS: dict[str, type[Any]] = {
    "model": ReleasedSection,
    "pool": PoolSection,
    "select": SelectSection,
    "private": PrivateSection,
    "finetune": FinetuneSection,
}
STRATEGIES = ("random", "entropy", "margin", "k-center", "diverse-public", "near-private")
USED_BY = {
    "uncertain": ("diverse-public", "near-private"),
    "components": ("diverse-public", "near-private"),
    "each": ("diverse-public",),
    "uncertainty": ("diverse-public", "near-private"),
    "voters": ("near-private",),
    "quantile": ("near-private",),
    "top": ("near-private",),
    "bound": ("near-private",),
}
_CHOICES = {
    "select.strategy": STRATEGIES,
    "select.uncertainty": ("entropy", "margin"),
    "select.voters": ("threshold", "top-k"),
    "private.adjacency": ("add-remove", "replace-one"),
}
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "model.outputs select.n select.components select.each select.top private.size private.records_per_user "
        "finetune.epochs finetune.batch_size",
        lambda v: v >= 1,
        "at least 1",
    ),
    (
        "select.bound private.epsilon private.budget finetune.learning_rate",
        lambda v: 0 < v < math.inf,
        "a positive, finite number",
    ),
    ("select.uncertain", lambda v: 1 <= v < math.inf, "a finite number of at least 1"),
    ("select.seed finetune.crop finetune.cutout", lambda v: v >= 0, "at least 0"),
    ("select.quantile", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("private.support", lambda v: 0 < v < 1, "above 0 and below 1"),
)


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """A whole file. Relative paths are relative to it."""

    path: Path
    model: ReleasedSection
    pool: PoolSection
    select: SelectSection
    private: PrivateSection | None
    finetune: FinetuneSection

    def file(self, name: str) -> Path:
        return self.path.parent / name

    @property
    def out(self) -> Path:
        return self.file(self.select.out)

    @property
    def model_out(self) -> Path:
        return self.out / "model" if self.finetune.out is None else self.file(self.finetune.out)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the strategy that were given."""
        given = asdict(self.select)
        return {key: given[key] for key in USED_BY if given[key] is not None}


def load_select_config(path: Path) -> SelectConfig:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    if not path.is_file():
        raise InvalidArgument(f"config={str(path)!r} does not exist: give the path of a TOML file.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config={str(path)!r} is not valid TOML: {error}.") from None
    for name, section in raw.items():
        if name not in SECTIONS:
            raise InvalidArgument(f"config={str(path)!r} has an unknown section [{name}]{_hint(name, SECTIONS)}.")
        _check_keys(name, section)
    raw.setdefault("finetune", {})
    sections: dict[str, Any] = {
        name: None if name == "private" and name not in raw else _section(name, kind, raw.get(name))
        for name, kind in SECTIONS.items()
    }
    config = SelectConfig(path=path, **sections)
    _check_values(config)
    _check_strategy(config)
    _check_private(config)
    return config


def _check_keys(name: str, section: Any) -> None:
    """Here rather than with the rest, since hints are about the sections of this file."""
    known = [f.name for f in fields(SECTIONS[name])]
    for key in section if isinstance(section, dict) else ():
        if key not in known:
            others = [f"[{other}]" for other, kind in SECTIONS.items() if key in {f.name for f in fields(kind)}]
            hint = f": it belongs to {' or '.join(others)}" if others else _hint(key, known)
            raise InvalidArgument(f"[{name}] has no key {key!r}{hint}.")


def _check_values(config: SelectConfig) -> None:
    def value(name: str) -> tuple[Any, str]:
        section, key = name.split(".")
        found = getattr(getattr(config, section), key, None)  # [private] may be left out
        return found, f"[{section}] {key}={found!r}"

    for name, choices in _CHOICES.items():
        found, text = value(name)
        if found is not None and found not in choices:
            raise InvalidArgument(f"{text} must be one of {', '.join(map(repr, choices))}.")
    for names, right, remedy in _RANGES:
        for name in names.split():
            found, text = value(name)
            if found is not None and not right(found):
                raise InvalidArgument(f"{text} must be {remedy}.")
    between = config.pool.range
    if between is not None and not (len(between) == 2 and -math.inf < between[0] < between[1] < math.inf):
        raise InvalidArgument(f"[pool] range={between} must be [lowest, highest].")
    for key in ("hidden", "shape"):
        sizes = getattr(config.model, key)
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise InvalidArgument(f"[model] {key}={sizes} must list sizes of at least 1.")


def _check_strategy(config: SelectConfig) -> None:
    select = config.select
    for key, value in config.options.items():
        if select.strategy not in USED_BY[key]:
            raise InvalidArgument(
                f"[select] {key}={value!r} is not used by strategy={select.strategy!r}: it is of "
                f"{' and '.join(USED_BY[key])}, so leave it out."
            )
    if select.quantile is not None and select.voters == "top-k":
        raise InvalidArgument(
            f"[select] quantile={select.quantile} is of voters='threshold': leave it out, or give top."
        )
    if select.top is not None and select.voters != "top-k":
        raise InvalidArgument(f"[select] top={select.top} is of voters='top-k': leave it out, or give quantile.")


def _check_private(config: SelectConfig) -> None:
    private, strategy = config.private, config.select.strategy
    if (private is not None) != (strategy == "near-private"):
        remedy = "add it, or choose diverse-public, which asks nothing" if private is None else "leave the section out"
        raise InvalidArgument(f"[private] is only for strategy='near-private', and strategy={strategy!r}: {remedy}.")
    if private is None:
        return
    if not private.data.endswith(".npz"):
        raise InvalidArgument(
            f"[private] data={private.data!r} must be an .npz file with the images that were trained on."
        )
    if not 0 < private.delta < 1 / private.size:
        raise InvalidArgument(
            f"[private] delta={private.delta} must lie between 0 and 1/size={1 / private.size:.3g}: a larger delta "
            "permits publishing someone's row outright."
        )
    if private.budget is not None and private.budget < private.epsilon:
        raise InvalidArgument(
            f"[private] budget={private.budget} must be at least epsilon={private.epsilon}, which this selection costs."
        )
