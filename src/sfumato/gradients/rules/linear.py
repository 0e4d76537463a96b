"""Matrix products with a parameter: `F.linear`, `matmul`, `addmm` (nn.Linear, projections, tied heads).

y_r = W x_r + b, so the gradient of W is sum_r dy_r (x) x_r, kept as its two factors, and that of b is sum_r dy_r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.contributions import HALF, Dense, summed_in
from sfumato.gradients.factored import Outer
from sfumato.gradients.rules.call import Call, autocast

_LARGE = 4096  # outputs from which a copy of the weight, with some more rows, costs nothing beside the product


class _Linear(torch.autograd.Function):
    """`F.linear` that reports (x, dy) and returns only dx.

    `weight` and `bias` may have rows of zeros at the end, beyond `outputs`: then dy is reported with columns of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        outputs: int,
        report: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.report = report
        y = F.linear(x, weight, bias)
        return y if outputs == len(weight) else y[..., :outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        missing = len(weight) - dy.shape[-1]
        dy = F.pad(dy, (0, missing)) if missing else dy
        ctx.report(x.detach(), dy)
        return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None, None, None


def _apply(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Any:
    """`weight` is (O, I), or (I, O) if `transposed`."""
    layout = call.layout_of(x)
    if layout is None or weight.ndim != 2 or layout.dim == x.ndim - 1 or (bias is not None and bias.ndim != 1):
        return NotImplemented
    tape = call.tape
    x, matrix, b = autocast(x, weight.detach(), None if bias is None else bias.detach())
    matrix = matrix.T if transposed else matrix
    width = len(matrix)

    def report(x: Tensor, dy: Tensor) -> None:
        wide = tape.vectors(dy, layout)
        outputs = wide[..., :width]
        if call.is_tracked(weight):
            inputs = tape.vectors(x, layout)
            if transposed:
                tape.add(weight, Outer(inputs, outputs, weight.shape[0]))
            else:
                tape.add(weight, Outer(outputs, inputs, width, wide=wide))
        if bias is not None and call.is_tracked(bias):
            tape.add(bias, Dense(outputs.sum(1, dtype=summed_in(outputs.dtype))))

    matrix, b = _aligned(matrix, b)
    return _Linear.apply(tape.tap, x, matrix, b, width, report)  # type: ignore[no-untyped-call]


def _aligned(matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """With rows of zeros up to a multiple of 64: a vocabulary of 50,257 keeps tensor cores from loading 16 bytes."""
    missing = -len(matrix) % 64
    if not missing or len(matrix) < _LARGE or matrix.dtype not in HALF or not kernels.contracts(matrix):
        return matrix, bias
    return F.pad(matrix, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


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
