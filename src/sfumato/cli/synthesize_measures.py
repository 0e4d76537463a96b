"""What made rows are worth, as [measure] asks for it: always against public rows."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.cli.augmentation import augmentation, check_augmentation
from sfumato.cli.synthesize_config import MeasureSection, SynthesisConfig
from sfumato.cli.synthesize_rows import ImageRows, TableRows, refuse_private, taken
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.models import basic
from sfumato.models.wide_resnet import wide_resnet
from sfumato.nn import Pixels
from sfumato.objective import Objective, cross_entropy
from sfumato.public import Public
from sfumato.synthesis import Features, cas, fid, lite0_features, memorised, pixel_features, precision, recall
from sfumato.warmup import warm_up

Rows = ImageRows | TableRows


def check_measures(config: SynthesisConfig, rows: Rows, kept: Tensor, held: Tensor) -> None:
    """Whatever would be refused after the training is refused before it."""
    measure, images, called = config.measure, isinstance(rows, ImageRows), config.called("measure")
    if measure.features is not None and (measure.features == "columns") == images:
        of = "'pixels' or 'lite0' for images" if images else "'columns' for a table"
        raise InvalidArgument(f"{called} features={measure.features!r} does not suit the public rows: give {of}.")
    if measure.weights is not None:
        path = config.file(measure.weights)
        refuse_private(config, path, f"{called} weights")
        if not path.is_file():
            raise InvalidArgument(f"{called} weights={str(path)!r} does not exist: check the path.")
    made = min(config.sample.n, measure.rows or config.sample.n)
    least = {"fid": 2, "precision_recall": measure.neighbours + 1}
    for name, count in least.items():
        if name in measure.wanted and min(made, len(held)) < count:
            raise InvalidArgument(
                f"{called} {name} needs {count} rows of either kind, and there are {made} made and {len(held)} held "
                f"out: raise {config.called('sample')} n or {config.called('data')} held_out."
            )
    if measure.memorised and len(kept) < 3:
        raise InvalidArgument(f"{called} memorised needs 3 public rows, and the generator sees {len(kept)}: give more.")
    if measure.cas:
        if rows.labels is None or rows.labels.is_floating_point():
            raise InvalidArgument(f"{called} cas needs classes, and the public rows have none: leave it out.")
        check_augmentation(called[1:-1], measure, tuple(rows.rows.shape[1:]))
        _classifier(config, rows, kept)


def measured(
    config: SynthesisConfig, rows: Rows, kept: Tensor, held: Tensor, made: Public, device: torch.device, *, shown: bool
) -> dict[str, Any]:
    """The measures as JSON has them; each says by what it was taken and of how many rows."""
    measure = config.measure
    whole = made.batch()
    parts = list(whole) if isinstance(whole, tuple | list) else [whole]
    first = [part[: measure.rows] for part in parts]
    synthetic = Public(tuple(first) if len(first) > 1 else first[0], seed=measure.seed)
    found: dict[str, Any] = {}
    if measure.cas:
        classifier = _classifier(config, rows, kept)
        found["cas"] = _cas(measure, rows, classifier, synthetic, taken(rows, held), device, shown)
    if not set(measure.wanted) - {"cas"}:
        return found
    features = _features(config, rows, kept, device)
    if measure.fid:
        found["fid"] = asdict(fid(synthetic, taken(rows, held), features=features))
    if measure.precision_recall:
        for name, take in (("precision", precision), ("recall", recall)):
            found[name] = asdict(take(synthetic, taken(rows, held), features=features, k=measure.neighbours))
    if measure.memorised:
        copies = memorised(synthetic, taken(rows, kept), features=features)
        found["memorised"] = {
            "measure": "near-copies",
            "value": copies.share,
            "by": copies.by,
            "synthetic": len(synthetic),
            "reference": len(kept),
            "among_public_rows": copies.within,
            "threshold": copies.threshold,
        }
    return found


def _features(config: SynthesisConfig, rows: Rows, kept: Tensor, device: torch.device) -> Features:
    measure = config.measure
    if isinstance(rows, TableRows):
        middle, spread = _standard(rows, kept)
        return Features("columns over their deviations", lambda values: (values.double() - middle) / spread)
    if measure.weights is not None:
        return lite0_features(config.file(measure.weights), resolution=measure.resolution, device=device)
    return pixel_features()


def _standard(rows: TableRows, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Means and deviations of the columns of the rows that the generator saw; constant columns stay as they are."""
    values = rows.rows[kept].double()
    spread = values.std(0, correction=0)
    return values.mean(0), torch.where(spread > 0, spread, 1.0)


# ------------------------------------------------------------------------------------------------ accuracy score


def _cas(
    measure: MeasureSection,
    rows: Rows,
    classifier: tuple[str, nn.Module],
    synthetic: Public,
    held: Public,
    device: torch.device,
    shown: bool,
) -> dict[str, Any]:
    autocast = torch.bfloat16 if device.type == "cuda" else None
    train = partial(
        warm_up,
        steps=measure.steps,
        batch_size=measure.batch_size,
        learning_rate=measure.learning_rate,
        augment=augmentation(measure),
        progress=shown,
    )
    name, module = classifier
    objective = Objective(module.to(device), cross_entropy, autocast)
    with own_generators(measure.seed):  # views are drawn by torch's own
        found = cas(objective, _numbered(synthetic, rows), _numbered(held, rows), train=train)
    return asdict(replace(found, by=f"{name}, {measure.steps} steps"))


def _classifier(config: SynthesisConfig, rows: Rows, kept: Tensor) -> tuple[str, nn.Module]:
    """A fresh one, and its name."""
    measure, called = config.measure, config.called("measure")
    shape, images = tuple(rows.rows.shape[1:]), isinstance(rows, ImageRows)
    kind = measure.model or ("wrn-16-4" if images else "mlp")
    outputs = len(_known(rows))
    if kind in ("cnn", "wrn-16-4") and not images:
        raise InvalidArgument(f"{called} model={kind!r} is for images: give 'linear' or 'mlp' for a table.")
    with own_generators(measure.seed):
        if kind == "wrn-16-4":
            return kind, wide_resnet(16, 4, outputs, channels=shape[0])
        inputs = int(np.prod(shape))
        first = Pixels() if isinstance(rows, ImageRows) else _Standardised(*_standard(rows, kept))
        if kind == "cnn":
            module = nn.Sequential(first, basic.cnn(shape[0], outputs))
            try:
                module(torch.zeros(1, *shape))  # its lazy layer learns its size here
            except RuntimeError:
                raise InvalidArgument(
                    f"{called} model='cnn' is for larger images than {shape[1]} x {shape[2]}: give 'mlp' or 'wrn-16-4'."
                ) from None
            return kind, module
        made = basic.linear(inputs, outputs) if kind == "linear" else basic.mlp(inputs, outputs)
        return kind, nn.Sequential(first, made)


class _Standardised(nn.Module):
    """Columns of mean 0 and deviation 1 over the public rows."""

    def __init__(self, middle: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer("middle", middle.float())
        self.register_buffer("spread", spread.float())
        self.middle: Tensor
        self.spread: Tensor

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.middle) / self.spread


def _known(rows: Rows) -> Tensor:
    """The classes, in order: all numbers of images, those that occur in a table."""
    assert rows.labels is not None
    return torch.arange(rows.classes) if isinstance(rows, ImageRows) else torch.unique(rows.labels)


def _numbered(public: Public, rows: Rows) -> Public:
    """Classes counted from 0, as outputs are."""
    features, labels = public.batch()
    return Public((features, torch.searchsorted(_known(rows), labels.long())), seed=0)
