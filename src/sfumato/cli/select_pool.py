"""Images for `sfumato select`: public ones from an NPZ file or a folder, and how they are shown to a person."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.cli.select_apart import ORACLE_ARRAYS, POOL_ARRAYS
from sfumato.data.arrays import Array, read_arrays
from sfumato.data.image_files import ENDINGS, image_files, read_images
from sfumato.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """One row per image, as stored, and the names of the files if there are any."""

    rows: Array
    names: tuple[str, ...] | None = None

    def sha256(self) -> str:
        """Of every pixel in this order."""
        digest = hashlib.sha256(f"{self.rows.dtype} {self.rows.shape}".encode())
        digest.update(np.ascontiguousarray(self.rows).tobytes())
        return digest.hexdigest()


def read_pool(path: Path, channels: int | None) -> Pool:
    """An NPZ file, or a folder of image files in the order of their names; `channels`, 1 or 3, are the model's."""
    if path.is_dir():
        return _folder(path, channels)
    if not path.exists():
        raise InvalidArgument(f"[pool] images={str(path)!r} does not exist: check the path.")
    rows = _array(path, "[pool] images", *POOL_ARRAYS)
    if rows.dtype.kind not in "biuf" or rows.ndim < 2 or not len(rows):
        raise InvalidArgument(f"[pool] images={str(path)!r} must hold one row of numbers per image, not {rows.dtype}.")
    if not bool(np.isfinite(rows).all()):
        raise InvalidArgument(f"[pool] images={str(path)!r} has NaN or infinite values: leave those images out.")
    return Pool(rows=rows)


def check_within(name: str, pool: Pool, between: tuple[float, float] | None) -> None:
    """Raise if some values would be cut off."""
    low, high = float(pool.rows.min()), float(pool.rows.max())
    slack = 0.0 if between is None else 1e-6 * (between[1] - between[0])  # of floats that were scaled before
    if between is not None and not between[0] - slack <= low <= high <= between[1] + slack:
        raise InvalidArgument(
            f"[pool] images={name!r} has values from {low:g} to {high:g}, which do not lie in range={list(between)}: "
            "give [pool] range = [lowest, highest], what black and white are in these images."
        )


def read_oracle(path: Path) -> Array:
    """The labels of the whole pool, for experiments: an NPY file, or an NPZ file with them beside the images."""
    if not path.is_file():
        raise InvalidArgument(f"--oracle={str(path)!r} does not exist: give a file with the labels of the whole pool.")
    if path.suffix == ".npy":
        try:
            labels: Array = np.load(path, allow_pickle=False)
        except (ValueError, EOFError):
            raise InvalidArgument(f"--oracle={str(path)!r} is not an NPY file: write it with numpy.save.") from None
    else:
        labels = _array(path, "--oracle", *ORACLE_ARRAYS)
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and bool((labels == np.floor(labels)).all()))
    return labels.astype(np.int64) if whole else labels


def pictures(pool: Pool, indices: Array, shape: tuple[int, ...] | None, between: tuple[float, float] | None) -> Tensor:
    """The rows of these numbers as (n, channels, height, width) that can be shown: uint8, or floats in 0..1.

    `shape` is what the model calls one row, for files that do not say. `between` is black and white; without it bytes
    are as they are, and other numbers in 0..1, or else stretched to it.
    """
    rows, found = pool.rows[indices], pool.rows.shape[1:]
    if len(found) == 3 and found[0] not in (1, 3) and found[2] in (1, 3):
        rows = rows.transpose(0, 3, 1, 2)
    elif len(found) == 2:
        rows = rows[:, None]
    elif len(found) != 3:
        if shape is None or len(shape) != 3:
            raise InvalidArgument(
                f"[pool] images has rows of {list(found)}: give [model] shape = [channels, height, width] to show them."
            )
        rows = rows.reshape(len(rows), *shape)
    if between is None and rows.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(rows))
    low, high = between or (float(pool.rows.min()), float(pool.rows.max()))
    if between is None and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    values = (rows.astype(np.float64) - low) / max(high - low, 1e-300)
    return torch.from_numpy(np.ascontiguousarray(values.clip(0.0, 1.0)))


def _array(path: Path, what: str, *names: str) -> Array:
    (found,) = read_arrays(path, what, [(name,) for name in names])
    assert found is not None
    return found


def _folder(path: Path, channels: int | None) -> Pool:
    if (path / "grid.png").exists() and (path / "synthetic.npz").exists():
        raise InvalidArgument(
            f"[pool] images={str(path)!r} is a folder of sfumato synthesize, whose grid.png is no image to label: give "
            "the synthetic.npz in it."
        )
    files = image_files(path, below=True)
    if not files:
        raise InvalidArgument(f"[pool] images={str(path)!r} holds no {', '.join(ENDINGS)} files: check the path.")
    rows = read_images(files, "[pool] images", channels=channels)
    return Pool(rows=rows, names=tuple(str(p.relative_to(path)) for p in files))
