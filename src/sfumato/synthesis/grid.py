"""Images beside each other in one picture, to look at: a row per class."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis import store

_GAP = 2  # pixels between images
_SIDE = 48  # the least side of an image in the picture, which small ones are enlarged to
_GREY = 128


def grid(images: Tensor, labels: Tensor | None = None, *, columns: int = 12, most_rows: int = 20) -> Tensor:
    """A picture (H, W, 3), uint8, of the first images of every class, in rows; without labels, of the first ones.

    Of more than `most_rows` classes the first are shown; a class with fewer images ends in grey.

    >>> grid(torch.zeros(30, 1, 24, 24, dtype=torch.uint8), torch.arange(30) % 3, columns=5).shape
    torch.Size([152, 252, 3])
    """
    if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        raise InvalidArgument(
            f"images of the shape {tuple(images.shape)} and type {images.dtype} cannot be drawn: give uint8 (N, 1, H, "
            "W) or (N, 3, H, W)."
        )
    if columns < 1 or most_rows < 1:
        raise InvalidArgument(f"columns={columns} and most_rows={most_rows} must be at least 1.")
    if labels is None:
        rows = list(torch.split(images[: columns * most_rows], columns))
    else:
        rows = [images[labels == value][:columns] for value in torch.unique(labels)[:most_rows]]
    times = max(1, math.ceil(_SIDE / min(images.shape[2:])))
    height, width = (side * times for side in images.shape[2:])
    picture = torch.full(
        (len(rows) * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP, 3), _GREY, dtype=torch.uint8
    )
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = _GAP + i * (height + _GAP), _GAP + j * (width + _GAP)
            enlarged = image.repeat_interleave(times, 1).repeat_interleave(times, 2)
            picture[top : top + height, left : left + width] = enlarged.permute(1, 2, 0)
    return picture


def write_png(path: Path, picture: Tensor) -> None:
    """A picture (H, W, 3) as a PNG file."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(picture.cpu().numpy()).save(content, "PNG")
    store.put(path, content.getvalue())
