"""Matrix products with a parameter: `F.linear`, `matmul`, `addmm` (nn.Linear, projections, tied heads).

y_r = W x_r + b, so the gradient of W is sum_r dy_r (x) x_r, kept as its two factors, and that of b is sum_r dy_r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.gradients.contributions import Dense, summed_in
from sfumato.gradients.rules.call import Call, autocast


class _Linear(torch.autograd.Function):
    """`F.linear` that reports (x, dy) and returns only dx."""

    @staticmethod
    def forward(
        ctx: Any, tap: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, report: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.report = report
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        ctx.report(x.detach(), dy)
        return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None, None


def _apply(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Any:
    """`weight` is (O, I), or (I, O) if `transposed`."""
    layout = call.layout_of(x)
    if layout is None or weight.ndim != 2 or layout.dim == x.ndim - 1 or (bias is not None and bias.ndim != 1):
        return NotImplemented
    tape = call.tape

    def report(x: Tensor, dy: Tensor) -> None:
        outputs = tape.vectors(dy, layout)
        if call.is_tracked(weight):
            inputs = tape.vectors(x, layout)
            a, b = (inputs, outputs) if transposed else (outputs, inputs)
            tape.add_outer(weight, a, b)
        if bias is not None and call.is_tracked(bias):
            tape.add(bias, Dense(outputs.sum(1, dtype=summed_in(outputs.dtype))))

    x, matrix, b = autocast(x, weight.detach(), None if bias is None else bias.detach())
    matrix = matrix.T if transposed else matrix
    return _Linear.apply(tape.tap, x, matrix, b, report)  # type: ignore[no-untyped-call]


def linear(call: Call) -> Any:
    def bound(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return _apply(call, input, weight, bias, transposed=False)

    return bound(*call.args, **call.kwargs)


def matmul(call: Call) -> Any:
    x, weight = call.args
    if call.is_tracked(x) or x.ndim < 2:
        return NotImplemented
    return _apply(call, x, weight, None, transposed=True)


def addmm(call: Call) -> Any:
    if call.kwargs or len(call.args) != 3:
        return NotImplemented
    bias, x, weight = call.args
    if call.is_tracked(x) or not call.is_tracked(weight) or call.layout_of(bias) is not None:
        return NotImplemented
    return _apply(call, x, weight, bias, transposed=True)


TABLE = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
}
