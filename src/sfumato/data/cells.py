"""Files of rows with named columns, cell by cell: CSV, and with pyarrow Parquet and Hugging Face datasets on disk.

Names come first, without a value; errors never quote a cell.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument

CSV = (".csv", ".data", ".test", ".txt")
PARQUET = ".parquet"


def is_dataset(path: Path) -> bool:
    """A folder that `datasets.Dataset.save_to_disk` wrote."""
    return path.is_dir() and (path / "state.json").exists() and any(path.glob("*.arrow"))


def has_cells(path: Path) -> bool:
    return path.suffix in (*CSV, PARQUET) or is_dataset(path)


def names(path: Path, role: str, declared: Sequence[str] = ()) -> list[str]:
    """The columns' names: from the file's schema or header row, or as declared for a CSV file that has none."""
    if path.suffix not in CSV:
        return _distinct(path, role, list(_schema(path, role).names))
    if declared:
        return list(declared)
    header = [name.strip() for name in next(_csv_rows(path, role), [])]
    if not header or all(is_number(name) for name in header):
        # Never taken for column names: they would be shown, and may be someone's values.
        remedy = "as in the files that the model was trained on" if role == "data" else "or declare columns = [...]"
        raise InvalidArgument(
            f"{role}={str(path)!r} has no header row: its first line must name the columns, {remedy}."
        )
    return _distinct(path, role, header)


def rows(path: Path, role: str, declared: Sequence[str] = ()) -> Iterator[list[Any]]:
    """The rows, without the header row."""
    if path.suffix in CSV:
        found = _csv_rows(path, role)
        if not declared:
            next(found, None)
        yield from found
        return
    for batch in _batches(path, role):
        yield from map(list, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def without_header(path: Path, role: str) -> str:
    """What else may be wrong where a name is looked for in the first line; nothing in files that know their names."""
    if path.suffix not in CSV:
        return ""
    if role == "data":  # of `sfumato predict`
        return ", or add a header row if it has none: the model was trained on files with one"
    return ", or declare [data] columns if it has no header row"


def _distinct(path: Path, role: str, header: list[str]) -> list[str]:
    if len(set(header)) < len(header):
        raise InvalidArgument(
            f"{role}={str(path)!r} names a column twice in its header row: rename one of them"
            f"{without_header(path, role)}."
        )
    return header


def _csv_rows(path: Path, role: str) -> Iterator[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from (row for row in csv.reader(file, skipinitialspace=True) if row)
    except (csv.Error, UnicodeDecodeError):  # both may quote the file
        raise InvalidArgument(f"{role}={str(path)!r} is not a CSV file in UTF-8: export it again.") from None


# ------------------------------------------------------------------------------------------------ Arrow


def _arrow(path: Path, role: str) -> Any:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        for part in ("ipc", "parquet"):
            importlib.import_module(f"pyarrow.{part}")
    except ImportError:
        raise InvalidArgument(f"{role}={str(path)!r} needs pyarrow to be read: pip install pyarrow.") from None
    return arrow


def _parts(path: Path, role: str) -> list[Path]:
    """The files that hold the rows.

    Those of a dataset are named in its state.json: map, sort and filter leave copies beside them, as cache-*.arrow.
    """
    if path.is_file():
        return [path]
    state = _state(path, role)
    if state.get("_indices_data_files"):  # as old versions saved what select and shuffle gave
        raise InvalidArgument(
            f"{role}={str(path)!r} holds other rows than its dataset shows, since it was saved with indices: call "
            "flatten_indices() on it, and save it again."
        )
    try:
        files = [file["filename"] for file in state["_data_files"]]
        named = bool(files) and len(set(files)) == len(files) and all(name == Path(name).name for name in files)
    except (KeyError, TypeError):
        named = False
    if not named:
        raise InvalidArgument(
            f"{role}={str(path)!r} has a state.json that does not name the files of its rows, each once and in this "
            "folder, as _data_files: save the dataset again with save_to_disk."
        )
    return [path / name for name in files]


def _state(path: Path, role: str) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (ValueError, OSError):
        raise _unreadable(path, role) from None
    return state if isinstance(state, dict) else {}


def _schema(path: Path, role: str) -> Any:
    parts = _parts(path, role)
    arrow = _arrow(path, role)
    try:
        if path.is_file():
            return arrow.parquet.read_schema(path)
        with arrow.memory_map(str(parts[0])) as file:
            return arrow.ipc.open_stream(file).schema
    except (arrow.ArrowInvalid, OSError):
        raise _unreadable(path, role) from None


def _batches(path: Path, role: str) -> Iterator[Any]:
    parts = _parts(path, role)
    arrow = _arrow(path, role)
    try:
        if path.is_file():
            yield from arrow.parquet.ParquetFile(path).iter_batches()
            return
        for part in parts:
            with arrow.memory_map(str(part)) as file:
                yield from arrow.ipc.open_stream(file)
    except (arrow.ArrowInvalid, OSError):
        raise _unreadable(path, role) from None


def _unreadable(path: Path, role: str) -> InvalidArgument:
    kind = "a Parquet file" if path.suffix == PARQUET else "a dataset that save_to_disk wrote"
    return InvalidArgument(f"{role}={str(path)!r} cannot be read as {kind}: write it again.")
