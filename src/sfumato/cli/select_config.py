"""The TOML file of `sfumato select`, read and checked; docs/labelling.md says what its keys mean."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfumato.cli.config_file import (
    ConfigFile,
    check_budget,
    check_delta,
    check_sizes,
    check_values,
    only_given,
    read_sections,
    sections_of,
)
from sfumato.errors import InvalidArgument
from sfumato.reading import read_toml


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
    range: list[float] | None = None  # what is mapped to 0..1; [0, 255] for image files, else that of the training


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
    labels_alone: bool = False  # else the rest of the pool keeps what the model knew
    share: float = 0.5  # of the labelled images in the training, with the rest of the pool
    epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 0.01
    crop: int = 0
    flip: bool = False
    cutout: int = 0


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
_RANGES = {
    "at least 1": """
        model.outputs select.n select.components select.each select.top private.size private.records_per_user
        finetune.epochs finetune.batch_size
    """,
    "a positive, finite number": "select.bound private.epsilon private.budget finetune.learning_rate",
    "a finite number of at least 1": "select.uncertain",
    "a finite number of at least 0": "select.seed finetune.crop finetune.cutout",
    "at least 0 and below 1": "select.quantile",
    "above 0 and below 1": "private.support finetune.share",
}


@dataclass(frozen=True, kw_only=True)
class SelectConfig(ConfigFile):
    """A whole file."""

    model: ReleasedSection
    pool: PoolSection
    select: SelectSection
    private: PrivateSection | None
    finetune: FinetuneSection

    @property
    def out(self) -> Path:
        return self.file(self.select.out)

    @property
    def model_out(self) -> Path:
        return self.out / "model" if self.finetune.out is None else self.file(self.finetune.out)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the strategy that were given."""
        values = asdict(self.select)
        return only_given(**{key: values[key] for key in USED_BY})


SECTIONS = sections_of(SelectConfig)


def load_select_config(path: Path) -> SelectConfig:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    config = read_sections(SelectConfig, path, read_toml(path))
    check_values(config, _CHOICES, _RANGES)
    check_sizes("model", "hidden", config.model.hidden)
    check_sizes("model", "shape", config.model.shape)
    between = config.pool.range
    if between is not None and not (len(between) == 2 and -math.inf < between[0] < between[1] < math.inf):
        raise InvalidArgument(f"[pool] range={between} must be [lowest, highest].")
    _check_strategy(config)
    _check_private(config)
    if config.finetune.labels_alone and "finetune.share" in config.given:
        raise InvalidArgument(
            f"[finetune] share={config.finetune.share} has no meaning for labels_alone=true: leave one of them out."
        )
    return config


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
    if private is None:
        if strategy == "near-private":
            raise InvalidArgument(
                "[private] is missing, and [select] strategy='near-private' asks private images: add it, or choose "
                "diverse-public, which asks nothing."
            )
        return
    if strategy != "near-private":
        raise InvalidArgument(
            f"[private] is only for [select] strategy='near-private', and strategy={strategy!r} asks nothing: leave "
            "the section out."
        )
    if not private.data.endswith(".npz"):
        raise InvalidArgument(
            f"[private] data={private.data!r} must be an .npz file with the images that were trained on."
        )
    check_delta("private", private.delta, private.size)
    check_budget("private", private.budget, private.epsilon, "selection")
