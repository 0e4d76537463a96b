"""Augmentation of images on their own device: crops, the AutoAugment policy, and CutMix for public images."""

from sfumato.augment.autoaugment import AutoAugment
from sfumato.augment.batch import Chain
from sfumato.augment.crops import Augmentation, crop_slowly
from sfumato.augment.cutmix import CutMix

__all__ = ["Augmentation", "AutoAugment", "Chain", "CutMix", "crop_slowly"]
