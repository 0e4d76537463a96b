"""What a user's code, lent private rows by the door, must not leave behind: errors, warnings, and buffers that moved.

The model's own buffers are lent as copies (`objective.py`). Other modules, a teacher in a loss or a network in a row
map, are not known beforehand: they are seen when they are called.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from sfumato.errors import SfumatoError, UnsupportedModel
from sfumato.generators import one_at_a_time

_T = TypeVar("_T")


def unquoted(work: Callable[[], _T], *, private: bool, advice: Callable[[], str]) -> _T:
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
            f"The question failed inside the door with {type(error).__name__}, whose text may quote private rows: "
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
    before = warnings.showwarning
    warnings.showwarning = lambda *args, **options: None
    try:
        yield
    finally:
        warnings.showwarning = before


@contextmanager
def _same_buffers(known: Collection[nn.Module]) -> Iterator[None]:
    here, apart = threading.get_ident(), {id(module) for module in known}
    kept: list[tuple[nn.Module, dict[str, Tensor | None], list[tuple[Tensor, int, Tensor]]]] = []

    def called(module: nn.Module, _: Any) -> None:
        if id(module) in apart or threading.get_ident() != here:
            return
        apart.add(id(module))
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise UnsupportedModel(
                f"A {type(module).__name__} that sees private rows normalises each by the others: call eval() on the "
                "module that it is in, or use another normalisation."
            )
        if module._buffers:
            tensors = [b for b in module._buffers.values() if b is not None]
            kept.append((module, dict(module._buffers), [(b, b._version, b.detach().clone()) for b in tensors]))

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()
        with torch.no_grad():
            for module, buffers, values in kept:
                module._buffers.update(buffers)
                for tensor, version, value in values:
                    if tensor._version != version:
                        tensor.copy_(value)
