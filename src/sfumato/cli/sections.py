"""The keys of the TOML file of `sfumato train`, one dataclass per section. docs/config.md says what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sfumato.cli.synthesize_config import GeneratorSection, GuidanceSection, MeasureSection, SampleSection

CNN_SIDE = 14  # of the smallest image that the windows of the cnn fit into


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which rows are private, public and for testing, and what is declared about them."""

    private: str
    name: str  # under which the ledger knows the private data: the same data must keep the same name
    size: int  # declared number of units; approximate under add-remove, exact under replace-one
    label: str | None = None  # the column to predict
    classes: list[str] | None = None  # its labels, where they are text, in the order of the model's outputs
    public: str | None = None
    test: str | None = None
    unit: str | None = None  # "example" or "user"; by default "user" if `users` is given
    users: str | None = None  # the column, or array (NPZ), with a user id per row
    records_per_user: int = 64
    range: list[float] | str | None = None  # [lowest, highest] of every feature, or "public": from the public rows
    lower: float | list[float] | None = None
    upper: float | list[float] | None = None
    columns: list[str] | None = None  # the names, where CSV files have no header row
    categories: dict[str, list[str]] = field(default_factory=dict)  # the words of columns that hold words
    ranges: dict[str, list[float]] = field(default_factory=dict)  # [lowest, highest] by the name of the column
    ignore: list[str] = field(default_factory=list)  # columns to leave out
    missing: list[str] = field(default_factory=list)  # cells that mean: not known
    synthetic: str | None = None  # further public rows: a file, or the folder of `sfumato synthesize`


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model; the number of outputs is declared, never counted from private labels."""

    kind: str  # "linear", "mlp", "cnn", "transformers:folder", "timm:name", or "module:function" of one's own
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
    extended: bool = False  # public rows join the batch, and batch_size counts both kinds
    method: str | list[str] = "dp-sgd"
    loss: str = "cross-entropy"
    clip: float | str = 1.0  # or "auto": normalised; or "public": as long as public rows' gradients are
    views: int | None = None  # of each row, averaged inside the clip; 1, or 16 under weight-multiplicity
    crop: int = 0  # pixels
    flip: bool = False
    cutout: int = 0  # pixels
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.0
    ema: bool = False
    keep_last: int = 0  # iterates, for ensembles
    choose: float = 0.0  # share of public rows held back, to choose between last weights, ema and mean of iterates
    alignment: bool = False  # measure how far private gradients point where public ones do
    reserve: int = 0  # further steps that are paid for, to do again what a crash loses
    seed: int = 0  # of public randomness only: initial weights and public batches
    checkpoint_every: float = 30.0  # seconds
    evaluate_every: int | None = None  # steps

    @property
    def methods(self) -> tuple[str, ...]:
        """Outermost first; all stand on DP-SGD."""
        named = [self.method] if isinstance(self.method, str) else self.method
        return tuple(name for name in METHODS if name in named or name == "dp-sgd")


@dataclass(frozen=True, kw_only=True)
class MethodSection:
    """Options of the methods that [training] names; without a value, the method's own default."""

    origin_clip: float | None = None
    origin_memory: float | None = None
    line_search: bool | None = None
    public_batch: int | None = None
    public_clip: float | None = None
    decay_steps: float | None = None
    alpha_min: float | None = None
    answer_clip: float | None = None
    damping: float | None = None
    scale_memory: float | None = None
    radius: float | None = None
    offset_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class WarmupSection:
    """Plain training on the public rows before the private one."""

    steps: int
    batch_size: int = 100
    learning_rate: float = 0.05  # falls to zero along half a cosine
    optimizer: str = "sgd"
    momentum: float | None = None  # of sgd; 0.9
    weight_decay: float = 5e-4
    sam_radius: float = 0.0  # sharpness-aware minimisation; 0 is without
    adaptive: bool = False  # ASAM
    crop: int = 0
    flip: bool = False
    cutout: int = 0


@dataclass(frozen=True, kw_only=True)
class SynthesisSection:
    """More public rows, made of the public ones before anything private is touched; tables of `sfumato synthesize`."""

    sample: SampleSection
    generator: GeneratorSection | None = None
    guidance: GuidanceSection | None = None
    measure: MeasureSection | None = None
    categorical: list[str] = field(default_factory=list)  # columns whose numbers are codes
    held_out: float = 0.0  # the share of the public rows that the generator does not see, for measuring
    seed: int = 0  # of which these are


@dataclass(frozen=True, kw_only=True)
class AfterwardsSection:
    """The two questions of near-private, reserved in one plan with the training for a later `sfumato select`."""

    epsilon: float  # what both would cost without the training; a part of [privacy] epsilon
    support: float = 0.5  # the share of it for counting votes; the rest is for the principal directions
    voters: str = "threshold"  # or "top-k"


METHODS = ("ada-dps", "mirror-descent", "dope-sgd", "shrunk-origin", "weight-multiplicity", "dp-sgd")  # outermost first

USED_BY = {
    "origin_clip": ("dope-sgd", "shrunk-origin"),
    "origin_memory": ("shrunk-origin",),
    "line_search": ("mirror-descent", "dope-sgd", "shrunk-origin"),
    "public_batch": ("ada-dps", "mirror-descent", "dope-sgd", "shrunk-origin"),
    "public_clip": ("mirror-descent", "extended"),
    "decay_steps": ("mirror-descent",),
    "alpha_min": ("mirror-descent",),
    "answer_clip": ("mirror-descent",),
    "damping": ("ada-dps",),
    "scale_memory": ("ada-dps",),
    "radius": ("weight-multiplicity",),
    "offset_batch": ("weight-multiplicity",),
}
