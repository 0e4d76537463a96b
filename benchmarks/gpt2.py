"""GPT-2 small (124M parameters, random weights) as next-token training: Hugging Face's module, and one for the peers.

`hugging_face` is the model as people have it: `Conv1D` layers, one row of positions for all, the head tied to the token
embedding. Opacus's ghost clipping knows neither of the first two and is wrong on the third, so `GPT2` is the same
network of `nn.Linear`, `nn.Embedding` and `nn.LayerNorm` with a head of its own. To compare with them, plain training
and Sfumato run that one too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Sizes = dict[str, int]

SMALL: Sizes = {"vocabulary": 50257, "length": 256, "width": 768, "layers": 12, "heads": 12}
UNTIED = "nn.Linear, untied head (163M parameters)"  # what `GPT2` is
TINY: Sizes = {"vocabulary": 97, "length": 8, "width": 32, "layers": 2, "heads": 2}


def hugging_face(*, vocabulary: int, length: int, width: int, layers: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(length, 1024 if width == 768 else length),
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.attention(self.norm1(x)).chunk(3, -1)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # not every fused kernel can be batched by vmap
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(
        self, *, vocabulary: int, length: int, width: int, layers: int, heads: int, fused: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, fused=fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        # One row of positions per example: a hook reads the batch from the first axis of every layer's input.
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(positions))))


def token_loss(module: Callable[..., Any], batch: Batch) -> Tensor:
    """The mean over a sequence's tokens, one value per sequence."""
    x, y = batch
    answer = module(x)
    logits = answer if isinstance(answer, Tensor) else answer.logits
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def sequences(n: int, sizes: Sizes, device: str) -> Batch:
    tokens = torch.randint(sizes["vocabulary"], (n, sizes["length"] + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
