"""The network: its sizes, what it listens to, and that kernels change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.nn import GroupNormAct
from sfumato.synthesis.unet import UNet, _Block, _doubled_nhwc, _halved_nhwc, cifar_unet, ddpmpp_unet, digits_unet, unet

KERNELS = pytest.mark.skipif(
    not kernels.INSTALLED or not (kernels.INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


def shaken(network: UNet, seed: int = 0) -> UNet:
    """With weights that are nowhere zero, as they are after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return network.requires_grad_(False).eval()


def small(**options: Any) -> UNet:
    torch.manual_seed(0)
    given: dict[str, Any] = {"image": (1, 8, 8), "channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,)}
    return shaken(unet(**given | options))


def inputs(rows: int = 3, image: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor, Tensor, None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *image, generator=generator)
    return x, torch.linspace(-1.5, 1, rows), torch.arange(rows) % 10, None


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=KERNELS)])
def test_one_level_of_noise_may_be_of_all_images(fused: bool) -> None:
    network, (x, c_noise, _, _) = small(classes=0), inputs()
    with kernels.using(kernels.Use.INTERPRETER if fused else kernels.Use.NEVER):
        one, each = (network(x, level) for level in (c_noise[:1], c_noise[:1].repeat(3)))
    assert torch.allclose(one, each, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "millions"),
    [(cifar_unet, 27.8), (ddpmpp_unet, 55.5)],
)
def test_sizes_are_those_that_were_named(make: Any, millions: float) -> None:
    with torch.device("meta"):
        network = make()
        result = network(torch.empty(2, 3, 32, 32), torch.empty(2), torch.zeros(2, dtype=torch.long), torch.empty(2, 9))
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)
    assert result.shape == (2, 3, 32, 32)


def test_the_small_one_is_small() -> None:
    network = digits_unet()
    assert 0.1e6 < sum(p.numel() for p in network.parameters()) < 0.3e6
    assert network(*inputs()).shape == (3, 1, 8, 8)


@KERNELS
@pytest.mark.parametrize("make", [digits_unet, cifar_unet, ddpmpp_unet])
def test_every_normalisation_is_one_that_the_kernel_takes(make: Any) -> None:
    from sfumato.kernels.group_norm import fits

    with torch.device("meta"):
        network = make()
    norms = [part for part in network.modules() if isinstance(part, GroupNormAct)]
    assert len(norms) > 10
    assert all(fits(norm.channels, norm.groups, 32 * 32) for norm in norms)
    assert not any(isinstance(part, nn.GroupNorm | nn.SiLU) for part in network.modules())


def test_colour_images_in_float32_and_bfloat16() -> None:
    network = small(image=(3, 32, 32), channels=8, multipliers=(1, 2, 2), attention=(16,), augment_labels=9)
    x, c_noise, labels, _ = inputs(2, (3, 32, 32))
    plain = network(x, c_noise, labels, torch.ones(2, 9))
    assert plain.shape == (2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        low = network(x, c_noise, labels, torch.ones(2, 9))
    assert low.dtype == torch.bfloat16
    assert float((low.float() - plain).norm() / plain.norm()) < 0.05


def test_a_new_network_is_quiet() -> None:
    """Its blocks begin as the identity, so that training begins near F = 0, which EDM makes a good guess."""
    torch.manual_seed(0)
    assert float(digits_unet()(*inputs(16)).detach().std()) < 0.3


def test_rows_do_not_mix() -> None:
    network = small(augment_labels=9)
    x, c_noise, labels, _ = inputs(4)
    augment_labels = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    together = network(x, c_noise, labels, augment_labels)
    for i in range(4):
        one = slice(i, i + 1)
        alone = network(x[one], c_noise[one], labels[one], augment_labels[one])
        assert torch.allclose(together[one], alone, atol=1e-5)


@pytest.mark.parametrize("which", ["image", "noise", "label", "augmentation"])
def test_everything_that_is_given_has_an_effect(which: str) -> None:
    network = small(augment_labels=9)
    x, c_noise, labels, _ = inputs()
    augment_labels = torch.zeros(3, 9)
    before = network(x, c_noise, labels, augment_labels)
    changed = {
        "image": (x + 0.1, c_noise, labels, augment_labels),
        "noise": (x, c_noise + 0.1, labels, augment_labels),
        "label": (x, c_noise, labels + 1, augment_labels),
        "augmentation": (x, c_noise, labels, augment_labels + 0.1),
    }[which]
    assert ((network(*changed) - before).abs().amax((1, 2, 3)) > 1e-3).all()


def test_labels_of_zero_are_no_labels() -> None:
    network = small(augment_labels=9)
    x, c_noise, labels, _ = inputs()
    assert torch.equal(network(x, c_noise, labels, torch.zeros(3, 9)), network(x, c_noise, labels, None))


def test_without_classes_labels_are_ignored() -> None:
    network = small(classes=0)
    x, c_noise, labels, _ = inputs()
    assert torch.equal(network(x, c_noise, labels), network(x, c_noise, None))


def test_attention_sees_the_whole_image() -> None:
    """One pixel reaches the far corner through attention in the middle, and does not through two convolutions."""
    network = unet(image=(1, 16, 16), classes=0, channels=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0)
    network.requires_grad_(False)
    x, c_noise, _, _ = inputs(1, (1, 16, 16))
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "attention" in name and "norm" not in name:
                p.normal_()
    moved = x.clone()
    moved[0, 0, 0, 0] += 3
    quiet = network(x, c_noise)[0, 0, -1, -1]
    assert abs(float(network(moved, c_noise)[0, 0, -1, -1] - quiet)) > 1e-4


@KERNELS
def test_kernels_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.kernels import group_norm

    calls: list[int] = []
    original = group_norm.forward
    monkeypatch.setattr(group_norm, "forward", lambda *a: calls.append(1) or original(*a))
    network = small(image=(1, 4, 4), channels=8, attention=(4,)).requires_grad_()

    def found(use: kernels.Use) -> list[Tensor]:
        with kernels.using(use):
            y = network(*inputs(2, (1, 4, 4)))
            return [y.detach(), *torch.autograd.grad(y.square().sum(), list(network.parameters()))]

    fast = found(kernels.Use.INTERPRETER)
    assert len(calls) == sum(isinstance(part, GroupNormAct) for part in network.modules())
    for a, b in zip(fast, found(kernels.Use.NEVER), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("use", [kernels.Use.NEVER, pytest.param(kernels.Use.INTERPRETER, marks=KERNELS)])
@pytest.mark.parametrize("channels", [8, 12])  # 12 does not fit the kernel
def test_a_block_is_shifted_within_its_normalisation(use: kernels.Use, channels: int) -> None:
    """To the same result as by an addition of its own, without a tensor of the size of the images."""
    added: list[Any] = []

    class Additions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.add, Tensor.add, Tensor.__add__):
                added.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    block, x, conditions = _Block(8, channels, 0.0), torch.randn(3, 8, 4, 4), torch.randn(3, 2 * channels)
    nn.init.normal_(block.conv2.weight)
    leaves = [*block.parameters(), x.requires_grad_(), conditions.requires_grad_()]
    shift = conditions.split(channels, 1)[1]
    with kernels.using(use):
        with Additions():
            y = block(x, shift)
        h = block.conv1(block.norm1(x)) + shift[:, :, None, None]
        z = block.conv2(block.norm2(h)) + (x if block.shortcut is None else block.shortcut(x))
        assert added == [(3, channels, 4, 4)]  # the block's own, of what it is added to
        dy = torch.randn_like(y)
        ours, theirs = ([t, *torch.autograd.grad(t, leaves, dy)] for t in (y, z))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_dropout_is_for_training() -> None:
    network = small(dropout=0.5)
    assert torch.equal(network(*inputs()), network(*inputs()))
    network.train()
    assert not torch.allclose(network(*inputs()), network(*inputs()), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": (32, 32)}, "must be \\(channels, height, width\\)"),
        ({"image": (1, 10, 10)}, "do not allow: give fewer levels"),
        ({"channels": 6}, "channels=6 must be a multiple of 4"),
        ({"channels": 100}, "do not divide into attention heads"),
        ({"multipliers": ()}, "multipliers=\\(\\) must be positive"),
        ({"blocks": 0}, "blocks=0 must be a whole number of at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must lie in"),
    ],
)
def test_wrong_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        unet(**options)


def test_wrong_labels_are_refused() -> None:
    x, c_noise, labels, _ = inputs()
    with pytest.raises(InvalidArgument, match="labels=None must hold one of 10 classes"):
        small()(x, c_noise)
    with pytest.raises(InvalidArgument, match="augment_labels were given to a network without any"):
        small()(x, c_noise, labels, torch.zeros(3, 9))


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(_halved_nhwc, lambda x: F.avg_pool2d(x, 2)), (_doubled_nhwc, lambda x: F.interpolate(x, scale_factor=2.0))],
    ids=["halved", "doubled"],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_resizing_for_gpus_is_resizing(ours: Any, torchs: Any, layout: torch.memory_format) -> None:
    x = torch.randn(3, 5, 4, 6, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    found, wanted = ours(x), torchs(x)
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)
    v = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x, v), torch.autograd.grad(wanted, x, v))
