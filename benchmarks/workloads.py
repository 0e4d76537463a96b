"""The four models whose private step is timed, as plain torch modules that every peer can run.

Each comes with a loss, `loss(module, batch) -> (N,)`, and a batch of random data of the right shape. No layer mixes
examples, no activation is in place and no parameter is used twice: all three stop one peer or another.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[[Callable[..., Tensor], Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    title: str
    module: Callable[[], nn.Module]
    loss: Loss
    sample: Callable[[int, torch.Generator], Batch]
    batch_size: int
    chunk: int  # examples per call of chunked vmap: the fastest, or near it, in a sweep of powers of two on two cores
    cpu_goal: float  # CPU time of a private step, as a multiple of the plain one
    memory_goal: float = 2.0  # growth of peak memory, likewise

    def build(self, batch_size: int | None = None, seed: int = 0) -> tuple[nn.Module, Batch]:
        """The module and a batch, the same ones at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.module()
        return module, self.sample(batch_size or self.batch_size, torch.Generator().manual_seed(seed))


def convnet() -> nn.Module:
    """The ConvNet of the DP-SGD literature on CIFAR-10 (Papernot et al. 2021), 0.55M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


class WideBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, channels), nn.GroupNorm(16, width)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if channels != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(y)
        return skip + self.conv2(F.relu(self.norm2(self.conv1(y))))


class WideResNet(nn.Module):
    """WRN-16-4 with GroupNorm(16), 2.75M parameters; no weight standardisation, which not every peer can run."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 16
        for width, stride in ((64, 1), (128, 2), (256, 2)):
            blocks += [WideBlock(channels, width, stride), WideBlock(width, width, 1)]
            channels = width
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(16, channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


def mlp() -> nn.Module:
    widths = (600, 1024, 512, 256)
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(256, 10))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        # Written out: the fused CPU kernel cannot be batched by vmap, and at this length it is the slower one anyway.
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Two causal blocks, learned positions and an untied head; 4.2M parameters."""

    def __init__(self, vocabulary: int = 8000, length: int = 35, width: int = 200, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        # One row of positions per example: a hook reads the batch from the first axis of every layer's input.
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(positions))))


def label_loss(module: Callable[..., Tensor], batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(module(x), y, reduction="none")


def sequence_loss(module: Callable[..., Tensor], batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def images(n: int, rng: torch.Generator) -> Batch:
    return torch.randn(n, 3, 32, 32, generator=rng), torch.randint(10, (n,), generator=rng)


def rows(n: int, rng: torch.Generator) -> Batch:
    return torch.randn(n, 600, generator=rng), torch.randint(10, (n,), generator=rng)


def sequences(n: int, rng: torch.Generator) -> Batch:
    tokens = torch.randint(8000, (n, 36), generator=rng)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKLOADS = {
    "conv": Workload(
        title="ConvNet 3x32x32, batch 256",
        module=convnet,
        loss=label_loss,
        sample=images,
        batch_size=256,
        chunk=16,
        cpu_goal=1.10,
    ),
    "wrn": Workload(
        title="WRN-16-4, batch 32",
        module=WideResNet,
        loss=label_loss,
        sample=images,
        batch_size=32,
        chunk=8,
        cpu_goal=1.25,
    ),
    "mlp": Workload(
        title="MLP 600-1024-512-256-10, batch 1024",
        module=mlp,
        loss=label_loss,
        sample=rows,
        batch_size=1024,
        chunk=8,
        cpu_goal=1.10,
    ),
    "lm": Workload(
        title="2-block LM, vocabulary 8k, length 35, batch 64",
        module=LanguageModel,
        loss=sequence_loss,
        sample=sequences,
        batch_size=64,
        chunk=8,
        cpu_goal=1.35,
    ),
}
