"""CutMix (Yun, Han, Oh, Chun, Choe and Yoo, ICCV 2019, Algorithm A1): a box of another image, and of its label."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sfumato.augment.batch import check_images
from sfumato.errors import InvalidArgument


@dataclass(frozen=True)
class CutMix:
    """A batch (images, labels) in which a box of each image is another image's: (images, soft labels (N, classes)).

    It mixes rows, so it is for public data only, in the warm-up: a private row would enter other people's gradients.
    The door refuses it.

    Each image is mixed with the given `probability`, with a partner drawn for itself. The box covers about a share
    1 - lambda of the image, lambda ~ Beta(alpha, alpha), and is cut at the edges; a label weighs as much as the pixels
    that show it. Randomness comes from torch's global generator of the images' device.

    >>> images, soft = CutMix(classes=3)((torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])))
    >>> images.shape, soft.shape, torch.allclose(soft.sum(1), torch.ones(4))
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 3]), True)
    """

    alpha: float = 1.0
    probability: float = 1.0
    _: KW_ONLY
    classes: int
    mixes_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise InvalidArgument(f"alpha={self.alpha} must be positive and finite: boxes cover Beta(alpha, alpha).")
        if not 0 <= self.probability <= 1:
            raise InvalidArgument(f"probability={self.probability} must lie in 0..1: it is the share of images mixed.")
        if not isinstance(self.classes, int) or self.classes < 1:
            raise InvalidArgument(f"classes={self.classes!r} must be a positive whole number: the number of labels.")

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = self._checked(batch)
        N, _, H, W = images.shape
        device = images.device
        # Never an image with itself, where there is another.
        partner = torch.arange(N, device=device) + torch.randint(1, max(N, 2), (N,), device=device)
        partner %= max(N, 1)
        concentration = torch.full((N,), float(self.alpha), device=device)
        lam = torch.distributions.Beta(concentration, concentration, validate_args=False).sample()
        mixed = torch.rand(N, device=device) < self.probability
        r_x, r_y = torch.randint(0, W, (N,), device=device), torch.randint(0, H, (N,), device=device)

        cut = (1 - lam).clamp(min=0).sqrt() * mixed
        inside_x, inside_y = _run(r_x, cut, W), _run(r_y, cut, H)
        box = inside_y[:, None, :, None] & inside_x[:, None, None, :]
        kept = 1 - inside_x.sum(1) * inside_y.sum(1) / (H * W)  # lambda, of the box as it was cut
        one_hot = torch.zeros(N, self.classes, device=device).scatter_(1, labels[:, None], 1.0)
        soft = kept[:, None] * one_hot + (1 - kept[:, None]) * one_hot[partner]
        return torch.where(box, images[partner], images), soft

    def _checked(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            raise InvalidArgument(f"batch is of type {type(batch).__name__}: give CutMix a pair (images, labels).")
        images, labels = batch
        check_images(images)
        if labels.shape != (len(images),) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise InvalidArgument(
                f"labels have the shape {tuple(labels.shape)} and type {labels.dtype}: give one class number per image."
            )
        labels = labels.to(images.device).long()
        # A GPU is not waited for: there, torch's own assertion stops labels out of range.
        if labels.device.type == "cpu" and bool(((labels < 0) | (labels >= self.classes)).any()):
            raise InvalidArgument(
                f"labels lie in {int(labels.min())}..{int(labels.max())}, but classes={self.classes}: raise it."
            )
        return images, labels


def _run(centre: Tensor, share: Tensor, size: int) -> Tensor:
    """Which of `size` pixels lie in a run of length `share` of them about `centre`, cut at the edges: (N, size)."""
    half = (share * size).long()[:, None] // 2
    away = torch.arange(size, device=centre.device) - centre[:, None]
    return (away >= -half) & (away < half)
