"""What one privacy unit adds to the gradient of one parameter, in the cheapest exact form, and its norm.

Shapes: U units, R rows folded into a unit (records x views x positions), O outputs, I inputs, P entries of a parameter.

Two forms. `Dense` holds the U vectors themselves; its norm is the norm of the very vector that is summed. `Outer` and
`Convolution` hold factors whose contraction over R is the gradient, so U x P numbers are never formed ("ghost" norms,
and a weighted sum straight from the factors). A ghost norm is not the norm of a stored vector, so it is *inflated* by
a bound on its own rounding error: the clip factor can only come out too small, never too large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The longest run of numbers that is summed in working precision before float64 takes over.
_BLOCK = 256
PRODUCT_BLOCK = 128

SMALL = 1 << 16  # entries of a parameter below which a GPU bundles its rows with others

# Factors may come in this, where a product of two is exact in float32; whatever is added up is at least float32. Not in
# float16, whose range is too small: products and origins would vanish in it.
HALF = frozenset({torch.bfloat16})


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The precision in which products of numbers of this precision are added up."""
    return torch.float32 if dtype in HALF else dtype


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """(U, M, R) x (U, R, N), added up and put out in `summed_in` their precision."""
    if a.dtype not in HALF:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def rounding(dtype: torch.dtype, length: int, *, product: bool = False) -> float:
    """Relative error bound of a sum of `length` products, in units of the sum of their absolute values.

    Sums are cut into blocks. Within a block a reduction has >= 8 interleaved lanes, so no chain of additions is longer
    than block/8, and 8 more join the lanes; a matrix product adds up each entry in one chain.
    `tests/gradients/test_safety.py` derives both.
    """
    chain = min(length, PRODUCT_BLOCK + 8) if product else min(length, _BLOCK) / 8 + 8
    if dtype in HALF:  # products are exact in float32, but tensor cores cut off where others round: a whole unit
        return chain * torch.finfo(torch.float32).eps
    return chain * torch.finfo(dtype).eps / 2


def underflow(dtype: torch.dtype, length: int) -> float:
    """Absolute error of a sum of `length` products whose terms may be too small for the format, or be flushed to 0."""
    return length * torch.finfo(torch.float32 if dtype != torch.float64 else dtype).tiny


def gram(x: Tensor) -> Tensor:
    """(U, R, K) -> (U, R, R) inner products, as float64: blocks of K in working precision, then float64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in torch.split(x, PRODUCT_BLOCK, dim=2):
        total = total + batched_product(part, part.transpose(1, 2)).double()
    return total


def factored_norms(gram_a: Tensor, gram_b: Tensor, error: float, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms of sum_r a_r (x) b_r from Gram matrices, plus a bound on their error; sum |a_r|, sum |a_r||b_r|.

    An entry of a Gram matrix is off by at most `error` times the product of the two lengths, plus `least`.
    """
    a, b = (torch.diagonal(g, dim1=1, dim2=2).clamp_min(0).add(least).sqrt() for g in (gram_a, gram_b))
    off_a, off_b = (error * x.unsqueeze(1) * x.unsqueeze(2) + least for x in (a, b))
    doubt = off_a * gram_b.abs() + off_b * gram_a.abs() + off_a * off_b
    return (gram_a * gram_b + doubt).sum((1, 2)), a.sum(1), (a * b).sum(1)


def not_negative(squared: Tensor) -> Tensor:
    """Squared norms that rounding made negative are 0; what has overflowed is infinite, also where it is -infinite."""
    return torch.where(squared.isfinite(), squared.clamp_min(0), torch.inf)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared L2 norm of every row of a (U, P) tensor, never too small: blocks in working precision, then float64."""
    U, P = rows.shape
    rows = rows.to(summed_in(rows.dtype))
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.dtype == torch.float64:
        return rows.square().sum(1) * (1 + 2 * rounding(rows.dtype, P)) + underflow(rows.dtype, P)
    whole = P - P % _BLOCK
    total = torch.zeros(U, dtype=torch.float64, device=rows.device)
    for part in (rows[:, :whole].reshape(U, -1, _BLOCK), rows[:, whole:].reshape(U, 1, P - whole)):
        if part.numel():
            total += torch.linalg.vector_norm(part, dim=2, dtype=torch.float32).double().square().sum(1)
    return total * (1 + 2 * rounding(rows.dtype, P)) + underflow(rows.dtype, P)


@dataclass(frozen=True)
class Shift:
    """The affine part of a clip for one parameter: g -> scale * (g - origin)."""

    origin: Tensor | None
    scale: Tensor | None

    def applied(self, gradients: Tensor, *, own: bool) -> Tensor:
        """Instantiated gradients, shifted; where they are if they are the caller's `own`.

        A copy would cost as much as instantiating them did: a CPU is slow to find new memory.
        """
        for change, by in ((torch.sub, self.origin), (torch.mul, self.scale)):
            if by is not None:
                as_wide = torch.result_type(gradients, by) == gradients.dtype
                gradients, own = change(gradients, by, out=gradients if own and as_wide else None), True
        return gradients


class Contribution(ABC):
    """Per-unit gradients of one parameter, after `prepare` of the vectors scale * (g - origin)."""

    @abstractmethod
    def prepare(self, shift: Shift) -> Tensor:
        """Fix the shift; return an upper bound (U,) float64 on the squared norms of the shifted vectors."""

    skips_zeros = False
    """Whether units with factor 0 are not even read; the others must `drop` units that are not finite."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The lowest precision in it."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        """sum_i factors_i * scale * (g_i - origin), in the parameter's shape.

        At most `at_once` units are added up in less than float64.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """The per-unit gradients themselves, (U, *shape); call before `prepare`."""

    def instantiated(self) -> Contribution:
        """The same with every gradient written down."""
        return Dense(self.dense(), own=True)

    @staticmethod
    def joined(parts: Sequence[Any]) -> Contribution:
        """The sum of several uses of one parameter, all of this kind."""
        total = parts[0].dense()
        for part in parts[1:]:
            total = total + part.dense()
        return Dense(total, own=len(parts) > 1)

    def has_ghost(self, shift: Shift) -> bool:
        """Whether norms can be had from factors under this shift."""
        return False

    def ghost_pays(self) -> bool:
        """Whether norms from factors cost less than instantiating."""
        return False

    @abstractmethod
    def drop(self, keep: Tensor) -> None:
        """Erase the units where `keep` is False: 0 * NaN is NaN, so a zero factor alone would not silence them."""


def shifted_sum(total: Tensor, factors: Tensor, shift: Shift) -> Tensor:
    """scale * (total - (sum of factors) * origin), from the weighted sum of unshifted gradients."""
    if shift.origin is not None:
        # A number in float64 times a tensor in float32 would be rounded to float32, however many units it counts.
        total = total - factors.to(total.dtype).sum() * shift.origin.to(total.dtype)
    return total if shift.scale is None else shift.scale * total


def in_parts(one: Callable[[slice], Tensor], units: int, at_once: int) -> Tensor:
    """A sum over units, in working precision if they are few, else part by part in float64."""
    if units <= at_once:
        return one(slice(None))
    total = one(slice(0, at_once)).double()
    for start in range(at_once, units, at_once):
        total += one(slice(start, start + at_once))
    return total


class Dense(Contribution):
    """Instantiated gradients, (U, *shape), which nobody else holds if they are its `own`."""

    def __init__(self, gradients: Tensor, *, own: bool = False) -> None:
        self.gradients, self._own = gradients, own

    @property
    def dtype(self) -> torch.dtype:
        return self.gradients.dtype

    def dense(self) -> Tensor:
        return self.gradients

    def instantiated(self) -> Contribution:
        return self

    def prepare(self, shift: Shift) -> Tensor:
        # Shift first, square after: expanding |g|^2 - 2<g,p> + |p|^2 would cancel exactly where an origin is good.
        self.gradients = shift.applied(self.gradients, own=self._own)
        rows = self.gradients.reshape(len(self.gradients), -1)
        return squared_norms(rows)

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        flat = self.gradients.reshape(len(self.gradients), -1)
        c = factors.to(flat.dtype)
        return in_parts(lambda part: c[part] @ flat[part], len(flat), at_once).reshape(self.gradients.shape[1:])

    def drop(self, keep: Tensor) -> None:
        mask = keep.reshape(-1, *[1] * (self.gradients.ndim - 1))
        self.gradients = self.gradients.masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class Ghost:
    """What is known of U gradients that were never written down: g = sum over R of a_r (x) b_r."""

    squared: Tensor
    """An upper bound on |g|^2."""
    a: Tensor
    """An upper bound on sum |a_r|."""
    ab: Tensor
    """An upper bound on sum |a_r||b_r|."""

    def __add__(self, other: Ghost) -> Ghost:
        """Of the sum of two gradients, but for twice their inner product."""
        return Ghost(self.squared + other.squared, self.a + other.a, self.ab + other.ab)

    def as_summed(self, error: float) -> Ghost:
        """With the rounding of a sum of a unit's R products, perhaps in one chain, relative to their lengths."""
        return Ghost((self.squared.sqrt() + error * self.ab).square(), self.a, self.ab)

    def around(
        self, origin: Tensor, inner: Tensor, sizes: tuple[int, int, int], *, error: float, size: Tensor | None = None
    ) -> Tensor:
        """|g - p|^2 = |g|^2 - 2<g, p> + |p|^2, plus a bound on what rounding can hide where the terms cancel.

        `inner` is off by `error` times the two lengths. `size` is `ab` after a scale, and `origin` is scaled too.
        """
        R, outputs, inputs = sizes
        length = origin.double().norm()
        doubt = 2 * error * (self.ab if size is None else size) * length
        vanished = inputs * outputs**0.5 * self.a + R * outputs + (outputs * inputs) ** 0.5 * self.ab
        doubt = doubt + 16 * underflow(origin.dtype, 1) * vanished  # a term may be flushed at each of a few additions
        result: Tensor = not_negative(self.squared - 2 * inner + length.square()) + doubt
        return result


def combined(parts: Sequence[Contribution], shift: Shift, *, ghost: bool | None = None) -> Contribution:
    """One contribution for all uses of a parameter: uses are summed *before* the norm is taken.

    `ghost` forces (True) or forbids (False) factored norms where they exist; None chooses by cost.
    """
    whole = parts[0]
    if len(parts) > 1:
        same = all(type(part) is type(whole) for part in parts)
        whole = whole.joined(parts) if same else Contribution.joined(parts)
    factored = whole.has_ghost(shift) and (whole.ghost_pays() if ghost is None else ghost)
    return whole if factored else whole.instantiated()
