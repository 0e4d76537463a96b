"""Triton kernels for the few contractions that cost the time, each beside its slow twin in plain PyTorch.

Nothing here knows of privacy. The modules of this folder import Triton when they are imported, so the rest of the
package imports them inside the branch that `usable` guards: without Triton, or without a GPU, the twins run instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

INSTALLED = importlib.util.find_spec("triton") is not None
"""Whether Triton is there at all."""

INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on CPU tensors; decided before this package is imported."""


class Use(Enum):
    """When kernels run: on CUDA tensors, never, or also on CPU tensors through the interpreter (for tests)."""

    AUTO = "auto"
    NEVER = "never"
    INTERPRETER = "interpreter"


_use = Use.NEVER if os.environ.get("SFUMATO_KERNELS") == "0" else Use.AUTO
_contract = True


@contextmanager
def using(use: Use) -> Iterator[None]:
    """Switch for the whole process, since backward passes run in threads of their own. NEVER stays NEVER inside."""
    global _use
    before = _use
    _use = Use.NEVER if before is Use.NEVER else use
    try:
        yield
    finally:
        _use = before


def usable(*tensors: Tensor | None) -> bool:
    """Whether kernels can run on these tensors now. Not under vmap or other function transforms, which they cannot see.

    float64 is left to the twins: it is for checking, and tensor cores are not.
    """
    if _use is Use.NEVER or not INSTALLED or torch._C._are_functorch_transforms_active():
        return False
    given = [t for t in tensors if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return False
    if INTERPRETED:
        return _use is Use.INTERPRETER and all(t.device.type == "cpu" for t in given)
    return all(t.is_cuda for t in given)


@contextmanager
def contractions(allowed: bool) -> Iterator[None]:
    """Allow the engine its own kernels or not; layers keep theirs."""
    global _contract
    before, _contract = _contract, allowed
    try:
        yield
    finally:
        _contract = before


def contracts(*tensors: Tensor | None) -> bool:
    """Whether the engine's kernels can run on these tensors now."""
    return _contract and usable(*tensors)
