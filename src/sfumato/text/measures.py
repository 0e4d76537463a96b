"""Losses of models that predict the next word, one per row, and per word over a whole text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.ensembles import mean_logits
from sfumato.errors import InvalidArgument
from sfumato.text.cutting import IGNORED


def next_word(module: nn.Module, batch: Any) -> Tensor:
    """The mean over a row's words of -log p(word | words before), for a batch `(inputs, targets)`: one value per row.

    >>> from sfumato.models.lstm import WordLSTM
    >>> rows = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    >>> next_word(WordLSTM(10, hidden=4), rows).shape
    torch.Size([2])
    """
    inputs, targets = batch
    losses = _word_losses(module(inputs), targets)
    # A row is divided by its own number of words, before the clip: no other row is looked at.
    means: Tensor = losses.sum(1) / (targets != IGNORED).sum(1).clamp_min(1)
    return means


def word_loss(
    module: nn.Module, weights: Iterable[Mapping[str, Tensor]], rows: tuple[Tensor, Tensor], *, batch_size: int = 64
) -> float:
    """The mean of -log p over all words of public or test rows `(inputs, targets)`; its exponential is the perplexity.

    With several weights (iterates, say) it is that of the ensemble by mean logits.

    >>> from sfumato.models.lstm import WordLSTM
    >>> model = WordLSTM(10, hidden=4)
    >>> rows = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    >>> 1 < word_loss(model, [dict(model.named_parameters())], rows) < 4
    True
    """
    inputs, targets = rows
    device = next(module.parameters()).device
    together = [{name: p.to(device) for name, p in params.items()} for params in weights]  # once, not for every part
    words = int((targets != IGNORED).sum())
    if not words:
        raise InvalidArgument("rows have no target that is a word: there is nothing to measure.")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)  # the logits of all rows at once would fill the memory
        logits = mean_logits(module, together, inputs[part])
        total += _word_losses(logits, targets[part].to(device)).sum(dtype=torch.float64)
    return float(total) / words


def _word_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, T); 0 where there is no word."""
    if logits.shape[:2] != targets.shape:
        raise InvalidArgument(
            f"module gives {tuple(logits.shape[1:])} per row for targets of {tuple(targets.shape[1:])}: it must give "
            "logits of every next word."
        )
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets.shape)
