"""Table look-ups: the gradient of the table is sum_r onehot(token_r) (x) dy_r, kept as tokens and dy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedModel
from sfumato.gradients.rules.call import Call


class _Embedding(torch.autograd.Function):
    """`F.embedding` that reports dy."""

    @staticmethod
    def forward(ctx: Any, tap: Tensor, tokens: Tensor, table: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        ctx.report = report
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.report(grads[0])
        return None, None, None, None


def embedding(call: Call) -> Any:
    def bound(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        layout = call.layout_of(input)
        if max_norm is not None or scale_grad_by_freq:
            raise UnsupportedModel(
                "An embedding with max_norm or scale_grad_by_freq lets examples act on each other: leave them at "
                "their defaults."
            )
        if layout is None or not call.is_tracked(weight):
            return NotImplemented
        tape = call.tape
        padding = None if padding_idx is None else padding_idx % weight.shape[0]

        def report(dy: Tensor) -> None:
            vectors = tape.vectors(dy, layout)
            tokens = layout.rows_first(input, tape.rows).reshape(tape.units, -1)
            if padding is not None:
                vectors = vectors.masked_fill((tokens == padding).unsqueeze(2), 0)
            tape.add_outer(weight, tokens, vectors)

        return _Embedding.apply(tape.tap, input, weight.detach(), report)  # type: ignore[no-untyped-call]

    return bound(*call.args, **call.kwargs)


TABLE = {F.embedding: embedding}
