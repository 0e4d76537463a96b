"""Causal language models of `transformers`, with or without adapters: a loss per sequence, and perplexity.

Nothing is imported from there: a causal language model is what takes `input_ids` and answers with `.logits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn.modes import in_mode
from sfumato.objective import Batch

IGNORED = -100  # the label of a position that predicts nothing, for torch and `transformers` alike


def next_token_loss(module: nn.Module, batch: Batch) -> Tensor:
    """One value per sequence: the mean cross entropy of its next tokens.

    A batch is a tensor of token ids, one sequence per row, or a dict of what the model takes: `input_ids`, perhaps
    `attention_mask` (0 where there is padding) and `labels` (-100 where nothing is to be predicted; not shifted). A
    sequence without anything to predict has loss 0. The mean is over the sequence's own tokens, so that a long one
    weighs no more than a short one before the clip.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from sfumato import Objective
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    >>> objective = Objective(GPT2LMHeadModel(GPT2Config(**sizes)), next_token_loss)
    >>> objective.losses(objective.parameters(), torch.randint(9, (4, 6))).shape
    torch.Size([4])
    """
    losses, counted = _by_token(module, _named(batch))
    return losses.sum(1) / counted.sum(1).clamp_min(1)


@torch.no_grad()
def perplexity(model: nn.Module, rows: Batch, *, batch_size: int = 32, autocast: torch.dtype | None = None) -> float:
    """exp(mean loss over all predicted tokens) of public or test sequences, with dropout off.

    `rows` are as `next_token_loss` takes them, but on any device. Tokens weigh alike, so with padding it is not the
    exponential of the mean of row losses.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes))
    >>> model.lm_head.weight.data.zero_()[:1]  # every token is as likely as any other
    tensor([[0., 0., 0., 0., 0., 0., 0., 0.]])
    >>> round(perplexity(model, torch.randint(9, (4, 6))), 3)
    9.0
    """
    if batch_size < 1:
        raise InvalidArgument(f"batch_size={batch_size} must be at least 1: it is the number of rows of one pass.")
    device = next(model.parameters()).device
    total, count = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    with in_mode(model, training=False), torch.autocast(device.type, autocast, enabled=autocast is not None):
        for part in _parts(_named(rows), batch_size, device):
            losses, counted = _by_token(model, part)
            total += losses.double().sum()
            count += counted.sum()
    if not bool(count):
        raise InvalidArgument("rows have no token to predict: give sequences of at least two tokens.")
    return math.exp(float(total / count))


def _named(batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise InvalidArgument(
            f"the batch is a {type(batch).__name__}: give a tensor of token ids, or a dict that holds 'input_ids'."
        )
    return batch


def _parts(batch: Mapping[str, Any], rows: int, device: torch.device) -> Iterator[Mapping[str, Any]]:
    for start in range(0, len(batch["input_ids"]), rows):
        yield {
            name: value[start : start + rows].to(device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }


def _by_token(module: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(rows, length) losses, zero where nothing is predicted; and where something is."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    targets = _targets(batch)
    # Kept keys and values would only take memory: nothing is generated.
    logits = module(**inputs, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets.shape), targets != IGNORED


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """What each position is to predict. The targets are shifted, not the logits, which would have to be copied."""
    labels: Tensor = batch.get("labels", batch["input_ids"])[:, 1:]
    if (mask := batch.get("attention_mask")) is not None:
        # Neither from padding nor of it: on the left, the first true token follows padding.
        labels = labels.masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), IGNORED)
    return F.pad(labels, (0, 1), value=IGNORED)
