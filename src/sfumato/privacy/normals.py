"""Standard normals for `privacy/noise.py`, each of them used once, drawn ahead while a step computes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_BLOCK = 2**20  # normals that the thread draws before it looks up


class Normals:
    """An endless row of standard normals, each handed out once, part of it drawn ahead by a thread.

    Why no number is handed out twice, and none is read before it is written. `_drawn` holds the blocks not yet handed
    out, in order. A block enters it once, when it is made, and leaves it before it is handed out. While the thread runs
    it alone uses `_rng` and writes the blocks of its own list; this side touches neither until `_join`, which waits for
    the thread's end and then moves the filled blocks to `_drawn`. So every block has one owner at a time, and
    Thread.start and Thread.join order the accesses. A lock keeps callers apart, the end of the process among them.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._lock = threading.Lock()
        self._drawn: deque[Tensor] = deque()
        self._thread: threading.Thread | None = None
        self._filling: list[Tensor] = []
        self._filled = 0
        self._stop = False
        _ALL.add(self)

    def take(self, count: int, *, pinned: bool) -> list[Tensor]:
        """The next `count` normals, in float64 on the host, in one or more parts."""
        parts = []
        with self._lock:
            self._join()
            while count > 0:
                block = self._drawn.popleft() if self._drawn else self._draw(count, pinned)
                if len(block) > count:
                    block, later = block[:count], block[count:]
                    self._drawn.appendleft(later)
                parts.append(block)
                count -= len(block)
        return parts

    def draw_ahead(self, count: int, *, pinned: bool) -> None:
        """Starts to draw, until `count` normals are there."""
        with self._lock:
            self._join()
            missing = count - sum(map(len, self._drawn))
            while missing > 0:  # torch allocates here: when the process ends, a thread must not be stopped inside C++
                self._filling.append(torch.empty(min(missing, _BLOCK), dtype=torch.float64, pin_memory=pinned))
                missing -= len(self._filling[-1])
            if self._filling:
                self._thread = threading.Thread(target=self._fill, name="sfumato-noise", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread within one block and forgets what was drawn."""
        self._stop = True
        with self._lock:
            self._join()
            self._stop = False
            self._drawn.clear()

    def _draw(self, count: int, pinned: bool) -> Tensor:
        block = torch.empty(count, dtype=torch.float64, pin_memory=pinned)
        self._rng.standard_normal(out=block.numpy())
        return block

    def _fill(self) -> None:
        for block in self._filling:
            if self._stop:
                return
            self._rng.standard_normal(out=block.numpy())
            self._filled += 1

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            # Only what was filled is handed out: blocks that the thread did not reach (closed, or died) are dropped.
            self._drawn.extend(self._filling[: self._filled])
            self._thread, self._filling, self._filled = None, [], 0


# A thread that draws when the process ends is stopped first, for it would be stopped inside C++, which aborts the
# process. It may outlive the source that it draws for, but not these normals. Those that a forked child holds copies of
# are used no more there, and their lock may be held for ever.
_ALL: weakref.WeakSet[Normals] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    for normals in list(_ALL):
        normals.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ALL.clear)
