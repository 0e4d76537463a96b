"""What a user's code, lent private rows by the door, must not leave behind: errors, warnings, and buffers that moved.

The model's own buffers are lent as copies (`objective.py`). Other modules, a teacher in a loss or a network in a row
map, are not known beforehand: they are seen when they are called.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from sfumato.errors import SfumatoError, UnsupportedModel
from sfumato.generators import one_at_a_time

_T = TypeVar("_T")
LOADER = "sfumato-loader"
"""How the names of threads begin in which rows are loaded."""


def unquoted(work: Callable[[], _T], *, private: bool, charged: bool, advice: Callable[[], str]) -> _T:
    """Keeps the text of errors of code that sees private rows: it may quote a row, or count a batch."""
    try:
        return work()
    except SfumatoError:
        raise
    except torch.OutOfMemoryError:  # whose text counts a batch
        text = (
            "The device ran out of memory while a question was answered, which stays charged: lower "
            "performance=Performance(micro_batch=...) or free the device, then go on from the checkpoint."
        )
    except Exception as error:
        if not private:
            raise
        text = (
            f"The question {'was charged and ' if charged else ''}failed inside the door with "
            f"{type(error).__name__}, whose text may quote private rows: "
            f"{advice()}"
        )
    # Out here nothing is being handled: else that error, with rows in its frames, would become this one's context.
    raise SfumatoError(text)


@contextmanager
def no_traces(*, known: Collection[nn.Module], silent: bool) -> Iterator[None]:
    """Buffers of modules other than `known` are afterwards as they were; if `silent`, no warning is shown.

    All of this is set for the process, so one thread at a time is inside.
    """
    with one_at_a_time(), ExitStack() as held:
        if silent:
            held.enter_context(_silence())
        held.enter_context(_same_buffers(known))
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """A warning may quote a row, count a batch, or be there only if one person is.

    Filters stay as they are: to change them makes Python forget which warnings it has shown, and show them all again
    after every answer.
    """
    quiet = _Quiet(warnings.showwarning)
    warnings.showwarning = quiet
    try:
        yield
    finally:
        quiet.open = False
        if warnings.showwarning is quiet:  # else another thread keeps it, and will put it back
            warnings.showwarning = quiet.before


class _Quiet:
    """In the place of `warnings.showwarning`: shows nothing while the door is open, and lets Python forget it."""

    def __init__(self, before: Callable[..., None]) -> None:
        self.before, self.open = before, True

    def __call__(self, message: Any, category: Any, filename: Any, lineno: Any, *args: Any, **options: Any) -> None:
        if self.open:
            _forget(str(message), category, lineno, sys._getframe())
        else:
            self.before(message, category, filename, lineno, *args, **options)


def _forget(text: str, category: type[Warning], lineno: int, frame: FrameType | None) -> None:
    """Python notes what it has shown, in the module that warned, and is silent the next time: that would tell, too."""
    warnings.onceregistry.pop((text, category), None)  # type: ignore[attr-defined]
    while frame is not None:
        noted = frame.f_globals.get("__warningregistry__", {})
        for key in ((text, category, lineno), (text, category, 0), (text, category)):
            noted.pop(key, None)
        frame = frame.f_back


@contextmanager
def _same_buffers(known: Collection[nn.Module]) -> Iterator[None]:
    """Of modules that are called in this thread, or in that which loads rows for it."""
    here, apart = threading.get_ident(), {id(module) for module in known}
    kept: list[_Kept] = []

    def called(module: nn.Module, _: Any) -> None:
        loads = threading.current_thread().name.startswith(LOADER)
        if id(module) in apart or not (loads or threading.get_ident() == here):
            return
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise UnsupportedModel(
                f"A {type(module).__name__} that sees private rows normalises each by the others: call eval() on the "
                "module that it is in, or use another normalisation."
            )
        apart.add(id(module))
        kept.append(_Kept(module))

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()
        for one in kept:
            one.put_back()


class _Kept:
    """The buffers of one module as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module  # also so that its id is not used again
        self._none = {name for name, buffer in module._buffers.items() if buffer is None}
        self._before = {
            name: (buffer, buffer.detach().clone())
            for name, buffer in module.named_buffers(recurse=False)
            if not is_functorch_wrapped_tensor(buffer)  # inside a vmap of the user's own: lent for that long only
        }

    def put_back(self) -> None:
        if not isinstance(self._module, torch.jit.ScriptModule):  # whose buffers cannot be exchanged
            buffers = self._module._buffers
            for name in set(buffers) - set(self._before) - self._none:
                if (made := buffers[name]) is not None and not is_functorch_wrapped_tensor(made):
                    del buffers[name]
            buffers.update({name: buffer for name, (buffer, _) in self._before.items()})
        for buffer, value in self._before.values():
            if not torch.equal(buffer, value):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(value)
