"""What one privacy unit adds to the gradient of one parameter, in the cheapest exact form, and its norm.

Shapes: U units, R rows folded into a unit (records x views x positions), O outputs, I inputs, P entries of a parameter.

Two forms. `Dense` holds the U vectors themselves; its norm is the norm of the very vector that is summed. `Outer` and
`Convolution` hold factors whose contraction over R is the gradient, so U x P numbers are never formed ("ghost" norms,
and a weighted sum straight from the factors). A ghost norm is not the norm of a stored vector, so it is *inflated* by
a bound on its own rounding error: the clip factor can only come out too small, never too large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The longest run of numbers that is summed in working precision before float64 takes over.
_BLOCK = 256
PRODUCT_BLOCK = 128


def rounding(dtype: torch.dtype, length: int, *, product: bool = False) -> float:
    """Relative error bound of a sum of `length` products, in units of the sum of their absolute values.

    Sums are cut into blocks. Within a block a reduction has >= 8 interleaved lanes, so no chain of additions is longer
    than block/8, and 8 more join the lanes; a matrix product adds up each entry in one chain.
    `tests/gradients/test_safety.py` derives both.
    """
    accumulate = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    chain = min(length, PRODUCT_BLOCK + 8) if product else min(length, _BLOCK) / 8 + 8
    return chain * torch.finfo(accumulate).eps / 2


def underflow(dtype: torch.dtype, length: int) -> float:
    """Absolute error of a sum of `length` products whose terms may be too small for the format, or be flushed to 0."""
    return length * torch.finfo(torch.float32 if dtype != torch.float64 else dtype).tiny


def gram(x: Tensor) -> Tensor:
    """(U, R, K) -> (U, R, R) inner products, as float64: blocks of K in working precision, then float64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in torch.split(x, PRODUCT_BLOCK, dim=2):
        total = total + torch.bmm(part, part.transpose(1, 2)).double()
    return total


def factored_norms(gram_a: Tensor, gram_b: Tensor, error: float, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms of sum_r a_r (x) b_r from Gram matrices, plus a bound on their error; sum |a_r|, sum |a_r||b_r|.

    An entry of a Gram matrix is off by at most `error` times the product of the two lengths, plus `least`.
    """
    a, b = (torch.diagonal(g, dim1=1, dim2=2).clamp_min(0).add(least).sqrt() for g in (gram_a, gram_b))
    off_a, off_b = (error * x.unsqueeze(1) * x.unsqueeze(2) + least for x in (a, b))
    doubt = off_a * gram_b.abs() + off_b * gram_a.abs() + off_a * off_b
    return (gram_a * gram_b + doubt).sum((1, 2)), a.sum(1), (a * b).sum(1)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared L2 norm of every row of a (U, P) tensor, never too small: blocks in working precision, then float64."""
    U, P = rows.shape
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


class Contribution(ABC):
    """Per-unit gradients of one parameter, after `prepare` of the vectors scale * (g - origin)."""

    @abstractmethod
    def prepare(self, shift: Shift) -> Tensor:
        """Fix the shift; return an upper bound (U,) float64 on the squared norms of the shifted vectors."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The lowest precision in it."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """sum_i factors_i * scale * (g_i - origin), in the parameter's shape. Units with factor 0 must add nothing."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The per-unit gradients themselves, (U, *shape); call before `prepare`."""

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
        total = total - factors.sum() * shift.origin
    return total if shift.scale is None else shift.scale * total


class Dense(Contribution):
    """Instantiated gradients, (U, *shape)."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    @property
    def dtype(self) -> torch.dtype:
        return self.gradients.dtype

    def dense(self) -> Tensor:
        return self.gradients

    def prepare(self, shift: Shift) -> Tensor:
        # Shift first, square after: expanding |g|^2 - 2<g,p> + |p|^2 would cancel exactly where an origin is good.
        if shift.origin is not None:
            self.gradients = self.gradients - shift.origin
        if shift.scale is not None:
            self.gradients = self.gradients * shift.scale
        rows = self.gradients.reshape(len(self.gradients), -1)
        return squared_norms(rows)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        flat = self.gradients.reshape(len(self.gradients), -1)
        return (factors.to(flat.dtype) @ flat).reshape(self.gradients.shape[1:])

    def drop(self, keep: Tensor) -> None:
        mask = keep.reshape(-1, *[1] * (self.gradients.ndim - 1))
        self.gradients = torch.where(mask, self.gradients, torch.zeros((), dtype=self.gradients.dtype))


def outer_ghost_pays(R: int, outputs: int, inputs: int) -> bool:
    """Gram matrices cost R^2 (O + I); instantiating costs about as much as the weighted sum, plus passes over O * I."""
    return R == 1 or R * (outputs + inputs) <= 4 * outputs * inputs


def around_origin(
    squared: Tensor,
    inner: Tensor | None,
    origin: Tensor | None,
    a: Tensor,
    ab: Tensor,
    size: Tensor,
    sizes: tuple[int, int, int],
) -> Tensor:
    """|g - p|^2 = |g|^2 - 2<g, p> + |p|^2, plus a bound on what rounding can hide where the terms cancel.

    `a` and `ab` bound sum |a_r| and sum |a_r||b_r| over the R factors of g; `size` is the latter after the scale, and
    `origin` is scaled too. `inner` was computed in chains of at most a block.
    """
    if origin is None or inner is None:
        return squared
    R, outputs, inputs = sizes
    length = origin.double().norm()
    doubt = 2 * rounding(origin.dtype, inputs + 8, product=True) * size * length
    vanished = inputs * outputs**0.5 * a + R * outputs + (outputs * inputs) ** 0.5 * ab
    doubt = doubt + 2 * underflow(origin.dtype, 1) * vanished
    result: Tensor = (squared - 2 * inner + length.square()).clamp_min(0) + doubt
    return result


class Outer(Contribution):
    """Gradients sum_r a_r (x) b_r of a matrix (O, I). `a` is (U, R, O), or (U, R) integer rows of one-hot vectors."""

    def __init__(self, a: Tensor, b: Tensor, outputs: int) -> None:
        self.a, self.b, self.outputs = a, b, outputs
        self._shift = Shift(None, None)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype if self.one_hot or self.a.dtype == self.b.dtype else torch.float16

    @property
    def one_hot(self) -> bool:
        return not self.a.is_floating_point()

    @staticmethod
    def joined(parts: Sequence[Outer]) -> Outer:
        """The sum of several uses of one parameter: their factors side by side. One-hot rows are written out."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if all(p.one_hot for p in parts):
            a = torch.cat([p.a for p in parts], 1)
        else:
            a = torch.cat([p.written_out() for p in parts], 1)
        return Outer(a, torch.cat([p.b for p in parts], 1), first.outputs)

    def written_out(self) -> Tensor:
        return F.one_hot(self.a, self.outputs).to(self.b.dtype) if self.one_hot else self.a

    def has_ghost(self, shift: Shift) -> bool:
        return shift.scale is None or self.b.shape[1] == 1  # an elementwise scale does not factorise over R > 1

    def ghost_pays(self) -> bool:
        R, inputs = self.b.shape[1:]
        return self.one_hot or outer_ghost_pays(R, self.outputs, inputs)

    def dense(self) -> Tensor:
        if self.one_hot:
            U, R, inputs = self.b.shape
            out = self.b.new_zeros(U, self.outputs, inputs)
            return out.scatter_add_(1, self.a.unsqueeze(2).expand(U, R, inputs), self.b)
        return torch.bmm(self.a.transpose(1, 2), self.b)

    def prepare(self, shift: Shift) -> Tensor:
        self._shift = shift
        if self.b.shape[1] == 1:
            return self._prepare_single()
        longest, dtype = max(self.outputs, self.b.shape[2]), self.b.dtype
        gram_a = (self.a.unsqueeze(1) == self.a.unsqueeze(2)).double() if self.one_hot else gram(self.a)
        error, least = rounding(dtype, longest, product=True), underflow(dtype, longest)
        squared, a, ab = factored_norms(gram_a, gram(self.b), error, least)
        inner = None if shift.origin is None else self._inner(shift.origin)
        return around_origin(squared, inner, shift.origin, a, ab, ab, (self.b.shape[1], self.outputs, self.b.shape[2]))

    def _prepare_single(self) -> Tensor:
        """R = 1: |ab'| = |a||b|, and |s * (ab' - p)|^2 = (a^2)' s^2 (b^2) - 2 a'(s^2 p) b + |s p|^2."""
        b = self.b[:, 0]
        b_squared = squared_norms(b)
        a_squared = torch.ones_like(b_squared) if self.one_hot else squared_norms(self.a[:, 0])
        plain = a_squared * b_squared
        squared = plain if self._shift.scale is None else self._scaled_single(self._shift.scale)
        origin, scale = self._shift.origin, self._shift.scale
        inner = None
        if origin is not None:
            inner = self._inner(origin if scale is None else scale * scale * origin)
            origin = origin if scale is None else scale * origin
        sizes = (1, self.outputs, b.shape[1])
        return around_origin(squared, inner, origin, a_squared.sqrt(), plain.sqrt(), squared.sqrt(), sizes)

    def _scaled_single(self, scale: Tensor) -> Tensor:
        """(a^2)' s^2 (b^2), each factor brought to at most 1 first so that no square overflows or vanishes unseen."""
        b = self.b[:, 0]
        most_s, most_b = scale.abs().amax().clamp_min(1e-30), b.abs().amax(1).clamp_min(1e-30)
        products = (b / most_b.unsqueeze(1)).square() @ (scale / most_s).square().T
        if self.one_hot:
            most_a = torch.ones_like(most_b)
            squared = products.gather(1, self.a).double().sum(1)
        else:
            a = self.a[:, 0]
            most_a = a.abs().amax(1).clamp_min(1e-30)
            squared = (products * (a / most_a.unsqueeze(1)).square()).double().sum(1)
        entries = self.outputs * b.shape[1]
        # All terms are positive, so the relative error is that of the longest chain of additions.
        squared = squared * (1 + (b.shape[1] + 8) * torch.finfo(b.dtype).eps) + underflow(b.dtype, 4 * entries)
        return squared * (most_a.double() * most_b.double() * most_s.double()).square()

    def _inner(self, matrix: Tensor) -> Tensor:
        """<g_i, matrix> for every unit."""
        if self.one_hot:
            return (matrix[self.a] * self.b).double().sum((1, 2))
        total = torch.zeros((), dtype=torch.float64, device=self.b.device)
        for b, columns in zip(
            torch.split(self.b, PRODUCT_BLOCK, 2), torch.split(matrix, PRODUCT_BLOCK, 1), strict=True
        ):
            total = total + ((b @ columns.T) * self.a).double().sum((1, 2))
        return total

    def weighted_sum(self, factors: Tensor) -> Tensor:
        c = factors.to(self.b.dtype)[:, None, None]
        inputs = self.b.shape[2]
        if self.one_hot:
            total = self.b.new_zeros(self.outputs, inputs)
            total.index_add_(0, self.a.reshape(-1), (c * self.b).reshape(-1, inputs))
        else:
            a, b = (self.a * c, self.b) if self.outputs < inputs else (self.a, self.b * c)  # scale the smaller one
            total = a.reshape(-1, self.outputs).T @ b.reshape(-1, inputs)
        return shifted_sum(total, factors.to(total.dtype), self._shift)

    def drop(self, keep: Tensor) -> None:
        mask = keep[:, None, None]
        self.b = torch.where(mask, self.b, torch.zeros((), dtype=self.b.dtype))
        if not self.one_hot:
            self.a = torch.where(mask, self.a, torch.zeros((), dtype=self.a.dtype))


def combined(parts: Sequence[Contribution], shift: Shift, *, ghost: bool | None = None) -> Contribution:
    """One contribution for all uses of a parameter: uses are summed *before* the norm is taken.

    `ghost` forces (True) or forbids (False) factored norms where they exist; None chooses by cost.
    """
    whole = parts[0]
    outer = [p for p in parts if isinstance(p, Outer)]
    if len(outer) == len(parts):
        whole = Outer.joined(outer)
    elif len(parts) > 1:
        total = whole.dense()
        for part in parts[1:]:
            total = total + part.dense()
        whole = Dense(total)
    if isinstance(whole, Dense):
        return whole
    factored = whole.has_ghost(shift) and (whole.ghost_pays() if ghost is None else ghost)
    return whole if factored else Dense(whole.dense())
