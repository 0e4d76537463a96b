"""The normalisation kernels against their twins, and both against autograd through torch's own group norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import kernels
from sfumato.errors import InvalidArgument

if not kernels.INSTALLED:
    pytest.skip("needs Triton", allow_module_level=True)
if not kernels.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from sfumato.kernels import group_norm as gn

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda u: u, "relu": F.relu, "silu": F.silu}
SHAPES = [  # channels, groups, height, width; 35 and 9 positions are no powers of two
    (16, 16, 4, 4),
    (16, 4, 5, 7),
    (8, 1, 4, 4),
    (64, 16, 3, 3),
    (4, 2, 1, 1),
    (1, 1, 8, 4),
]


def make(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, images: int = 3) -> list[Tensor]:
    """x, dy, weight and bias, with no pre-activation near the kink of a ReLU."""
    C, groups, H, W = shape
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(images, C, H, W, generator=generator).to(dtype) for _ in range(2))
    weight = 1 + 0.3 * torch.rand(C, generator=generator)
    bias = torch.randn(C, generator=generator)
    u = F.group_norm(x.double(), groups, weight.double(), bias.double())
    for _ in range(200):
        near = (u.abs() < 2e-3).amax((0, 2, 3))
        bias = torch.where(near, bias + 5e-3, bias)
        u = F.group_norm(x.double(), groups, weight.double(), bias.double())
    assert float(u.abs().min()) > 1e-3
    return [t.to(DEVICE) for t in (x, dy, weight, bias)]


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write shows."""

    def full(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", full(torch.empty))
    monkeypatch.setattr(torch, "empty_like", full(torch.empty_like))


Activations = tuple[str, str]  # before and after
Inner = Callable[[Tensor], Tensor]  # the inner bias for some images

PLACES: list[Activations] = [
    ("none", "none"),
    *(("none", a) for a in ("relu", "silu")),
    *((a, "none") for a in ("relu", "silu")),
    ("silu", "relu"),
]


def both(
    shape: tuple[int, int, int, int], dtype: torch.dtype, places: Activations, inner: Inner | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Every result of forward and backward, from kernel and twin."""
    x, dy, weight, bias = make(shape, dtype)
    groups, a = shape[1], None if inner is None else inner(x)
    ours = gn.forward(x, groups, weight, bias, 1e-5, *places, a)
    theirs = gn.forward_slowly(x, groups, weight, bias, 1e-5, *places, a)
    ours += found(gn.backward(x, dy, weight, bias, *ours[1:], groups, *places, a))
    theirs += found(gn.backward_slowly(x, dy, weight, bias, *theirs[1:], groups, *places, a))
    assert len(ours) == (6 if inner is None else 7)
    return list(zip(ours, theirs, strict=True))


def inner_bias(x: Tensor) -> Tensor:
    """One number per channel that brings no x to the kink of a ReLU."""
    bias = torch.full((x.shape[1],), 0.3, device=x.device)
    for _ in range(200):
        near = ((x.float() + bias[:, None, None]).abs() < 2e-3).amax((0, 2, 3))
        bias = torch.where(near, bias + 5e-3, bias)
    return bias


def per_image(x: Tensor) -> Tensor:
    """The same in rows, one per image, of either sign: columns of a wider tensor, which is NaN elsewhere."""
    N, C = x.shape[:2]
    wider = torch.full((N, 2 * C + 3), float("nan"), device=x.device)
    signs = [(-1) ** i for i in range(N)]
    wider[:, 3 : C + 3] = torch.stack([s * inner_bias(s * image[None]) for s, image in zip(signs, x, strict=True)])
    return wider[:, 3 : C + 3]


def found(results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(t for t in results if t is not None)


def compare(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.ndim == 2 or ours.is_contiguous(memory_format=torch.channels_last)
        rounding = 2e-2 if ours.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("places", PLACES[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_like_their_twins(
    shape: tuple[int, int, int, int], dtype: torch.dtype, places: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gn.fits(shape[0], shape[1], shape[2] * shape[3])
    poisoned(monkeypatch)
    compare(both(shape, dtype, places), dtype)


@pytest.mark.parametrize("inner", [inner_bias, per_image])
@pytest.mark.parametrize("places", [("relu", "none"), ("silu", "relu")])
@pytest.mark.parametrize("tiles", ["one", "several"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_inner_bias(
    shape: tuple[int, int, int, int], tiles: str, places: Activations, inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiles == "several":
        cut(shape, monkeypatch)
    poisoned(monkeypatch)
    compare(both(shape, torch.float32, places, inner), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inner_bias_per_image_is_added_to_each_image(dtype: torch.dtype) -> None:
    """However its rows lie, in whatever type: what each image alone gets with its row."""
    x, dy, weight, bias = make((16, 4, 4, 4), dtype)
    rows = torch.randn(3, 35, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, 3:19]
    options = 1e-5, "none", "silu"
    y, *kept = gn.forward(x, 4, weight, bias, *options, rows)
    gradients = gn.backward(x, dy, weight, bias, *kept, 4, *options[1:], rows)
    for i in range(len(x)):
        one = slice(i, i + 1)
        alone, *kept_alone = gn.forward(x[one], 4, weight, bias, *options, rows[i])
        theirs = gn.backward(x[one], dy[one], weight, bias, *kept_alone, 4, *options[1:], rows[i])
        ours = [t[one] for t in (y, *found(gradients))]
        compare(list(zip(ours, (alone, *found(theirs)), strict=True)), dtype)
    shared = rows[:1].expand(3, 16)  # row stride 0
    for a, b in ((rows.contiguous(), rows), (rows.t().contiguous().t(), rows), (shared, rows[0])):
        compare(list(zip(*(gn.forward(x, 4, weight, bias, *options, r) for r in (a, b)), strict=True)), dtype)


@pytest.mark.parametrize("wrong", [(2, 16), (1, 16), (3, 8), (8,), (16, 3), (3, 16, 1)])
def test_shapes_past_whose_end_a_kernel_would_read_are_refused(wrong: tuple[int, ...]) -> None:
    x, dy, weight, bias = make((16, 4, 4, 4))
    a = torch.zeros(wrong, device=x.device)
    mean = torch.zeros(3, 4, device=x.device)
    with pytest.raises(InvalidArgument, match=r"16 of them; .* for every image") as caught:
        gn.forward(x, 4, weight, bias, 1e-5, "none", "silu", a)
    assert "3" not in str(caught.value), "how many images there are may be private"
    with pytest.raises(InvalidArgument, match="weight, bias or inner bias has"):
        gn.backward(x, dy, weight, bias, mean, mean, 4, "none", "silu", a)
    for w, b in ((a, bias), (weight, a), (torch.ones(3, 16), bias)):
        with pytest.raises(InvalidArgument, match="weight, bias or inner bias has"):
            gn.forward(x, 4, w, b, 1e-5, "none", "silu")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("places", [("none", "silu"), ("silu", "none"), ("relu", "none")])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_of_several_tiles(
    shape: tuple[int, int, int, int], places: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(shape, monkeypatch)
    poisoned(monkeypatch)
    compare(both(shape, torch.float32, places), torch.float32)


def cut(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Images into tiles of 4 positions, in float32."""
    for table in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(gn, table, {})
    monkeypatch.setattr(gn, "_OTHERWISE", (8 * shape[0], 4))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("slowly", [False, True])
def test_like_autograd(places: Activations, slowly: bool) -> None:
    """And the gradients of weight and biases of each image are those of that image alone."""
    x, dy, weight, bias = make((16, 4, 4, 4))
    inner = inner_bias(x) if places == ("relu", "none") else torch.zeros(16, device=x.device)
    forward, backward = (gn.forward_slowly, gn.backward_slowly) if slowly else (gn.forward, gn.backward)
    y, mean, rstd = forward(x, 4, weight, bias, 1e-5, *places, inner)
    dx, dw, db, da = backward(x, dy, weight, bias, mean, rstd, 4, *places, inner)
    assert da is not None
    for i in range(len(x)):
        leaves = [t.double().requires_grad_() for t in (x[i : i + 1], weight, bias, inner)]
        before, after = (ACTIVATIONS[a] for a in places)
        out = after(F.group_norm(before(leaves[0] + leaves[3][:, None, None]), 4, leaves[1], leaves[2]))
        truth = [out, *torch.autograd.grad(out, leaves, dy[i : i + 1].double())]
        for ours, theirs in zip((y[i : i + 1], dx[i : i + 1], dw[i], db[i], da[i]), truth, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slowly", [False, True])
def test_without_affine(slowly: bool) -> None:
    x, dy, *_ = make((8, 2, 4, 4))
    forward, backward = (gn.forward_slowly, gn.backward_slowly) if slowly else (gn.forward, gn.backward)
    y, mean, rstd = forward(x, 2, None, None, 1e-5, "none", "silu")
    dx, dw, db, da = backward(x, dy, None, None, mean, rstd, 2, "none", "silu")
    leaf = x.clone().requires_grad_()
    out = F.silu(F.group_norm(leaf, 2))
    torch.testing.assert_close(y, out.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, torch.autograd.grad(out, leaf, dy)[0], rtol=1e-5, atol=1e-5)
    assert dw.shape == db.shape == (3, 8)
    assert da is None


def test_images_far_from_zero_keep_their_variance() -> None:
    """E x^2 - (E x)^2 would be rounding alone here."""
    x, _, weight, bias = make((8, 2, 4, 4))
    far = x + 1000
    y, _, rstd = gn.forward(far, 2, weight, bias, 1e-5, "none", "none")
    truth = F.group_norm(far.double(), 2, weight.double(), bias.double())
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-3)
    deviation = far.double().reshape(3, 2, -1).var(2, correction=0).add(1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), deviation, rtol=1e-4, atol=0)


@pytest.mark.parametrize("places", [("none", "relu"), ("relu", "none"), ("silu", "none")])
def test_one_bad_image_spoils_itself_alone(places: Activations) -> None:
    x, dy, weight, bias = make((8, 2, 4, 4))
    clean = gn.forward(x, 2, weight, bias, 1e-5, *places)
    x[1, 0, 0, 0] = float("nan")
    y, mean, rstd = gn.forward(x, 2, weight, bias, 1e-5, *places)
    dx, dw, db, da = gn.backward(x, dy, weight, bias, mean, rstd, 2, *places, torch.zeros_like(bias))
    assert y[1, :4].isnan().all()
    assert dw[1].isnan().any()
    assert da is not None
    for t in (y, dx, dw, db, da):
        assert t[[0, 2]].isfinite().all()
    torch.testing.assert_close(y[[0, 2]], clean[0][[0, 2]], rtol=0, atol=0)


def test_any_strides_and_no_images_at_all() -> None:
    x, dy, weight, bias = make((8, 2, 4, 4))
    expanded = dy[:, :, :1, :1].expand_as(dy)
    y, mean, rstd = gn.forward(x.contiguous(memory_format=torch.channels_last), 2, weight, bias, 1e-5, "none", "relu")
    torch.testing.assert_close(y, gn.forward(x.contiguous(), 2, weight, bias, 1e-5, "none", "relu")[0], rtol=0, atol=0)
    ours = gn.backward(x, expanded, weight, bias, mean, rstd, 2, "none", "relu")
    theirs = gn.backward(x, expanded.contiguous(), weight, bias, mean, rstd, 2, "none", "relu")
    for a, b in zip(found(ours), found(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    y, mean, rstd = gn.forward(x[:0], 2, weight, bias, 1e-5, "none", "relu")
    dx, dw, db, _ = gn.backward(x[:0], dy[:0], weight, bias, mean, rstd, 2, "none", "relu")
    assert (y.shape, dx.shape, dw.shape, db.shape) == (x[:0].shape, x[:0].shape, (0, 8), (0, 8))


@pytest.mark.parametrize(("channels", "groups", "positions"), [(12, 4, 16), (160, 16, 64), (8, 16, 4), (8192, 8, 1)])
def test_what_does_not_fit(channels: int, groups: int, positions: int) -> None:
    assert not gn.fits(channels, groups, positions)


def test_what_does_not_fit_runs_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(gn, kernel, None)
    compare(both((12, 3, 4, 4), torch.float32, ("none", "relu")), torch.float32)
