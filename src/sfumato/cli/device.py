"""The option --device: where torch computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

DeviceName = Literal["auto", "cpu", "cuda"]


def find_device(name: DeviceName) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("--device=cuda is not there: torch sees no GPU, so use --device cpu.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
