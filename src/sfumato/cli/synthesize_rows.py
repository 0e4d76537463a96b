"""The public rows that a synthesis is made from: images of an NPZ file or a folder, or a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.cli.synthesize_config import NOT_PUBLIC, DataSection, SynthesisConfig
from sfumato.data.arrays import Array, read_arrays
from sfumato.data.image_files import ENDINGS, image_files, read_images
from sfumato.data.tables import layout, read_table
from sfumato.errors import InvalidArgument
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a file has its images, so that what is made can be used beside them."""

    row_shape: tuple[int, ...]
    limits: tuple[float, float] = (0.0, 255.0)  # black and white
    dtype: str = "uint8"

    def written(self, images: Tensor, labels: Tensor | None) -> dict[str, Array]:
        """uint8 images as arrays in the shape and on the scale of the file."""
        low, high = self.limits
        values = images.numpy() if (low, high) == (0, 255) else low + (high - low) * (images.numpy() / 255)
        kind = np.dtype(self.dtype)
        rounded = np.rint(values) if kind.kind in "iu" else values
        arrays = {"X": rounded.astype(kind).reshape(len(images), *self.row_shape)}
        return arrays if labels is None else {**arrays, "y": labels.numpy()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRows:
    """Images (N, C, H, W), uint8 or floats in 0..1, and their classes, if they have any."""

    rows: Tensor
    labels: Tensor | None
    names: tuple[str, ...] = ()  # of classes
    scale: Scale

    @property
    def image(self) -> tuple[int, int, int]:
        channels, height, width = self.rows.shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        return 0 if self.labels is None else int(self.labels.max()) + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """A table (N, d) of floats and a label per row."""

    rows: Tensor
    labels: Tensor
    columns: tuple[str, ...] = ()  # of a CSV file
    label: str = "y"
    names: tuple[str, ...] = ()  # of labels that were text
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by column, what its codes stand for

    def written(self, rows: Tensor, labels: Tensor) -> bytes:
        """A CSV file if it was one, with the same columns; else arrays."""
        if not self.columns:
            return npz({"X": rows.numpy(), "y": labels.numpy()})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.columns, self.label])
        for row, label in zip(rows.numpy(), labels.tolist(), strict=True):
            cells = [self._cell(name, value) for name, value in zip(self.columns, row, strict=True)]
            writer.writerow([*cells, self.names[int(label)] if self.names else _number(label)])
        return text.getvalue().encode()

    def _cell(self, column: str, value: Any) -> str:
        return self.words[column][int(value)] if column in self.words else _number(value)


def read_rows(config: SynthesisConfig) -> ImageRows | TableRows:
    """What [data] public names; InvalidArgument if it is not understood, or if it is not public."""
    path = config.file(config.data.public)
    refuse_private(config, path, "[data] public")
    if not path.exists():
        raise InvalidArgument(f"[data] public={str(path)!r} does not exist: check the path.")
    if path.is_dir():
        return _pictures(path)
    if path.suffix == ".csv":
        return _csv(path, config.data)
    if path.suffix == ".npz":
        return _npz(path, config.data)
    raise InvalidArgument(f"[data] public={str(path)!r} must be an .npz or .csv file, or a folder of images.")


def refuse_private(config: SynthesisConfig, path: Path, key: str) -> None:
    """Raise if a path is a private training's folder, or lies in one."""
    folder = (path if path.is_dir() else path.parent).resolve()
    around = set(config.path.resolve().parents)  # of the config itself: what is there belongs to everything
    for place in (folder, *(p for p in folder.parents if p not in around)):
        if (place / "run.json").is_file() and _asked_of_private(place / "run.json"):
            raise InvalidArgument(
                f"{key}={str(path)!r} belongs to a run that private answers went into: {NOT_PUBLIC}; name public rows "
                "that lie elsewhere."
            )


def _asked_of_private(record: Path) -> bool:
    try:
        statement = json.loads(record.read_text())["statement"]
        return bool(statement) and bool(statement.get("mechanisms", True))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True  # nobody can say that it is harmless


def split(
    rows: ImageRows | TableRows, share: float, seed: int, *, by_class: bool, section: str = "[data]"
) -> tuple[Tensor, Tensor]:
    """Numbers of the rows to train on and of those held out, in order; that share of every class, to the nearest."""
    count = len(rows.rows)
    rng = np.random.default_rng(seed)
    groups = np.zeros(count) if rows.labels is None or not by_class else rows.labels.numpy()
    chosen = []
    for value in np.unique(groups):
        members = np.flatnonzero(groups == value)
        chosen.append(rng.permutation(members)[: round(share * len(members))])
    held = np.sort(np.concatenate(chosen))
    if share and not 0 < len(held) < count:
        raise InvalidArgument(
            f"{section} held_out={share} of {count} public rows leaves {count - len(held)} to train on and {len(held)} "
            "to measure with: choose another share."
        )
    return torch.from_numpy(np.setdiff1d(np.arange(count), held)), torch.from_numpy(held)


def taken(rows: ImageRows | TableRows, which: Tensor, seed: int | None = None) -> Public:
    """These of the rows as public data."""
    return Public(rows.rows[which] if rows.labels is None else (rows.rows[which], rows.labels[which]), seed=seed)


def npz(arrays: dict[str, Array]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


# ------------------------------------------------------------------------------------------------ NPZ


def _npz(path: Path, data: DataSection) -> ImageRows | TableRows:
    x, y = read_arrays(path, "[data] public", [("x", "y"), ("x_public", "y_public")])  # as `sfumato train` has them
    assert x is not None
    where = f"[data] public={str(path)!r}"
    if x.dtype.kind not in "biuf" or x.ndim < 2 or not len(x):
        raise InvalidArgument(f"{where} has X of the shape {x.shape} and type {x.dtype}: give one row of numbers each.")
    if y is not None and (y.dtype.kind not in "biuf" or y.shape != x.shape[:1]):
        raise InvalidArgument(f"{where} has y of the shape {y.shape} and type {y.dtype}: give one number per row of X.")
    if x.ndim == 2 and data.shape is None:
        for key in ("label", "classes", "categorical"):
            if getattr(data, key):
                raise InvalidArgument(f"[data] {key} is for CSV files, and {str(path)!r} holds arrays: leave it out.")
        if y is None:
            raise InvalidArgument(f"{where} is a table without labels, y: add them, or give shape if it holds images.")
        return TableRows(rows=torch.from_numpy(x.astype(np.float32)), labels=_labels(y, data, where))
    shape = data.shape or x.shape[1:]
    shape = (1, *shape) if len(shape) == 2 else shape
    if len(shape) != 3 or np.prod(shape) != np.prod(x.shape[1:]):
        raise InvalidArgument(
            f"{where} has rows of the shape {list(x.shape[1:])}, which are no images {list(shape)}: give shape = "
            "[channels, height, width]."
        )
    if shape[0] not in (1, 3):
        raise InvalidArgument(
            f"{where} has images {list(shape)}: they must be [channels, height, width] with 1 or 3 channels, so "
            "transpose them, or give shape."
        )
    low, high = data.range or ((0.0, 255.0) if x.dtype == np.uint8 else (0.0, 1.0))
    if not low <= float(x.min()) <= float(x.max()) <= high:
        raise InvalidArgument(
            f"{where} has pixels from {float(x.min()):g} to {float(x.max()):g}, outside of {low:g} to {high:g}: give "
            "range = [black, white]."
        )
    plain = x.dtype == np.uint8 and (low, high) == (0, 255)
    pixels = x if plain else ((x.astype(np.float64) - low) / (high - low)).astype(np.float32)
    labels = None if y is None else _labels(y, data, where).long()
    return ImageRows(
        rows=torch.from_numpy(np.array(pixels)).reshape(len(x), *shape),
        labels=labels,
        scale=Scale(row_shape=tuple(x.shape[1:]), limits=(low, high), dtype=x.dtype.name),
    )


def _labels(y: Array, data: DataSection, where: str) -> Tensor:
    if data.target == "number":
        return torch.from_numpy(y.astype(np.float32))
    if y.dtype.kind == "f" and not bool((y == np.rint(y)).all()):
        raise InvalidArgument(f"{where} has labels that are not whole numbers: number the classes from 0.")
    if int(y.min()) < 0:
        raise InvalidArgument(f"{where} has labels from {int(y.min())}: number the classes from 0.")
    return torch.from_numpy(y.astype(np.int64))


# ------------------------------------------------------------------------------------------------ CSV


def _csv(path: Path, data: DataSection) -> TableRows:
    found = layout(path, "public", label=data.label)
    if strange := [name for name in data.categorical if name not in found.columns]:
        raise InvalidArgument(f"[data] categorical names {strange[0]!r}, which is no column of {str(path)!r}.")
    table = read_table(found, label=data.label, classes=data.classes)
    return TableRows(
        rows=torch.from_numpy(table.features),
        labels=_labels(table.labels, data, f"[data] public={str(path)!r}"),
        columns=found.columns,
        label=str(data.label),
        names=data.classes or (),
    )


def _number(value: Any) -> str:
    """Shortest, and without a point where it is whole."""
    return str(int(value)) if float(value).is_integer() else str(value)


# ------------------------------------------------------------------------------------------------ folders


def _pictures(folder: Path) -> ImageRows:
    """One folder per class, in the order of their names; or images without classes."""
    kinds = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    places = kinds or [folder]
    files = [image_files(place) for place in places]
    for place, found in zip(places, files, strict=True):
        if not found:
            raise InvalidArgument(
                f"[data] public={str(place)!r} holds no images ({', '.join(ENDINGS)}): remove the folder, or "
                "name another."
            )
    images = read_images([path for found in files for path in found], "[data] public")
    labels = np.repeat(np.arange(len(files)), [len(found) for found in files])
    return ImageRows(
        rows=torch.from_numpy(images),
        labels=torch.from_numpy(labels) if kinds else None,
        names=tuple(place.name for place in kinds),
        scale=Scale(row_shape=images.shape[1:]),
    )
