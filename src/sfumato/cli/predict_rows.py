"""Rows to predict for, from files of the form that a model was trained on; labels may be there, and are not needed.

Cells become numbers by the `Encoding` that was kept with the run. As for test rows, errors name a column and a line,
and quote no cell; of the private rows not even the line, nor the name of an image, is told.
"""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.data import cells
from sfumato.data.arrays import first_array
from sfumato.data.encoding import word
from sfumato.data.image_files import image_files, read_images
from sfumato.data.preprocessing import Preprocessing
from sfumato.data.tables import npz_names
from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]
_CHUNK = 8192  # rows in memory as cells at a time
_ENDINGS = ("", "_test")  # of the arrays in an NPZ file, as for test rows


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a file holds: features before scaling, and where they were asked for, one label per row."""

    features: Array
    labels: npt.NDArray[np.float64] | None = None
    files: Sequence[str] | None = None  # of images, below their folder
    undeclared: dict[str, int] = field(default_factory=dict)  # words that no category has: how many, by column
    array: str | None = None  # of an NPZ file


def read_rows(path: Path, made: Preprocessing, *, labels: bool = False, private: bool = False) -> Found:
    """The rows of a file or folder; `labels`: also what is to be predicted, which must then be there.

    `private`: they are those that were trained on, whose labels nobody compares with.
    """
    if not path.exists():
        raise InvalidArgument(f"data={str(path)!r} does not exist: check the path.")
    if made.columns:
        return _read_cells(path, made, labels, private)
    if path.is_dir():
        return _read_images(path, made, labels, private)
    if path.suffix == ".npz":
        return _read_npz(path, made, labels)
    raise InvalidArgument(
        f"data={str(path)!r} must be an .npz file or a folder of images: the model was trained on rows without "
        "named columns."
    )


def holds_private(path: Path, private: Path, *, arrays: Sequence[str] = ()) -> bool:
    """Whether rows of this file are the private ones, by its place, also through links; a copy is not known as one.

    Of an NPZ file the first of `arrays` that it has is read, or what predictions are made for.
    """
    if not path.exists() or not private.exists():
        return False
    if path.samefile(private):  # an NPZ file may hold private and test rows
        return path.suffix != ".npz" or _reads_private(path, arrays)
    if not (path.is_dir() and private.is_dir()):
        return False
    folder = private.resolve()  # of images, of which some may be taken
    return any(file.resolve().is_relative_to(folder) for file in image_files(path, below=True))


def _reads_private(path: Path, arrays: Sequence[str]) -> bool:
    try:
        private = npz_names(path, "private", None)
    except InvalidArgument:  # nothing in it can have been trained on
        return False
    array = first_array(path, arrays) if arrays else _npz_names(path)[0].lower()
    return array in {name.lower() for name in private}


# ------------------------------------------------------------------------------------------------ named columns


def _read_cells(path: Path, made: Preprocessing, labels: bool, private: bool) -> Found:
    if not cells.has_cells(path):
        raise InvalidArgument(
            f"data={str(path)!r} must be a .csv or .parquet file or a dataset saved on disk: the model was trained on "
            "named columns."
        )
    header, rows = _open(path, made)
    if missing := [name for name in made.columns if name not in header]:
        remedy = "" if made.encoding.columns else f": check its header row{cells.without_header(path, 'data')}"
        raise InvalidArgument(
            f"data={str(path)!r} has no column {missing[0]!r}, which the model was trained with{remedy}."
        )
    if labels and made.label not in header:
        raise InvalidArgument(
            f"data={str(path)!r} has no column {made.label!r}, which a score compares with: add it, or leave the score "
            "out."
        )
    features: list[Array] = []
    found: list[Array] = []
    undeclared: Counter[str] = Counter()
    line = 1 if made.encoding.columns and path.suffix in cells.CSV else 2
    while chunk := list(islice(rows, _CHUNK)):
        ragged = next((i for i, row in enumerate(chunk) if len(row) != len(header)), None)
        if ragged is not None:
            raise InvalidArgument(
                f"data={str(path)!r} has a row with more or fewer cells than columns{_line(line + ragged, private)}: "
                "repair the file."
            )
        columns = dict(zip(header, zip(*chunk, strict=True), strict=True))
        features.append(np.hstack([_numbers(path, made, name, columns[name], line, private) for name in made.columns]))
        if labels:
            found.append(_labels(path, made, columns[str(made.label)], line))
        for name, words in made.encoding.categories.items():
            known = {*words, *made.encoding.missing, ""}
            undeclared[name] += sum(word(cell) not in known for cell in columns.get(name, ()))
        line += len(chunk)
    if not features:
        raise InvalidArgument(f"data={str(path)!r} has no rows.")
    return Found(
        features=np.concatenate(features),
        labels=np.concatenate(found) if labels else None,
        undeclared=dict(+undeclared),
    )


def _open(path: Path, made: Preprocessing) -> tuple[list[str], Any]:
    """The names of its columns and its rows; where names are declared, the column of labels may be left out."""
    declared = list(made.encoding.columns)
    rows = cells.rows(path, "data", declared)
    first = next(rows, None)
    if first is not None and declared and path.suffix in cells.CSV:
        if {word(cell) for cell in first} <= set(declared):
            # Not skipped: its columns may be in another order than those that were declared.
            raise InvalidArgument(
                f"data={str(path)!r} begins with a row of column names, and the model was trained on files without "
                "one: remove that line, and keep the columns in the declared order."
            )
        if len(first) == len(declared) - 1:
            declared.remove(str(made.label))
    return cells.names(path, "data", declared), rows if first is None else chain([first], rows)


def _line(line: int, private: bool) -> str:
    return "" if private else f" (about line {line})"


def _numbers(path: Path, made: Preprocessing, name: str, found: Sequence[Any], line: int, private: bool) -> Array:
    try:
        return made.encoding.encode(name, found)
    except (TypeError, ValueError):  # it quotes the cell
        missing = made.encoding.missing
        bad = next(i for i, c in enumerate(found) if not cells.is_number(c) and word(c) not in missing)
        known = f", nor one of those that mean: not known ({', '.join(missing)})" if missing else ""
        raise InvalidArgument(
            f"data={str(path)!r} has in column {name!r} a cell that is no number{known}{_line(line + bad, private)}: "
            "repair it, or remove the row."
        ) from None


def _labels(path: Path, made: Preprocessing, found: Sequence[Any], line: int) -> Array:
    if made.classes is None:
        bad = next((i for i, cell in enumerate(found) if not cells.is_number(cell)), None)
        said = "a label that is no number"
    else:
        number_of = {label: k for k, label in enumerate(made.classes)}
        bad = next((i for i, cell in enumerate(found) if word(cell) not in number_of), None)
        said = f"a label other than {', '.join(number_of)}"
    if bad is not None:
        raise InvalidArgument(
            f"data={str(path)!r} has in column {made.label!r} {said} (about line {line + bad}): repair it, or remove "
            "the row."
        )
    return np.array([float(c) if made.classes is None else number_of[word(c)] for c in found], dtype=np.float64)


# ------------------------------------------------------------------------------------------------ images and arrays


def _read_images(path: Path, made: Preprocessing, labels: bool, private: bool) -> Found:
    files = image_files(path, below=True)
    if not files:
        raise InvalidArgument(f"data={str(path)!r} holds no images.")
    channels = made.shape[0] if len(made.shape) == 3 else None
    try:
        images = read_images(files, f"data={str(path)!r}", channels=channels)
    except InvalidArgument as error:  # it names the file
        if not private or "Pillow" in str(error):
            raise
        raise InvalidArgument(
            f"data={str(path)!r} has a file that is no image, or of another size: repair the folder."
        ) from None
    if len(made.shape) == 3 and images.shape[1:] != tuple(made.shape):  # others may hold as many pixels
        raise InvalidArgument(
            f"data={str(path)!r} has images of {images.shape[3]} x {images.shape[2]} pixels, and the model was trained "
            f"on {made.shape[2]} x {made.shape[1]}: bring them to that size."
        )
    _check_shape(path, images, made)
    names = [file.relative_to(path).as_posix() for file in files]
    found = None
    if labels:
        if made.classes is None:
            raise InvalidArgument(
                f"data={str(path)!r} is a folder, and the classes of the model have numbers and no names of folders: "
                "leave the score out, or give an .npz file with labels."
            )
        number_of = {name: k for k, name in enumerate(made.classes)}
        folders = [name.partition("/")[0] for name in names]
        if other := next((name for name in folders if name not in number_of), None):
            raise InvalidArgument(
                f"data={str(path)!r} has {other!r}, which is no folder of a class: a score needs the images of each "
                f"class in a folder of its name, {', '.join(number_of)}."
            )
        found = np.array([number_of[name] for name in folders], dtype=np.float64)
    return Found(features=images, labels=found, files=names)


def _read_npz(path: Path, made: Preprocessing, labels: bool) -> Found:
    name, name_of_labels = _npz_names(path)
    if labels and name_of_labels is None:
        raise InvalidArgument(
            f"data={str(path)!r} has no array {'y' + name[1:]!r}, which a score compares "
            "with: add it, or leave the score out."
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            features = arrays[name]
            found = arrays[name_of_labels] if labels else None
    except (ValueError, zipfile.BadZipFile, EOFError):
        raise InvalidArgument(f"data={str(path)!r} cannot be read as plain arrays: write it again.") from None
    if features.dtype.kind not in "biuf" or features.ndim < 2 or not len(features):
        raise InvalidArgument(f"data={str(path)!r}: array {name!r} must hold numbers, one row of features per example.")
    if found is not None and (found.dtype.kind not in "biuf" or found.shape != features.shape[:1]):
        raise InvalidArgument(
            f"data={str(path)!r}: array {name_of_labels!r} must hold one number per row of {name!r}, which a score "
            "compares with."
        )
    _check_shape(path, features, made)
    return Found(features=features, labels=None if found is None else found.astype(np.float64), array=name)


def _npz_names(path: Path) -> tuple[str, str | None]:
    """The arrays of features and, where there are some, of their labels: X and y before x_test and y_test."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy").lower(): name.removesuffix(".npy") for name in archive.namelist()}
    except zipfile.BadZipFile:
        raise InvalidArgument(f"data={str(path)!r} is not an NPZ file: write it with numpy.savez.") from None
    endings = [e for e in _ENDINGS if f"x{e}" in found]
    if not endings:
        raise InvalidArgument(f"data={str(path)!r} must hold an array {' or '.join(f'x{e}' for e in _ENDINGS)}.")
    ending = next((e for e in endings if f"y{e}" in found), endings[0])
    return found[f"x{ending}"], found.get(f"y{ending}")


def _check_shape(path: Path, features: Array, made: Preprocessing) -> None:
    if math.prod(features.shape[1:]) != math.prod(made.shape):
        raise InvalidArgument(
            f"data={str(path)!r} has rows of shape {features.shape[1:]}, and the model was trained on "
            f"{tuple(made.shape)}: give the same features."
        )
