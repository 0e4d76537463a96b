"""The global generators of torch, numpy and Python, lent to code that is not ours and put back as they were."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

_lock = threading.RLock()


def one_at_a_time() -> AbstractContextManager[Any]:
    """For whoever lends what belongs to the whole process, and puts it back.

    Of two threads that overlap, the last one to leave would put back what it found: the other's secret state.
    """
    return _lock


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held the old one is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, which without an accelerator queues every seed, with a traceback, for one that may come."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def own_generators(seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside, or how much of it, leaves no trace outside; with a seed, it begins from that.

    How often private rows draw (views, dropout) depends on how many were sampled. Outside, the same generators choose
    public views and first weights: they must not know.
    """
    with one_at_a_time():
        numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        try:
            with torch.random.fork_rng(devices=devices):
                if seed is not None:
                    seed_torch(seed)
                    np.random.seed(seed % 2**32)  # noqa: NPY002
                    random.seed(seed)
                yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)
