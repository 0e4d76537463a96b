"""How a training is interrupted between two steps."""

from __future__ import annotations

import signal
import threading
from typing import Self


class Interruption:
    """A handler of signals: it raises KeyboardInterrupt, and remembers it, for what it raises may be lost.

    A signal is handled wherever the program happens to be. Python drops what is raised in a destructor or in a callback
    from C, and some libraries drop all errors of a part that they can do without.
    """

    def __init__(self) -> None:
        self.asked = self.held = False

    def __call__(self, *_: object) -> None:
        waits = self.held and not self.asked
        self.asked = True
        if not waits:
            raise KeyboardInterrupt


class Patience:
    """Holds a first Ctrl-C back until the step is whole; a second one comes through at once.

    Where the command line has its own `Interruption`, that one is held back, whatever signal it handles; and if it was
    asked before, and in vain, the training ends after its first step.
    """

    def __init__(self) -> None:
        # Only the main thread can; and where a program has its own handler, that is respected.
        mine = threading.current_thread() is threading.main_thread()
        handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] if mine else []
        known = next((handler for handler in handlers if isinstance(handler, Interruption)), None)
        self._interruption = known or Interruption()
        self._installs = known is None and signal.default_int_handler in handlers[:1]

    @property
    def ended(self) -> bool:
        return self._interruption.asked

    def __enter__(self) -> Self:
        self._interruption.held = True
        if self._installs:
            signal.signal(signal.SIGINT, self._interruption)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._installs:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._interruption.held = False
        if self.ended and kind is None:
            raise KeyboardInterrupt  # it came after the last step: the training is finished, the program still ends
