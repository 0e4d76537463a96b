"""Which augmentations a CUDA graph may hold together with the step that they are made for."""

from __future__ import annotations

from typing import Any

from sfumato.augment.autoaugment import AutoAugment
from sfumato.augment.batch import Chain
from sfumato.augment.crops import Augmentation


def recordable(augment: Any) -> bool:
    """Whether it draws from torch's generators alone, and never looks at what it drew: a replay runs no Python."""
    if type(augment) is Chain:
        return all(recordable(one) for one in augment.augmentations)
    return type(augment) in (Augmentation, AutoAugment)
