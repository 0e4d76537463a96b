"""Instantiated gradients as the GPU writes them: rows in the kernel's own order, mapped where they are read.

A gradient of a parameter (O, ...) is O rows of F numbers. With weight standardisation, rows are gradients of the
*effective* weight; the map back is linear and works row by row, so it is applied inside the norm and once to the sum,
and mapped gradients are never written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.contributions import Contribution, Dense, Shift, shifted_sum, squared_norms


@dataclass(frozen=True)
class Order:
    """How a parameter's entries lie in a row: (O, I, *kernel) with the kernel before I, or as they are."""

    shape: tuple[int, ...]
    channels_last: bool

    def to_rows(self, parameter: Tensor) -> Tensor:
        """(O, F), from the parameter's shape."""
        moved = parameter.movedim(1, -1) if self.channels_last else parameter
        return moved.reshape(self.shape[0], -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The parameter's shape, from (..., O, F)."""
        if not self.channels_last:
            return rows.reshape(*rows.shape[:-2], *self.shape)
        outputs, inputs, *kernel = self.shape
        return rows.reshape(*rows.shape[:-2], outputs, *kernel, inputs).movedim(-1, rows.ndim - 1)


@dataclass(frozen=True)
class Standardisation:
    """The way back from gradients of gain * u, with u = (w - mean w) / sqrt(|w - mean w|^2 + eps), to those of w.

    g -> scales * (g - mean g - u <g, u>), row by row. With directions 0 and scales 1 it only centres.
    """

    directions: Tensor
    """u, (O, F), in the rows' order."""
    scales: Tensor
    """gain / sqrt(|w - mean w|^2 + eps), (O,)."""

    def mapped(self, rows: Tensor) -> Tensor:
        u, s = self.directions.to(rows.dtype), self.scales.to(rows.dtype).unsqueeze(-1)
        return s * (rows - rows.mean(-1, keepdim=True) - u * self.alongside(rows).unsqueeze(-1))

    def alongside(self, rows: Tensor) -> Tensor:
        """<g, u> of every row: the gradient of the gain."""
        products: Tensor = torch.linalg.vecdot(rows, self.directions.to(rows.dtype))
        return products


class Rows(Contribution):
    """(U, O, F) float32 rows in an order of their own, with the map that makes gradients of them."""

    def __init__(
        self,
        rows: Tensor,
        order: Order,
        standardisation: Standardisation | None = None,
        *,
        made_of: torch.dtype | None = None,
    ) -> None:
        self.rows, self.order, self.standardisation = rows, order, standardisation
        self.made_of = rows.dtype if made_of is None else made_of
        self._shift = Shift(None, None)
        self._alongside: Tensor | None = None
        # Decided once: `prepare` and `weighted_sum` must agree on who maps and shifts.
        self._by_kernel = kernels.contracts(rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def skips_zeros(self) -> bool:  # type: ignore[override]
        return self._by_kernel

    def instantiated(self) -> Contribution:
        return self

    def dense(self) -> Tensor:
        rows = self.rows if self.standardisation is None else self.standardisation.mapped(self.rows)
        return self.order.from_rows(rows)

    @property
    def alongside(self) -> Tensor:
        """(U, O): what the gain of standardised rows gets; a by-product of `prepare`, where that came first."""
        assert self.standardisation is not None
        return self.standardisation.alongside(self.rows) if self._alongside is None else self._alongside

    def prepare(self, shift: Shift) -> Tensor:
        self._shift = shift
        origin, scale = (None if t is None else self.order.to_rows(t) for t in (shift.origin, shift.scale))
        if self._by_kernel:
            from sfumato.kernels import rows as kernel

            s = self.standardisation
            pair = None if s is None else (s.directions, s.scales)
            squared, self._alongside = kernel.squared_norms(self.rows, origin=origin, scale=scale, standardised=pair)
            return squared
        if self.standardisation is not None:
            self._alongside = self.alongside
            self.rows = self.standardisation.mapped(self.rows)
        self.rows = Shift(origin, scale).applied(self.rows, own=True)
        return squared_norms(self.rows.flatten(1))

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        if not self._by_kernel:  # `prepare` has mapped and shifted them
            return self.order.from_rows(Dense(self.rows).weighted_sum(factors, at_once))
        from sfumato.kernels import rows as kernel

        total = kernel.weighted_sum(self.rows, factors)
        total = total if self.standardisation is None else self.standardisation.mapped(total)
        total = self.order.from_rows(total)
        return shifted_sum(total, factors, self._shift)

    def drop(self, keep: Tensor) -> None:
        if not self.skips_zeros:
            self.rows = self.rows.masked_fill(~keep[:, None, None], 0.0)


class Bundle:
    """Many small parameters side by side, so that a GPU is asked once for all their norms and once for their sums."""

    def __init__(self, gradients: Sequence[Tensor], shifts: Sequence[Shift]) -> None:
        self.sizes = [g[0].numel() for g in gradients]
        rows = torch.cat([g.reshape(len(g), -1) for g in gradients], 1)
        origins, scales = ([getattr(s, part) for s in shifts] for part in ("origin", "scale"))
        self._shift = Shift(_cat(origins), _cat(scales))
        self._rows = Rows(rows.unsqueeze(1), Order((1, rows.shape[1]), channels_last=False))
        self._sums: tuple[Tensor, Sequence[Tensor]] | None = None  # for which factors

    def prepare(self) -> Tensor:
        return self._rows.prepare(self._shift)

    def sum_of(self, place: int, factors: Tensor, at_once: int) -> Tensor:
        if self._sums is None or self._sums[0] is not factors:
            self._sums = factors, torch.split(self._rows.weighted_sum(factors, at_once)[0], self.sizes)
        return self._sums[1][place]


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([p.reshape(-1) for p in parts if p is not None]).unsqueeze(0)


class Bundled(Contribution):
    """One parameter of a bundle, whose norms are the bundle's."""

    skips_zeros = True

    def __init__(self, bundle: Bundle, place: int, gradients: Tensor) -> None:
        self._bundle, self._place = bundle, place
        self._shape, self._dtype = gradients.shape[1:], gradients.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def prepare(self, shift: Shift) -> Tensor:
        raise AssertionError("the bundle prepares")

    def dense(self) -> Tensor:
        raise AssertionError("the bundle holds the rows")

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        return self._bundle.sum_of(self._place, factors, at_once).reshape(self._shape)

    def drop(self, keep: Tensor) -> None:
        pass
