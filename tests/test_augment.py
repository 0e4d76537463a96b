"""Random views: each is a window of the image's own padded self, all windows come, and no row sees another."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.augment import Augmentation
from sfumato.errors import InvalidArgument
from sfumato.gradients.rowwise import check_augment

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def distinct(rows: int, C: int, H: int, W: int) -> Tensor:
    """Images whose every pixel differs, so that a view tells where it is from."""
    return torch.arange(rows * C * H * W, dtype=torch.float32).reshape(rows, C, H, W)


def windows(image: Tensor, pad: int) -> dict[tuple[int, int, int], Tensor]:
    H, W = image.shape[1:]
    padded = F.pad(image[None], (pad,) * 4, mode="reflect")[0]
    found = {}
    for top, left in product(range(2 * pad + 1), repeat=2):
        window = padded[:, top : top + H, left : left + W]
        found[top, left, 0], found[top, left, 1] = window, window.flip(2)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flip", [True, False])
def test_every_view_is_a_window_and_every_window_comes(device: str, flip: bool) -> None:
    image = distinct(1, 2, 5, 6)
    torch.manual_seed(0)
    rows = 2000
    views = Augmentation(pad=2, flip=flip)(image.expand(rows, -1, -1, -1).to(device)).cpu()
    counts = {key: int((views == window).all((1, 2, 3)).sum()) for key, window in windows(image[0], 2).items()}
    kept = {key: n for key, n in counts.items() if flip or not key[2]}
    assert sum(kept.values()) == rows
    expected = rows / len(kept)
    assert all(abs(n - expected) < 6 * expected**0.5 for n in kept.values())


@pytest.mark.parametrize("device", DEVICES)
def test_views_are_of_their_own_image(device: str) -> None:
    images = distinct(20, 3, 6, 6)
    torch.manual_seed(0)
    views = Augmentation(pad=3)(images.to(device)).cpu()
    for view, image in zip(views, images, strict=True):
        assert any(torch.equal(view, window) for window in windows(image, 3).values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "grey"), [(torch.uint8, 127), (torch.float32, 0.5)])
@pytest.mark.parametrize("side", [3, 4])
def test_cutout_is_one_square_anywhere(device: str, dtype: torch.dtype, grey: float, side: int) -> None:
    torch.manual_seed(0)
    images = torch.full((400, 2, 8, 9), 3, dtype=dtype, device=device)
    views = Augmentation(pad=0, flip=False, cutout=side)(images).cpu()
    assert views.dtype == dtype
    holes = views == grey
    assert bool((holes | (views == 3)).all())
    assert torch.equal(holes[:, 0], holes[:, 1])
    rows, columns = holes[:, 0].any(2), holes[:, 0].any(1)
    assert torch.equal(holes[:, 0], rows[:, :, None] & columns[:, None, :])
    for along in (rows, columns):
        jumps = along.int().diff(dim=1).abs().sum(1) + along[:, 0] + along[:, -1]
        assert bool((jumps == 2).all())  # one run
        assert int(along.sum(1).max()) == side
        assert int(along.sum(1).min()) >= side // 2
        assert bool(along.any(0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_drawn_by_themselves(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    floats = torch.rand(30, 3, 8, 8, generator=generator).to(device)
    labels = torch.arange(30, device=device) % 3
    pixels = (floats * 255).to(torch.uint8)
    for images, cutout in product((floats, pixels), (0, 4)):
        check_augment(Augmentation(cutout=cutout), (images, labels))


def test_what_else_a_batch_holds_is_left_alone() -> None:
    images, labels = torch.rand(4, 3, 6, 6), torch.arange(4)
    as_tuple, as_list = Augmentation(2)((images, labels)), Augmentation(2)([images, labels])
    assert isinstance(as_tuple, tuple)
    assert isinstance(as_list, list)
    for batch in (as_tuple, as_list):
        assert batch[1] is labels
        assert batch[0].shape == images.shape
    before = images.clone()
    view = Augmentation(2, cutout=3)(images)
    assert torch.equal(images, before)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(Augmentation(0, flip=False)(images), images)
    assert Augmentation(2)(images[:0]).shape == (0, 3, 6, 6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(4, 6, 6), r"\(4, 6, 6\)"),
        (torch.zeros(4, 3, 6, 6, dtype=torch.int64), "int64"),
        (torch.rand(4, 3, 4, 8), "pad is 4"),
        ({"images": torch.rand(4, 3, 6, 6)}, "dict"),
        ((), "tuple"),
    ],
)
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Augmentation()(batch)


def test_other_options_are_refused() -> None:
    for options in ({"pad": -1}, {"cutout": -1}):
        with pytest.raises(InvalidArgument, match="=-1"):
            Augmentation(**options)
