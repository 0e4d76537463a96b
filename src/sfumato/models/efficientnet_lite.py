"""EfficientNet-Lite0 (Tan & Le 2019, arXiv 1905.11946, without squeeze-and-excitation), with frozen normalisation.

Inverted residuals (Sandler et al. 2018, arXiv 1801.04381) with ReLU6. Batch normalisation keeps the statistics it was
trained with, in training too: it is one fixed affine map per channel, so no example acts on another. Parameters are
named as in the published PyTorch weights (`efficientnet-lite0-57934424.pth`), which load as they are. Left out is what
regularised the first training: stochastic depth, and dropout (0.2) before the last layer.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.nn import Pixels
from sfumato.nn.functional import at_least_float32, full_precision

FEATURES = 1280
_STEM = 32
_EPS = 1e-3
# Blocks, kernel, stride of the first of them, expansion, output channels: table 1 of 1905.11946, less the stem.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
# The Lite models were trained on (v - 127) / 128, v in 0..255.
_MEAN, _STD = 127 / 255, 128 / 255


def efficientnet_lite0(
    weights: str | Path | None = None, outputs: int = 1000, *, resolution: int = 224
) -> EfficientNetLite:
    """EfficientNet-Lite0 for images (N, 3, H, W) of any size, uint8 or floats in 0..1.

    `weights`: a file of published weights; with another number of `outputs` than its own, the last layer begins anew.
    Without a file the normalisations do nothing: useful to try things out, not to train from scratch.
    `resolution`: what images are resized to, as squares; a smaller one costs less and sees less.

    >>> model = efficientnet_lite0(outputs=10, resolution=32)
    >>> model(torch.zeros(2, 3, 28, 28, dtype=torch.uint8)).shape
    torch.Size([2, 10])
    """
    for name, value in (("outputs", outputs), ("resolution", resolution)):
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: give a positive number.")
    module = EfficientNetLite(outputs, resolution)
    if weights is not None:
        _load(module, Path(weights))
    return module


@torch.no_grad()
def features(
    module: nn.Module,
    images: Tensor,
    *,
    batch_size: int = 256,
    autocast: torch.dtype | None = None,
    progress: bool = False,
) -> Tensor:
    """The pooled features (N, 1280) of images, in float32 on the module's device.

    Each row is computed from its own image alone: features of private images are as private as the images, and may
    stand in for them as rows of private data.

    >>> features(efficientnet_lite0(resolution=32), torch.zeros(3, 3, 32, 32)).shape
    torch.Size([3, 1280])
    """
    if not isinstance(module, EfficientNetLite):
        raise InvalidArgument(
            f"module={type(module).__name__} must come from efficientnet_lite0, whose features these are."
        )
    if batch_size < 1:
        raise InvalidArgument(f"batch_size is {batch_size}: give a positive number.")
    device = module._fc.weight.device
    was_training = module.training
    module.eval()
    try:
        found = [torch.empty(0, FEATURES, device=device)]
        for part in track(torch.split(images, batch_size), "features", disable=not progress):
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                found.append(module.pooled(part.to(device)).float())
        return torch.cat(found)
    finally:
        module.train(was_training)


class EfficientNetLite(nn.Module):
    """The network; `pooled` is what its last layer sees."""

    def __init__(self, outputs: int, resolution: int) -> None:
        super().__init__()
        self.resolution = resolution
        self.pixels = Pixels(_MEAN, _STD)
        self._conv_stem = _SameConv2d(3, _STEM, 3, stride=2)
        self._bn0 = FrozenBatchNorm(_STEM)
        blocks: list[nn.Module] = []
        before = _STEM
        for count, kernel, stride, expansion, after in _STAGES:
            for i in range(count):
                blocks.append(_InvertedResidual(before, after, kernel, 1 if i else stride, expansion))
                before = after
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = _SameConv2d(before, FEATURES, 1)
        self._bn1 = FrozenBatchNorm(FEATURES)
        self._fc = nn.Linear(FEATURES, outputs)

    def pooled(self, images: Tensor) -> Tensor:
        """Features (N, 1280), averaged over places."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise InvalidArgument(f"images have the shape {tuple(images.shape)}: give (N, 3, height, width).")
        x = self.pixels(_resized(images, self.resolution))
        x = F.relu6(self._bn0(self._conv_stem(x)))
        x = F.relu6(self._bn1(self._conv_head(self._blocks(x))))
        return at_least_float32(x).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.pooled(images)
        with full_precision(x):  # the loss wants the logits' digits
            logits: Tensor = self._fc(x)
        return logits


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with fixed statistics, whatever mode the module is in; its affine map is frozen too."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))  # unused, but a name in the published weights

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=_EPS)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={_EPS}"


class _SameConv2d(nn.Conv2d):
    """Without bias, and padded as TensorFlow's 'SAME' is, under which these weights were trained.

    Outputs are ceil(size / stride), and where the padding is odd, its larger half is below and to the right.
    """

    def __init__(self, before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(before, after, kernel, stride, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        needed = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:]]
        if needed[0] == needed[1] and needed[0] % 2 == 0:
            return F.conv2d(x, self.weight, None, stride, needed[0] // 2, 1, self.groups)
        (top, bottom), (left, right) = ((n // 2, n - n // 2) for n in needed)
        return F.conv2d(F.pad(x, [left, right, top, bottom]), self.weight, None, stride, 0, 1, self.groups)


class _InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project without activation; a shortcut where the shapes allow it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = before * expansion
        self._expand_conv = _SameConv2d(before, inner, 1) if expansion != 1 else None
        self._bn0 = FrozenBatchNorm(inner) if expansion != 1 else None
        self._depthwise_conv = _SameConv2d(inner, inner, kernel, stride=stride, groups=inner)
        self._bn1 = FrozenBatchNorm(inner)
        self._project_conv = _SameConv2d(inner, after, 1)
        self._bn2 = FrozenBatchNorm(after)
        self._shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        inner = x
        if self._expand_conv is not None and self._bn0 is not None:
            inner = F.relu6(self._bn0(self._expand_conv(x)))
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        projected: Tensor = self._bn2(self._project_conv(inner))
        return projected + x if self._shortcut else projected


def _resized(images: Tensor, resolution: int) -> Tensor:
    """Bicubic, as in the network's training; antialiased, which that was not, so that large images shrink well."""
    if images.shape[-2:] == (resolution, resolution):
        return images
    values = images / 255 if images.dtype == torch.uint8 else at_least_float32(images)
    return F.interpolate(values, (resolution, resolution), mode="bicubic", align_corners=False, antialias=True)


def _load(module: EfficientNetLite, path: Path) -> None:
    if not path.is_file():
        raise InvalidArgument(f"weights={str(path)!r} is not a file: give the path of published weights, or None.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise InvalidArgument(f"weights={str(path)!r} is not a file of weights that torch.save wrote.") from None
    own = module.state_dict()
    last = {"_fc.weight", "_fc.bias"}
    if not isinstance(state, Mapping) or set(state) != set(own):
        raise InvalidArgument(
            f"weights={str(path)!r} has other names than EfficientNet-Lite0: give its published weights."
        )
    other_outputs = state["_fc.bias"].shape != own["_fc.bias"].shape
    taken = {name: own[name] if other_outputs and name in last else value for name, value in state.items()}
    for name, value in taken.items():
        if value.shape != own[name].shape:
            raise InvalidArgument(
                f"weights={str(path)!r} has {name!r} of shape {tuple(value.shape)}, not {tuple(own[name].shape)}: give "
                "the published weights of EfficientNet-Lite0."
            )
    module.load_state_dict(taken)
