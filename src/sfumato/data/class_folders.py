"""Images in one folder per class. Which classes there are is declared: a private folder is never listed for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.data.image_files import image_files, read_images
from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]


def shape(folder: Path, role: str) -> tuple[int, int, int]:
    """Channels, height and width, from the head of the first file, without a pixel: all must have the same."""
    first = next((path for path in image_files(folder, below=True)), None)
    if first is None:
        raise InvalidArgument(f"{role}={str(folder)!r} holds no images: put those of each class into a folder in it.")
    return _head(first, f"{role}={str(folder)!r}")


def read(
    folder: Path, role: str, row: tuple[int, ...], classes: Sequence[str] | None
) -> tuple[Array, npt.NDArray[np.float64]]:
    """The images as float32 and the classes' numbers."""
    if classes is None:
        raise InvalidArgument(f"classes is missing: name the folders in {role}={str(folder)!r}, classes = [...].")
    files = [(path, k) for k, name in enumerate(classes) for path in _of_class(folder, role, name)]
    if not files:
        raise InvalidArgument(f"{role}={str(folder)!r} holds no images in the folders of its classes.")
    images = _images([path for path, _ in files], folder, role, row[0])
    if images.shape[1:] != row:
        raise InvalidArgument(f"{role}={str(folder)!r} has images of several sizes: bring all to one size.")
    return images.astype(np.float32), np.array([k for _, k in files], dtype=np.float64)


def _head(path: Path, what: str) -> tuple[int, int, int]:
    try:
        from PIL import Image
    except ImportError:
        raise InvalidArgument(f"{what} is a folder of images, which needs Pillow: pip install pillow.") from None
    try:
        with Image.open(path) as image:  # reads pixels only when they are asked for
            return 1 if image.mode in ("L", "1") else 3, image.height, image.width
    except (OSError, SyntaxError, ValueError):
        raise InvalidArgument(f"{what} has a file that cannot be read as an image: remove it.") from None


def _of_class(folder: Path, role: str, name: str) -> list[Path]:
    place = folder / name
    if not place.is_dir() and role == "private":
        return []  # an error would say that nobody is of this class
    if not place.is_dir():
        raise InvalidArgument(f"{role}={str(folder)!r} has no folder {name!r}: make it, or correct classes.")
    return image_files(place, below=True)


def _images(files: Sequence[Path], folder: Path, role: str, channels: int | None) -> npt.NDArray[np.uint8]:
    what = f"{role}={str(folder)!r}"
    if role != "private":
        return read_images(files, what, channels=channels)
    try:
        return read_images(files, what, channels=channels)
    except InvalidArgument as error:
        if "Pillow" in str(error):
            raise
        raise InvalidArgument(f"{what} has a file that is no image, or of another size: repair the folder.") from None
