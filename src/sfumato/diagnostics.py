"""What can be told about a private training for free: from released answers and public data alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sfumato.generators import own_generators
from sfumato.gradients import Gradient
from sfumato.public import Public
from sfumato.questions import GradientMean

_Z = 2.2414  # two intervals, each right in 97.5 % of all cases: together in 95 %
_ROWS = 640  # of public data that an answer is compared with


def cosine(answer: Gradient, public: Gradient, noise: float) -> Tensor:
    """(cosine, lowest, highest): how far a noisy gradient, before its noise, points where a public one does.

    `noise` is the standard deviation in each coordinate. Along one direction the noise is only that, and its share of
    the answer's squared length is known; so the angle between gradients is found even where noise is most of the
    answer. The band holds the true cosine in 95 % of all cases at least, and is (-1, 1) where nothing can be said.
    """
    entries = sum(t.numel() for t in answer.values())
    along = answer.dot(public) / public.norm().clamp_min(1e-300)
    squared = answer.dot(answer) - entries * noise**2
    spread = _Z * torch.sqrt(2 * entries * noise**4 + 4 * noise**2 * squared.clamp_min(0.0))
    shortest, longest = ((squared + s).clamp_min(0.0).sqrt() for s in (-spread, spread))

    def bound(edge: Tensor, upwards: bool) -> Tensor:
        length = torch.where((edge > 0) == upwards, shortest, longest)
        return (edge / length.clamp_min(1e-300)).clamp(-1.0, 1.0)

    middle = (along / squared.clamp_min(1e-300).sqrt()).clamp(-1.0, 1.0)
    low, high = bound(along - _Z * noise, False), bound(along + _Z * noise, True)
    return torch.stack([middle, torch.minimum(low, middle), torch.maximum(high, middle)])


@dataclass
class Alignments:
    """The cosine of every answer with the public gradient; taken between a method and the door, it changes nothing.

    An answer around an origin is compared with that; else a batch of public rows gives the direction. Where there is
    no public data, nothing is measured.
    """

    public: Public | None
    noise_multiplier: float
    expected: float  # the declared batch
    found: list[Any] = field(default_factory=list)  # [step, cosine, lowest, highest]

    def watched(self, ask: Callable[..., Any], step: int) -> Callable[..., Any]:
        """`ask`, with its answers to gradient questions compared."""

        def asked(question: Any, **options: Any) -> Any:
            answer = ask(question, **options)
            if isinstance(question, GradientMean):
                self._compare(question, answer, step)
            return answer

        return asked

    def _compare(self, question: GradientMean, answer: Gradient, step: int) -> None:
        clip = question.clip
        p = clip.origin
        if p is None and self.public is not None:
            drawn = self.public.random_state
            with own_generators():  # what is measured must not change what is trained
                p = self.public.gradient(question.params, _ROWS)
            self.public.random_state = drawn
        if p is not None:
            noise = self.noise_multiplier * clip.norm / self.expected
            step_of_p = p if clip.scale is None else clip.scale * p
            self.found.append((step, cosine(clip.restore(answer), step_of_p, noise)))

    def up_to(self, step: int) -> list[list[float]]:
        """Without a step that was answered and then failed: it is done again."""
        return [entry for entry in self.to_list() if entry[0] <= step]

    def to_list(self) -> list[list[float]]:
        """Numbers at last: until now they stayed where they were computed, so that no GPU had to wait."""
        self.found = [_plain(entry) for entry in self.found]
        return list(self.found)


def _plain(entry: Any) -> list[float]:
    return entry if isinstance(entry, list) else [entry[0], *(round(float(v), 6) for v in entry[1])]


def latest(found: list[list[float]]) -> Mapping[str, float]:
    """For a table of the training: the mean cosine of the last ten answers."""
    last = [cosine for _, cosine, *_ in found[-10:]]
    return {"public_cosine": math.fsum(last) / len(last)} if last else {}
