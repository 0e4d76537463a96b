"""The recurrence of an LSTM: all time steps of one layer in one direction, as one use of its recurrent weights.

With the pre-activations z_t = gates_t + W h_{t-1} + b, the gradient of W is sum_t dz_t (x) h_{t-1} and that of b is
sum_t dz_t, as those of a linear map over time: they stay factors, and nothing is reported step by step.

Shapes: T steps, N rows, H hidden units; gates are (T, N, 4H) in torch's order i, f, g, o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sfumato.gradients.contributions import Dense, summed_in
from sfumato.gradients.factored import Outer
from sfumato.gradients.rules.call import Call

States = tuple[Tensor, Tensor]  # (T, N, H) of all steps, (N, H) of the cell after the last


def lstm_recurrence(
    gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool = False
) -> States:
    """What happens to `gates` = W_ih x + b_ih; also without the dimension of rows, as under vmap."""
    if has_torch_function((gates, hidden, cell, weight, bias)):
        tensors = (gates, hidden, cell, weight, bias)
        found: States = handle_torch_function(lstm_recurrence, tensors, *tensors, backwards)
        return found
    states: list[Tensor] = []
    for gates_t in gates.flip(0) if backwards else gates:
        i, f, g, o = (gates_t + F.linear(hidden, weight, bias)).chunk(4, dim=-1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        states.append(hidden)
    return torch.stack(states[::-1] if backwards else states), cell


class _Recurrence(torch.autograd.Function):
    """The same that reports (h_{t-1}, dz_t) of all steps, and returns what flows back to gates and first states."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tensor,
        gates: Tensor,
        hidden: Tensor,
        cell: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        report: Callable[[Tensor, Tensor], None],
    ) -> States:
        T, N, H = len(gates), *hidden.shape
        with torch.autocast(gates.device.type, enabled=False):
            z = gates.clone() if bias is None else gates + bias
            h, c, bounded = hidden.new_empty(T + 1, N, H), cell.new_empty(T + 1, N, H), cell.new_empty(T, N, H)
            h[0], c[0] = hidden, cell
            by_gate = z.view(T, N, 4, H)
            for t in range(T):
                z[t].addmm_(h[t], weight.T)
                by_gate[t, :, :2].sigmoid_()
                by_gate[t, :, 2].tanh_()
                by_gate[t, :, 3].sigmoid_()
                i, f, g, o = by_gate[t].unbind(1)
                torch.mul(f, c[t], out=c[t + 1]).addcmul_(i, g)
                torch.tanh(c[t + 1], out=bounded[t])
                torch.mul(o, bounded[t], out=h[t + 1])
        ctx.save_for_backward(h, c, bounded, by_gate, weight)
        ctx.report = report
        # Of the results nothing else keeps hold: a view of `h` could be written to by the model.
        return h[1:].clone(), c[T].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, c, bounded, by_gate, weight = ctx.saved_tensors
        dh_all, dc = grads
        T, N, H = bounded.shape
        i, f, g, o = by_gate.unbind(2)
        # dz of each gate is dc (of the last one dh) times something known for all steps at once.
        per_gate = torch.empty_like(by_gate)
        torch.mul(g, i * (1 - i), out=per_gate[:, :, 0])
        torch.mul(c[:-1], f * (1 - f), out=per_gate[:, :, 1])
        torch.mul(i, 1 - g * g, out=per_gate[:, :, 2])
        torch.mul(bounded, o * (1 - o), out=per_gate[:, :, 3])
        through_cell = o * (1 - bounded * bounded)
        dh, dc = torch.zeros_like(dc), dc.clone()
        dz = per_gate  # written over, step by step
        for t in reversed(range(T)):
            dh = dh + dh_all[t]
            dc.addcmul_(dh, through_cell[t])
            dz[t, :, :3].mul_(dc.unsqueeze(1))
            dz[t, :, 3].mul_(dh)
            dc.mul_(f[t])
            dh = dz[t].view(N, 4 * H) @ weight
        flat = dz.view(T, N, 4 * H)
        ctx.report(h[:-1], flat)
        return None, flat, dh, dc, None, None, None


def recurrence(call: Call) -> Any:
    gates, hidden, cell, weight, bias, backwards = call.args
    layout = call.layout_of(gates)
    if layout is None or layout.dim != 1 or not call.is_tracked(weight) or call.kwargs or gates.ndim != 3:
        return NotImplemented
    tape = call.tape

    def report(before: Tensor, dz: Tensor) -> None:
        outputs = tape.vectors(dz, layout)
        tape.add(weight, Outer(outputs, tape.vectors(before, layout), len(weight)))
        if bias is not None and call.is_tracked(bias):
            tape.add(bias, Dense(outputs.sum(1, dtype=summed_in(outputs.dtype))))

    # In the parameters' own precision under autocast too: rounding would add up over the steps.
    gates, hidden, cell = (x.to(weight.dtype) for x in (gates, hidden, cell))
    gates = gates.flip(0) if backwards else gates
    states, last = _Recurrence.apply(  # type: ignore[no-untyped-call]
        tape.tap, gates, hidden, cell, weight.detach(), None if bias is None else bias.detach(), report
    )
    return states.flip(0) if backwards else states, last


TABLE = {lstm_recurrence: recurrence}
