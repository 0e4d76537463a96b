"""The table of layers: small models, each around one kind of layer, with a batch and a per-example loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.nn import GroupNormAct, WSConv2d
from sfumato.objective import Objective

Case = tuple[nn.Module, Any]


def squared_output(module: nn.Module, batch: Any) -> Tensor:
    """A smooth loss for any output: weighted squares, so that no gradient entry is zero by symmetry."""
    out = module(*batch) if isinstance(batch, tuple) else module(batch)
    out = out.reshape(len(out), -1)
    weights = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype, device=out.device)
    return (out.square() * weights).mean(1) + out.sin().mean(1)


def image(*shape: int) -> tuple[Tensor]:
    return (torch.randn(5, *shape),)


def tokens(length: int, vocabulary: int) -> tuple[Tensor]:
    return (torch.randint(0, vocabulary, (5, length)),)


class WeightStandardised(nn.Module):
    """A convolution whose weight is standardised, as DP vision models use: a derived parameter with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(4, 1, 1, 1) * 1.3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-4).sqrt() * self.gain
        return F.conv2d(x, w, self.conv.bias, padding=1)


class TiedHead(nn.Module):
    """Re-uses an embedding's weight through `F.linear`: where ghost clipping elsewhere lets 2.05 C through."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, t: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.table(t))), self.table.weight)


class Conditioned(nn.Module):
    """A normalisation is given an inner bias per image, which the image and parameters say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.shifts = WSConv2d(3, 8, 3), GroupNormAct(4, 8, "silu"), nn.Linear(3, 13)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, shift = self.shifts(x.mean((2, 3))).split([5, 8], 1)
        return self.out(self.norm(self.conv(x), shift).mean((2, 3)))


class SelfAttention(nn.Module):
    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        out = self.attention(x, x, x)[0]
        return out if self.batch_first else out.transpose(0, 1)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=6)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attention(x, memory, memory, need_weights=False)[0]


class PaddedSequence(nn.Module):
    """A dict batch of padded tokens with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.table(batch["tokens"])
        x, _ = self.attention(x, x, x, key_padding_mask=batch["padding"])
        kept = (~batch["padding"]).unsqueeze(2).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class OwnParameters(nn.Module):
    """Parameters used directly: scale, shift, a class token expanded over the batch, positions, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 4, 4) * 0.1)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(1.2))
        self.form = nn.Parameter(torch.randn(4, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x * self.scale / self.temperature
        return torch.einsum("bti,ij,btj->bt", x, self.form, x)


class SequenceFirst(nn.Module):
    """Linear layers on (time, batch, features), and on both merged with the batch varying fastest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.transpose(0, 1)))
        merged = self.second(x.reshape(-1, 6))
        return merged.reshape(-1, x.shape[1], 3).transpose(0, 1)


class Merged(nn.Module):
    """(batch * time, features) through addmm, as GPT-2's Conv1D does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6) * 0.3)
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 4), self.weight).reshape(*x.shape[:2], 6)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank correction (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Regularised(nn.Module):
    """A penalty on a parameter inside every example's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * self.layer.weight.square().sum()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x += self.shift
        return F.relu(x) + x


class Shared(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def padded() -> tuple[dict[str, Tensor]]:
    t = torch.randint(1, 11, (5, 6))
    lengths = torch.tensor([6, 3, 1, 5, 2])
    padding = torch.arange(6)[None] >= lengths[:, None]
    return ({"tokens": t.masked_fill(padding, 0), "padding": padding},)


def convolution(dimensions: int, **options: Any) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return kind(4, 6, options.pop("kernel_size", 3), **options)


TABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "linear": (lambda: nn.Linear(6, 4), lambda: image(6)),
    "linear-sequence": (lambda: nn.Linear(6, 4), lambda: image(7, 6)),
    "linear-no-bias": (lambda: nn.Linear(6, 4, bias=False), lambda: image(6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), lambda: image(6)),
    "conv1d": (lambda: convolution(1, stride=2, padding=1), lambda: image(4, 9)),
    "conv2d": (lambda: convolution(2), lambda: image(4, 6, 5)),
    "conv2d-stride-padding": (lambda: convolution(2, stride=(2, 1), padding=(1, 2)), lambda: image(4, 6, 5)),
    "conv2d-dilation": (lambda: convolution(2, dilation=2, padding=2), lambda: image(4, 6, 5)),
    "conv2d-groups": (lambda: convolution(2, groups=2), lambda: image(4, 6, 5)),
    "conv2d-same-even": (lambda: convolution(2, kernel_size=(2, 4), padding="same"), lambda: image(4, 6, 5)),
    "conv2d-reflect": (lambda: convolution(2, padding=1, padding_mode="reflect"), lambda: image(4, 6, 5)),
    "conv2d-pointwise": (lambda: convolution(2, kernel_size=1, stride=2), lambda: image(4, 6, 5)),
    "conv3d": (lambda: convolution(3, padding=1, stride=(1, 2, 1)), lambda: image(4, 4, 5, 3)),
    "conv-deep": (
        lambda: nn.Sequential(nn.Conv2d(2, 40, 3), nn.Tanh(), nn.Conv2d(40, 40, 3), nn.Tanh(), nn.Conv2d(40, 3, 2)),
        lambda: image(2, 6, 6),
    ),
    "conv-large": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh()), lambda: image(4, 12, 12)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), lambda: image(4, 4, 4)),
    "weight-standardised": (WeightStandardised, lambda: image(3, 6, 6)),
    "ws-conv": (
        lambda: nn.Sequential(
            WSConv2d(3, 8, 3, padding=1, bias=True),
            GroupNormAct(4, 8, "silu"),
            WSConv2d(8, 4, 3, stride=2),
            GroupNormAct(2, 4, "silu", activation_first=True, inner_bias=True),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        lambda: image(3, 6, 6),
    ),
    "ws-conv-conditioned": (Conditioned, lambda: image(3, 6, 6)),
    "weight-norm": (weight_norm, lambda: image(6)),
    "embedding": (lambda: nn.Embedding(11, 4), lambda: tokens(7, 11)),
    "embedding-padding": (lambda: nn.Embedding(11, 4, padding_idx=3), lambda: tokens(7, 11)),
    "layer-norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), lambda: image(3, 6)),
    "layer-norm-2d": (lambda: nn.LayerNorm((3, 6)), lambda: image(2, 3, 6)),
    "group-norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(3, 6)), lambda: image(4, 5, 5)),
    "instance-norm": (lambda: nn.InstanceNorm2d(4, affine=True), lambda: image(4, 5, 5)),
    "rms-norm": (lambda: nn.RMSNorm(6), lambda: image(3, 6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(4)), lambda: image(6)),
    "bilinear": (lambda: nn.Bilinear(6, 3, 4), lambda: (torch.randn(5, 6), torch.randn(5, 3))),
    "attention": (lambda: SelfAttention(True), lambda: image(5, 8)),
    "attention-sequence-first": (lambda: SelfAttention(False, bias=False), lambda: image(5, 8)),
    "attention-cross": (CrossAttention, lambda: (torch.randn(5, 4, 8), torch.randn(5, 7, 6))),
    "transformer-encoder": (transformer, lambda: image(5, 8)),
    "padded-dict": (PaddedSequence, padded),
    "lstm": (lambda: Recurrent(), lambda: image(6, 4)),
    "lstm-deep-bidirectional": (lambda: Recurrent(num_layers=2, bidirectional=True, bias=False), lambda: image(6, 4)),
    "tied-head": (TiedHead, lambda: tokens(6, 11)),
    "shared-module": (Shared, lambda: image(6)),
    "own-parameters": (OwnParameters, lambda: image(3, 4)),
    "sequence-first": (SequenceFirst, lambda: image(7, 4)),
    "merged-addmm": (Merged, lambda: image(7, 4)),
    "transposed-matmul": (Transposed, lambda: image(4)),
    "low-rank": (LowRank, lambda: image(6)),
    "penalty": (Regularised, lambda: image(6)),
    "in-place": (InPlace, lambda: image(6)),
}


def make(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[Objective, Any]:
    """The named model and batch, reproducibly, in the given precision."""
    torch.manual_seed(seed)
    module, batch = TABLE[name]
    built = module().to(dtype)
    rows = tuple(
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in t.items()}
        if isinstance(t, dict)
        else (t.to(dtype) if t.is_floating_point() else t)
        for t in batch()
    )
    return Objective(built, squared_output), rows
