"""The language model of Amid et al. 2022 (paper 003, table 2c): an embedding, two LSTM layers, a softmax over words."""

from __future__ import annotations

import warnings

from torch import Tensor, nn


class WordLSTM(nn.Module):
    """(N, T) words to (N, T, words) logits of the word that follows each; with the defaults, paper 003's model.

    >>> import torch
    >>> model = WordLSTM(8000)
    >>> sum(p.numel() for p in model.parameters())
    2160320
    >>> model(torch.zeros(2, 35, dtype=torch.long)).shape
    torch.Size([2, 35, 8000])
    """

    def __init__(self, words: int, hidden: int = 120, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, words)

    def forward(self, words: Tensor) -> Tensor:
        embedded = self.embedding(words)
        with warnings.catch_warnings():
            # Weights that are lent for one call are no single block for cuDNN, which then copies half a megabyte.
            warnings.filterwarnings("ignore", message=".*contiguous chunk of memory.*")
            states, _ = self.lstm(embedded)
        logits: Tensor = self.head(states)
        return logits
