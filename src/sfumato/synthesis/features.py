"""What images are compared by: pixels, a public network's features, or any function that is given a name.

Numbers from different features cannot be compared, so a measure always says which it was taken by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.models.efficientnet_lite import EfficientNetLite, efficientnet_lite0
from sfumato.private import Private
from sfumato.public import Public


@dataclass(frozen=True)
class Features:
    """A function from images (N, ...) to one row of numbers each, (N, d), and the name that results carry.

    The Inception network that papers take comes with other packages; torch-fidelity's, say, is plugged in so:

        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])  # takes uint8 images
        inception = Features("Inception v3 (torch-fidelity), pool 3", lambda images: network(images)[0])

    >>> brightness = Features("brightness", lambda images: images.float().mean((1, 2, 3))[:, None])
    >>> brightness(torch.ones(5, 1, 8, 8)).shape
    torch.Size([5, 1])
    """

    name: str
    function: Callable[[Tensor], Tensor]
    batch_size: int = 256

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgument(f"name={self.name!r} must not be empty: results say by it what they were taken by.")
        if self.batch_size < 1:
            raise InvalidArgument(f"batch_size={self.batch_size} must be at least 1.")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features in float64: measures subtract numbers that are close."""
        found = torch.cat([self._checked(part) for part in torch.split(images, self.batch_size)])
        if not bool(torch.isfinite(found).all()):
            raise InvalidArgument(f"features {self.name!r} gave NaN or infinite values: look at what they are given.")
        return found

    def _checked(self, images: Tensor) -> Tensor:
        rows = self.function(images)
        if rows.ndim != 2 or len(rows) != len(images):
            raise InvalidArgument(
                f"features {self.name!r} gave the shape {tuple(rows.shape)} for {len(images)} images: they must give "
                "one row of numbers per image, (N, d)."
            )
        return rows.double()


def pixel_features() -> Features:
    """The pixels themselves in 0..1, for small images; rows of a table are taken as they are.

    >>> pixel_features()(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)).max()
    tensor(1., dtype=torch.float64)
    """
    return Features("pixels", _flat)


def lite0_features(
    weights: str | Path, *, resolution: int = 224, device: torch.device | str = "cpu", batch_size: int = 256
) -> Features:
    """The 1,280 pooled features of EfficientNet-Lite0 with published weights; images are uint8 or floats in 0..1."""
    module = _lite0(weights, resolution, device)
    name = f"EfficientNet-Lite0 features at {resolution} pixels"
    return Features(name, lambda images: module.pooled(_coloured(images).to(device)), batch_size)


def lite0_classes(
    weights: str | Path, *, resolution: int = 224, device: torch.device | str = "cpu", batch_size: int = 256
) -> Features:
    """The logits of EfficientNet-Lite0 for the 1,000 classes of its published weights, for `inception_score`."""
    module = _lite0(weights, resolution, device)
    name = f"EfficientNet-Lite0 classes at {resolution} pixels"
    return Features(name, lambda images: module(_coloured(images).to(device)), batch_size)


def public_rows(data: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Images or rows of a table, and the labels beside them if any. Private data is refused."""
    if isinstance(data, Private):
        raise InvalidArgument(
            f"{name} is private data, which measures may not look at: give public rows, or ask the door for a noisy "
            "statistic of the private ones, such as private.ask(NoisyMean(...), noise=..., sampler=...)."
        )
    batch = data.batch() if isinstance(data, Public) else data
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    if not (1 <= len(parts) <= 2 and all(isinstance(part, Tensor | np.ndarray) for part in parts)):
        raise InvalidArgument(
            f"{name}={type(data).__name__} is not understood: give a Public, or tensors as it holds them: rows alone, "
            "or (rows, labels)."
        )
    rows, *labels = (torch.as_tensor(part) for part in parts)
    if rows.ndim < 2 or not len(rows):
        raise InvalidArgument(f"{name} has rows of the shape {tuple(rows.shape)}: give (N, ...), with N at least 1.")
    return rows, labels[0] if labels else None


def _flat(images: Tensor) -> Tensor:
    values = images.double()
    return (values / 255 if images.dtype == torch.uint8 else values).flatten(1)


def _lite0(weights: str | Path, resolution: int, device: torch.device | str) -> EfficientNetLite:
    return efficientnet_lite0(weights, resolution=resolution).to(device).eval()


def _coloured(images: Tensor) -> Tensor:
    return images.expand(-1, 3, -1, -1) if images.ndim == 4 and images.shape[1] == 1 else images
