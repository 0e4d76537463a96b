"""Reading tables whose values may be private: CSV, Parquet, datasets on disk, NPZ, folders of images.

Two steps. `layout` looks at what is public by declaration: column names and the shape of a row, no value and no count
of rows. `read_table` reads the values; its errors name a column and never quote a cell, and of a private file not even
the line is named.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.data import cells, class_folders
from sfumato.data.encoding import Encoding, word
from sfumato.data.user_ids import is_missing
from sfumato.errors import InvalidArgument
from sfumato.reading import suggestion

Role = Literal["private", "public", "test", "synthetic"]
Array = npt.NDArray[Any]

_CHUNK = 8192  # rows in memory as cells at a time
_SHOWN = 40  # letters of a word that is public
_NPZ_NAMES = {"private": ("", "_train", "_private")} | {
    role: ("", f"_{role}") for role in ("public", "test", "synthetic")
}


@dataclass(frozen=True)
class Layout:
    """What is known of a table without looking at a value."""

    path: Path
    role: Role
    shape: tuple[int, ...]  # of one row's features
    columns: tuple[str, ...] = ()  # the feature columns, where columns have names, in order
    encoding: Encoding = field(default_factory=Encoding)


@dataclass(frozen=True)
class Table:
    """One row of float32 features, one label and, where asked for, one user id per example."""

    features: Array
    labels: Array
    users: Array | None = None


def layout(
    path: Path,
    role: Role,
    *,
    label: str | None,
    users: str | None = None,
    encoding: Encoding | None = None,
    image: class_folders.Shape | None = None,
) -> Layout:
    """The layout of a file or folder; InvalidArgument if it cannot be one.

    `image`, declared or that of public ones, is what the images of a private folder are.
    """
    code = encoding or Encoding()
    if not path.exists():
        raise InvalidArgument(f"{role}={str(path)!r} does not exist: check the path.")
    if path.is_dir() and not cells.is_dataset(path):
        return Layout(path, role, class_folders.shape(path, role, image))
    if _is_npz(path, role):
        names = npz_names(path, role, users)
        return Layout(path, role, _npz_shape(path, role, names[0])[1:])
    if label is None:
        raise InvalidArgument(f"label is missing: name the column of {role}={str(path)!r} that is to be predicted.")
    header = cells.names(path, role, code.columns)
    needed = (label, users, *code.ignore, *code.categories)
    for name in needed:
        if name is not None and name not in header and not (name == users and role != "private"):
            # Names of a header row are not shown: the file may have none, and they are someone's values.
            declared = code.columns and path.suffix in cells.CSV
            remedy = (
                suggestion(name, header)
                if declared
                else f": check the name in its header row{cells.without_header(path, role)}."
            )
            among = " among its declared columns" if declared else ""
            raise InvalidArgument(f"{role}={str(path)!r} has no column {name!r}{among}{remedy}")
    columns = tuple(name for name in header if name not in (label, users, *code.ignore))
    if not columns:
        raise InvalidArgument(f"{role}={str(path)!r} has no columns beside {label!r}: there is nothing to learn from.")
    return Layout(path, role, (code.widths(columns),), columns, code)


def match(other: Layout, private: Layout) -> None:
    """Raise unless the other table has the same features as the private one; the order of columns may differ.

    And raise if it is the private one: whatever is computed of public and test rows is not protected.
    """
    if other.role != "private" and same_rows(other.path, other.role, private.path):
        raise InvalidArgument(
            f"{other.role}={str(other.path)!r} holds the private rows themselves: give rows of other people."
        )
    if bool(other.columns) == bool(private.columns):
        if missing := [name for name in private.columns if name not in other.columns]:
            raise InvalidArgument(
                f"{other.role}={str(other.path)!r} has no column {missing[0]!r}, but private data has."
            )
        if extra := [name for name in other.columns if name not in private.columns]:
            raise InvalidArgument(
                f"{other.role}={str(other.path)!r} has a column {extra[0]!r} that the private data has not: remove it."
            )
    if other.shape != private.shape:
        raise InvalidArgument(
            f"{other.role}={str(other.path)!r} has rows of shape {other.shape} and the private data of "
            f"{private.shape}: give all tables the same features."
        )


def same_rows(path: Path, role: Role, private: Path) -> bool:
    """Whether what is read of a file in this role is private, by its place, also through links, hard ones too."""
    if not path.samefile(private):
        return False
    if path.suffix != ".npz":
        return True
    return npz_names(path, role, None) == npz_names(private, "private", None)  # one file may hold both


def read_table(
    table: Layout,
    *,
    label: str | None,
    users: str | None = None,
    columns: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> Table:
    """The values; `columns` is the order in which the features are wanted, `classes` are labels that are text."""
    if table.path.is_dir() and not table.columns:
        return Table(*class_folders.read(table.path, table.role, table.shape, classes))
    if not table.columns:
        if classes is not None:
            raise InvalidArgument(f"classes={list(classes)} is for columns: the arrays of an NPZ file hold numbers.")
        return _read_npz(table, users)
    assert label is not None
    return _read_cells(table, columns or table.columns, label, users, classes)


def _as_float32(values: Array) -> Array:
    with np.errstate(over="ignore"):  # a warning would tell of a private value; infinite rows contribute nothing
        return values.astype(np.float32)


def class_labels(labels: Array, classes: int, role: Role) -> npt.NDArray[np.int64]:
    """Labels as class numbers; raises if one is not a whole number from 0 to classes - 1, without saying which."""
    numbers = np.asarray(labels)
    with np.errstate(invalid="ignore"):
        whole = (numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < classes)
    if not bool(whole.all()):
        raise InvalidArgument(
            f"The labels of the {role} data must be whole numbers from 0 to {classes - 1}, since outputs={classes}: "
            "declare the right number of classes, or renumber the labels."
        )
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class Scaling:
    """Features mapped from [lower, upper] to [0, 1] and cut there; both are declared, or taken from public rows."""

    lower: Array
    upper: Array

    @staticmethod
    def declared(lower: float | Sequence[float], upper: float | Sequence[float], shape: tuple[int, ...]) -> Scaling:
        low, high = (np.asarray(v, dtype=np.float32) for v in (lower, upper))
        for name, value in (("lower", low), ("upper", high)):
            if value.ndim and value.shape != shape:
                raise InvalidArgument(f"{name} has {value.size} values and a row has {shape} features: give one each.")
        if not bool(np.all(low < high)):
            raise InvalidArgument("lower must be below upper in every column: check the declared range.")
        return Scaling(low, high)

    def only(self, numbers: npt.NDArray[np.bool_]) -> Scaling:
        """The same, but the slots of categories stay 0 and 1."""
        return Scaling(*(np.where(numbers, v, k).astype(np.float32) for k, v in enumerate((self.lower, self.upper))))

    @staticmethod
    def of_public(features: Array) -> Scaling:
        """The range of each column of public rows; a constant column becomes 0."""
        known = np.isfinite(features)  # what is missing has no range
        low = np.min(features, 0, where=known, initial=np.inf)
        high = np.max(features, 0, where=known, initial=-np.inf)
        low, high = np.where(known.any(0), low, 0), np.where(known.any(0), high, 1)
        return Scaling(low, np.where(high > low, high, low + 1))

    def __call__(self, features: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled: Array = np.clip((features - self.lower) / (self.upper - self.lower), 0.0, 1.0)
        return scaled.astype(np.float32)


# ------------------------------------------------------------------------------------------------ named columns


def _read_cells(
    table: Layout, wanted: Sequence[str], label: str, users: str | None, classes: Sequence[str] | None
) -> Table:
    path, role, code = table.path, table.role, table.encoding
    header = cells.names(path, role, code.columns)
    rows = cells.rows(path, role, code.columns)
    features: list[Array] = []
    labels: list[Array] = []
    people: list[str] = []
    line = 1 if code.columns else 2
    while chunk := list(islice(rows, _CHUNK)):
        ragged = next((i for i, row in enumerate(chunk) if len(row) != len(header)), None)
        if ragged is not None:
            than = "there are columns" if code.columns else "its header"
            raise InvalidArgument(
                f"{role}={str(path)!r} has a row with more or fewer cells than {than}{_line(role, line + ragged)}: "
                "repair the file."
            )
        columns = dict(zip(header, zip(*chunk, strict=True), strict=True))
        features.append(np.hstack([_numbers(table, name, columns[name], line) for name in wanted]))
        labels.append(_labels(table, label, columns[label], classes, line))
        if users in columns:
            people += _people(table, str(users), columns[users])
        line += len(chunk)
    if not features:
        raise InvalidArgument(f"{role}={str(path)!r} has no rows{'' if code.columns else ' below its header'}.")
    ids = np.array(people) if users in header else None
    return Table(_as_float32(np.concatenate(features)), np.concatenate(labels), ids)


def _numbers(table: Layout, name: str, found: Sequence[Any], line: int) -> Array:
    try:
        return table.encoding.encode(name, found)
    except (TypeError, ValueError):  # it quotes the cell
        missing = table.encoding.missing
        bad = next(i for i, c in enumerate(found) if not cells.is_number(c) and word(c) not in missing)
        raise InvalidArgument(
            f"{table.role}={str(table.path)!r}: column {name!r} has a cell that is not a number"
            f"{_line(table.role, line + bad)}: declare its categories, ignore it, or name such cells in missing."
        ) from None


def _labels(table: Layout, name: str, found: Sequence[Any], classes: Sequence[str] | None, line: int) -> Array:
    if classes is None:
        bad = next((i for i, cell in enumerate(found) if not cells.is_number(cell)), None)
        said, remedy = "a cell that is not a number", "declare its labels, classes = [...]."
    else:
        number_of = {label: k for k, label in enumerate(classes)}
        bad = next((i for i, cell in enumerate(found) if word(cell) not in number_of), None)
        said, remedy = "a label that is not in classes", "declare all of them."
    if bad is not None:
        if table.role != "private":  # whose words are nobody's business
            wrong = "no number" if classes is None else "not in classes"
            said = f"the label {word(found[bad])[:_SHOWN]!r}, which is {wrong}"
        where = f"{table.role}={str(table.path)!r}: column {name!r}"
        raise InvalidArgument(f"{where} has {said}{_line(table.role, line + bad)}: {remedy}")
    return np.array([float(cell) if classes is None else number_of[word(cell)] for cell in found], dtype=np.float64)


def _people(table: Layout, name: str, found: Sequence[Any]) -> list[str]:
    ids = [word(cell) for cell in found]
    if any(user in table.encoding.missing or is_missing(user) for user in ids):
        raise InvalidArgument(
            f"{table.role}={str(table.path)!r}: column {name!r} has a row without a user id: give every row one, since "
            "nobody is protected without it."
        )
    return ids


def _line(role: Role, line: int) -> str:
    return "" if role == "private" else f" (about line {line})"


# ------------------------------------------------------------------------------------------------ NPZ


def _is_npz(path: Path, role: Role) -> bool:
    if path.suffix != ".npz" and not cells.has_cells(path):
        raise InvalidArgument(
            f"{role}={str(path)!r} must be a .csv, .parquet or .npz file, a folder of images by class, or a dataset "
            "saved on disk."
        )
    return path.suffix == ".npz"


def npz_names(path: Path, role: Role, users: str | None) -> tuple[str, str]:
    """The arrays of features and labels: X and y, or x_train and y_train (private), x_public, x_test, ..."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy").lower(): name.removesuffix(".npy") for name in archive.namelist()}
    except zipfile.BadZipFile:
        raise InvalidArgument(f"{role}={str(path)!r} is not an NPZ file: write it with numpy.savez.") from None
    if users is not None and role == "private" and users not in found.values():
        raise InvalidArgument(f"{role}={str(path)!r} has no array {users!r}: it is to hold one user id per row.")
    for ending in _NPZ_NAMES[role]:
        if f"x{ending}" in found and f"y{ending}" in found:
            return found[f"x{ending}"], found[f"y{ending}"]
    choices = " or ".join(f"x{e} and y{e}" for e in _NPZ_NAMES[role])
    raise InvalidArgument(f"{role}={str(path)!r} must hold the arrays {choices}: rename them.")


def _npz_shape(path: Path, role: Role, name: str) -> tuple[int, ...]:
    """From the array's header alone; no value is read."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if dtype.kind not in "biuf":
        raise InvalidArgument(f"{role}={str(path)!r}: array {name!r} must hold numbers, not {dtype}.")
    if len(shape) < 2:
        raise InvalidArgument(f"{role}={str(path)!r}: array {name!r} must have one row of features per example.")
    return tuple(int(n) for n in shape)


def _read_npz(table: Layout, users: str | None) -> Table:
    path, role = table.path, table.role
    x, y = npz_names(path, role, users)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            features, labels = arrays[x], arrays[y]
            ids = arrays[users] if users is not None and users in arrays else None
    except (ValueError, zipfile.BadZipFile, EOFError):
        raise InvalidArgument(
            f"{role}={str(path)!r} cannot be read as plain arrays: write it with numpy.savez."
        ) from None
    if labels.dtype.kind not in "biuf" or labels.shape != features.shape[:1]:
        raise InvalidArgument(f"{role}={str(path)!r}: array {y!r} must hold one number per row of {x!r}.")
    return Table(_as_float32(features), labels.astype(np.float64), ids)
