"""Tensors of several processes: how answers lie in one bucket, and how to tell whether two processes hold the same."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sfumato.objective import Batch
from sfumato.questions import Exact, Joint


class Form:
    """How an exact answer lies in one flat bucket: float64, or int64 for counts."""

    def __init__(self, exact: Exact) -> None:
        tensors = exact if isinstance(exact, dict) else {"": exact}
        self._named = isinstance(exact, dict)
        self._shapes = {name: t.shape for name, t in tensors.items()}
        self.device = next(iter(tensors.values())).device
        whole = all(not (t.is_floating_point() or t.is_complex()) for t in tensors.values())
        self._kind = torch.int64 if whole else torch.float64

    def __repr__(self) -> str:
        return f"{self._kind} {[(name, tuple(shape)) for name, shape in self._shapes.items()]}"

    def flat(self, exact: Exact, device: torch.device, kind: torch.dtype | None = None) -> Tensor:
        tensors = exact.values() if isinstance(exact, dict) else [exact]
        return torch.cat([t.detach().reshape(-1).to(device, kind or self._kind) for t in tensors])

    def of(self, flat: Tensor, device: torch.device | None = None) -> Exact:
        parts = torch.split(flat.to(device or flat.device), [shape.numel() for shape in self._shapes.values()])
        tensors = {name: t.view(shape) for (name, shape), t in zip(self._shapes.items(), parts, strict=True)}
        return tensors if self._named else tensors[""]


def form_of(exact: Exact) -> str:
    """What all processes must agree on before they add up."""
    return repr(Form(exact))


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that changes with every bit; it is added up where the tensors are."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = 0
    for bits in torch.stack([t.detach().reshape(-1).view(kinds[t.element_size()]).sum() for t in tensors]).tolist():
        found = (found * 31 + bits) % (2**61 - 1)
    return found


def public_of(question: Any) -> list[Mapping[str, Tensor]]:
    """The named tensors of a question, all of them public: weights, origin, scale, offsets."""
    if isinstance(question, Joint):
        return [tensors for part in question.parts for tensors in public_of(part)]
    clip = getattr(question, "clip", None)
    own = [getattr(question, "params", None), getattr(clip, "origin", None), getattr(clip, "scale", None)]
    return [tensors for tensors in (*own, *(getattr(question, "offsets", None) or ())) if tensors]


def projected(tensors: Mapping[str, Tensor]) -> list[float]:
    """Its length, and how far it points in a fixed direction in which nothing special happens."""
    square, along = [], []
    for t in tensors.values():
        x = t.detach().reshape(-1).float()
        square.append(x.square().sum())
        along.append(x @ torch.arange(len(x), device=x.device, dtype=torch.float32).cos())
    length, projection = torch.stack([torch.stack(square).sum().sqrt(), torch.stack(along).sum()]).tolist()
    return [length, projection]


def row_digests(rows: Batch) -> tuple[int, ...]:
    """Of each row, over all of its tensors."""
    parts = [t.detach().cpu() for t in tree_flatten(rows)[0] if isinstance(t, Tensor)]
    return tuple(digest(repr([p[i].tolist() for p in parts])) for i in range(min(map(len, parts), default=0)))


def digest(text: str) -> int:
    """A number that stands for a text; unlike `hash`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def generators() -> tuple[Any, ...]:
    """The states of torch's, numpy's and Python's global generators."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), gpu, np.random.get_state(), random.getstate()  # noqa: NPY002


def set_generators(states: tuple[Any, ...]) -> None:
    """Go on from these states."""
    torch.set_rng_state(states[0])
    if states[1] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    random.setstate(states[3])
