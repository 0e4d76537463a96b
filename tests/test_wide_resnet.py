"""The wide residual network: its size, what it takes, and that examples do not meet in it."""

from __future__ import annotations

import pytest
import torch

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.models.wide_resnet import wide_resnet
from sfumato.nn import GroupNormAct, WSConv2d

DEVICE = "cuda" if torch.cuda.is_available() and not kernels.INTERPRETED else "cpu"


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they would round to ten bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def pixels(rows: int, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=generator).to(DEVICE)


def count(**options: int) -> int:
    return sum(p.numel() for p in wide_resnet(**options).parameters())


def test_sizes() -> None:
    assert count(depth=16, width=4) == 2_751_146
    model = wide_resnet(16, 4)
    convolutions = [m for m in model.modules() if isinstance(m, WSConv2d)]
    norms = [m for m in model.modules() if isinstance(m, GroupNormAct)]
    assert len(convolutions) == 16  # 13 of 3 x 3, and 3 shortcuts
    assert [m.channels for m in norms] == [16, 64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 256, 256]
    assert all(m.groups == 16 for m in norms)


def test_with_the_activation_first_shortcuts_have_norms_of_their_own() -> None:
    model = wide_resnet(16, 4, activation_first=True)
    norms = [m for m in model.modules() if isinstance(m, GroupNormAct)]
    assert len(norms) == 16
    assert all(m.inner_bias is not None for m in norms)
    assert all(m.bias is None for m in model.modules() if isinstance(m, WSConv2d))
    assert not any(n.inner_bias is not None for n in wide_resnet(16, 4).modules() if isinstance(n, GroupNormAct))


def test_groups_divide_the_channels() -> None:
    norms = [m for m in wide_resnet(10, 3, groups=32).modules() if isinstance(m, GroupNormAct)]
    assert [(m.channels, m.groups) for m in norms] == [
        (16, 16),
        (48, 16),
        (48, 16),
        (96, 32),
        (96, 32),
        (192, 32),
        (192, 32),
    ]


def test_uint8_and_floats_give_the_same() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 1, 7).to(DEVICE)
    images = pixels(3)
    logits = model(images)
    assert logits.shape == (3, 7)
    torch.testing.assert_close(model(images / 255), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(images[:1]), logits[:1], rtol=1e-4, atol=1e-4)


def test_activation_first_gives_convolutions_features_of_mean_0() -> None:
    torch.manual_seed(0)
    seen = {}
    for first in (False, True):
        model = wide_resnet(10, 1, activation_first=first).to(DEVICE)
        for conv in model.body.modules():
            if isinstance(conv, WSConv2d):
                conv.register_forward_pre_hook(
                    lambda _m, given, f=first: seen.setdefault(f, []).append(given[0].detach())
                )
        assert bool(model(pixels(2)).isfinite().all())
    assert all(float(x.min()) == 0 for x in seen[False])
    assert all(float(x.mean().abs()) < 1e-5 and float(x.min()) < 0 for x in seen[True])


def test_strides() -> None:
    model = wide_resnet(10, 1).to(DEVICE)
    sizes = []
    for block in model.body:
        block.register_forward_hook(lambda _m, _i, out: sizes.append(tuple(out.shape[1:])))
    model(pixels(1, 16))
    assert sizes == [(16, 16, 16), (32, 8, 8), (64, 4, 4)]


def test_learns_under_autocast() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 1).to(DEVICE)
    images, labels = pixels(8), torch.arange(8, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(images)
        assert logits.dtype == torch.float32
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.skipif(not kernels.INSTALLED, reason="needs Triton")
@pytest.mark.skipif(not kernels.INTERPRETED and DEVICE == "cpu", reason="needs a CUDA device, or TRITON_INTERPRET=1")
def test_kernels_change_nothing() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 1).to(DEVICE)
    images = pixels(2)
    found = []
    for use in (kernels.Use.NEVER, kernels.Use.INTERPRETER):
        with kernels.using(use):
            logits = model(images)
            found.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    largest = max(float(t.abs().max()) for t in found[0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * largest)


def test_state_round_trip() -> None:
    first, second = wide_resnet(10, 1).to(DEVICE), wide_resnet(10, 1).to(DEVICE)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(pixels(2)), first(pixels(2)), rtol=0, atol=0)


def test_wrong_sizes_are_refused() -> None:
    for options in ({"depth": 15}, {"depth": 4}, {"width": 0}, {"outputs": 0}, {"channels": 0}, {"groups": 0}):
        name, value = next(iter(options.items()))
        with pytest.raises(InvalidArgument, match=f"{name} is {value}"):
            wide_resnet(**options)
