"""One round as the server sees it: of all that arrives, what counts.

An answer counts once, if it is of this round, in time, from a client that was asked, and of the right names, shapes and
kind. Whatever else arrives is dropped without a word: it changes nothing but the sender's own contribution, which is
then zero. An update that is not finite is zero, too; how long a finite one may be is for the question to say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sfumato.federated.clients import Answers, Clients, Request
from sfumato.gradients.clip import fading, largest_norm

_AT_ONCE = 1 << 20  # entries that are held in float64: few enough to stay near the processor
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what float64 holds, and every device reads


def received(clients: Clients, request: Request, addresses: Sequence[int]) -> Iterator[Tensor]:
    """Ask these clients and give what counts, in blocks: one row of float64 for each, parameters side by side.

    Entries may still be NaN or infinite; `bounded_sum` takes care of them.
    """
    missing = set(addresses)
    ends = math.inf if clients.seconds is None else time.monotonic() + clients.seconds
    for answers in clients.collect(request, addresses):
        came = time.monotonic()
        if came > ends:
            return
        known = _in_shape(answers, request)
        if known is None:
            continue
        kept = []
        for place, address in enumerate(known.addresses):
            if address in missing:
                missing.discard(address)
                kept.append(place)
        if kept:
            yield from _rows(known, kept, request.params)
            # The clock stands still while the server works: one user's answer must not make another's late.
            ends += time.monotonic() - came


def _in_shape(answers: Answers, request: Request) -> Answers | None:
    """The answers if they have the form that was asked for; this never raises, whatever was sent."""
    try:
        return answers if _fits(answers, request) else None
    except Exception:  # of things that cannot even be compared or measured
        return None


def _fits(answers: Answers, request: Request) -> bool:
    if not isinstance(answers, Answers) or answers.round != request.round or not isinstance(answers.updates, Mapping):
        return False
    updates, count = answers.updates, len(answers.addresses)
    if not all(_is_address(address) for address in answers.addresses) or updates.keys() != request.params.keys():
        return False
    for name, p in request.params.items():
        t = updates[name]
        if not (isinstance(t, Tensor) and t.layout is torch.strided and t.dtype in _KINDS and not t.is_meta):
            return False
        if t.shape != (count, *p.shape):
            return False
    return True


def _is_address(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _rows(answers: Answers, kept: list[int], params: Mapping[str, Tensor]) -> Iterator[Tensor]:
    width = sum(p.numel() for p in params.values())
    device = next(iter(params.values())).device
    updates = [answers.updates[name].detach() for name in params]
    if len(kept) < len(answers.addresses):
        updates = [t[kept] for t in updates]
    step = max(1, _AT_ONCE // max(1, width))
    for start in range(0, len(kept), step):
        count = min(step, len(kept) - start)
        values = torch.empty(count, width, dtype=torch.float64, device=device)
        at = 0
        for t in updates:
            part = t[start : start + count].reshape(count, -1)
            values[:, at : at + part.shape[1]] = part.to(device)
            at += part.shape[1]
        yield values


def bounded_sum(values: Tensor, factors: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of rows, each times the factor for its norm, and which rows counted: those whose squares are finite.

    Norms are rounded up, by more than a sum of so many squares can be rounded down. Before squares overflow a row
    counts less and less: how a norm is rounded may be up to the rows around it.
    """
    norms = torch.linalg.vector_norm(values, dim=1)
    valid = norms <= largest_norm(values.dtype)
    rounded_up = norms * (1 + (values.shape[1] + 16) * 2.0**-52)
    weights = torch.where(valid, factors(rounded_up) * fading(norms, values.dtype), 0.0)
    if values.is_cuda or not bool(valid.all()):  # a GPU is not waited for
        values = values.nan_to_num(0.0, 0.0, 0.0)  # zero times NaN would be NaN
    return weights @ values, valid


def as_named(flat: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A row of all parameters side by side, as one tensor for each."""
    parts = torch.split(flat, [p.numel() for p in params.values()])
    return {name: part.view(p.shape) for part, (name, p) in zip(parts, params.items(), strict=True)}


def side_by_side(named: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """The other way, in float64."""
    return torch.cat([named[name].to(p.device, torch.float64).reshape(-1) for name, p in params.items()])
