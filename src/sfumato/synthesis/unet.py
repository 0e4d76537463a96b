"""A class-conditional UNet, the network F of a diffusion model, after DDPM++ (Song et al. 2021) as in EDM (2022).

On a GPU it is fast in bfloat16: normalisation and SiLU are one kernel, images lie channels-last, and channels after a
concatenation stay powers of two, which that kernel wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn import GroupNormAct
from sfumato.nn.functional import autocast_dtype, channels_last_here, full_precision, widened
from sfumato.synthesis.nonleaking import AUGMENT_LABELS

_HEAD = 64  # channels of an attention head


def unet(
    *,
    image: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    channels: int = 128,
    multipliers: tuple[int, ...] = (1, 2, 2),
    blocks: int = 2,
    attention: tuple[int, ...] = (16,),
    dropout: float = 0.13,
    augment_labels: int = 0,
) -> UNet:
    """A UNet for images of the shape (C, H, W); the defaults have 27.8 million parameters.

    Args:
        classes: of the labels that it is conditioned on; 0 for none.
        multipliers: of `channels`, one per level; every level halves height and width.
        blocks: residual blocks per level on the way down; one more on the way up.
        attention: heights at which the last block of a level attends; the middle always does.
        augment_labels: how many labels of an augmentation it takes, `AUGMENT_LABELS` for `NonLeaking`.

    >>> small = unet(image=(1, 8, 8), channels=16, multipliers=(1, 2), blocks=1, attention=())
    >>> small(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([3, 7]), None).shape
    torch.Size([2, 1, 8, 8])
    """
    return UNet(
        Shape(
            image=image,
            classes=classes,
            channels=channels,
            multipliers=multipliers,
            blocks=blocks,
            attention=attention,
            dropout=dropout,
            augment_labels=augment_labels,
        )
    )


def digits_unet(image: tuple[int, int, int] = (1, 8, 8), classes: int = 10, augment_labels: int = 0) -> UNet:
    """For 8 x 8 digits on a CPU: 0.18 million parameters."""
    return unet(
        image=image,
        classes=classes,
        channels=16,
        multipliers=(1, 2),
        blocks=1,
        attention=(),
        dropout=0.0,
        augment_labels=augment_labels,
    )


def cifar_unet(
    image: tuple[int, int, int] = (3, 32, 32), classes: int = 10, augment_labels: int = AUGMENT_LABELS
) -> UNet:
    """For 32 x 32 images: 27.8 million parameters, minutes on one GPU."""
    return unet(image=image, classes=classes, augment_labels=augment_labels)


def ddpmpp_unet(
    image: tuple[int, int, int] = (3, 32, 32), classes: int = 10, augment_labels: int = AUGMENT_LABELS
) -> UNet:
    """Of the size of EDM's DDPM++ for CIFAR-10, 55.5 million parameters (Karras et al. 2022, table 7)."""
    return unet(image=image, classes=classes, multipliers=(2, 2, 2), blocks=4, augment_labels=augment_labels)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a UNet is made from: the arguments of `unet`."""

    image: tuple[int, int, int]
    classes: int
    channels: int
    multipliers: tuple[int, ...]
    blocks: int
    attention: tuple[int, ...]
    dropout: float
    augment_labels: int

    def __post_init__(self) -> None:
        if len(self.image) != 3 or min(self.image) < 1:
            raise InvalidArgument(f"image={self.image} must be (channels, height, width), such as (3, 32, 32).")
        if not self.multipliers or min(self.multipliers) < 1:
            raise InvalidArgument(f"multipliers={self.multipliers} must be positive, one per level, such as (1, 2, 2).")
        halvings = len(self.multipliers) - 1
        if any(side % 2**halvings for side in self.image[1:]):
            raise InvalidArgument(
                f"multipliers={self.multipliers} halve images {halvings} times, which a height and width of "
                f"{self.image[1:]} do not allow: give fewer levels, or images whose sides are multiples of "
                f"{2**halvings}."
            )
        if self.channels < 4 or self.channels % 4:
            raise InvalidArgument(
                f"channels={self.channels} must be a multiple of 4, and best a power of two, such as 128."
            )
        if any(width % max(1, width // _HEAD) for width in self.widths):
            raise InvalidArgument(
                f"channels={self.channels} times {self.multipliers} do not divide into attention heads of about "
                f"{_HEAD}: choose a power of two."
            )
        for name, least in (("blocks", 1), ("classes", 0), ("augment_labels", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name}={value} must be a whole number of at least {least}.")
        if not 0 <= self.dropout < 1:
            raise InvalidArgument(f"dropout={self.dropout} must lie in [0, 1): it is the share of features dropped.")

    @property
    def widths(self) -> list[int]:
        """Channels of every level."""
        return [self.channels * m for m in self.multipliers]

    @property
    def attends(self) -> list[bool]:
        """Whether a level's last block attends."""
        return [self.image[1] >> level in self.attention for level in range(len(self.multipliers))]


class UNet(nn.Module):
    """F(x; c_noise, labels, augment_labels), in the shape of x. Made by `unet`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.image, self.classes, self.augment_labels = shape.image, shape.classes, shape.augment_labels
        image, channels, widths, attends = shape.image, shape.channels, shape.widths, shape.attends
        blocks, dropout = shape.blocks, shape.dropout
        self.conditions = _Conditions(channels, shape.classes, shape.augment_labels)

        # The first level's width at once, so that what is concatenated at the end is a power of two wide as well.
        now = widths[0]
        self.first = _conv(image[0], now, 3)
        skips = [now]
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            if level:
                self.down.append(_Block(now, width, dropout, _Size.HALVED))
                skips.append(width)
            for block in range(blocks):
                self.down.append(_Block(width, width, dropout, attends=attends[level] and block == blocks - 1))
                skips.append(width)
            now = width
        self.middle = nn.ModuleList([_Block(now, now, dropout, attends=True), _Block(now, now, dropout)])
        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            if level < len(widths) - 1:
                self.up.append(_Block(now, width, dropout, _Size.DOUBLED))
                now = width
            for block in range(blocks + 1):
                joined = now + skips.pop()
                self.up.append(_Block(joined, width, dropout, attends=attends[level] and block == blocks, joins=True))
                now = width
        self.norm = _norm(now, "silu")
        self.last = _conv(now, image[0], 3, scale=0.1)

        # One product for the shifts of all blocks.
        self._widths = [block.after for block in self._blocks()]
        self.shifts = nn.Linear(4 * channels, sum(self._widths))
        nn.init.normal_(self.shifts.weight, 0, 0.3 / math.sqrt(4 * channels))
        nn.init.zeros_(self.shifts.bias)

    def forward(
        self, x: Tensor, c_noise: Tensor, labels: Tensor | None = None, augment_labels: Tensor | None = None
    ) -> Tensor:
        with full_precision(x):  # small, and noise levels want their digits
            conditions = self.shifts(self.conditions(c_noise, labels, augment_labels)).expand(len(x), -1)
        shifts = iter(conditions.split(self._widths, 1))

        kind = autocast_dtype(x) or x.dtype
        if channels_last_here(x):
            x = x.contiguous(memory_format=torch.channels_last)
        h = F.conv2d(*widened(x.to(kind), self.first.weight.to(kind), 1), padding=1)
        kept = [h]
        for block in self.down:
            h = block(h, next(shifts))
            kept.append(h)
        for block in self.middle:
            h = block(h, next(shifts))
        for block in self.up:
            h = block(torch.cat([h, kept.pop()], 1) if block.joins else h, next(shifts))
        result: Tensor = self.last(self.norm(h))
        return result

    def _blocks(self) -> list[_Block]:
        return [block for part in (self.down, self.middle, self.up) for block in part if isinstance(block, _Block)]


class _Conditions(nn.Module):
    """One vector per image of its noise level, its class and its augmentation."""

    def __init__(self, channels: int, classes: int, augment_labels: int) -> None:
        super().__init__()
        self.channels, self.classes, self.augment_labels = channels, classes, augment_labels
        self.of_label = nn.Linear(classes, channels, bias=False) if classes else None
        self.of_augment = nn.Linear(augment_labels, channels, bias=False) if augment_labels else None
        self.first = nn.Linear(channels, 4 * channels)
        self.second = nn.Linear(4 * channels, 4 * channels)
        if self.of_label is not None:
            nn.init.normal_(self.of_label.weight, 0, 1.0)
        if self.of_augment is not None:
            nn.init.normal_(self.of_augment.weight, 0, 0.3)

    def forward(self, c_noise: Tensor, labels: Tensor | None, augment_labels: Tensor | None) -> Tensor:
        # Waves in 4 c_noise = ln sigma, from 50 long, which is all of its range, to 0.4.
        frequencies = torch.exp2(torch.linspace(-3, 4, self.channels // 2, device=c_noise.device, dtype=c_noise.dtype))
        angles = 4 * c_noise[:, None] * frequencies
        e = torch.cat([angles.cos(), angles.sin()], 1) * math.sqrt(2)
        if self.of_label is not None:
            if labels is None:
                raise InvalidArgument(f"labels=None must hold one of {self.classes} classes for every image.")
            # Written out, since torch's one_hot waits for the GPU to check the labels.
            one_hot = labels[:, None] == torch.arange(self.classes, device=labels.device)
            e = e + self.of_label(one_hot.to(e.dtype))
        if augment_labels is not None:
            if self.of_augment is None:
                raise InvalidArgument(
                    "augment_labels were given to a network without any: give unet(augment_labels=9)."
                )
            e = e + self.of_augment(augment_labels.to(e.dtype))
        return F.silu(self.second(F.silu(self.first(e))))


class _Size(Enum):
    SAME = "same"
    HALVED = "halved"
    DOUBLED = "doubled"

    def __call__(self, x: Tensor) -> Tensor:
        if self is _Size.SAME:
            return x
        if channels_last_here(x):
            return _halved_nhwc(x) if self is _Size.HALVED else _doubled_nhwc(x)
        return F.avg_pool2d(x, 2) if self is _Size.HALVED else F.interpolate(x, scale_factor=2, mode="nearest")


# The same by a reduction and a copy, as are their gradients. Where channels lie last, torch's kernels were a tenth of a
# training step on an H200, half of that the gradient of pooling.


def _halved_nhwc(x: Tensor) -> Tensor:
    N, C, H, W = x.shape
    return x.permute(0, 2, 3, 1).reshape(N, H // 2, 2, W // 2, 2, C).mean((2, 4)).permute(0, 3, 1, 2)


def _doubled_nhwc(x: Tensor) -> Tensor:
    N, C, H, W = x.shape
    rows = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    return rows.expand(N, H, 2, W, 2, C).reshape(N, 2 * H, 2 * W, C).permute(0, 3, 1, 2)


class _Block(nn.Module):
    """Two convolutions after their normalisations, the second shifted by the conditions; then, perhaps, attention."""

    def __init__(
        self,
        before: int,
        after: int,
        dropout: float,
        size: _Size = _Size.SAME,
        *,
        attends: bool = False,
        joins: bool = False,
    ) -> None:
        super().__init__()
        self.after, self.dropout, self.size, self.joins = after, dropout, size, joins
        self.norm1 = _norm(before, "silu")
        self.conv1 = _conv(before, after, 3)
        self.norm2 = _norm(after, "silu")
        self.conv2 = _conv(after, after, 3, scale=0.0)  # a block begins as the identity
        self.shortcut = _conv(before, after, 1) if before != after else None
        self.attention = _Attention(after) if attends else None

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = self.conv1(self.size(self.norm1(x)))
        h = self.norm2(h, shift)  # of h + shift, which on a GPU is never written down
        h = self.conv2(F.dropout(h, self.dropout, self.training))
        x = self._resized(x) + h
        return x if self.attention is None else self.attention(x)

    def _resized(self, x: Tensor) -> Tensor:
        """Mixing channels and resizing commute: what comes first is what leaves less to do."""
        if self.shortcut is None:
            return self.size(x)
        resized: Tensor
        resized = self.size(self.shortcut(x)) if self.size is _Size.DOUBLED else self.shortcut(self.size(x))
        return resized


class _Attention(nn.Module):
    """Every position looks at all others of its image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = max(1, channels // _HEAD)
        self.norm = _norm(channels, None)
        self.qkv = _conv(channels, 3 * channels, 1)
        self.out = _conv(channels, channels, 1, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        N, C, H, W = x.shape
        per_position = self.qkv(self.norm(x)).permute(0, 2, 3, 1)  # where channels lie last, without a copy
        q, k, v = per_position.reshape(N, H * W, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, H, W, C).permute(0, 3, 1, 2)
        result: Tensor = x + self.out(seen)
        return result


def _conv(before: int, after: int, side: int, scale: float = 1.0) -> nn.Conv2d:
    """Without bias, which the next normalisation has and which costs a pass over memory of its own."""
    conv = nn.Conv2d(before, after, side, padding=side // 2, bias=False)
    nn.init.normal_(conv.weight, 0, scale / math.sqrt(before * side * side))
    return conv


def _norm(channels: int, activation: str | None) -> GroupNormAct:
    groups = math.gcd(min(32, max(1, channels // 4)), channels)
    return GroupNormAct(groups, channels, "silu" if activation else None)
