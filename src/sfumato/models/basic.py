"""Small models for tables and small images; no layer here mixes examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def linear(inputs: int, outputs: int) -> nn.Module:
    """Logistic regression, or one output per target."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (64,)) -> nn.Module:
    """Fully connected layers with tanh, whose bounded activations suit clipping."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def cnn(channels: int, outputs: int) -> nn.Module:
    """Two convolutions and two linear layers with tanh, for images of about 28 x 28, and of 14 x 14 at least."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.LazyLinear(32),
        nn.Tanh(),
        nn.Linear(32, outputs),
    )
