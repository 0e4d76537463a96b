"""Where chosen images lie among each other: a plane in which those that look alike are close."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.data.image_files import read_images
from sfumato.errors import InvalidArgument
from sfumato.report.contents import Picture

FEWEST = 3  # images that a plane is laid through


def places(pictures: Sequence[Picture]) -> list[tuple[float, float]]:
    """Of every image in the unit square, by the two principal components of the pixels; nothing if there is no plane.

    Images are public, so this costs nothing; the pixels stand in for the model's own embedding, which is not kept.
    """
    import numpy as np

    if len(pictures) < FEWEST:
        return []
    try:
        images = read_images([picture.file for picture in pictures], "images", channels=3)
    except InvalidArgument:  # of several sizes, or without Pillow: the images are shown all the same
        return []
    rows = images.reshape(len(images), -1).astype(np.float64)
    rows -= rows.mean(axis=0)
    left, lengths, right = np.linalg.svd(rows, full_matrices=False)
    if lengths[1] <= 1e-9 * max(lengths[0], 1.0):
        return []
    signs = np.sign(right[np.arange(2), np.abs(right[:2]).argmax(axis=1)])  # else left and right would be by chance
    plane = left[:, :2] * lengths[:2] * signs
    low, high = plane.min(axis=0), plane.max(axis=0)
    return [(float(x), float(y)) for x, y in (plane - low) / (high - low)]
