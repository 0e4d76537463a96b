"""AutoAugment's operations, the policy found for CIFAR-10 (Cubuk, Zoph, Mane, Vasudevan and Le, CVPR 2019), and one
that was not searched for on anybody's images (TrivialAugment, Mueller and Hutter, ICCV 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, unique

from sfumato.errors import InvalidArgument

GREATEST = 9
"""The largest level: the range of each magnitude is cut into ten, from no effect to the greatest."""


@unique
class Operation(IntEnum):
    """The paper's operations that act on one image, grouped by how they are computed."""

    IDENTITY = 0
    # Moved: each pixel is fetched from elsewhere.
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    # Blended: the image against a duller version of itself.
    BRIGHTNESS = 6
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    # Looked up: grey levels are exchanged for others.
    POSTERIZE = 10
    SOLARIZE = 11
    AUTO_CONTRAST = 12
    EQUALIZE = 13
    INVERT = 14


@dataclass(frozen=True)
class Step:
    """An operation, how often it is applied, and how strongly: `level` 0 to 9 (of no account for the last three)."""

    operation: Operation
    probability: float
    level: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.operation, Operation):
            raise InvalidArgument(f"operation={self.operation!r} must be one of Operation.")
        if not 0 <= self.probability <= 1:
            raise InvalidArgument(
                f"probability={self.probability} must lie in 0..1: it is the share of images changed."
            )
        if self.level not in range(GREATEST + 1):
            raise InvalidArgument(f"level={self.level!r} must be a whole number in 0..{GREATEST}.")


Policy = tuple[tuple[Step, Step], ...]


def amount(step: Step, sign: int) -> float:
    """What the level means: an enhancement factor, the width of a poster's grey levels, a threshold; else 0.

    The paper's ranges, in the reading that has become usual: enhancements are 1 +- 0.9 level/9, with a random sign.
    (The authors' released code takes 0.1 + 1.8 level/10 without one, and keeps fewer bits.)
    """
    share = step.level / GREATEST
    if Operation.BRIGHTNESS <= step.operation <= Operation.SHARPNESS:
        return 1 + sign * 0.9 * share
    if step.operation == Operation.POSTERIZE:
        return float(1 << round(4 * share))  # 8 to 4 bits are kept
    if step.operation == Operation.SOLARIZE:
        return 256 * (1 - share)
    return 0.0


def movement(step: Step, sign: int, H: int, W: int) -> tuple[float, float, float, float, float, float]:
    """(a, b, c, d, e, f): what is shown at (x, y) is fetched from (ax + by + c, dx + ey + f), in pixels.

    Shears leave the first row or column where it is, shifts are by whole pixels, and turns are about the centre.
    """
    share = sign * step.level / GREATEST
    match step.operation:
        case Operation.SHEAR_X:
            return 1, 0.3 * share, 0, 0, 1, 0
        case Operation.SHEAR_Y:
            return 1, 0, 0, 0.3 * share, 1, 0
        case Operation.TRANSLATE_X:  # at most 150 pixels of 331, the width of the paper's images
            return 1, 0, int(150 / 331 * W * share), 0, 1, 0
        case Operation.TRANSLATE_Y:
            return 1, 0, 0, 0, 1, int(150 / 331 * H * share)
        case Operation.ROTATE:
            cos, sin = math.cos(math.radians(30 * share)), math.sin(math.radians(30 * share))
            return cos, -sin, (1 - cos) * W / 2 + sin * H / 2, sin, cos, (1 - cos) * H / 2 - sin * W / 2
        case _:
            return 1, 0, 0, 0, 1, 0


def _policy(*pairs: tuple[Operation, float, int, Operation, float, int]) -> Policy:
    return tuple((Step(a, p, m), Step(b, q, n)) for a, p, m, b, q, n in pairs)


_O = Operation
CIFAR10 = _policy(
    (_O.INVERT, 0.1, 7, _O.CONTRAST, 0.2, 6),
    (_O.ROTATE, 0.7, 2, _O.TRANSLATE_X, 0.3, 9),
    (_O.SHARPNESS, 0.8, 1, _O.SHARPNESS, 0.9, 3),
    (_O.SHEAR_Y, 0.5, 8, _O.TRANSLATE_Y, 0.7, 9),
    (_O.AUTO_CONTRAST, 0.5, 8, _O.EQUALIZE, 0.9, 2),
    (_O.SHEAR_Y, 0.2, 7, _O.POSTERIZE, 0.3, 7),
    (_O.COLOR, 0.4, 3, _O.BRIGHTNESS, 0.6, 7),
    (_O.SHARPNESS, 0.3, 9, _O.BRIGHTNESS, 0.7, 9),
    (_O.EQUALIZE, 0.6, 5, _O.EQUALIZE, 0.5, 1),
    (_O.CONTRAST, 0.6, 7, _O.SHARPNESS, 0.6, 5),
    (_O.COLOR, 0.7, 7, _O.TRANSLATE_X, 0.5, 8),
    (_O.EQUALIZE, 0.3, 7, _O.AUTO_CONTRAST, 0.4, 8),
    (_O.TRANSLATE_Y, 0.4, 3, _O.SHARPNESS, 0.2, 6),
    (_O.BRIGHTNESS, 0.9, 6, _O.COLOR, 0.2, 8),
    (_O.SOLARIZE, 0.5, 2, _O.INVERT, 0.0, 3),
    (_O.EQUALIZE, 0.2, 0, _O.AUTO_CONTRAST, 0.6, 0),
    (_O.EQUALIZE, 0.2, 8, _O.EQUALIZE, 0.6, 4),
    (_O.COLOR, 0.9, 9, _O.EQUALIZE, 0.6, 6),
    (_O.AUTO_CONTRAST, 0.8, 4, _O.SOLARIZE, 0.2, 8),
    (_O.BRIGHTNESS, 0.1, 3, _O.COLOR, 0.7, 0),
    (_O.SOLARIZE, 0.4, 5, _O.AUTO_CONTRAST, 0.9, 3),
    (_O.TRANSLATE_Y, 0.9, 9, _O.TRANSLATE_Y, 0.7, 9),
    (_O.AUTO_CONTRAST, 0.9, 2, _O.SOLARIZE, 0.8, 3),
    (_O.EQUALIZE, 0.8, 8, _O.INVERT, 0.1, 3),
    (_O.TRANSLATE_Y, 0.7, 9, _O.AUTO_CONTRAST, 0.9, 1),
)
"""The 25 sub-policies of the paper's appendix: an image draws one, and makes its steps with their probabilities."""

NEVER = Step(_O.IDENTITY, 0.0)
TRIVIAL: Policy = tuple(
    (Step(operation, 1.0, level), NEVER)
    for operation in Operation
    if operation != _O.INVERT
    for level in range(GREATEST + 1)
)
"""TrivialAugment: one operation, all equally likely, at a level drawn at random.

CIFAR-10's policy was found with training images of CIFAR-10: where those count as private, take this one.
"""
