"""The layers: what they compute, their gradients, and that autocast, vmap and overriding of functions work on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.nn import GroupNormAct, Pixels, WSConv2d
from sfumato.nn.functional import Activation, group_norm_act, standardised_conv2d, standardised_weight

KERNELS = pytest.mark.skipif(
    not kernels.INSTALLED or not (kernels.INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)
WAYS = [kernels.Use.NEVER, pytest.param(kernels.Use.INTERPRETER, marks=KERNELS)]
DEVICE = "cuda" if torch.cuda.is_available() and not kernels.INTERPRETED else "cpu"


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they would round to ten bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


PLAIN = {Activation.NONE: lambda u: u, Activation.RELU: F.relu, Activation.SILU: F.silu}


def inputs(channels: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, channels, 4, 4).to(dtype), 1 + torch.rand(channels), torch.rand(channels)
    return x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("channels", [8, 12])  # 12 does not fit the kernels
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_act_like_autograd(
    use: kernels.Use, activation: Activation, first: bool, channels: int, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (activation, Activation.NONE) if first else (Activation.NONE, activation)
    calls = watch_kernels(monkeypatch)
    x, weight, bias = inputs(channels)
    given = [x, weight, bias] if affine else [x]
    leaves = [t.clone().requires_grad_() for t in given]
    with kernels.using(use):
        y = group_norm_act(leaves[0], 4, *(leaves[1:] if affine else (None, None)), 1e-5, after, before)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        ours = [y, *torch.autograd.grad(y, leaves, dy)]
    wide = [t.double().requires_grad_() for t in given]
    z = PLAIN[after](F.group_norm(PLAIN[before](wide[0]), 4, *wide[1:]))
    for a, b in zip(ours, [z, *torch.autograd.grad(z, wide, dy.double())], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    fused = use is kernels.Use.INTERPRETER and channels == 8
    assert calls == (["forward", "backward"] if fused else [])


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("channels", [8, 12])
def test_an_inner_bias_is_added_before_the_first_activation(use: kernels.Use, channels: int) -> None:
    x, weight, bias = inputs(channels)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, bias / 3)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with kernels.using(use):
        y = group_norm_act(*leaves[:1], 4, *leaves[1:3], 1e-5, Activation.NONE, Activation.SILU, leaves[3])
    z = F.group_norm(F.silu(wide[0] + wide[3][:, None, None]), 4, *wide[1:3])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours, truth = [y, *torch.autograd.grad(y, leaves, dy)], [z, *torch.autograd.grad(z, wide, dy.double())]
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("channels", [8, 12])  # 12 does not fit the kernels
@pytest.mark.parametrize("places", [(Activation.NONE, Activation.SILU), (Activation.SILU, Activation.NONE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inner_bias_per_image_like_autograd(
    use: kernels.Use,
    channels: int,
    places: tuple[Activation, Activation],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a part of a wider tensor, as the conditions of a network are, and keeps a type of its own."""
    calls = watch_kernels(monkeypatch)
    before, after = places
    x, weight, bias = inputs(channels, dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, torch.randn(3, 2 * channels, device=DEVICE))]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with kernels.using(use):
        y = group_norm_act(*leaves[:1], 4, *leaves[1:3], 1e-5, after, before, leaves[3].split(channels, 1)[1])
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        ours = [y, *torch.autograd.grad(y, leaves, dy)]
    shifted = PLAIN[before](wide[0] + wide[3].split(channels, 1)[1][:, :, None, None])
    z = PLAIN[after](F.group_norm(shifted, 4, *wide[1:3]))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, [z, *torch.autograd.grad(z, wide, dy.double())], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    assert [t.dtype for t in ours] == [dtype, dtype, *[torch.float32] * 3]
    assert calls == (["forward", "backward"] if use is kernels.Use.INTERPRETER and channels == 8 else [])


@pytest.mark.parametrize("use", WAYS)
def test_an_inner_bias_per_image_in_other_dimensions_and_under_vmap(use: kernels.Use) -> None:
    x, rows = torch.randn(3, 8, 5, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    with kernels.using(use):
        y = group_norm_act(x, 2, None, None, inner_bias=rows)
        torch.testing.assert_close(y, F.relu(F.group_norm(x + rows[:, :, None], 2)))
        one_by_one = vmap(lambda x, row: group_norm_act(x[None], 2, None, None, inner_bias=row[None])[0])
        torch.testing.assert_close(one_by_one(x, rows), y)


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("wrong", [(2, 8), (1, 8), (3, 4), (1,), (24,), (8, 3), (3, 8, 1, 1)])
def test_an_inner_bias_of_another_shape_is_refused(use: kernels.Use, wrong: tuple[int, ...]) -> None:
    x, weight, bias = inputs()
    with kernels.using(use), pytest.raises(InvalidArgument, match=r"inner_bias has .* 8 numbers") as caught:
        group_norm_act(x, 4, weight, bias, inner_bias=torch.zeros(wrong, device=DEVICE))
    assert "3" not in str(caught.value), "how many images there are may be private"


def test_a_layer_is_given_an_inner_bias() -> None:
    layer, (x, _, _) = GroupNormAct(4, 8, "silu").to(DEVICE), inputs()
    rows = torch.randn(3, 8, device=DEVICE)
    torch.testing.assert_close(layer(x, rows), layer(x + rows[:, :, None, None]))
    of_its_own = GroupNormAct(4, 8, activation_first=True, inner_bias=True).to(DEVICE)
    with pytest.raises(InvalidArgument, match="inner_bias was given to a layer that has one"):
        of_its_own(x, rows)


def watch_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, as they are called."""
    calls: list[str] = []
    if not kernels.INSTALLED:
        return calls
    from sfumato.kernels import group_norm

    for name in ("forward", "backward"):
        original = getattr(group_norm, name)
        monkeypatch.setattr(group_norm, name, lambda *a, _f=original, _n=name: calls.append(_n) or _f(*a))
    return calls


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 5), (3, 8, 2, 3, 2)])
def test_other_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with kernels.using(kernels.Use.INTERPRETER):
        torch.testing.assert_close(group_norm_act(x, 2, None, None), F.relu(F.group_norm(x, 2)))


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type_and_float32_statistics(use: kernels.Use, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(8, dtype)
    with kernels.using(use), torch.autocast(DEVICE, torch.bfloat16):
        y = group_norm_act(x, 2, weight, bias)
    assert y.dtype == dtype
    exact = F.relu(F.group_norm(x.float(), 2, weight, bias))
    torch.testing.assert_close(y, exact.to(dtype), rtol=1e-2, atol=1e-6)
    assert group_norm_act(x.double(), 2, weight, bias).dtype == torch.float64


@pytest.mark.parametrize("use", WAYS)
def test_autocast_trains(use: kernels.Use) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pixels(), WSConv2d(3, 8, 3, padding=1, bias=True), GroupNormAct(4, 8), WSConv2d(8, 8, 1))
    model.to(DEVICE)
    kept: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda _m, _i, out: kept.append(out.dtype))
    with kernels.using(use):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8, device=DEVICE))
        out.float().square().mean().backward()
    assert kept == [torch.bfloat16] * 4
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert bool(p.grad.isfinite().all())
        assert bool(p.grad.any())


# ------------------------------------------------------------------------------------------------ standardised weights


def test_standardised_rows() -> None:
    weight, gain = torch.randn(5, 3, 3, 3) + 2, torch.rand(5)
    rows = standardised_weight(weight, None, 1e-12).flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(standardised_weight(weight, gain, 1e-12).flatten(1), rows * gain[:, None])
    assert standardised_weight(weight.bfloat16(), gain, 1e-4).dtype == torch.bfloat16
    assert bool(standardised_weight(torch.ones(2, 3, 1, 1), None, 1e-4).isfinite().all())


def test_the_gradient_has_its_closed_form() -> None:
    """At a large eps too, where the smoothing matters."""
    weight, gain = torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    g, eps = torch.randn_like(weight), 3.0
    leaves = weight.requires_grad_(), gain.requires_grad_()
    dw, dgain = torch.autograd.grad(standardised_weight(*leaves, eps), leaves, g)
    rows, G = weight.detach().flatten(1), g.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    r = (centred.square().sum(1, keepdim=True) + eps).rsqrt()
    u = centred * r
    along = (u * G).sum(1, keepdim=True)
    expected = gain.detach()[:, None] * r * (G - G.mean(1, keepdim=True) - u * along)
    torch.testing.assert_close(dw.flatten(1), expected)
    torch.testing.assert_close(dgain, along[:, 0])


@pytest.mark.parametrize("use", WAYS)
@pytest.mark.parametrize("with_gain", [True, False])
@pytest.mark.parametrize("half", [False, True])
def test_standardised_convolution_like_autograd(
    use: kernels.Use, with_gain: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    if kernels.INSTALLED:
        from sfumato.kernels import standardise

        for name in ("forward", "backward"):
            real = getattr(standardise, name)
            monkeypatch.setattr(standardise, name, lambda *a, n=name, f=real, **k: [calls.append(n), f(*a, **k)][1])
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 6, 6), torch.randn(5, 3, 3, 3) + 1, *([torch.rand(5)] if with_gain else [])]
    leaves = [t.to(DEVICE).requires_grad_() for t in given]
    wide = [t.to(DEVICE).double().requires_grad_() for t in given]
    with kernels.using(use), torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        y = standardised_conv2d(*leaves[:2], leaves[2] if with_gain else None, None, 2, 1)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        ours = [y, *torch.autograd.grad(y, leaves, dy)]
    z = F.conv2d(wide[0], standardised_weight(wide[1], wide[2] if with_gain else None, 1e-4), None, 2, 1)
    tolerance = 0.03 if half else 1e-5
    for a, b in zip(ours, [z, *torch.autograd.grad(z, wide, dy.double())], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))
    assert calls == (["forward", "backward"] if use is kernels.Use.INTERPRETER else [])


def test_convolution_options() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    layer = WSConv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=True).double()
    nn.init.uniform_(layer.gain)
    nn.init.uniform_(layer.bias)
    weight = standardised_weight(layer.weight, layer.gain, layer.eps)
    expected = F.conv2d(x, weight, layer.bias, (2, 1), (1, 0), (1, 2), 2)
    torch.testing.assert_close(layer(x), expected)
    without = WSConv2d(4, 6, 1, gain=False)
    assert [name for name, _ in without.named_parameters()] == ["weight"]
    torch.testing.assert_close(without(x.float()).shape, torch.Size([2, 6, 9, 8]))


def test_initial_weights() -> None:
    torch.manual_seed(0)
    layer = WSConv2d(64, 128, 3, groups=2, bias=True)
    assert abs(float(layer.weight.detach().std()) * (32 * 9) ** 0.5 - 1) < 0.02
    assert bool((layer.gain == 1).all())
    assert not bool(layer.bias.any())


# ------------------------------------------------------------------------------------------------ pixels


def test_pixels() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    expected = torch.tensor([-2.0, -1.2, 2.0]).reshape(1, 1, 1, 3)
    torch.testing.assert_close(Pixels()(pixels), expected)
    torch.testing.assert_close(Pixels()(pixels / 255), expected)
    torch.testing.assert_close(Pixels(0.0, 1.0)(pixels), pixels / 255)
    assert Pixels()((pixels / 255).double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        for images in (pixels, pixels / 255):
            assert Pixels()(images).dtype == torch.bfloat16


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_channels_last_on_a_gpu() -> None:
    model = nn.Sequential(Pixels(), WSConv2d(3, 8, 3), GroupNormAct(4, 8)).to(DEVICE)
    x = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8, device=DEVICE)
    for layer in model:
        x = layer(x)
        assert x.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------ as modules


@pytest.mark.parametrize("use", WAYS)
def test_per_example_gradients_by_vmap(use: kernels.Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cannot see through vmap, and are not called there."""
    torch.manual_seed(0)
    model = nn.Sequential(Pixels(), WSConv2d(3, 8, 3, padding=1), GroupNormAct(4, 8, "silu"), nn.Flatten())
    model.to(DEVICE)
    x = torch.rand(3, 3, 4, 4, device=DEVICE)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, params, (row[None],)).square().sum()

    calls = watch_kernels(monkeypatch)
    with kernels.using(use):
        rows = vmap(grad(loss), (None, 0))(params, x)
        assert calls == []
        for i in range(3):
            value = model(x[i : i + 1]).square().sum()
            alone = torch.autograd.grad(value, list(model.parameters()))
            for (_, ours), theirs in zip(rows.items(), alone, strict=True):
                torch.testing.assert_close(ours[i], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", WAYS)
def test_a_mode_sees_each_as_one_operation(use: kernels.Use) -> None:
    seen: list[tuple[Any, int, dict[str, Any]]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, len(args), kwargs or {}))
            return func(*args, **(kwargs or {}))

    conv, norm = WSConv2d(3, 8, 3).to(DEVICE), GroupNormAct(2, 8, None).to(DEVICE)
    x = torch.randn(2, 3, 5, 5, device=DEVICE)
    with kernels.using(use):
        expected = norm(conv(x))
        with Watch():
            y = norm(conv(x))
    of_ours = [s for s in seen if s[0] in (group_norm_act, standardised_conv2d, F.group_norm, F.conv2d)]
    assert of_ours == [(standardised_conv2d, 9, {}), (group_norm_act, 8, {})]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_state_is_kept_under_plain_names() -> None:
    make = [lambda: WSConv2d(4, 8, 3, bias=True), lambda: GroupNormAct(2, 8)]
    for build, names in zip(make, (["weight", "gain", "bias"], ["weight", "bias"]), strict=True):
        first, second = build(), build()
        for p in first.parameters():
            nn.init.uniform_(p)
        assert list(first.state_dict()) == names
        second.load_state_dict(first.state_dict())
        x = torch.randn(2, 4 if len(names) == 3 else 8, 5, 5)
        torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)
    assert Pixels().state_dict() == {}


def test_they_print_what_they_are() -> None:
    assert repr(WSConv2d(4, 8, 3)) == "WSConv2d(4, 8, kernel_size=(3, 3), stride=(1, 1))"
    full = WSConv2d(4, 8, 3, 2, 1, 2, 2, True, False, 1e-3)
    assert repr(full) == (
        "WSConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(2, 2), groups=2, eps=0.001, "
        "bias=True, gain=False)"
    )
    assert repr(GroupNormAct(2, 8, "silu")) == "GroupNormAct(2, 8, activation='silu', eps=1e-05)"
    assert repr(GroupNormAct(2, 8, activation_first=True)).endswith("eps=1e-05, activation_first=True)")
    assert repr(GroupNormAct(2, 8, activation_first=True, inner_bias=True)).endswith("first=True, inner_bias=True)")
    assert repr(Pixels()) == "Pixels(mean=0.5, std=0.25)"


def test_wrong_options_are_refused() -> None:
    for wrong, message in (
        (lambda: GroupNormAct(3, 8), "groups is 3"),
        (lambda: GroupNormAct(2, 8, inner_bias=True), "needs activation_first=True"),
        (lambda: GroupNormAct(2, 8, "tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: WSConv2d(3, 8, 3, groups=2), "groups is 2"),
        (lambda: Pixels(std=0.0), "std is 0.0"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            wrong()
