"""Frozen features of a pretrained network, computed once and kept: what most people begin with."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from sfumato.data.images import Images, cifar10
from sfumato.errors import InvalidArgument
from sfumato.models.efficientnet_lite import efficientnet_lite0, features

WEIGHTS = "weights/efficientnet-lite0-57934424.pth"


def cifar10_features(resolution: int) -> Images:
    """What EfficientNet-Lite0, trained on ImageNet, sees in CIFAR-10 at this resolution: (N, 1280) for train and test.

    The weights are looked for in $SFUMATO_DATA; the features are kept in $SFUMATO_CACHE, by default ~/.cache/sfumato.
    """
    from safetensors.torch import load_file, save_file

    cache = Path(os.environ.get("SFUMATO_CACHE") or Path.home() / ".cache" / "sfumato")
    path = cache / f"cifar10-efficientnet-lite0-{resolution}.safetensors"
    if not path.exists():
        parts = {f"{name}.{i}": t for name, rows in _computed(resolution).items() for i, t in enumerate(rows)}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        save_file(parts, draft)
        draft.replace(path)
    kept = load_file(path)
    train, test = ((kept[f"{name}.0"].float(), kept[f"{name}.1"]) for name in ("train", "test"))
    return Images(train=train, test=test)


def _computed(resolution: int) -> dict[str, tuple[Tensor, Tensor]]:
    weights = Path(os.environ.get("SFUMATO_DATA", "")) / WEIGHTS
    if not weights.is_file():
        raise InvalidArgument(f"The pretrained weights are not there: set SFUMATO_DATA to a folder with {WEIGHTS}.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = efficientnet_lite0(weights, resolution=resolution).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = cifar10()
    found = {}
    for name, (x, y) in (("train", images.train), ("test", images.test)):
        found[name] = features(network, x, batch_size=8 if device.type == "cpu" else 512, progress=True).half(), y
    return found


def prepared(rows: Tensor, public_mean: Tensor, length: float = 1.0) -> Tensor:
    """Centred by what is public, and each row of that length: row by row, with nothing from private rows."""
    centred = rows - public_mean
    lengths: Tensor = centred.norm(dim=1, keepdim=True)
    return centred * (length / lengths.clamp_min(1e-12))
