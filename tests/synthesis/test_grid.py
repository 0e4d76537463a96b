"""The picture of samples: every pixel of every image is where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.errors import InvalidArgument
from sfumato.synthesis.grid import grid, write_png


def test_rows_are_classes(tmp_path: Path) -> None:
    images = torch.randint(256, (7, 3, 50, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([5, 2, 5, 2, 5, 5, 2])
    write_png(tmp_path / "grid.png", grid(images, labels, columns=3))
    found = np.asarray(Image.open(tmp_path / "grid.png"))
    assert found.shape == (2 * 52 + 2, 3 * 62 + 2, 3)
    for i, row in enumerate(([1, 3, 6], [0, 2, 4])):  # the first of class 2, then of class 5
        for j, number in enumerate(row):
            tile = found[2 + 52 * i : 52 + 52 * i, 2 + 62 * j : 62 + 62 * j]
            assert np.array_equal(tile, images[number].permute(1, 2, 0).numpy())
    rest = found.copy()
    for top in (2, 54):
        for left in (2, 64, 126):
            rest[top : top + 50, left : left + 60] = 128
    assert (rest == 128).all()


def test_small_images_are_enlarged_and_missing_ones_grey() -> None:
    images = torch.tensor([0, 255, 77], dtype=torch.uint8)[:, None, None, None].expand(3, 1, 8, 8)
    found = grid(images, torch.tensor([0, 0, 1]), columns=2)
    assert found.shape == (2 * 50 + 2, 2 * 50 + 2, 3)
    assert (found[2:50, 2:50] == 0).all()
    assert (found[2:50, 52:100] == 255).all()
    assert (found[52:100, 2:50] == 77).all()
    assert (found[52:100, 52:100] == 128).all()


def test_without_labels_and_with_many_classes() -> None:
    images = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 1, 48, 48)
    found = grid(images, columns=4)
    assert found[2::50, 2::50, 0][:3, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 128, 128]]
    assert len(grid(images, torch.arange(10), most_rows=3)) == 3 * 50 + 2


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (torch.rand(4, 1, 8, 8), {}, "type torch.float32 cannot be drawn"),
        (torch.zeros(4, 2, 8, 8, dtype=torch.uint8), {}, "cannot be drawn"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), {"columns": 0}, "columns=0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        grid(given, **options)
