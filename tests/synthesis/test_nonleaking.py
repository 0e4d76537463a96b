"""The augmentation that a generator is told of: what labels say is what was done, and zeros say nothing was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.synthesis.nonleaking import AUGMENT_LABELS, NonLeaking, moved

NAMES = ["flip_x", "flip_y", "scale", "cos_1", "sin", "along_x", "along_y", "shift_x", "shift_y"]


def blob(height: int = 32, width: int = 32) -> Tensor:
    """A smooth image without symmetries that ends well before its edges."""
    image = torch.zeros(height, width, dtype=torch.float64)
    image[height // 4, width // 3], image[height // 2, width // 2 + 4], image[height // 2 + 3, width // 3] = 9, 12, 6
    smooth = ndimage.gaussian_filter(image.numpy(), 2.5)
    return torch.from_numpy(smooth)[None, None].clamp(-1, 1)


def labels(**given: float) -> Tensor:
    return torch.tensor([[given.get(name, 0.0) for name in NAMES]]).double()


def test_zeros_leave_images_alone() -> None:
    images = torch.rand(5, 3, 9, 12) * 2 - 1
    assert torch.allclose(moved(images, torch.zeros(5, AUGMENT_LABELS)), images, atol=1e-5)
    views, drawn = NonLeaking(p=0.0, mirrored=0.0)(images)
    assert torch.equal(drawn, torch.zeros(5, AUGMENT_LABELS))
    assert torch.allclose(views, images, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flip_x": 1.0}, lambda v: v.flip(3)),
        ({"flip_y": 1.0}, lambda v: v.flip(2)),
        ({"cos_1": -2.0}, lambda v: v.flip(2, 3)),
        ({"cos_1": -1.0, "sin": 1.0}, lambda v: v.rot90(-1, (2, 3))),
        ({"shift_x": 1.0}, lambda v: v.roll(4, 3)),  # an eighth of 32
        ({"shift_y": -2.0}, lambda v: v.roll(-8, 2)),
    ],
)
def test_exact_moves_are_exact(given: dict[str, float], expected: Any) -> None:
    image = blob()
    inside = (slice(None), slice(None), slice(11, -11), slice(11, -11))  # away from reflections
    assert torch.allclose(moved(image, labels(**given))[inside], expected(image)[inside], atol=1e-6)


def moments(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of an image taken as a density over (x, y)."""
    density = image[0, 0] / image.sum()
    y, x = torch.meshgrid(*(torch.arange(n).double() for n in density.shape), indexing="ij")
    points = torch.stack([x, y])
    mean = (points * density).sum((1, 2))
    centred = points - mean[:, None, None]
    return mean, torch.einsum("ahw,bhw,hw->ab", centred, centred, density)


@pytest.mark.parametrize(
    ("given", "matrix"),
    [
        ({"scale": 1.0}, [[2**0.2, 0], [0, 2**0.2]]),
        ({"scale": -1.0}, [[2**-0.2, 0], [0, 2**-0.2]]),
        ({"along_x": 1.0}, [[2**0.2, 0], [0, 2**-0.2]]),
        ({"along_x": -1.0}, [[2**0.2, 0], [0, 2**-0.2]]),
        ({"along_y": 1.5}, [[2**-0.3, 0], [0, 2**0.3]]),
        ({"cos_1": 0.8 - 1, "sin": 0.6}, [[0.8, -0.6], [0.6, 0.8]]),
    ],
)
def test_covariances_follow_the_matrix(given: dict[str, float], matrix: list[list[float]]) -> None:
    A = torch.tensor(matrix).double()
    (_, before), (_, after) = moments(blob(48, 48)), moments(moved(blob(48, 48), labels(**given)))
    assert torch.allclose(after, A @ before @ A.T, rtol=0.01)
    assert not torch.allclose(after, before, atol=0.5)


def test_labels_say_what_was_done_and_how_often_is_as_asked() -> None:
    torch.manual_seed(0)
    images = blob(16, 16).float().expand(4000, 1, 16, 16)
    views, drawn = NonLeaking(p=0.12)(images)
    assert torch.equal(views, moved(images, drawn))
    shares = (drawn != 0).double().mean(0)
    expected = torch.tensor([0.5, 0.06, *[0.12] * 7]).double()
    assert torch.allclose(shares, expected, atol=0.03)
    untouched = (drawn == 0).all(1)
    assert float(untouched.double().mean()) == pytest.approx(0.5 * 0.94 * 0.88**5, abs=0.03)
    assert torch.allclose(views[untouched], images[untouched], atol=1e-5)


def test_views_stay_in_range() -> None:
    views, _ = NonLeaking(p=1.0)(torch.rand(50, 3, 8, 8).round() * 2 - 1)
    assert float(views.abs().max()) <= 1


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"p=1\.5 must be a probability"):
        NonLeaking(p=1.5)
    with pytest.raises(InvalidArgument, match="give \\(N, C, H, W\\) of floats"):
        NonLeaking()(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
