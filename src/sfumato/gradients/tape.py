"""Layouts and the tape: where examples lie in a tensor, and what each use of a parameter contributed.

A pass runs `rows` rows through the model at once. Rows of one privacy unit lie next to each other: with `units` units
there are fold = rows / units rows to a unit (its records x views), and rules sum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sfumato.errors import UnsupportedModel
from sfumato.gradients.contributions import Contribution, Dense, summed_in
from sfumato.gradients.factored import Outer


@dataclass(frozen=True)
class Layout:
    """The dimension of a tensor that counts rows, of size rows * m. `minor`: rows vary fastest, as in (time, rows).

    `known` are the m that the model was probed with. Another one may still divide by the number of rows, though what
    it counts is no longer rows x length.
    """

    dim: int
    minor: bool = False
    known: frozenset[int] = field(default=frozenset(), compare=False)

    def joined(self, other: Layout) -> Layout:
        return replace(self, known=self.known | other.known)

    def split(self, x: Tensor, rows: int) -> tuple[Tensor, int]:
        """Unflatten the dimension; return the tensor and the position of the rows' own dimension."""
        m, rest = divmod(x.shape[self.dim], rows)
        if rest or (self.known and m not in self.known):
            raise UnsupportedModel(
                "A dimension that holds the examples has another size per example than it was probed with: the model's "
                "shapes depend on the data; pad to one length, outside the model."
            )
        if self.minor:
            return torch.unflatten(x, self.dim, (m, rows)), self.dim + 1
        return torch.unflatten(x, self.dim, (rows, m)), self.dim

    def rows_first(self, x: Tensor, rows: int) -> Tensor:
        """(rows, ...) with the m-dimension kept among the rest."""
        x, dim = self.split(x, rows)
        return x.movedim(dim, 0)


def _closed(parameter: Tensor, contribution: Contribution) -> None:
    raise AssertionError("a tape collects nothing after its pass")


class Tape:
    """Collects contributions by parameter while one pass is differentiated."""

    def __init__(
        self, rows: int, units: int, add: Callable[[Tensor, Contribution], None], *, several_passes: bool = False
    ) -> None:
        self.rows, self.units, self._add = rows, units, add
        self.several_passes = several_passes
        """Whether this is one of several passes, at other parameters each, whose contributions will be joined."""
        # Makes every tapped operation part of the graph, also where its input needs no gradient (the first layer).
        self.tap = torch.zeros((), requires_grad=True)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._differentiating = False

    @property
    def fold(self) -> int:
        return self.rows // self.units

    def vectors(self, x: Tensor, layout: Layout, features: int = 1) -> Tensor:
        """(units, R, *features): all but the last `features` dimensions folded into R."""
        shape = x.shape[x.ndim - features :]
        return layout.rows_first(x, self.rows).reshape(self.units, -1, *shape)

    def per_unit(self, rows_first: Tensor) -> Tensor:
        """Sum (rows, ...) over the rows of each unit: (units, ...), in float32 or above."""
        dtype = summed_in(rows_first.dtype)
        if self.fold == 1:
            return rows_first.to(dtype)
        return rows_first.reshape(self.units, self.fold, *rows_first.shape[1:]).sum(1, dtype=dtype)

    def copies(self, parameter: Tensor) -> Tensor:
        """One copy of the parameter per row, as a stride-0 view; its gradient is recorded per unit."""
        rows = parameter.detach().expand(self.rows, *parameter.shape).requires_grad_()
        self._copies.append((parameter, rows))
        return rows

    def differentiate(self, losses: Tensor, weights: Tensor, leaves: Sequence[Tensor]) -> list[bool]:
        """Run the backward pass; say which of `leaves` autograd reached, which no tapped use may let it.

        Only what is asked for gets a gradient: a trainable tensor outside the objective (a temperature in the loss,
        say) must not find the exact private gradient in its `.grad`.
        """
        copies = [rows for _, rows in self._copies]
        self._differentiating = True
        gradients = torch.autograd.grad(losses, [self.tap, *copies, *leaves], weights, allow_unused=True)
        for (parameter, _), gradient in zip(self._copies, gradients[1 : 1 + len(copies)], strict=True):
            if gradient is not None:
                self.add_rows(parameter, gradient)
        return [gradient is not None for gradient in gradients[1 + len(copies) :]]

    def close(self) -> None:
        """Let go of everything."""
        self._copies.clear()
        self._add, self._differentiating = _closed, False

    def add(self, parameter: Tensor, contribution: Contribution) -> None:
        """What a use of a parameter contributes; gradients that the model takes itself, of its input say, do not."""
        if self._differentiating:
            self._add(parameter, contribution)
        elif torch.is_grad_enabled():  # rules give a gradient, not the gradient of a gradient
            raise UnsupportedModel(
                "The model differentiates a gradient that it has taken itself: leave create_graph off, and penalties "
                "on gradients out of the loss."
            )

    def add_rows(self, parameter: Tensor, rows_first: Tensor) -> None:
        self.add(parameter, Dense(self.per_unit(rows_first)))

    def add_outer(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Gradient sum_r a_r (x) b_r; (units, R, O) and (units, R, I)."""
        self.add(parameter, Outer(a, b, parameter.shape[0]))
