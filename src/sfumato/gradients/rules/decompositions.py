"""Large functions that hide several uses of parameters, written out so that each use is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedModel
from sfumato.gradients.rules.recurrence import lstm_recurrence
from sfumato.nn.functional import Activation, at_least_float32, group_norm_act, per_channel


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` for (T, N, E) inputs: project, attend, project."""
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UnsupportedModel("nn.MultiheadAttention with add_bias_kv or add_zero_attn has no rule: leave both off.")
    if query.ndim != 3:
        raise UnsupportedModel(
            "nn.MultiheadAttention needs batched input of three dimensions: add the batch dimension."
        )
    T, N, E = query.shape
    S, heads, width = key.shape[0], num_heads, E // num_heads
    if not use_separate_proj_weight and query is key and key is value:
        assert in_proj_weight is not None
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        if use_separate_proj_weight:
            weights: Sequence[Tensor | None] = (q_proj_weight, k_proj_weight, v_proj_weight)
        else:
            assert in_proj_weight is not None
            weights = in_proj_weight.chunk(3)
        biases: Sequence[Tensor | None] = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True) if w is not None
        )
    # (T, N, E) -> (N, heads, T, width)
    q, k, v = (t.reshape(-1, N, heads, width).permute(1, 2, 0, 3) for t in (q, k, v))
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        mask = mask.reshape(N, heads, T, S) if mask.ndim == 3 else mask
    elif is_causal:
        mask = _additive(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1), q)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q).reshape(N, 1, 1, S)
        mask = padding if mask is None else mask + padding
    dropout = dropout_p if training else 0.0
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(width)
        attention = (scores if mask is None else scores + mask).softmax(-1)
        attended = F.dropout(attention, dropout) @ v
        shown = attention.mean(1) if average_attn_weights else attention
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        shown = None
    joined = attended.permute(2, 0, 1, 3).reshape(T, N, E)
    return F.linear(joined, out_proj_weight, out_proj_bias), shown


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))


def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm` (what nn.LSTM calls), layer by layer: one use of the input weights and one of the recurrent ones."""
    if not isinstance(args[3], bool):
        raise UnsupportedModel("nn.LSTM on a PackedSequence has no rule: give padded sequences and mask the loss.")
    x, (h_all, c_all), weights, biased, layers, dropout, training, bidirectional, batch_first = args
    if batch_first:
        x = x.transpose(0, 1)
    per_layer = 4 if biased else 2
    if len(weights) % per_layer or len(weights) // per_layer != layers * (2 if bidirectional else 1):
        raise UnsupportedModel("nn.LSTM with proj_size has no rule: set proj_size=0.")
    last_h, last_c = [], []
    for layer in range(layers):
        directions = []
        for direction in range(2 if bidirectional else 1):
            index = layer * (2 if bidirectional else 1) + direction
            w_ih, w_hh, *bias = weights[index * per_layer : (index + 1) * per_layer]
            b_ih, b_hh = bias if biased else (None, None)
            gates_in = F.linear(x, w_ih, b_ih)  # all steps at once
            states, c = lstm_recurrence(gates_in, h_all[index], c_all[index], w_hh, b_hh, bool(direction))
            directions.append(states)
            last_h.append(states[0] if direction else states[-1])
            last_c.append(c)
        x = torch.cat(directions, -1)
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.bilinear` as a contraction, which vmap knows."""
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def shifted_group_norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    after: Activation,
    before: Activation,
    inner_bias: Tensor,
) -> Tensor:
    """`group_norm_act` with an inner bias per image, which is data like x: their sum, then the rest of it."""
    wide = at_least_float32(x)
    wide = wide + per_channel(inner_bias, x).to(wide.dtype)
    return group_norm_act(wide, groups, weight, bias, eps, after, before).to(x.dtype)


def of(func: Any, args: Any) -> Callable[..., Any] | None:
    """What a call is written out as, if it is."""
    if func is group_norm_act and (args[-1] is None or args[-1].ndim == 1):
        return None  # there is a rule for it
    return TABLE.get(func)


TABLE: Mapping[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention,
    torch.lstm: lstm,
    F.bilinear: bilinear,
    group_norm_act: shifted_group_norm_act,
}
