"""Everything that determines a training, and nothing else: two cells with equal settings share their runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.experiments.reading import read, suggestion

TEXTS = ("wikitext2", "tiny-text")
DATASETS = ("cifar10", "mnist", "digits", "cifar10-features", "digits-rows", *TEXTS)
LANGUAGE_MODELS = ("lstm", "bert")
MODELS = ("wide-resnet", "cifar-convnet", "convnet3", "cnn", "mlp", "pixel-mlp", "linear", *LANGUAGE_MODELS)
VOCABULARIES = ("public", "not-private")
CUTS = ("line", "stream")
STRATEGIES = ("none", "random", "entropy", "margin", "k-center", "diverse-public", "near-private")
GENERATORS = ("digits", "cifar", "ddpmpp")
PROCESSES = ("edm", "ddpm")
SETTINGS = ("cold", "warm", "warm-aug", "extended", "cold-extended", "warm-only", "not-private")
UNASKED = ("warm-only", "not-private")  # nothing private is asked, so nothing is spent
OPTIONS = {  # the table with the options of a method
    "dope-sgd": "dope",
    "mirror-descent": "mirror",
    "ada-dps": "ada",
    "shrunk-origin": "shrunk",
    "weight-multiplicity": "multiplicity",
    "exact-mirror": "exact",
}
METHODS = ("dp-sgd", *OPTIONS)
WITHOUT_STATE = ("dp-sgd", "dope-sgd", "weight-multiplicity")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which rows are private and public. The split is the same for all seeds, as the papers have one."""

    name: str
    private: int
    public: int
    hold_out: int = 0  # of the public rows, kept out of everything but the choice among the averages
    test: int | None = None  # so many of the test rows; all by default
    shuffled_labels: bool = False  # of the public rows: public data that is worth nothing
    split: int = 0  # the seed of the split
    synthetic: bool = False  # rows generated from the public ones join them, see `Synthesis`
    pollution: int = 0  # so many rows of another kind join the public ones, with labels that mean nothing here
    resolution: int | None = None  # at which a pretrained network saw the images, for cifar10-features
    row_length: float = 1.0  # of every row of a table


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    depth: int | None = None  # wide-resnet; layers of lstm, blocks of bert
    width: int | None = None  # wide-resnet, lstm, bert
    activation_first: bool | None = None  # wide-resnet
    hidden: tuple[int, ...] | None = None  # mlp and pixel-mlp, which takes images of whole numbers


@dataclass(frozen=True, kw_only=True)
class Text:
    """How text is made rows of words. `private` and `public` of the data then count rows."""

    words: int = 8000  # in the vocabulary, the unknown one included
    length: int = 35
    cut: str = "line"  # as paper 003 does; "stream" as paper 000
    vocabulary: str = "public"  # or "not-private": counted in all the text, as the papers do


@dataclass(frozen=True, kw_only=True)
class Crops:
    """Views of an image; with the defaults, the image itself."""

    pad: int = 0
    flip: bool = False
    cutout: int = 0
    trivial: bool = False  # TrivialAugment, before the cutout
    auto: bool = False  # AutoAugment with its policy for CIFAR-10, before the cutout
    cutmix: bool = False  # last of all; for public rows only


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """A diffusion model of the public rows. One serves all cells and seeds that have the same."""

    rows: int  # that it makes
    network: str = "cifar"
    process: str = "edm"
    images: int  # that it is trained on, counted each time they are seen
    batch_size: int = 256
    learning_rate: float = 1e-3
    augment_p: float = 0.12
    steps: int = 18  # of the sampler
    guidance: float = 0.0  # w_d, the weight of a discriminator of public and synthetic rows
    guide_rows: int = 10_000  # unguided samples that the discriminator learns from
    guide_steps: int = 2_000
    alone: bool = False  # the synthetic rows take the place of the public ones, instead of joining them


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which of the public rows are labelled, and the training on those, after the private one (paper 004)."""

    strategy: str = "none"
    labels: tuple[int, ...]  # how many, each time from the private model
    uncertain: float = 4.0  # k / n: so many uncertain rows for each that is chosen; diverse-public and near-private
    components: int = 10  # p
    each: int = 10  # N_each, of diverse-public
    quantile: float = 0.5  # private rows vote that are as uncertain as this share of the public ones; near-private
    pca_epsilon: float = 0.3  # what the PCA would cost alone; near-private
    support_epsilon: float = 0.7  # what the counts would cost alone; near-private
    epochs: int = 4
    batch_size: int = 64
    learning_rate: float = 0.1
    labels_alone: bool = False  # else the other public rows are trained on, too, with what the model says of them
    augment: Crops = field(default_factory=Crops)


@dataclass(frozen=True, kw_only=True)
class Federated:
    """Rows belong to users, who are the privacy unit; `batch_size` counts users, and `steps` rounds."""

    rows_per_user: int
    everyone: bool = False  # public users are behind the door, too
    epochs: int = 1  # of local training; with the defaults, FedSGD
    local_batch: int | None = None
    local_learning_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Plain SGD with a cosine schedule on the public rows."""

    steps: int
    batch_size: int = 100
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    sharpness: float = 0.0  # the radius of SAM; 0 is plain SGD
    ema: bool = False
    augment: Crops = field(default_factory=Crops)


@dataclass(frozen=True, kw_only=True)
class Dope:
    origin_clip: float | None = None  # the papers' lambda; the clip norm by default
    bounded: bool = True  # False is the algorithm as printed
    public_batch: int = 640
    line_search: bool = False  # no public step is longer than the public loss falls


@dataclass(frozen=True, kw_only=True)
class Mirror:
    decay_steps: float
    alpha_min: float = 0.0
    public_batch: int = 640
    public_clip: float | None = None
    answer_clip: float | None = None
    line_search: bool = False


@dataclass(frozen=True, kw_only=True)
class Ada:
    damping: float = 1.0
    memory: float = 0.95
    public_batch: int = 640


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    origin_clip: float | None = None
    public_batch: int = 640
    memory: float = 0.8
    line_search: bool = False


@dataclass(frozen=True, kw_only=True)
class Multiplicity:
    radius: float = 0.1
    public_batch: int = 64


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The step size is the learning rate."""

    strength: float  # of the regulariser that makes the public loss strongly convex


@dataclass(frozen=True, kw_only=True)
class Training:
    """The private training. Of `epsilon` and `noise` (the noise multiplier) one is given; neither if not private."""

    setting: str
    method: tuple[str, ...] = ("dp-sgd",)  # outermost first; all stand on DP-SGD
    epsilon: float | None = None
    noise: float | None = None
    delta: float
    steps: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    clip: float = 1.0
    views: int = 1
    augment: Crops = field(default_factory=Crops)
    public_augment: Crops = field(default_factory=Crops)  # of the public gradients
    keep_last: int = 100  # iterates for the ensembles
    evaluate_every: int | None = None
    bfloat16_on_gpu: bool = False
    extended_clip: float | None = None  # the longest mean gradient of public rows that join the batch
    dope: Dope | None = None
    mirror: Mirror | None = None
    ada: Ada | None = None
    shrunk: Shrunk | None = None
    multiplicity: Multiplicity | None = None
    exact: Exact | None = None


_LATER = {  # what came later, and where it is not used: without it, work in progress keeps its name
    "federated": None,
    "text": None,
    "data.row_length": 1.0,
    "training.extended_clip": None,
    "training.mirror.public_clip": None,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training as data; `read_settings` of its `to_json()` gives an equal one."""

    data: Data
    model: Model
    training: Training
    warm_up: WarmUp | None = None
    synthesis: Synthesis | None = None
    selection: Selection | None = None
    federated: Federated | None = None
    text: Text | None = None

    @property
    def public_rows(self) -> int:
        """How many may be trained on, synthetic ones included."""
        real, made = self.data.public - self.data.hold_out, self.synthesis
        return real if made is None else made.rows + (0 if made.alone else real)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples as lists, as they come back
        return plain

    def key(self) -> str:
        """Short and the same wherever the settings are; for names of files."""
        plain = self.to_json()
        for path, unused in _LATER.items():
            *tables, name = path.split(".")
            table = plain
            for part in tables:
                table = table[part] or {}
            if table.get(name, unused) == unused:
                table.pop(name, None)
        return digest(plain)


def stated(options: Any) -> dict[str, Any]:
    """What differs from the defaults: a digest of it stays what it is when a later version knows more options."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(options)}
    given = {name: getattr(options, name) for name in defaults}
    return {name: stated(v) if is_dataclass(v) else v for name, v in given.items() if v != defaults[name]}


def digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def read_settings(raw: Mapping[str, Any], where: str) -> Settings:
    """Strictly, and without what plays no part: the warm-up of a cold start, options of methods that are not used."""
    settings: Settings = read(Settings, raw, where)
    training = settings.training
    training = replace(training, **{table: _options(training, name) for name, table in OPTIONS.items()})
    cold = training.setting.startswith("cold") or training.setting == "not-private"
    data = settings.data if settings.data.name == "cifar10-features" else replace(settings.data, resolution=None)
    settings = replace(
        settings,
        data=data,
        training=training if training.setting.endswith("extended") else replace(training, extended_clip=None),
        warm_up=None if cold else settings.warm_up,
        synthesis=settings.synthesis if data.synthetic else None,
        selection=None if settings.selection is None or settings.selection.strategy == "none" else settings.selection,
        text=(settings.text or Text()) if data.name in TEXTS else None,
    )
    _check_names(settings, where)
    _check_numbers(settings, where)
    _check_method(training, where)
    if not cold and settings.warm_up is None:
        raise InvalidArgument(f"{where} has setting={training.setting!r} and no warm_up: add the table.")
    if data.synthetic and settings.synthesis is None:
        raise InvalidArgument(f"{where} has synthetic rows and no synthesis: add the table.")
    return settings


def _options(training: Training, method: str) -> Any:
    """None for a method that is not used, its defaults where nothing was said."""
    given = getattr(training, OPTIONS[method])
    if method not in training.method:
        return None
    return _DEFAULTS[method]() if given is None and method in _DEFAULTS else given


_DEFAULTS = {"dope-sgd": Dope, "ada-dps": Ada, "shrunk-origin": Shrunk, "weight-multiplicity": Multiplicity}


def _check_names(settings: Settings, where: str) -> None:
    synthesis = settings.synthesis
    selection, text = settings.selection, settings.text
    made_by = () if synthesis is None else (("network", synthesis.network), ("process", synthesis.process))
    for what, found, known in (
        ("data, name", settings.data.name, DATASETS),
        ("model, name", settings.model.name, MODELS),
        ("setting", settings.training.setting, SETTINGS),
        *(("method", name, METHODS) for name in settings.training.method),
        *(() if selection is None else (("selection, strategy", selection.strategy, STRATEGIES),)),
        *(() if text is None else (("vocabulary", text.vocabulary, VOCABULARIES), ("cut", text.cut, CUTS))),
        *((f"synthesis, {what}", name, GENERATORS if what == "network" else PROCESSES) for what, name in made_by),
    ):
        if found not in known:
            raise InvalidArgument(f"{where}, {what}={found!r} is not known{suggestion(found, known)}")
    _check_text(settings, where)


def _check_text(settings: Settings, where: str) -> None:
    data = settings.data
    if (settings.text is None) == (settings.model.name in LANGUAGE_MODELS):
        raise InvalidArgument(
            f"{where} has data {data.name} and model {settings.model.name}: language models, and they alone, read text."
        )
    others = data.pollution or data.shuffled_labels or data.synthetic or settings.selection or settings.federated
    if settings.text is not None and others:
        raise InvalidArgument(
            f"{where} has text with pollution, shuffled labels, synthetic rows, a selection or users: leave them out."
        )


def _check_numbers(settings: Settings, where: str) -> None:
    data, training, warm_up = settings.data, settings.training, settings.warm_up
    positive: dict[str, float | None] = {"private": data.private, "public": data.public, "test": data.test}
    for name in (
        "epsilon",
        "noise",
        "delta",
        "steps",
        "batch_size",
        "learning_rate",
        "clip",
        "extended_clip",
        "views",
        "keep_last",
    ):
        positive[name] = getattr(training, name)
    if warm_up is not None:
        positive |= {f"warm_up {name}": getattr(warm_up, name) for name in ("steps", "batch_size", "learning_rate")}
    if settings.text is not None:
        positive |= {"text words": settings.text.words, "text length": settings.text.length}
    if settings.synthesis is not None:
        counts = ("rows", "images", "batch_size", "learning_rate", "steps", "guide_rows", "guide_steps")
        positive |= {f"synthesis {name}": getattr(settings.synthesis, name) for name in counts}
    if settings.selection is not None:
        counts = ("uncertain", "components", "each", "pca_epsilon", "support_epsilon", "epochs", "learning_rate")
        positive |= {f"selection {name}": getattr(settings.selection, name) for name in counts}
        if not settings.selection.labels or not 0 < min(settings.selection.labels) <= max(settings.selection.labels):
            raise InvalidArgument(f"{where}, selection labels={settings.selection.labels} must be numbers of rows.")
    if settings.federated is not None:
        local = ("rows_per_user", "epochs", "local_batch", "local_learning_rate")
        positive |= {f"federated {name}": getattr(settings.federated, name) for name in local}
    for name, value in positive.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidArgument(f"{where}, {name}={value} must be a positive, finite number.")
    if not 0 <= data.hold_out < data.public:
        raise InvalidArgument(f"{where}, hold_out={data.hold_out} must leave some of the {data.public} public rows.")
    given = (training.epsilon is not None) + (training.noise is not None)
    if given != (0 if training.setting in UNASKED else 1):
        raise InvalidArgument(
            f"{where} needs either epsilon or noise, which epsilon is turned into, or neither where nothing is asked."
        )
    if data.name == "cifar10-features" and data.resolution is None:
        raise InvalidArgument(f"{where} has data cifar10-features and no resolution: say how large the images were.")


def _check_method(training: Training, where: str) -> None:
    method = training.method
    if not method or len(set(method)) < len(method) or "dp-sgd" in method[:-1]:
        raise InvalidArgument(
            f"{where}, method={list(method)} must name different methods, outermost first; all stand on dp-sgd."
        )
    states = [name not in WITHOUT_STATE for name in method]
    if states != sorted(states, reverse=True):
        raise InvalidArgument(
            f"{where}, method={list(method)} must begin with those that carry state: "
            f"{', '.join(name for name in method if name not in WITHOUT_STATE)}."
        )
    if "ada-dps" in method[1:]:
        raise InvalidArgument(f"{where}, method={list(method)} must begin with ada-dps, which scales all below it.")
    if "exact-mirror" in method and training.exact is None:
        raise InvalidArgument(f"{where} has exact-mirror and no strength: add exact = {{ strength = ... }}.")
    if "mirror-descent" in method and training.mirror is None:
        raise InvalidArgument(f"{where} has mirror-descent and no decay_steps: add mirror = {{ decay_steps = ... }}.")
