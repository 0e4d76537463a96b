"""The TOML file of `sfumato synthesize`, read and checked. docs/synthesis.md says what its keys mean.

[synthesis] of `sfumato train` has the same tables, and is checked here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sfumato.cli.config_file import ConfigFile, check_values, read_sections, sections_of
from sfumato.errors import InvalidArgument
from sfumato.reading import read_toml

NOT_PUBLIC = "a generator that has seen private rows or answers is not public any more, and neither is what it makes"


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The public rows."""

    public: str  # an NPZ file, a folder of images, or a CSV file
    label: str | None = None  # the column to predict (CSV)
    classes: tuple[str, ...] | None = None  # its labels, where they are text (CSV)
    target: str = "class"  # or "number": what labels of a table are
    categorical: tuple[str, ...] = ()  # columns whose numbers are codes (CSV)
    shape: tuple[int, ...] | None = None  # [channels, height, width] of rows that are flat (NPZ)
    range: tuple[float, ...] | None = None  # what black and white are (NPZ); [0, 255] of bytes, else [0, 1]
    held_out: float = 0.0  # the share of the rows that the generator does not see, for measuring
    seed: int = 0  # of which these are


@dataclass(frozen=True, kw_only=True)
class GeneratorSection:
    """The network, and how it is trained."""

    size: str | None = None  # "digits", "cifar" or "ddpmpp"; or numbers:
    channels: int | None = None
    multipliers: tuple[int, ...] | None = None
    blocks: int | None = None
    attention: tuple[int, ...] | None = None
    dropout: float | None = None
    process: str = "edm"  # or "ddpm"
    images: int | None = None  # to train on, each as often as it is seen
    seconds: float | None = None  # instead: as many images as take about so long here
    batch_size: int = 256
    learning_rate: float = 1e-3
    rate_ramp: int = 80_000  # images
    ema_halflife: int = 500_000  # images
    augment_p: float = 0.0
    precision: str | None = None  # "float32" or "bfloat16"; by default the latter on a GPU
    seed: int = 0
    checkpoint_every: int = 500_000  # images
    shrinkage: float | None = None  # of a table's correlations


@dataclass(frozen=True, kw_only=True)
class GuidanceSection:
    """A discriminator of public rows and samples, that samples are guided by."""

    weight: float  # w_d
    steps: int = 1000
    rows: int | None = None  # samples to train it with; by default as many as public rows
    batch_size: int = 256
    learning_rate: float = 3e-4
    channels: int = 64
    multipliers: tuple[int, ...] = (1, 2, 2)
    blocks: int = 1
    lowest: float = 0.0  # levels of noise at which it acts
    highest: float | None = None
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class ChurnSection:
    """Fresh noise of the stochastic sampler, as EDM's algorithm 2 names it."""

    S_churn: float = 40.0
    S_min: float = 0.05
    S_max: float = 50.0
    S_noise: float = 1.003


@dataclass(frozen=True, kw_only=True)
class SampleSection:
    """How many rows are made, and how."""

    n: int
    steps: int = 18
    stochastic: bool | ChurnSection = False
    batch_size: int = 1000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasureSection:
    """What the made rows are worth."""

    cas: bool = False
    fid: bool = False
    precision_recall: bool = False
    memorised: bool = False
    rows: int | None = None  # made rows to look at; by default all
    features: str | None = None  # "pixels" or "lite0" of images, "columns" of tables
    weights: str | None = None  # of lite0
    resolution: int = 224  # that lite0 sees
    neighbours: int = 3  # of precision and recall
    model: str | None = None  # of cas: "linear", "mlp", "cnn" or "wrn-16-4"
    steps: int = 1000
    batch_size: int = 100
    learning_rate: float = 0.05
    crop: int = 0
    flip: bool = False
    cutout: int = 0
    seed: int = 0

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(name for name in ("cas", "fid", "precision_recall", "memorised") if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """Where everything goes."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig(ConfigFile):
    """A whole file."""

    data: DataSection
    generator: GeneratorSection
    guidance: GuidanceSection | None
    sample: SampleSection
    measure: MeasureSection
    output: OutputSection
    within: str | None = None  # the section of a training that has these as its tables; None: a file of their own

    @property
    def folder(self) -> Path:
        return self.file(self.output.folder)

    def called(self, section: str) -> str:
        if self.within is None:
            return super().called(section)
        return f"[{self.within}]" if section == "data" else f"[{self.within}.{section}]"

    @property
    def target(self) -> str:
        """The key that says where everything goes."""
        return "[output] folder" if self.within is None else "[training] out"

    @property
    def otherwise(self) -> str:
        """What can be done about a folder that does not fit, instead of putting things back."""
        return "choose another folder, or use --again" if self.within is None else "or choose another out"


SECTIONS = sections_of(SynthesisConfig)

_CHOICES = {
    "data.target": ("class", "number"),
    "generator.size": ("digits", "cifar", "ddpmpp"),
    "generator.process": ("edm", "ddpm"),
    "generator.precision": ("float32", "bfloat16"),
    "measure.features": ("pixels", "lite0", "columns"),
    "measure.model": ("linear", "mlp", "cnn", "wrn-16-4"),
}
_RANGES = {
    "at least 1": """
        generator.images generator.batch_size generator.ema_halflife generator.checkpoint_every guidance.steps
        guidance.rows guidance.batch_size sample.n sample.batch_size measure.rows measure.resolution measure.neighbours
        measure.steps measure.batch_size
    """,
    "at least 2": "sample.steps",
    "a positive, finite number": """
        generator.seconds generator.learning_rate guidance.learning_rate measure.learning_rate
    """,
    "a finite number": "guidance.weight",
    "a finite number of at least 0": """
        data.seed generator.rate_ramp generator.seed guidance.seed guidance.lowest guidance.highest sample.seed
        measure.crop measure.cutout measure.seed
    """,
    "at least 0 and below 1": "data.held_out generator.dropout",
    "between 0 and 1": "generator.augment_p generator.shrinkage",
}
NETWORK = ("channels", "multipliers", "blocks", "attention", "dropout")
_ONLY_OF_IMAGES = ("data.shape", "data.range", "sample.steps", "sample.stochastic", "sample.batch_size")
_ONLY_OF_AUGMENTATION = ("measure.crop", "measure.flip", "measure.cutout")
_ONLY_OF_TABLES = ("data.label", "data.classes", "data.target", "data.categorical", "generator.shrinkage")


def load_synthesis_config(path: Path) -> SynthesisConfig:
    """Read and check a file; InvalidArgument names the section, the key and the remedy."""
    raw = read_toml(path)
    for name, section in raw.items():
        named = name in ("private", "privacy")
        if named or (isinstance(section, dict) and "private" in section):
            what = f"[{name}]" if named else f"[{name}] private={section['private']!r}"
            raise InvalidArgument(f"{what} has no place in a synthesis: {NOT_PUBLIC}.")
    config = read_sections(SynthesisConfig, path, raw)
    check_synthesis(config)
    check_held_out(config, config.data.held_out)
    return config


def check_synthesis(config: SynthesisConfig) -> None:
    """Raise unless every value can be what it is; what the rows have to do with it is not known yet."""
    check_values(config, _CHOICES, _RANGES)
    _check_together(config)


def check_of_use(config: SynthesisConfig, *, tables: bool) -> None:
    """Refuse keys that rows of this kind have no use for, and ask for those that they need."""
    generator, called = config.generator, config.called("generator")
    if tables:
        of_network = {f"generator.{key}" for key in vars(generator)} - {"generator.shrinkage"}
        strange = config.given & {*_ONLY_OF_IMAGES, *_ONLY_OF_AUGMENTATION, *of_network}
        if config.guidance is not None:
            raise InvalidArgument(
                f"{config.called('guidance')} is for images, and the public rows are a table: leave the section out."
            )
        kind, other = "images", "a table"
    else:
        strange = config.given & set(_ONLY_OF_TABLES)
        kind, other = "tables", "images"
    if strange:
        section, key = min(strange).split(".")
        raise InvalidArgument(
            f"{config.called(section)} {key} is for {kind}, and the public rows are {other}: leave it out."
        )
    if tables:
        return
    if (generator.images is None) == (generator.seconds is None):
        raise InvalidArgument(f"{called} needs images or seconds, one of the two: how long to train.")
    numbers = [key for key in NETWORK if getattr(generator, key) is not None]
    if (generator.size is None) == (not numbers):
        raise InvalidArgument(
            f"{called} needs a size, 'digits', 'cifar' or 'ddpmpp', or numbers in its place: channels, multipliers, "
            "blocks, attention, dropout."
        )


def check_held_out(config: SynthesisConfig, held: float) -> None:
    """Raise if something is to be measured against rows that nobody holds out; `held` is their share, or number."""
    against = [name for name in config.measure.wanted if name != "memorised"]
    if against and not held:
        raise InvalidArgument(
            f"{config.called('measure')} {against[0]} needs public rows that the generator has not seen: give "
            f"{config.called('data')} held_out, such as 0.2."
        )


def _check_together(config: SynthesisConfig) -> None:
    data, measure, guidance = config.data, config.measure, config.guidance
    if data.range is not None and (len(data.range) != 2 or not data.range[0] < data.range[1]):
        raise InvalidArgument(f"[data] range={list(data.range)} must be [black, white], the lower number first.")
    if data.shape is not None and (len(data.shape) != 3 or min(data.shape) < 1):
        raise InvalidArgument(f"[data] shape={list(data.shape)} must be [channels, height, width].")
    if (measure.features == "lite0") != (measure.weights is not None):
        raise InvalidArgument(
            f"{config.called('measure')} features='lite0' and weights, the file that it reads, go together."
        )
    if guidance is None:
        return
    called = config.called("guidance")
    if guidance.seed == config.sample.seed:
        raise InvalidArgument(
            f"{called} seed={guidance.seed} is that of {config.called('sample')}, too: choose another, since the "
            "discriminator would know the very samples that it is to guide."
        )
    if guidance.highest is not None and not guidance.lowest < guidance.highest:
        raise InvalidArgument(f"{called} lowest={guidance.lowest} must be below highest={guidance.highest}.")
