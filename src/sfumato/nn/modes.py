"""Train and eval mode, lent for a while: afterwards every part of a module is in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Part by part as before afterwards: a frozen part may be in eval mode while the rest is trained.

    >>> module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with in_mode(module, training=True):
    ...     [part.training for part in module]
    [True, True]
    >>> [part.training for part in module]
    [True, False]
    """
    modes = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def recurring_shapes() -> Iterator[None]:
    """cuDNN may try its algorithms out, which pays where the same shapes come again and again."""
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def being_trained(module: nn.Module) -> Iterator[None]:
    """Train mode on batches of one shape; no gradient is left on trainable parameters."""
    with in_mode(module, training=True), recurring_shapes():
        try:
            yield
        finally:
            for p in module.parameters():
                if p.requires_grad:
                    p.grad = None
