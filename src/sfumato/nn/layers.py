"""Layers that treat examples one by one and train well under clipping: ordinary modules, with fast paths on a GPU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn.functional import (
    Activation,
    Pair,
    autocast_dtype,
    channels_last_here,
    group_norm_act,
    standardised_conv2d,
)


class WSConv2d(nn.Module):
    """A convolution whose weight's rows are standardised: mean 0 and norm 1, times a trained gain.

    Options are those of `nn.Conv2d`, but for padding, which is a number of zeros, and bias, which is off by default.
    `eps` is added to a row's squared norm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = False,
        gain: bool = True,
        eps: float = 1e-4,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise InvalidArgument(
                f"groups is {groups}, which does not divide {in_channels} and {out_channels} channels: choose a number "
                "that divides both."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.gain = nn.Parameter(torch.empty(out_channels)) if gain else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of deviation 1/sqrt(fan in), gain 1, bias 0."""
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")
        if self.gain is not None:
            nn.init.ones_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        options = (self.stride, self.padding, self.dilation, self.groups, self.eps)
        return standardised_conv2d(x, self.weight, self.gain, self.bias, *options)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        usual = (("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1), ("eps", 1e-4))
        text += "".join(f", {name}={getattr(self, name)}" for name, value in usual if getattr(self, name) != value)
        text += "" if self.bias is None else ", bias=True"
        return text + (", gain=False" if self.gain is None else "")


class GroupNormAct(nn.Module):
    """Group normalisation and the activation after it, as one operation; statistics are float32 under autocast too.

    With `activation_first` the activation comes before, so that what leaves has mean 0; with `inner_bias` as well, a
    trained number per channel is added before that activation, as a convolution's bias would be, in the same kernel.

    Without such a bias of its own it may be called with one: a number per channel, or a row of them per image.
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        activation: Literal["relu", "silu"] | None = "relu",
        eps: float = 1e-5,
        *,
        activation_first: bool = False,
        inner_bias: bool = False,
    ) -> None:
        super().__init__()
        if groups < 1 or channels % groups:
            raise InvalidArgument(
                f"groups is {groups}, which does not divide {channels} channels: choose a number that does."
            )
        if activation not in ("relu", "silu", None):
            raise InvalidArgument(f"activation is {activation!r}: choose 'relu', 'silu' or None.")
        self.groups, self.channels, self.eps = groups, channels, eps
        self.activation = Activation.NONE if activation is None else Activation(activation)
        self.activation_first = activation_first
        if inner_bias and not activation_first:
            raise InvalidArgument(
                "inner_bias=True needs activation_first=True: it is added before the activation that comes first."
            )
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.inner_bias = nn.Parameter(torch.zeros(channels)) if inner_bias else None

    def forward(self, x: Tensor, inner_bias: Tensor | None = None) -> Tensor:
        if inner_bias is None:
            inner_bias = self.inner_bias
        elif self.inner_bias is not None:
            raise InvalidArgument("inner_bias was given to a layer that has one: make it with inner_bias=False.")
        after, before = self.activation, Activation.NONE
        if self.activation_first:
            after, before = before, after
        return group_norm_act(x, self.groups, self.weight, self.bias, self.eps, after, before, inner_bias)

    def extra_repr(self) -> str:
        text = f"{self.groups}, {self.channels}, activation={self.activation.value!r}, eps={self.eps}"
        text += ", activation_first=True" if self.activation_first else ""
        return text + ("" if self.inner_bias is None else ", inner_bias=True")


class Pixels(nn.Module):
    """Images as a network takes them: (v - mean) / std with v in 0..1, where uint8 pixels are divided by 255 first.

    The result is channels-last on a GPU, and of autocast's type where that is on.
    """

    def __init__(self, mean: float = 0.5, std: float = 0.25) -> None:
        super().__init__()
        if not std > 0:
            raise InvalidArgument(f"std is {std}: give a positive number, which pixels are divided by.")
        self.mean, self.std = mean, std

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            values = (images - 255.0 * self.mean) / (255.0 * self.std)
        else:
            values = (images - self.mean) / self.std
        dtype = values.dtype if values.dtype == torch.float64 else autocast_dtype(values) or values.dtype
        if channels_last_here(values):
            return values.to(dtype=dtype, memory_format=torch.channels_last)
        return values.to(dtype)

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"


def _pair(value: Pair) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(v, int) for v in pair):
        raise InvalidArgument(f"{value!r} must be a whole number or a pair of them, as kernel, stride and padding are.")
    return pair
