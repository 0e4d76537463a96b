"""Gradients that stay factors: sums of outer products, as linear maps and tables make them, and tied weights.

Shapes as in `contributions.py`: U units, R rows folded into a unit, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.clip import fading, in_range
from sfumato.gradients.contributions import (
    HALF,
    PRODUCT_BLOCK,
    SMALL,
    Contribution,
    Ghost,
    Shift,
    batched_product,
    factored_norms,
    gram,
    in_parts,
    not_negative,
    rounding,
    shifted_sum,
    squared_norms,
    summed_in,
    underflow,
)

_HALVES = 2  # 16-bit matrices that an origin is split into: what they leave is far below the rounding of its products

_BLOCKS = 16  # of a product, added up in working precision


def outer_ghost_pays(R: int, outputs: int, inputs: int) -> bool:
    """Gram matrices cost R^2 (O + I); instantiating costs about as much as the weighted sum, plus passes over O * I."""
    return R == 1 or R * (outputs + inputs) <= 4 * outputs * inputs


class Outer(Contribution):
    """Gradients sum_r a_r (x) b_r of a matrix (O, I). `a` is (U, R, O), or (U, R) integer rows of one-hot vectors."""

    def __init__(self, a: Tensor, b: Tensor, outputs: int, *, wide: Tensor | None = None) -> None:
        self.a, self.b, self.outputs = a, b, outputs
        self.wide = a if wide is None else wide
        """`a`, or a tensor that begins with it and has columns of zeros after it, as kernels like it."""
        self._shift = Shift(None, None)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype if self.one_hot or self.a.dtype == self.b.dtype else torch.float16

    @property
    def by_kernel(self) -> bool:
        """Whether the GPU's tensor cores take it: products of 16-bit factors."""
        return self.b.dtype in HALF and not self.one_hot and kernels.contracts(self.a, self.b)

    @property
    def skips_zeros(self) -> bool:  # type: ignore[override]
        return self.by_kernel

    @property
    def one_hot(self) -> bool:
        return not self.a.is_floating_point()

    @staticmethod
    def joined(parts: Sequence[Outer]) -> Contribution:
        """Factors side by side; reads of a table and products with it stay apart."""
        read, used = [p for p in parts if p.one_hot], [p for p in parts if not p.one_hot]
        if read and used:
            return Tied(_side_by_side(read), _side_by_side(used))
        return _side_by_side(parts)

    def has_ghost(self, shift: Shift) -> bool:
        return shift.scale is None or self.b.shape[1] == 1  # an elementwise scale does not factorise over R > 1

    def ghost_pays(self) -> bool:
        R, inputs = self.b.shape[1:]
        if self.outputs * inputs <= SMALL and kernels.contracts(self.b):
            return False  # next to other small ones, a GPU takes their rows all at once
        return self.one_hot or outer_ghost_pays(R, self.outputs, inputs)

    def dense(self) -> Tensor:
        if self.one_hot:
            U, R, inputs = self.b.shape
            out = torch.zeros(U, self.outputs, inputs, dtype=summed_in(self.b.dtype), device=self.b.device)
            return out.scatter_add_(1, self.a.unsqueeze(2).expand(U, R, inputs), self.b.to(out.dtype))
        return batched_product(self.a.transpose(1, 2), self.b)

    def prepare(self, shift: Shift) -> Tensor:
        self._shift = shift
        ghost, origin, scale = self.ghost(), shift.origin, shift.scale
        if scale is None:
            if origin is None:
                return ghost.squared
            return ghost.around(origin, self.inner(origin), self.sizes, error=self.inner_error)
        # R = 1: |s * (ab' - p)|^2 = (a^2)' s^2 (b^2) - 2 a'(s^2 p) b + |s p|^2.
        squared = torch.where(in_range(scale), self._scaled_single(scale), torch.inf)
        ghost = Ghost(squared, ghost.a, ghost.ab)
        if origin is None:
            return ghost.squared
        inner, size = self.inner(scale * scale * origin), ghost.squared.sqrt()
        return ghost.around(scale * origin, inner, self.sizes, error=self.inner_error, size=size)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.b.shape[1], self.outputs, self.b.shape[2]

    def ghost(self) -> Ghost:
        if self.b.shape[1] == 1:  # |ab'| = |a||b|
            b = squared_norms(self.b[:, 0])
            a = torch.ones_like(b) if self.one_hot else squared_norms(self.a[:, 0])
            return Ghost(a * b, a.sqrt(), (a * b).sqrt())
        if self.by_kernel:
            from sfumato.kernels import outer

            return Ghost(*outer.squared_norms(self.wide, self.b)).as_summed(self._sum_error)
        longest, dtype = max(self.outputs, self.b.shape[2]), self.b.dtype
        gram_a = (self.a.unsqueeze(1) == self.a.unsqueeze(2)).double() if self.one_hot else gram(self.a)
        error, least = rounding(dtype, longest, product=True), underflow(dtype, longest)
        ghost = Ghost(*factored_norms(gram_a, gram(self.b), error, least))
        return ghost.as_summed(self._sum_error)

    @property
    def _sum_error(self) -> float:
        return (self.b.shape[1] + 16) * torch.finfo(summed_in(self.b.dtype)).eps

    def _scaled_single(self, scale: Tensor) -> Tensor:
        """(a^2)' s^2 (b^2), each factor brought to at most 1 first so that no square overflows or vanishes unseen."""
        b = self.b[:, 0]
        b = b.to(scale.dtype)
        most_s, most_b = scale.abs().amax().clamp_min(1e-30), b.abs().amax(1).clamp_min(1e-30)
        products = (b / most_b.unsqueeze(1)).square() @ (scale / most_s).square().T
        if self.one_hot:
            most_a = torch.ones_like(most_b)
            squared = products.gather(1, self.a).double().sum(1)
        else:
            a = self.a[:, 0].to(scale.dtype)
            most_a = a.abs().amax(1).clamp_min(1e-30)
            squared = (products * (a / most_a.unsqueeze(1)).square()).double().sum(1)
        entries = self.outputs * b.shape[1]
        # All terms are positive, so the relative error is that of the longest chain of additions.
        squared = squared * (1 + (b.shape[1] + 8) * torch.finfo(b.dtype).eps) + underflow(b.dtype, 4 * entries)
        squared = squared * (most_a.double() * most_b.double() * most_s.double()).square()
        # Beside so long a factor the other one, times a clip factor, may be too small to be rounded well.
        return squared / (fading(most_a.double(), b.dtype) * fading(most_b.double(), b.dtype)).square()

    def inner(self, matrix: Tensor) -> Tensor:
        """<g_i, matrix> for every unit; off by `inner_error` times the two lengths."""
        if self.one_hot:
            return (matrix[self.a] * self.b).double().sum((1, 2))
        if self.by_kernel and self.b.shape[1] > 1:
            from sfumato.kernels import inner

            return inner.inner(self.wide, self.b, inner.halves(matrix, _HALVES))  # whose products are exact
        # Contracted over the longer side first, so that what is left for float64 is small.
        if self.outputs > self.b.shape[2]:
            return (_in_blocks(self.a, matrix) * self.b).double().sum((1, 2))
        return (_in_blocks(self.b, matrix.T) * self.a).double().sum((1, 2))

    @property
    def inner_error(self) -> float:
        if self.by_kernel and self.b.shape[1] > 1:
            from sfumato.kernels import inner

            return inner.inner_error(*self.sizes, _HALVES)
        precision = summed_in(self.b.dtype)
        # Some blocks, and the product with the other factor, are in working precision too.
        more = (_BLOCKS + 2) * torch.finfo(precision).eps / 2
        return rounding(precision, max(self.sizes[1:]) + 8, product=True) + more

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        if self.by_kernel:
            from sfumato.kernels import outer

            total = in_parts(
                lambda part: outer.weighted_sum(self.wide[part], self.b[part], factors[part]), len(factors), at_once
            )[: self.outputs]
        else:
            total = in_parts(lambda part: self._sum_of(part, factors), len(factors), at_once)
        return shifted_sum(total, factors, self._shift)

    def _sum_of(self, part: slice, factors: Tensor) -> Tensor:
        """Factors are never rounded to 16 bits: |c g| <= C would not survive that."""
        precision, inputs = summed_in(self.b.dtype), self.b.shape[2]
        c = factors[part].to(precision)[:, None, None]
        a, b = self.a[part], self.b[part].to(precision)
        if self.one_hot:
            total = torch.zeros(self.outputs, inputs, dtype=precision, device=b.device)
            return total.index_add_(0, a.reshape(-1), (c * b).reshape(-1, inputs))
        a = a.to(precision)
        a, b = (a * c, b) if self.outputs < inputs else (a, b * c)  # scale the smaller one
        return a.reshape(-1, self.outputs).T @ b.reshape(-1, inputs)

    def drop(self, keep: Tensor) -> None:
        mask = keep[:, None, None]
        self.b = self.b.masked_fill(~mask, 0.0)
        if not self.one_hot:
            self.a = self.a.masked_fill(~mask, 0.0)


def _in_blocks(rows: Tensor, matrix: Tensor) -> Tensor:
    """(U, R, K) x (K, N), with no chain of additions longer than a block, and some blocks."""
    U, R, K = rows.shape
    flat, whole = rows.reshape(U * R, K), None
    for first in range(0, K, _BLOCKS * PRODUCT_BLOCK):
        part = torch.zeros(U * R, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        for start in range(first, min(first + _BLOCKS * PRODUCT_BLOCK, K), PRODUCT_BLOCK):
            block = slice(start, start + PRODUCT_BLOCK)
            part.addmm_(flat[:, block].to(matrix.dtype), matrix[block])
        whole = part if whole is None else whole.double().add_(part)
    assert whole is not None  # K is the width of a layer
    return whole.view(U, R, -1)


def _side_by_side(parts: Sequence[Outer]) -> Outer:
    if len(parts) == 1:
        return parts[0]
    return Outer(torch.cat([p.a for p in parts], 1), torch.cat([p.b for p in parts], 1), parts[0].outputs)


class Tied(Contribution):
    """A table that is read (one-hot factors) and also multiplied with, as a language model's tied embedding.

    Both kinds of factors stay as they are: |g + h|^2 = |g|^2 + |h|^2 + 2<g, h>, where the inner product of a read of
    entry t and a product with factors a_r (x) b_r is a_r[t] <b_t, b_r>.
    """

    def __init__(self, read: Outer, used: Outer) -> None:
        self.read, self.used = read, used
        self._shift = Shift(None, None)

    @property
    def dtype(self) -> torch.dtype:
        return self.used.dtype

    def has_ghost(self, shift: Shift) -> bool:
        return shift.scale is None

    def ghost_pays(self) -> bool:
        R, outputs, inputs = self.used.sizes
        return outer_ghost_pays(R + self.read.sizes[0], outputs, inputs)

    def dense(self) -> Tensor:
        return self.read.dense() + self.used.dense()

    def prepare(self, shift: Shift) -> Tensor:
        self._shift = shift
        whole = self.read.ghost() + self.used.ghost()
        whole = Ghost(whole.squared + 2 * self._inner_product(), whole.a, whole.ab)
        if shift.origin is None:
            return not_negative(whole.squared)
        inner = self.read.inner(shift.origin) + self.used.inner(shift.origin)
        R, outputs, inputs = self.used.sizes
        error = max(self.read.inner_error, self.used.inner_error)
        return whole.around(shift.origin, inner, (R + self.read.sizes[0], outputs, inputs), error=error)

    def _inner_product(self) -> Tensor:
        """An upper bound on <g, h>."""
        b = self.used.b.to(self.read.b.dtype)
        total = torch.zeros((), dtype=torch.float64, device=b.device)
        for x, y in zip(torch.split(b, PRODUCT_BLOCK, 2), torch.split(self.read.b, PRODUCT_BLOCK, 2), strict=True):
            total = total + batched_product(x, y.transpose(1, 2)).double()
        tokens = self.read.a.unsqueeze(1).expand(-1, b.shape[1], -1)
        a = self.used.a.gather(2, tokens).double()
        lengths = b.double().norm(dim=2).unsqueeze(2) * self.read.b.double().norm(dim=2).unsqueeze(1)
        error = rounding(b.dtype, b.shape[2], product=True) * lengths + underflow(b.dtype, b.shape[2])
        bound: Tensor = (a * total + a.abs() * error).sum((1, 2))
        return bound

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        total = self.read.weighted_sum(factors, at_once) + self.used.weighted_sum(factors, at_once)
        return shifted_sum(total, factors, self._shift)

    def drop(self, keep: Tensor) -> None:
        for part in (self.read, self.used):
            if not part.skips_zeros:
                part.drop(keep)
