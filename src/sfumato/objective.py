"""The objective: a module and a loss that returns one value per example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from sfumato.errors import InvalidArgument

Batch = Any  # a tensor, or a tuple, list or dict of tensors, whose first dimension counts examples
Loss = Callable[[nn.Module, Batch], Tensor]


def cross_entropy(module: nn.Module, batch: Batch) -> Tensor:
    """Classification loss of a batch `(inputs, labels)`: one value per example."""
    inputs, labels = batch
    return F.cross_entropy(module(inputs), labels, reduction="none")


def squared_error(module: nn.Module, batch: Batch) -> Tensor:
    """Regression loss of a batch `(inputs, targets)`: one value per example, the mean over the target's entries."""
    inputs, targets = batch
    predicted = module(inputs)
    errors: Tensor = (predicted.reshape(targets.shape) - targets).square()
    return errors.reshape(len(targets), -1).mean(1)


class _Bound(nn.Module):
    """Makes `loss(module, batch)` itself a module, so that `functional_call` can lend it other parameters."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.module, batch)


@dataclass(frozen=True, eq=False)
class Objective:
    """What is minimised: `loss(module, batch)` gives one value per example; nothing is reduced over the batch.

    Shared by `Public` and `Private`. Frozen parameters (`requires_grad=False`) are not trained and cost nothing.
    `autocast`: compute in this lower precision where `torch.autocast` would, such as `torch.bfloat16` on a GPU;
    parameters, gradients, norms and sums stay in float32 and above, and the bound on a contribution as tight.

    >>> import torch
    >>> objective = Objective(torch.nn.Linear(3, 2), cross_entropy)
    >>> params = objective.parameters()
    >>> objective.losses(params, (torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))).shape
    torch.Size([4])
    """

    module: nn.Module
    loss: Loss
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, _Loss) or not callable(self.loss):
            raise InvalidArgument(
                f"loss={type(self.loss).__name__} must be a function loss(module, batch) that gives one value per "
                "example, such as sfumato.cross_entropy."
            )
        if self.autocast not in (None, torch.bfloat16):
            raise InvalidArgument(
                f"autocast={self.autocast} must be None or torch.bfloat16: float16 would need its losses scaled."
            )

    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters by name, detached; shared storage is named once (tied weights)."""
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    def frozen(self) -> list[Tensor]:
        """The parameters that are not trained; a forward pass must not write to them."""
        return [p for p in self.module.parameters() if not p.requires_grad]

    def losses(self, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Per-example losses at `params`. The module's own parameters and buffers are neither read nor written.

        Buffers are lent as copies: a forward pass over private rows must not leave a trace in the module.
        """
        state = {f"module.{name}": p for name, p in params.items()}
        state |= {f"module.{name}": b.clone() for name, b in self.module.named_buffers()}
        device = next((p.device.type for p in params.values()), "cpu")
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            result: Tensor = torch.func.functional_call(_Bound(self.module, self.loss), state, (batch,))
        return result.float() if self.autocast is not None else result

    def exactly(self) -> Objective:
        """The same in the parameters' own precision."""
        return Objective(self.module, self.loss)
