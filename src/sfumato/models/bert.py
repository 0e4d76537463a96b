"""A small BERT (Devlin et al. 2019) that reads from left to right: paper 000's model of WikiText-2 has two blocks.

The paper gives perplexities of next words and no sizes; these are those of BERT-Tiny (Turc et al. 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input and normalised after, as in BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width)  # queries, keys and values
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        N, T, width = x.shape
        q, k, v = (part.reshape(N, T, self.heads, -1).transpose(1, 2) for part in self.joint(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm1(x + self.out(attended.transpose(1, 2).reshape(N, T, width)))
        result: Tensor = self.norm2(x + self.narrow(F.gelu(self.wide(x))))
        return result


class WordBERT(nn.Module):
    """(N, T) words to (N, T, words) logits of the word that follows each; the head is the embedding, as in BERT.

    >>> model = WordBERT(100, width=16, length=8)
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 100])
    """

    def __init__(self, words: int, *, width: int = 128, heads: int = 2, blocks: int = 2, length: int = 35) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.transform = nn.Linear(width, width)
        self.last_norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(words))
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embedding(words) + self.positions[: words.shape[1]])
        x = self.last_norm(F.gelu(self.transform(self.blocks(x))))
        return F.linear(x, self.embedding.weight, self.bias)
