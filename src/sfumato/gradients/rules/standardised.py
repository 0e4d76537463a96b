"""Weight-standardised convolutions: y = conv(x, gain * u), u = (w - mean w) / sqrt(|w - mean w|^2 + eps) row by row.

The gradient G of the effective weight is instantiated like any convolution's; `Rows` maps it back to w where it is
read, and the gain gets <G, u>. With K passes at K weights, the passes are added up inside one contraction (see
`kernels/scale.py`), so that no gradient of one example and one pass is ever written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sfumato.gradients.contributions import HALF, Contribution, Dense, Shift, summed_in
from sfumato.gradients.rows import Order, Rows, Standardisation
from sfumato.gradients.rules.call import Call, autocast
from sfumato.gradients.rules.convolution import Convolution, apply, channels_last, padded
from sfumato.nn.functional import autocast_dtype, directions, effective_weight, standardised_conv2d


class Pass(Contribution):
    """One of several passes over a weight: a convolution with dy already scaled, and what to take off along u."""

    def __init__(self, use: Convolution, along: Tensor, directions: Tensor) -> None:
        self.use, self.along, self.directions = use, along, directions

    @property
    def dtype(self) -> torch.dtype:
        return self.use.dtype

    def prepare(self, shift: Shift) -> Tensor:
        raise AssertionError("passes are joined first")

    def weighted_sum(self, factors: Tensor, at_once: int) -> Tensor:
        raise AssertionError("passes are joined first")

    def drop(self, keep: Tensor) -> None:
        raise AssertionError("passes are joined first")

    def dense(self) -> Tensor:
        return Pass.joined([self]).dense()

    def instantiated(self) -> Contribution:
        return Pass.joined([self])

    @staticmethod
    def joined(parts: Sequence[Pass]) -> Rows:
        use = parts[0].use
        rows = _all_rows([p.use for p in parts])
        by_output = rows.transpose(0, 1)
        along = torch.stack([p.along for p in parts], 2).transpose(0, 1)  # (O, U, K)
        directions = torch.stack([p.directions for p in parts], 1)  # (O, K, F)
        with tf32(use.dtype in HALF):  # what is left is what counts: it is normed and summed as it is stored
            torch.baddbmm(by_output, along, directions, alpha=-1.0, out=by_output)
        centring = Standardisation(torch.zeros_like(directions[:, 0]), torch.ones_like(directions[:, 0, 0]))
        return Rows(rows, use.order, centring)


def _all_rows(uses: Sequence[Convolution]) -> Tensor:
    """The sum over uses, those of one shape in one contraction each."""
    groups: dict[Any, list[Convolution]] = {}
    for use in uses:
        groups.setdefault((use.geometry, use.x.shape, use.x.dtype, use.dy.dtype), []).append(use)
    total: Tensor | None = None
    for group in groups.values():
        whole = Convolution.joined(group) if len(group) > 1 else group[0]
        assert isinstance(whole, Convolution)
        total = whole.rows() if total is None else total.add_(whole.rows())
    assert total is not None
    return total


def standardised_convolution(call: Call) -> Any:
    def bound(
        input: Tensor,
        weight: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        eps: float,
    ) -> Any:
        layout, tape = call.layout_of(input), call.tape
        if layout is None or layout.dim != 0 or input.ndim != 4 or input.shape[0] != tape.rows:
            return NotImplemented
        x, geometry = padded(input, tuple(weight.shape[2:]), stride, padding, dilation, groups)
        u, inverse = directions(weight.detach(), eps)
        gains = torch.ones_like(inverse) if gain is None else gain.detach()
        # The very numbers that the layer itself computes with: rounded otherwise, they would flip ReLUs.
        low = None if x.dtype == torch.float64 else autocast_dtype(x)
        g = None if gain is None else gain.detach()
        effective = effective_weight(weight.detach(), g, eps, low or weight.dtype, last=False)
        b = None if bias is None else bias.detach()
        x, w, b = autocast(x, effective, b)
        x, w = channels_last(x, w)

        def report(x: Tensor, dy: Tensor, y: Tensor | None) -> None:
            use = Convolution(x, dy, w, geometry, tape.units)
            if bias is not None and call.is_tracked(bias):
                tape.add(bias, Dense(tape.per_unit(dy.sum((2, 3), dtype=summed_in(dy.dtype)))))
            if y is not None and use.by_kernel:
                alongside = _report_pass(use, y, dy)
            else:
                alongside = _report_rows(use)
            if gain is not None and call.is_tracked(gain):
                tape.add(gain, Dense(alongside))

        def _report_rows(use: Convolution) -> Tensor:
            """Instantiate; returns the gradient of the gain."""
            order = Order(tuple(weight.shape), channels_last=use.in_rows())
            rows = use.rows() if use.in_rows() else use.dense().flatten(2)
            standardisation = Standardisation(order.to_rows(u), inverse * gains)
            whole = Rows(rows, order, standardisation, made_of=use.dtype)
            if call.is_tracked(weight):
                tape.add(weight, whole)
            return whole.alongside

        def _report_pass(use: Convolution, y: Tensor, dy: Tensor) -> Tensor:
            from sfumato.kernels.scale import scaled_and_reduced

            use.dy, reduced = scaled_and_reduced(y if b is None else y - b[:, None, None], dy, inverse * gains)
            reduced = tape.per_unit(reduced)  # gain * <G, u>
            if call.is_tracked(weight):
                tape.add(weight, Pass(use, reduced * inverse, use.order.to_rows(u)))
            # A gain of exactly zero hides <G, u>: it gets no gradient from this pass.
            safe = torch.where(gains == 0, torch.inf, gains)
            return reduced / safe

        return apply(tape, x, w, b, geometry, report, keep_output=tape.several_passes)

    return bound(*call.args, **call.kwargs)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices by tensor cores, where the factors were 16-bit already."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


TABLE = {standardised_conv2d: standardised_convolution}
