"""Reading tables of numbers, CSV or NPZ, whose values may be private.

Two steps. `layout` looks at what is public by declaration: column names and the shape of a row, no value and no count
of rows. `read_table` reads the values; its errors name a column and never quote a cell, and of a private file not even
the line is named.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

Role = Literal["private", "public", "test"]
Array = npt.NDArray[Any]

_CHUNK = 8192  # rows of a CSV file in memory as text at a time
_NPZ_NAMES = {"private": ("", "_train", "_private"), "public": ("", "_public"), "test": ("", "_test")}


@dataclass(frozen=True)
class Layout:
    """What is known of a table without looking at a value."""

    path: Path
    role: Role
    shape: tuple[int, ...]  # of one row's features
    columns: tuple[str, ...] = ()  # the feature columns of a CSV file, in order


@dataclass(frozen=True)
class Table:
    """One row of float32 features, one label and, where asked for, one user id per example."""

    features: Array
    labels: Array
    users: Array | None = None


def layout(path: Path, role: Role, *, label: str | None, users: str | None = None) -> Layout:
    """The layout of a file; FileNotFoundError or InvalidArgument if it cannot be one."""
    if not path.exists():
        raise InvalidArgument(f"{role}={str(path)!r} does not exist: check the path.")
    if _is_npz(path, role):
        names = _npz_names(path, role, users)
        return Layout(path, role, _npz_shape(path, role, names[0])[1:])
    if label is None:
        raise InvalidArgument(f"label is missing: name the column of {role}={str(path)!r} that is to be predicted.")
    header = _header(path, role)
    for name in (label, users):
        if name is not None and name not in header and not (name == users and role != "private"):
            raise InvalidArgument(f"{role}={str(path)!r} has no column {name!r}: check the name in its header row.")
    columns = tuple(name for name in header if name not in (label, users))
    if not columns:
        raise InvalidArgument(f"{role}={str(path)!r} has no columns beside {label!r}: there is nothing to learn from.")
    return Layout(path, role, (len(columns),), columns)


def match(other: Layout, private: Layout) -> None:
    """Raise unless the other table has the same features as the private one; the order of columns may differ."""
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


def read_table(
    table: Layout,
    *,
    label: str | None,
    users: str | None = None,
    columns: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> Table:
    """The values; `columns` is the order in which the features are wanted, `classes` are labels that are text (CSV)."""
    if not table.columns:
        if classes is not None:
            raise InvalidArgument(f"classes={list(classes)} is for CSV files: the arrays of an NPZ file hold numbers.")
        return _read_npz(table, users)
    assert label is not None
    wanted = [*(columns or table.columns), label]
    numbers, ids = _read_csv(table, wanted, users, classes)
    return Table(_as_float32(numbers[:, :-1]), numbers[:, -1], ids)


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

    @staticmethod
    def of_public(features: Array) -> Scaling:
        """The range of each column of public rows; a constant column becomes 0."""
        low, high = features.min(0), features.max(0)
        return Scaling(low, np.where(high > low, high, low + 1))

    def __call__(self, features: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled: Array = np.clip((features - self.lower) / (self.upper - self.lower), 0.0, 1.0)
        return scaled.astype(np.float32)


# ------------------------------------------------------------------------------------------------ CSV


def _rows(path: Path, role: Role) -> Iterator[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from (row for row in csv.reader(file) if row)
    except (csv.Error, UnicodeDecodeError):  # both may quote the file
        raise InvalidArgument(f"{role}={str(path)!r} is not a CSV file in UTF-8: export it again.") from None


def _header(path: Path, role: Role) -> list[str]:
    header = [name.strip() for name in next(_rows(path, role), [])]
    if not header or all(_is_number(name) for name in header):
        # Never taken for column names: they would be shown, and may be someone's values.
        raise InvalidArgument(f"{role}={str(path)!r} has no header row: its first line must name the columns.")
    if len(set(header)) < len(header):
        raise InvalidArgument(f"{role}={str(path)!r} names a column twice in its header row: rename one of them.")
    return header


def _read_csv(
    table: Layout, wanted: Sequence[str], users: str | None, classes: Sequence[str] | None
) -> tuple[Array, Array | None]:
    """The wanted columns, of which the last holds the labels."""
    path, role = table.path, table.role
    number_of = None if classes is None else {name: float(k) for k, name in enumerate(classes)}
    header = _header(path, role)
    positions = [header.index(name) for name in wanted]
    ids = header.index(users) if users in header else None
    rows = islice(_rows(path, role), 1, None)
    parts: list[Array] = []
    people: list[str] = []
    line = 2
    while chunk := list(islice(rows, _CHUNK)):
        ragged = next((i for i, row in enumerate(chunk) if len(row) != len(header)), None)
        if ragged is not None:
            raise InvalidArgument(
                f"{role}={str(path)!r} has a row with more or fewer cells than its header"
                f"{_line(role, line + ragged)}: repair the file."
            )
        part = np.empty((len(chunk), len(wanted)))
        for k, (name, position) in enumerate(zip(wanted, positions, strict=True)):
            is_label = k + 1 == len(wanted)
            if is_label and number_of is not None:
                numbers = [number_of.get(row[position].strip(), np.nan) for row in chunk]
                if bool(np.isnan(numbers).any()):
                    bad = int(np.isnan(numbers).argmax())
                    raise InvalidArgument(
                        f"{role}={str(path)!r}: column {name!r} has a label that is not in classes"
                        f"{_line(role, line + bad)}: declare all of them."
                    )
                part[:, k] = numbers
                continue
            try:
                part[:, k] = np.fromiter((float(row[position]) for row in chunk), np.float64, len(chunk))
            except ValueError:  # it quotes the cell
                bad = next(i for i, row in enumerate(chunk) if not _is_number(row[position]))
                remedy = "declare its labels, classes = [...]." if is_label else "encode or remove it."
                raise InvalidArgument(
                    f"{role}={str(path)!r}: column {name!r} has a cell that is not a number{_line(role, line + bad)}: "
                    f"{remedy}"
                ) from None
        parts.append(part)
        if ids is not None:
            people += [row[ids] for row in chunk]
        line += len(chunk)
    if not parts:
        raise InvalidArgument(f"{role}={str(path)!r} has no rows below its header.")
    return np.concatenate(parts), None if ids is None else np.array(people)


def _line(role: Role, line: int) -> str:
    return "" if role == "private" else f" (about line {line})"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ NPZ


def _is_npz(path: Path, role: Role) -> bool:
    if path.suffix not in (".csv", ".npz"):
        raise InvalidArgument(f"{role}={str(path)!r} must be a .csv or .npz file.")
    return path.suffix == ".npz"


def _npz_names(path: Path, role: Role, users: str | None) -> tuple[str, str]:
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
    x, y = _npz_names(path, role, users)
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
