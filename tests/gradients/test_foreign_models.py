"""Whole models that nobody here wrote, against autograd on batches of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.gradients import Clip, Performance, clipped_sum
from sfumato.objective import Objective
from tests.gradients import oracle
from tests.gradients.test_engine import TOLERANCE, clip_for, median_norm, total

transformers = pytest.importorskip("transformers", reason="needs the 'models' extra")
ROWS = 3
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


def next_token(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = module(**batch).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none").mean(1)


def pooled(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).logits.square().mean(1)


def text(mask: bool) -> dict[str, Tensor]:
    batch = {"input_ids": torch.randint(2, 40, (ROWS, 7))}
    if mask:
        lengths = torch.tensor([7, 4, 2])
        batch["attention_mask"] = (torch.arange(7)[None] < lengths[:, None]).long()
    return batch


def gpt2() -> tuple[nn.Module, Any, Any]:
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight  # tied
    return model, next_token, text(mask=False)


def bert() -> tuple[nn.Module, Any, Any]:
    config = transformers.BertConfig(
        vocab_size=40, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES
    )
    return transformers.BertForSequenceClassification(config), pooled, text(mask=True)


def vit() -> tuple[nn.Module, Any, Any]:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES
    )
    return transformers.ViTForImageClassification(config), pooled, {"pixel_values": torch.randn(ROWS, 3, 8, 8)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("make", [gpt2, bert, vit])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_model(make: Callable[[], tuple[nn.Module, Any, Any]], dtype: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    module, loss, batch = make()
    module = module.to(dtype).train(training)
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    objective = Objective(module, loss)
    params = objective.parameters()
    gradients = oracle.one_by_one(objective, params, batch, ROWS)
    for mode in ("plain", "origin", "origin+scale"):
        clip = clip_for(mode, params, median_norm(gradients))
        truth = total(oracle.clipped(gradients, clip))
        for performance in (Performance(), Performance(ghost=False, micro_batch=2)):
            error = oracle.relative_error(
                clipped_sum(objective, params, batch, clip=clip, performance=performance), truth
            )
            assert error <= TOLERANCE[dtype], (mode, performance, error)


def test_dropout_is_independent_per_example() -> None:
    """With dropout on, the sum of identical rows is not a multiple of one row's gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    objective = Objective(module, lambda m, b: m(b).square().sum(1))
    row = torch.randn(1, 8, dtype=torch.float64)
    params = objective.parameters()
    two = clipped_sum(objective, params, row.expand(2, 8).contiguous(), clip=Clip(1e9))
    torch.manual_seed(1)
    one = clipped_sum(objective, params, row, clip=Clip(1e9))
    assert oracle.relative_error({n: g * 2 for n, g in one.items()}, two) > 0.01
