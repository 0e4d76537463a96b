"""Folders of image files, as people have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
_GREY = ("L", "1")  # as Pillow calls them


def image_files(folder: Path, *, below: bool = False) -> list[Path]:
    """The image files of a folder, in the order of their names; `below`, also those of the folders in it."""
    found = folder.rglob("*") if below else folder.iterdir()
    return sorted(path for path in found if path.suffix.lower() in ENDINGS and path.is_file())


def read_images(files: Sequence[Path], what: str, *, channels: int | None = None) -> npt.NDArray[np.uint8]:
    """Images of one size as (N, channels, height, width).

    `channels` is 1 or 3, which all are brought to; None: 1 if all of them are grey. `what` is what a person calls the
    files, as errors do: `[pool] images`.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidArgument(f"{what} is a folder of images, which needs Pillow: pip install pillow.") from None
    found: list[npt.NDArray[Any]] = []
    for path in files:
        try:
            with Image.open(path) as image:
                grey = channels == 1 or (channels is None and image.mode in _GREY)
                pixels = np.asarray(image.convert("L" if grey else "RGB"))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
            raise InvalidArgument(f"{what}: {str(path)!r} cannot be read as an image: remove it.") from None
        if found and pixels.shape[:2] != found[0].shape[:2]:
            raise InvalidArgument(
                f"{what}: {str(path)!r} has {pixels.shape[1]} x {pixels.shape[0]} pixels and others "
                f"{found[0].shape[1]} x {found[0].shape[0]}: bring all images to one size."
            )
        found.append(pixels)
    if all(pixels.ndim == 2 for pixels in found):
        return np.stack(found)[:, None]
    coloured = [np.repeat(pixels[..., None], 3, 2) if pixels.ndim == 2 else pixels for pixels in found]
    return np.ascontiguousarray(np.stack(coloured).transpose(0, 3, 1, 2))
