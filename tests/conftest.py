"""Shared set-up: one thread per test process, and kernels in Triton's interpreter where there is no GPU."""

import importlib
import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are first imported

from sfumato import kernels  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C; tests send it


@pytest.fixture(autouse=kernels.INTERPRETED)
def _scalars_count_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter holds a scalar as an array of one entry, which NumPy 2.4 does not take as an integer."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a `thinned(n)` test with many cases every n-th is in the ordinary run; the others are slow ones."""
    seen: Counter[str] = Counter()
    for item in items:
        if (thinned := item.get_closest_marker("thinned")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
