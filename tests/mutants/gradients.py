"""Sums of gradients that one person moves by more than the noise is made for, and noise that is less than charged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import as_clip, dp_sgd
from sfumato.audit.canary import white_box
from sfumato.audit.doors import SIZE, worlds
from sfumato.audit.verdict import Verdict
from sfumato.gradients import Gradient
from sfumato.gradients.reference import per_example_gradients
from sfumato.questions import Exact, GradientMean, Sample
from tests.mutants.doors import Way, asked_as, by_neighbours_and_noise
from tests.mutants.mutant import Mutant

DOPE = partial(dope_sgd, public_batch=4)
ADA = AdaDPS(public_batch=4, damping=0.1)
VIEWS, STEPS_TOGETHER = 4, 4


def rows_in(sample: Sample) -> int:
    return sum(len(batch) for batch, _ in sample.parts())


def per_row(question: GradientMean, sample: Sample) -> dict[str, Tensor]:
    """(rows, ...) gradients as they are; rows that are no numbers are zero, which is right."""
    assert sample.objective is not None
    parts = [per_example_gradients(sample.objective, question.params, batch) for batch, _ in sample.parts()]
    none = {n: torch.zeros(0, *p.shape, dtype=torch.float64) for n, p in question.params.items()}
    found = {n: torch.cat([none[n], *(part[n].double() for part in parts)]) for n in none}
    finite = torch.stack([torch.isfinite(g).flatten(1).all(1) for g in found.values()]).all(0)
    return {n: torch.where(finite.reshape(-1, *[1] * (g.ndim - 1)), g, 0.0) for n, g in found.items()}


def norms(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()


def weighted(factors: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.tensordot(factors, g, 1) for n, g in gradients.items()}


# ------------------------------------------------------------------------------------------------ the mistakes


class OriginPerRow(GradientMean):
    """Paper 000, Algorithm 2, lines 9 to 12: |B| g_hat + sum clip(g_i - g_hat, C) + N(0, s^2 C^2)."""

    def exact(self, sample: Sample) -> Exact:
        total, origin = super().exact(sample), self.clip.origin
        assert isinstance(total, dict)
        return total if origin is None else {n: t + rows_in(sample) * origin[n] for n, t in total.items()}


def not_restored(params: Any, public: Any, ask: Any, *, clip: float = 1.0, origin: Gradient, **_: Any) -> Gradient:
    """What stands below DOPE-SGD there: the origin came back with the rows."""
    answer: Gradient = ask(GradientMean(params, replace(as_clip(clip), origin=origin)))
    return answer


class OverTheBatch(GradientMean):
    """(sum + noise) / |B| in the place of / E|B|."""

    def exact(self, sample: Sample) -> Exact:
        object.__setattr__(self, "sampled", rows_in(sample))
        return super().exact(sample)

    def release(self, noisy: Any, expected: float) -> Gradient:
        return super().release(noisy, max(1, self.sampled))  # type: ignore[attr-defined]


class ViewsAsRows(GradientMean):
    """repeat_interleave(K), and every view clipped by itself: K C in the place of C."""

    def exact(self, sample: Sample) -> Exact:
        one = GradientMean(self.params, self.clip, 1, self.augment)
        parts = [one.exact(sample) for _ in range(self.views)]
        return {n: sum(part[n] for part in parts) for n in self.params}  # type: ignore[index, misc]


class ForgetsTheClip(GradientMean):
    """Noise of standard deviation s in the place of s C."""

    @property
    def unit(self) -> float:
        return 1.0


class NoisePerPass(GradientMean):
    """m passes are accumulated and the noise is divided with them: s C / m."""

    @property
    def unit(self) -> float:
        return super().unit / STEPS_TOGETHER


class NoiseOfTheMean(GradientMean):
    """The noise of a mean, s C / B, is added to the sum, which is then divided by B: divided twice."""

    @property
    def unit(self) -> float:
        return super().unit / SIZE


class ClipsTheAggregate(GradientMean):
    """Paper 002, equation (3): g_pub + clip(g_pr - g_pub) of a batch's mean g_pr, with the noise of a mean of rows."""

    def exact(self, sample: Sample) -> Exact:
        mean = Gradient({n: g.sum(0) / SIZE for n, g in per_row(self, sample).items()})
        return dict(mean.clipped(self.clip.norm) * SIZE)


class DividesAfterTheClip(GradientMean):
    """clip(g_i, C) / A in the place of clip(g_i / A, C): C / min A."""

    def exact(self, sample: Sample) -> Exact:
        total = GradientMean(self.params, replace(self.clip, scale=None)).exact(sample)
        scale = self.clip.scale
        assert isinstance(total, dict)
        return total if scale is None else {n: t * scale[n] for n, t in total.items()}


class ClipsLayerByLayer(GradientMean):
    """C for each of L layers: sqrt(L) C."""

    def exact(self, sample: Sample) -> Exact:
        found = per_row(self, sample)
        return {n: torch.tensordot(self.clip.factors(norms({n: g})), g, 1) for n, g in found.items()}


class NormsInHalf(GradientMean):
    """Norms in bfloat16, which rounds them down by up to 1/512: contributions of more than C."""

    def exact(self, sample: Sample) -> Exact:
        found = per_row(self, sample)
        return weighted(self.clip.factors(norms(found).bfloat16().double()), found)


class NoiseBeforeTheClip(GradientMean):
    """sum clip(g_i + N(0, s^2 C^2), C): the noise is clipped, too, and nobody's absence is hidden."""

    def exact(self, sample: Sample) -> Exact:
        found = {n: g + self.clip.norm * torch.randn_like(g) for n, g in per_row(self, sample).items()}
        return weighted(self.clip.factors(norms(found)), found)

    @property
    def unit(self) -> float:
        return super().unit * 1e-9  # nothing is added after


class NotClipped(GradientMean):
    """g_i as it is, "since gradients are small" (paper 003, Algorithm 1)."""

    def exact(self, sample: Sample) -> Exact:
        found = per_row(self, sample)
        return weighted(torch.ones_like(norms(found)), found)


class NoNumbersPass(GradientMean):
    """A row that is no number is clipped to no number: NaN < C is false."""

    def exact(self, sample: Sample) -> Exact:
        total = super().exact(sample)
        assert isinstance(total, dict)
        bad = any(not bool(torch.isfinite(batch).all()) for batch, _ in sample.parts())
        object.__setattr__(self, "bad", bad)  # the door answers 0 for NaN: so it is put in after the noise
        return total

    def release(self, noisy: Any, expected: float) -> Gradient:
        answer = super().release(noisy, expected)
        return answer * float("nan") if self.bad else answer  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ audits


def by_canary(way: Way) -> list[Verdict]:
    """What an attacker proves who sees one noisy update: the costly audit, which sees noise and sums together."""
    return white_box(
        way.method,
        name=way.question.__name__,
        trials=600,
        among=[worlds()[1]],
        door=asked_as(way.question),
    )


PLAIN = Way(method=dp_sgd)
AROUND = Way(method=DOPE)
PRINTED = Way(method=partial(dope_sgd, public_batch=4, method=not_restored), question=OriginPerRow)


def gradient_mutant(name: str, wrong: str, right: Way, broken: Way) -> Mutant:
    return Mutant(name=name, wrong=wrong, right=right, broken=broken, audits=by_neighbours_and_noise)


def asks(question: type[GradientMean], of: Way = PLAIN) -> Way:
    return replace(of, question=question)


LONG = Way(method=partial(dp_sgd, clip=4.0), clip=4.0)
VIEWED = Way(method=partial(dp_sgd, views=VIEWS))
SCALED = Way(method=ADA)

MUTANTS = (
    gradient_mutant("M1", "the origin is added once per sampled row", AROUND, PRINTED),
    gradient_mutant("M2", "divided by the sampled number of rows", PLAIN, asks(OverTheBatch)),
    gradient_mutant("M4", "views are clipped one by one", VIEWED, asks(ViewsAsRows, VIEWED)),
    gradient_mutant("M5", "noise that is not in proportion to the clip norm", LONG, asks(ForgetsTheClip, LONG)),
    gradient_mutant("M6", "noise divided by the number of accumulated passes", PLAIN, asks(NoisePerPass)),
    gradient_mutant("M7", "noise divided by the batch twice", PLAIN, asks(NoiseOfTheMean)),
    gradient_mutant("M8", "the mean of a batch is clipped", PLAIN, asks(ClipsTheAggregate)),
    gradient_mutant("M9", "divided by A after the clip", SCALED, asks(DividesAfterTheClip, SCALED)),
    gradient_mutant("M10", "the whole clip norm for every layer", PLAIN, asks(ClipsLayerByLayer)),
    gradient_mutant("M21", "noise before the clip", PLAIN, asks(NoiseBeforeTheClip)),
    gradient_mutant("M22", "clip norms in half precision", PLAIN, asks(NormsInHalf)),
    gradient_mutant("M23", "no clip at all", PLAIN, asks(NotClipped)),
    gradient_mutant("M24", "rows that are no numbers pass", PLAIN, asks(NoNumbersPass)),
    *(
        Mutant(name=name, wrong=wrong, right=right, broken=broken, audits=by_canary, slow=True)
        for name, wrong, right, broken in (
            ("M1", "the origin is added once per sampled row", AROUND, PRINTED),
            ("M4", "views are clipped one by one", VIEWED, asks(ViewsAsRows, VIEWED)),
            ("M5", "noise that is not in proportion to the clip norm", LONG, asks(ForgetsTheClip, LONG)),
            ("M7", "noise divided by the batch twice", PLAIN, asks(NoiseOfTheMean)),
            ("M8", "the mean of a batch is clipped", PLAIN, asks(ClipsTheAggregate)),
        )
    ),
)
