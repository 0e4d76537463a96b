"""Augmentation of images on their own device: crops, AutoAugment and TrivialAugment, and CutMix for public images."""

from sfumato.augment.autoaugment import AutoAugment
from sfumato.augment.batch import Chain
from sfumato.augment.crops import Augmentation, crop_slowly, mirrored
from sfumato.augment.cutmix import CutMix
from sfumato.augment.policy import CIFAR10, TRIVIAL
from sfumato.augment.recording import recordable

__all__ = [
    "CIFAR10",
    "TRIVIAL",
    "Augmentation",
    "AutoAugment",
    "Chain",
    "CutMix",
    "crop_slowly",
    "mirrored",
    "recordable",
]
