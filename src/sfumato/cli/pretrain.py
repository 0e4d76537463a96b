"""Plain training on public rows: costs no privacy, and is where a warm start comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato.objective import Objective
    from sfumato.public import Public


def pretrain(
    objective: Objective, public: Public, *, steps: int, learning_rate: float = 0.01, batch_size: int | None = None
) -> None:
    """AdamW on the public gradient; the module is updated in place."""
    import torch

    trained = [p for p in objective.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    for _ in range(steps):
        public.gradient(objective.parameters(), batch_size).write_to(objective.module)
        optimizer.step()
