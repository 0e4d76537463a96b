"""Wide residual networks without batch normalisation: group norm, and convolutions with standardised weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn import GroupNormAct, Pixels, WSConv2d
from sfumato.nn.functional import at_least_float32, full_precision

Norm = Callable[[int], GroupNormAct]  # for so many channels

_FIRST = 16


def wide_resnet(
    depth: int = 16,
    width: int = 4,
    outputs: int = 10,
    *,
    channels: int = 3,
    groups: int = 16,
    activation_first: bool = False,
) -> nn.Module:
    """A pre-activation WRN-depth-width for images (N, channels, H, W), uint8 or floats in 0..1.

    `groups` are those of the normalisations; where they do not divide the channels, their largest common divisor is
    used. With `activation_first` ReLU comes before the normalisation, as De et al. 2022 have it (arXiv 2204.13650):
    convolutions then see features of mean 0. What their convolutions have biases for, to move ReLU's threshold, is done
    by the normalisation here, in the same kernel; and a shortcut has a normalisation of its own, as theirs has.
    """
    if depth < 10 or (depth - 4) % 6:
        raise InvalidArgument(f"depth is {depth}: it must be 4 more than a multiple of 6, such as 16, 28 or 40.")
    for name, value in (("width", width), ("outputs", outputs), ("channels", channels), ("groups", groups)):
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: give a positive number.")
    norm = partial(_norm, groups=groups, activation_first=activation_first)
    return _WideResNet((depth - 4) // 6, width, outputs, channels, norm, own_norms=activation_first)


class _WideResNet(nn.Module):
    def __init__(self, blocks: int, width: int, outputs: int, channels: int, norm: Norm, *, own_norms: bool) -> None:
        super().__init__()
        self.pixels = Pixels()
        self.first = WSConv2d(channels, _FIRST, 3, padding=1)
        body: list[nn.Module] = []
        before = _FIRST
        for stage in range(3):
            after = _FIRST * width * 2**stage
            for block in range(blocks):
                body.append(_Block(before, after, 2 if stage and not block else 1, norm, own_norm=own_norms))
                before = after
        self.body = nn.Sequential(*body)
        self.norm = norm(before)
        self.head = nn.Linear(before, outputs)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.body(self.first(self.pixels(images))))
        with full_precision(features):  # the head is small, and the loss wants its digits
            logits: Tensor = self.head(at_least_float32(features).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two convolutions, each after its normalisation; where the shape changes, the shortcut has one, too."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm, *, own_norm: bool) -> None:
        super().__init__()
        self.norm1 = norm(before)
        self.conv1 = WSConv2d(before, after, 3, stride, padding=1)
        self.norm2 = norm(after)
        self.conv2 = WSConv2d(after, after, 3, padding=1)
        self.shortcut_norm = norm(before) if before != after and own_norm else None
        self.shortcut = WSConv2d(before, after, 1, stride) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        activated = self.norm1(x)
        residue: Tensor = self.conv2(self.norm2(self.conv1(activated)))
        if self.shortcut is not None:
            x = self.shortcut(activated if self.shortcut_norm is None else self.shortcut_norm(x))
        return residue + x


def _norm(channels: int, *, groups: int, activation_first: bool) -> GroupNormAct:
    shared = math.gcd(groups, channels)
    return GroupNormAct(shared, channels, activation_first=activation_first, inner_bias=activation_first)
