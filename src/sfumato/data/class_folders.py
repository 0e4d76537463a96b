"""Images in one folder per class. Which classes there are is declared: a private folder is never listed for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.data.image_files import image_files, read_images
from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]


Shape = tuple[int, int, int]  # channels, height and width


def shape(folder: Path, role: str, declared: Shape | None = None) -> Shape:
    """As declared, or from the head of the first file, without a pixel: all must have the same.

    No private file is looked at: the first one by name, somebody's, would decide what becomes of everybody's.
    """
    if role == "private":
        if declared is None:
            raise InvalidArgument(
                f"[model] shape is missing: {role}={str(folder)!r} is a folder of images, whose size and colours are "
                "not read off private ones, so give shape = [3, height, width], 1 for grey, or a public or test folder."
            )
        return declared
    first = next((path for path in image_files(folder, below=True)), None)
    if first is None:
        raise InvalidArgument(f"{role}={str(folder)!r} holds no images: put those of each class into a folder in it.")
    channels, height, width = _head(first, f"{role}={str(folder)!r}")
    return channels if declared is None else declared[0], height, width


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
        raise InvalidArgument(
            f"{role}={str(folder)!r} has images of another size than {row[2]} x {row[1]} pixels: bring all to one size."
        )
    return images.astype(np.float32), np.array([k for _, k in files], dtype=np.float64)


def _head(path: Path, what: str) -> Shape:
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
        with warnings.catch_warnings():  # which would tell of somebody's file, as of a palette with transparency
            warnings.simplefilter("ignore")
            return read_images(files, what, channels=channels)
    except InvalidArgument as error:
        if "Pillow" in str(error):
            raise
        raise InvalidArgument(f"{what} has a file that is no image, or of another size: repair the folder.") from None
