"""CIFAR-10, MNIST, QMNIST and SVHN from files, in the forms in which they are handed around.

Official archives (CIFAR-10's Python batches, idx files, SVHN's MATLAB files), and compact ones: mosaics and NPZ.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]
Rows = tuple[Array, Array]

_CIFAR_TRAIN, _CIFAR_TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"
_CIFAR_BATCHES, _CIFAR_ARCHIVE, _CIFAR_MOSAICS = "cifar-10-batches-py", "cifar-10-python.tar.gz", "images/cifar10"
_MNIST_FOLDERS = ("", "mnist", "MNIST/raw")
_MNIST_IMAGES, _MNIST_LABELS = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"
_MNIST_COMPACT = "images/mnist.npz.xz"
_QMNIST_FOLDERS = ("", "qmnist", "QMNIST/raw")
_QMNIST_IMAGES, _QMNIST_LABELS = "qmnist-{}-images-idx3-ubyte", "qmnist-{}-labels-idx2-int"
_SVHN_FOLDERS = ("", "svhn", "SVHN")
_SVHN = "{}_32x32.mat"
_MOSAIC_ROW = 100  # images beside each other
_UNREADABLE = (
    *(AttributeError, EOFError, LookupError, OSError, TypeError, ValueError),  # which pickle raises for bad bytes
    *(lzma.LZMAError, pickle.UnpicklingError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Train and test rows, each `(images, labels)`: uint8 (N, channels, height, width), and int64."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def cifar10(folder: str | Path | None = None) -> Images:
    """CIFAR-10: 50,000 and 10,000 images of 3 x 32 x 32, in the order of the official batches.

    `folder` ($SFUMATO_DATA by default) holds `cifar-10-batches-py/`, or `cifar-10-python.tar.gz`, or mosaics of 100
    images per row, `images/cifar10/train_1.webp` to `train_5.webp` and `test.webp` beside `labels.npz`.
    """
    root = _root(folder, "CIFAR-10")
    if (batches := root / _CIFAR_BATCHES).is_dir():
        return _read(batches, partial(_cifar_batches, lambda name: (batches / name).open("rb")))
    if (archive := root / _CIFAR_ARCHIVE).is_file():
        return _read(archive, partial(_cifar_archive, archive))
    if (mosaics := root / _CIFAR_MOSAICS).is_dir():
        return _read(mosaics, partial(_cifar_mosaics, mosaics))
    raise _nothing(root, "CIFAR-10", (f"{_CIFAR_BATCHES}/", _CIFAR_ARCHIVE, f"{_CIFAR_MOSAICS}/"))


def mnist(folder: str | Path | None = None) -> Images:
    """MNIST: 60,000 and 10,000 images of 1 x 28 x 28.

    `folder` ($SFUMATO_DATA by default) holds the four official idx files, packed (.gz) or not, at its top, in `mnist/`
    or in `MNIST/raw/`; or `images/mnist.npz.xz`.
    """
    root = _root(folder, "MNIST")
    for place in (root / name for name in _MNIST_FOLDERS):
        if _packed_or_not(place, _MNIST_IMAGES.format("train")).is_file():
            return _read(place, partial(_idx_folder, place))
    if (compact := root / _MNIST_COMPACT).is_file():
        return _read(compact, partial(_compact_mnist, compact))
    looked_for = [f"{name}/{_MNIST_IMAGES.format('train')}[.gz]".lstrip("/") for name in _MNIST_FOLDERS]
    raise _nothing(root, "MNIST", (*looked_for, _MNIST_COMPACT))


def qmnist(folder: str | Path | None = None) -> Images:
    """QMNIST (Yadav & Bottou 2019): 60,000 training digits, and 60,000 for testing of 1 x 28 x 28.

    Of those for testing the first 10,000 are MNIST's; the other 50,000 were lost when MNIST was made, and are what
    paper 004 takes for public. `folder` ($SFUMATO_DATA by default) holds the four official idx files, packed (.gz) or
    not, at its top, in `qmnist/` or in `QMNIST/raw/`.
    """
    root = _root(folder, "QMNIST")
    for place in (root / name for name in _QMNIST_FOLDERS):
        if _packed_or_not(place, _QMNIST_IMAGES.format("train")).is_file():
            return _read(place, partial(_parts, partial(_qmnist_rows, place), "train"))
    looked_for = [f"{name}/{_QMNIST_IMAGES.format('train')}[.gz]".lstrip("/") for name in _QMNIST_FOLDERS]
    raise _nothing(root, "QMNIST", looked_for)


def svhn(folder: str | Path | None = None, *, extra: bool = False) -> Images:
    """Street View House Numbers, cropped: 73,257 and 26,032 digits of 3 x 32 x 32; the label of a zero is 0.

    With `extra` the 531,131 easier digits take the place of the training digits; they are what paper 004 takes for
    public. `folder` ($SFUMATO_DATA by default) holds `train_32x32.mat` (or `extra_32x32.mat`) and `test_32x32.mat`, at
    its top, in `svhn/` or in `SVHN/`.
    """
    root, first = _root(folder, "SVHN"), "extra" if extra else "train"
    for place in (root / name for name in _SVHN_FOLDERS):
        if (place / _SVHN.format(first)).is_file():
            return _read(place, partial(_parts, partial(_svhn_rows, place), first))
    raise _nothing(root, "SVHN", [f"{name}/{_SVHN.format(first)}".lstrip("/") for name in _SVHN_FOLDERS])


def split_public(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Row numbers `(public, private)`, in order: `count` rows, as many of each class, are public, drawn by the seed.

    The choice looks at every label, also at those that count as private afterwards. A benchmark may do so with data
    that is public in truth; where rows are private, what is public must be known without looking at them.

    >>> public, private = split_public(torch.arange(10).repeat(6), 20, seed=0)
    >>> len(public), len(private)
    (20, 40)
    """
    classes, sizes = torch.unique(labels, return_counts=True)
    if count < 1 or count % max(1, len(classes)):
        raise InvalidArgument(
            f"count={count} must be a positive multiple of the number of classes, {len(classes)}: as many rows of each "
            "are public."
        )
    each = count // len(classes)
    if each > int(sizes.min()):
        raise InvalidArgument(
            f"count={count} needs {each} rows of each class, and one has only {int(sizes.min())}: ask for fewer."
        )
    rng = np.random.default_rng(seed)
    members = (torch.nonzero(labels == c).flatten().cpu().numpy() for c in classes)
    public = np.sort(np.concatenate([rng.choice(rows, each, replace=False) for rows in members]))
    private = np.setdiff1d(np.arange(len(labels)), public)
    return torch.from_numpy(public), torch.from_numpy(private)


# ------------------------------------------------------------------------------------------------ places


def _parts(rows: Callable[[str], Rows], first: str) -> tuple[Rows, Rows]:
    return rows(first), rows("test")


def _root(folder: str | Path | None, what: str) -> Path:
    given = os.environ.get("SFUMATO_DATA") if folder is None else folder
    if not given:
        raise InvalidArgument(
            f"folder is None and SFUMATO_DATA is not set: give the folder that holds {what}, or set the variable."
        )
    return Path(given)


def _nothing(root: Path, what: str, looked_for: Sequence[str]) -> InvalidArgument:
    return InvalidArgument(
        f"folder={str(root)!r} does not hold {what}: looked for {', '.join(looked_for[:-1])} and {looked_for[-1]}."
    )


def _read(place: Path, read: Callable[[], tuple[Rows, Rows]]) -> Images:
    try:
        train, test = read()
    except FileNotFoundError as error:
        raise InvalidArgument(f"{str(error.filename)!r} is missing: complete what is in {str(place)!r}.") from None
    except InvalidArgument:
        raise
    except _UNREADABLE:
        raise InvalidArgument(f"{str(place)!r} cannot be read: a file in it is damaged; download it again.") from None
    for name, (images, labels) in (("train", train), ("test", test)):
        if images.dtype != np.uint8 or labels.shape != images.shape[:1]:
            raise InvalidArgument(f"{str(place)!r} has {name} images without one label each: download it again.")
    return Images(train=_tensors(train), test=_tensors(test))


def _tensors(rows: Rows) -> tuple[Tensor, Tensor]:
    images, labels = rows
    return torch.from_numpy(np.array(images, order="C")), torch.from_numpy(labels.astype(np.int64))


# ------------------------------------------------------------------------------------------------ CIFAR-10


def _cifar_batches(opened: Callable[[str], IO[bytes]]) -> tuple[Rows, Rows]:
    def rows(name: str) -> Rows:
        with opened(name) as file:
            batch = _PlainArrays(file, encoding="bytes").load()
        return np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])

    return _joined([rows(name) for name in _CIFAR_TRAIN]), rows(_CIFAR_TEST)


def _cifar_archive(path: Path) -> tuple[Rows, Rows]:
    with tarfile.open(path, "r:gz") as archive:

        def opened(name: str) -> IO[bytes]:
            file = archive.extractfile(f"{_CIFAR_BATCHES}/{name}")
            if file is None:
                raise KeyError(name)
            return file

        return _cifar_batches(opened)


class _PlainArrays(pickle.Unpickler):
    """Unpickles numbers, text, lists, dicts and arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        reconstruct = np.zeros(0).__reduce__()[0]
        known = {"_reconstruct": reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")


def _cifar_mosaics(folder: Path) -> tuple[Rows, Rows]:
    with np.load(folder / "labels.npz") as labels:
        y_train, y_test = labels["y_train"], labels["y_test"]
    train = np.concatenate([_mosaic(folder / f"train_{i}.webp") for i in range(1, 6)])
    return (train, y_train), (_mosaic(folder / "test.webp"), y_test)


def _mosaic(path: Path) -> Array:
    """(N, 3, 32, 32) from N / 100 rows of 100 images."""
    try:
        from PIL import Image
    except ImportError:
        raise InvalidArgument(f"{str(path)!r} needs Pillow to be read: install it with pip install pillow.") from None
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    tiles = pixels.reshape(-1, 32, _MOSAIC_ROW, 32, 3)  # row of images, y, image in the row, x, channel
    return tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _joined(parts: Sequence[Rows]) -> Rows:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


# ------------------------------------------------------------------------------------------------ MNIST


def _packed_or_not(place: Path, name: str) -> Path:
    packed = place / f"{name}.gz"
    return packed if packed.is_file() else place / name


def _idx_folder(place: Path) -> tuple[Rows, Rows]:
    return _idx_rows(place, "train"), _idx_rows(place, "t10k")


def _idx_rows(place: Path, part: str) -> Rows:
    images = _idx(_packed_or_not(place, _MNIST_IMAGES.format(part)), dimensions=3)
    return images[:, None], _idx(_packed_or_not(place, _MNIST_LABELS.format(part)), dimensions=1)


def _qmnist_rows(place: Path, part: str) -> Rows:
    images = _idx(_packed_or_not(place, _QMNIST_IMAGES.format(part)), dimensions=3)
    facts = _idx(_packed_or_not(place, _QMNIST_LABELS.format(part)), dimensions=2, kind=">i4")
    return images[:, None], facts[:, 0]  # of the eight facts about a digit, the first is what it shows


def _svhn_rows(place: Path, part: str) -> Rows:
    from scipy.io.matlab import MatReadError, loadmat

    try:
        held = loadmat(place / _SVHN.format(part), variable_names=("X", "y"))
    except MatReadError as error:
        raise ValueError("not a MATLAB file") from error
    return held["X"].transpose(3, 2, 0, 1), held["y"].reshape(-1) % 10  # height, width, colour, digit; a zero is a 10


def _idx(path: Path, dimensions: int, kind: str = "u1") -> Array:
    """An idx file: 0, 0, 8 for uint8 or 12 for int32, how many dimensions, each as a big-endian int32, and the data."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read()
    start = 4 + 4 * dimensions
    code = {"u1": 8, ">i4": 12}[kind]
    if content[:4] != bytes([0, 0, code, dimensions]) or len(content) < start:
        raise ValueError("not an idx file of this kind")
    shape = np.frombuffer(content[4:start], ">i4")
    return np.frombuffer(content[start:], kind).reshape(shape)


def _compact_mnist(path: Path) -> tuple[Rows, Rows]:
    with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as arrays:
        train, test = ((arrays[f"x_{part}"][:, None], arrays[f"y_{part}"]) for part in ("train", "test"))
    return train, test
