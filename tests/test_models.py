"""The papers' networks and the pretrained one: sizes, what they take, and that the engine's gradients are right."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato.cli.sections import CNN_SIDE
from sfumato.errors import InvalidArgument, UnsupportedModel
from sfumato.gradients import Clip, clipped_sum
from sfumato.gradients.probe import Probe
from sfumato.models import convnets
from sfumato.models.basic import cnn, linear
from sfumato.models.efficientnet_lite import EfficientNetLite, FrozenBatchNorm, efficientnet_lite0, features
from sfumato.models.wide_resnet import wide_resnet
from sfumato.objective import Objective, cross_entropy
from tests.gradients import oracle

WEIGHTS = Path(os.environ.get("SFUMATO_DATA", "")) / "weights" / "efficientnet-lite0-57934424.pth"
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cifar_convnet": (convnets.cifar_convnet, (3, 32, 32), 10),
    "emnist_cnn": (convnets.emnist_cnn, (1, 28, 28), 47),
    "convnet3": (convnets.convnet3, (3, 32, 32), 10),
    "purchase_mlp": (convnets.purchase_mlp, (600,), 10),
}


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_gradients(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """The door's probe accepts the module, and the engine's clipped sum is autograd's, row by row."""
    objective = Objective(module, cross_entropy)
    params = objective.parameters()
    rows = len(batch[1])
    Probe(objective).trace(params, batch)
    gradients = oracle.one_by_one(objective, params, batch, rows)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    clip = Clip(float(norms.median()))
    truth = {name: g.sum(0) for name, g in oracle.clipped(gradients, clip).items()}
    assert oracle.relative_error(clipped_sum(objective, params, batch, clip=clip), truth) < 1e-4


# ------------------------------------------------------------------------------------------------ the papers' networks


def layers(module: nn.Module) -> list[tuple[object, ...]]:
    """In the words of paper 003's table 2."""
    found: list[tuple[object, ...]] = []
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            found.append(("conv", m.out_channels, m.kernel_size[0], m.stride[0]))
        elif isinstance(m, nn.MaxPool2d):
            found.append(("pool", m.kernel_size, m.stride))
        elif isinstance(m, nn.Linear):
            found.append(("full", m.out_features))
    return found


def test_layers_are_those_of_the_papers() -> None:
    pool = ("pool", 2, 2)
    table_2a = (
        [("conv", 32, 3, 1)] * 2 + [pool] + [("conv", 64, 3, 1)] * 2 + [pool] + [("conv", 128, 3, 1)] * 2 + [pool]
    )
    assert layers(convnets.cifar_convnet()) == [*table_2a, ("full", 128), ("full", 10)]
    assert layers(convnets.emnist_cnn()) == [("conv", 16, 8, 2), ("conv", 32, 4, 2), ("full", 32), ("full", 47)]
    assert [kind for kind, *_ in layers(convnets.convnet3())] == ["conv", "pool"] * 3 + ["full"]
    assert layers(convnets.purchase_mlp()) == [("full", 1024), ("full", 512), ("full", 256), ("full", 10)]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_but_the_last_is_followed_by_tanh(name: str) -> None:
    leaves = [m for m in NETWORKS[name][0]().modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.Tanh)]
    assert [isinstance(m, nn.Tanh) for m in leaves] == [False, True] * (len(leaves) // 2) + [False]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_the_papers_networks(name: str) -> None:
    make, shape, classes = NETWORKS[name]
    torch.manual_seed(0)
    rows = pixels(3, *shape) if len(shape) == 3 else pixels(3, *shape).gt(127).float()
    module = make()
    assert module(rows).shape == (3, classes)
    check_gradients(module, (rows, torch.arange(3)))


@pytest.mark.parametrize("name", ["cifar_convnet", "emnist_cnn", "convnet3"])
def test_uint8_and_floats_give_the_same(name: str) -> None:
    make, shape, _ = NETWORKS[name]
    module, images = make(), pixels(2, *shape)
    torch.testing.assert_close(module(images / 255), module(images), rtol=1e-4, atol=1e-5)


def test_wrong_numbers_are_refused() -> None:
    for make, _, _ in NETWORKS.values():
        with pytest.raises(InvalidArgument, match="outputs is 0"):
            make(outputs=0)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="inputs is 0"):
        convnets.purchase_mlp(inputs=0)


@pytest.mark.parametrize(("depth", "millions"), [(16, 2.74), (40, 8.94)])
def test_wide_resnets_have_the_papers_sizes(depth: int, millions: float) -> None:
    """Table 5 of paper 002 cuts after two digits, and does not count the gains of standardised convolutions."""
    module = wide_resnet(depth=depth, width=4)
    gains = sum(p.numel() for name, p in module.named_parameters() if name.endswith("gain"))
    assert math.floor((size(module) - gains) / 1e4) / 100 == millions
    assert gains < 0.001 * size(module)


# ------------------------------------------------------------------------------------------------ EfficientNet-Lite0


@pytest.fixture(scope="module")
def lively() -> EfficientNetLite:
    """Lite0 at 32 x 32 with normalisations that do something, and in training mode."""
    torch.manual_seed(0)
    module = efficientnet_lite0(outputs=10, resolution=32)
    for m in module.modules():
        if isinstance(m, FrozenBatchNorm):
            for t, low, high in ((m.weight, 0.5, 1.5), (m.bias, -0.2, 0.5), (m.running_mean, -0.2, 0.2)):
                nn.init.uniform_(t, low, high)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
    return module.train()


def test_structure() -> None:
    """Against the published file: 296 tensors, 4,652,008 parameters, and the table of blocks in its names."""
    module = efficientnet_lite0(resolution=32)
    state = module.state_dict()
    assert len(state) == 296
    assert size(module) == 4_652_008
    depthwise = [state[f"_blocks.{i}._depthwise_conv.weight"].shape for i in range(16)]
    kernels = [3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3]
    inner = [32, 96, 144, 144, 240, 240, 480, 480, 480, 672, 672, 672, 1152, 1152, 1152, 1152]
    assert [tuple(shape) for shape in depthwise] == [(c, 1, k, k) for c, k in zip(inner, kernels, strict=True)]
    projected = [state[f"_blocks.{i}._project_conv.weight"].shape[0] for i in range(16)]
    assert projected == [16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320]
    strides = [m.stride[0] for name, m in module.named_modules() if name.endswith("_depthwise_conv")]  # type: ignore[index]
    assert [i for i, stride in enumerate(strides) if stride == 2] == [1, 3, 5, 11]
    assert "_blocks.0._expand_conv.weight" not in state
    assert tuple(state["_conv_head.weight"].shape) == (1280, 320, 1, 1)
    assert tuple(state["_fc.weight"].shape) == (1000, 1280)
    assert {name.rsplit(".", 1)[1] for name in state if "_bn" in name} == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_what_is_trained_is_convolutions_and_the_last_layer(lively: EfficientNetLite) -> None:
    trained = {name for name, p in lively.named_parameters() if p.requires_grad}
    assert trained == {name for name in lively.state_dict() if "conv" in name} | {"_fc.weight", "_fc.bias"}


def test_normalisation_is_frozen_in_training(lively: EfficientNetLite) -> None:
    before = {name: b.clone() for name, b in lively.named_buffers()}
    images = pixels(4, 3, 32, 32)
    training = lively(images)
    torch.testing.assert_close(lively.eval()(images), training, rtol=0, atol=0)
    torch.testing.assert_close(lively.train()(images[:1]), training[:1], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(b, before[name]) for name, b in lively.named_buffers())


def test_frozen_norm_is_evaluated_batch_norm() -> None:
    theirs, ours = nn.BatchNorm2d(5, eps=1e-3), FrozenBatchNorm(5)
    for t in (theirs.weight.data, theirs.bias.data, theirs.running_mean, theirs.running_var):
        nn.init.uniform_(t, 0.5, 2.0)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 5, 3, 3)
    torch.testing.assert_close(ours.train()(x), theirs.eval()(x), rtol=0, atol=0)


def test_gradients_of_all_convolutions(lively: EfficientNetLite) -> None:
    check_gradients(lively, (pixels(3, 3, 32, 32), torch.tensor([1, 5, 9])))


def test_ordinary_batch_norm_would_be_refused() -> None:
    """The control: the same network with one norm that looks at the batch."""
    torch.manual_seed(0)
    module = efficientnet_lite0(outputs=10, resolution=32)
    module._bn0 = nn.BatchNorm2d(32)  # type: ignore[assignment]
    objective = Objective(module.train(), cross_entropy)
    with pytest.raises(UnsupportedModel, match="'_bn0' normalises over the batch"):
        Probe(objective).trace(objective.parameters(), (pixels(3, 3, 32, 32), torch.arange(3)))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("shape", [(5, 5), (6, 6), (8, 8), (5, 8), (1, 1), (2, 3)])
def test_padding_is_tensorflows(shape: tuple[int, int], kernel: int, stride: int) -> None:
    """ceil(size / stride) outputs; the first window begins floor(pad / 2) before the image."""
    convolution = type(efficientnet_lite0(outputs=1)._conv_stem)(1, 1, kernel, stride=stride).double()
    x = torch.rand(1, 1, *shape, dtype=torch.float64)
    starts = []
    for length in shape:
        outputs = math.ceil(length / stride)
        padding = max(0, (outputs - 1) * stride + kernel - length)
        starts.append([i * stride - padding // 2 for i in range(outputs)])
    expected = torch.zeros(len(starts[0]), len(starts[1]), dtype=torch.float64)
    for (i, top), (j, left) in ((a, b) for a in enumerate(starts[0]) for b in enumerate(starts[1])):
        for u, v in np.ndindex(kernel, kernel):
            if 0 <= top + u < shape[0] and 0 <= left + v < shape[1]:
                expected[i, j] += x[0, 0, top + u, left + v] * convolution.weight[0, 0, u, v].detach()
    torch.testing.assert_close(convolution(x)[0, 0], expected)


@pytest.mark.parametrize("shape", [(20, 20), (50, 41)])
def test_images_are_resized_as_pillow_does(lively: EfficientNetLite, shape: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    x = pixels(1, 3, *shape)
    planes = [image.fromarray(plane.numpy().astype(np.float32)) for plane in x[0]]
    resized = np.stack([np.asarray(plane.resize((32, 32), image.Resampling.BICUBIC)) for plane in planes])
    expected = lively(torch.from_numpy(resized)[None] / 255)
    torch.testing.assert_close(lively(x), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lively(x / 255), expected, rtol=1e-3, atol=1e-4)


def test_pixels_are_centred_as_in_the_first_training(lively: EfficientNetLite) -> None:
    """(v - 127) / 128, the constants of the official EfficientNet-Lite."""
    seen: list[Tensor] = []
    handle = lively._conv_stem.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    lively(torch.tensor([0, 127, 255], dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 3, 32, 32))
    handle.remove()
    torch.testing.assert_close(seen[0][:, 0, 0, 0], torch.tensor([-127 / 128, 0.0, 1.0]), rtol=0, atol=1e-6)


def test_shortcuts_join_blocks_of_one_shape() -> None:
    """A block whose last affine map gives zero is the identity where there is a shortcut, else zero."""
    joined = []
    for i, block in enumerate(efficientnet_lite0()._blocks):
        nn.init.zeros_(block._bn2.weight)  # type: ignore[union-attr, arg-type]
        channels = 32 if i == 0 else block._expand_conv.in_channels  # type: ignore[union-attr]
        x = torch.rand(1, channels, 4, 4)
        y = block(x)
        if bool(y.any()):
            torch.testing.assert_close(y, x, rtol=0, atol=0)
            joined.append(i)
    assert joined == [2, 4, 6, 7, 9, 10, 12, 13, 14]


def test_features_are_what_the_last_layer_sees(lively: EfficientNetLite) -> None:
    images = pixels(5, 3, 32, 32)
    found = features(lively, images, batch_size=2)
    assert found.shape == (5, 1280)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert lively.training
    torch.testing.assert_close(lively._fc(found), lively(images), rtol=1e-4, atol=1e-5)
    head = linear(1280, 10)
    assert head(found).shape == (5, 10)
    assert features(lively, images[:0]).shape == (0, 1280)
    half = features(lively, images, autocast=torch.bfloat16)
    assert half.dtype == torch.float32
    assert 0 < float((half - found).norm() / found.norm()) < 0.1


def test_wrong_arguments_are_refused(lively: EfficientNetLite) -> None:
    with pytest.raises(InvalidArgument, match="outputs is 0"):
        efficientnet_lite0(outputs=0)
    with pytest.raises(InvalidArgument, match="resolution is 0"):
        efficientnet_lite0(resolution=0)
    with pytest.raises(InvalidArgument, match=r"images have the shape \(2, 1, 32, 32\)"):
        lively(pixels(2, 1, 32, 32))
    with pytest.raises(InvalidArgument, match="batch_size is 0"):
        features(lively, pixels(2, 3, 32, 32), batch_size=0)
    with pytest.raises(InvalidArgument, match="module=Sequential"):
        features(nn.Sequential(), pixels(2, 3, 32, 32))


def test_weights_from_a_file(lively: EfficientNetLite, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(lively.state_dict(), path)
    images = pixels(2, 3, 32, 32)
    torch.testing.assert_close(efficientnet_lite0(path, 10, resolution=32)(images), lively(images), rtol=0, atol=0)
    other = efficientnet_lite0(path, 7, resolution=32)
    torch.testing.assert_close(other.pooled(images), lively.pooled(images), rtol=0, atol=0)
    assert other(images).shape == (2, 7)
    assert not other._bn0.weight.requires_grad


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with pytest.raises(InvalidArgument, match="is not a file"):
        efficientnet_lite0(path)
    path.write_bytes(b"nothing")
    with pytest.raises(InvalidArgument, match="not a file of weights"):
        efficientnet_lite0(path)
    torch.save(linear(2, 2).state_dict(), path)
    with pytest.raises(InvalidArgument, match="other names"):
        efficientnet_lite0(path)
    state = efficientnet_lite0().state_dict()
    torch.save(state | {"_conv_stem.weight": torch.zeros(16, 3, 3, 3)}, path)
    with pytest.raises(InvalidArgument, match=r"'_conv_stem.weight' of shape \(16, 3, 3, 3\)"):
        efficientnet_lite0(path)


@pytest.mark.skipif(not WEIGHTS.is_file(), reason=f"needs $SFUMATO_DATA/weights/{WEIGHTS.name}")
@pytest.mark.parametrize("resolution", [224, 97])
def test_logits_are_those_of_the_published_model(resolution: int) -> None:
    """The oracle is the PyPI package that the weights were made with."""
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="needs pip install efficientnet-lite-pytorch")
    theirs = package.EfficientNet.from_name("efficientnet-lite0", image_size=resolution)
    theirs.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    ours = efficientnet_lite0(WEIGHTS, resolution=resolution).train()
    images = pixels(2, 3, resolution, resolution)
    with torch.no_grad():
        expected = theirs.eval()((images - 127.0) / 128.0)
        found, darker = ours(images), ours((images / 2).byte())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float((darker - expected).abs().max()) > 0.1  # the logits do depend on the image


def test_the_smallest_image_that_the_cnn_takes() -> None:
    assert cnn(1, 2)(torch.zeros(1, 1, CNN_SIDE, CNN_SIDE)).shape == (1, 2)
    for size in ((CNN_SIDE - 1, 28), (28, CNN_SIDE - 1)):
        with pytest.raises(RuntimeError, match=r"too small|Kernel size"):
            cnn(1, 2)(torch.zeros(1, 1, *size))
