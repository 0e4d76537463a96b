"""The engine with its kernels: the norm that clips, the bound on a contribution, and the sums.

Runs on a GPU where there is one, with larger shapes and more of them, else in Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import kernels
from sfumato.data.samplers import Poisson
from sfumato.errors import UnsupportedModel
from sfumato.gradients import Clip, Gradient, Performance, clipped_sum, engine, factored, memory, passes, reference
from sfumato.gradients.contributions import Contribution, Dense, Shift
from sfumato.gradients.engine import _next_part
from sfumato.gradients.factored import Outer, Tied
from sfumato.gradients.graphs import state_of
from sfumato.gradients.passes import Addends, exact_products, per_unit
from sfumato.gradients.probe import Probe
from sfumato.gradients.rows import Bundled, Order, Rows, Standardisation
from sfumato.gradients.rules import linear
from sfumato.gradients.rules.convolution import Convolution
from sfumato.models.lstm import WordLSTM
from sfumato.models.wide_resnet import wide_resnet
from sfumato.nn import GroupNormAct, WSConv2d
from sfumato.objective import Objective, cross_entropy
from sfumato.text import next_word
from tests.gradients import oracle
from tests.gradients.layers import Conditioned

CUDA = torch.cuda.is_available() and not kernels.INTERPRETED
if not kernels.INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not CUDA and not kernels.INTERPRETED:
    pytest.skip("neither a GPU nor Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

DEVICE, USE = ("cuda", kernels.Use.AUTO) if CUDA else ("cpu", kernels.Use.INTERPRETER)
NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="needs a CUDA device: CUDA graphs, and memory that can be measured")
ROUNDED = 1 + 1e-6
CLIPS = ("plain", "origin", "scale", "origin+scale")
Offsets = Sequence[dict[str, Tensor]]
Batch = tuple[Tensor, Tensor]

# NumPy, which is the interpreter, warns where rows overflow on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


# ------------------------------------------------------------------------------------------------ models


class Tail(nn.Module):
    """The mean over positions of images, then logits."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).float().mean((2, 3)))


def standardised() -> nn.Module:
    return Tail(
        nn.Sequential(
            WSConv2d(3, 16, 3, padding=1, bias=True),
            GroupNormAct(4, 16, "silu"),
            WSConv2d(16, 16, 3, stride=2, padding=1),
            GroupNormAct(4, 16, "silu", activation_first=True, inner_bias=True),
        ),
        16,
    )


def plain(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return Tail(
        nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.GroupNorm(4, 16),
            activation(),
            nn.Conv2d(16, 16, 3, padding=1),
            activation(),
        ),
        16,
    )


class Positions(nn.Module):
    """A linear net over positions: R > 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().mean(1)


class Language(nn.Module):
    """Next tokens by a table that is read and multiplied with."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.norm(self.table(tokens)))), self.table.weight)


def next_tokens(module: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    losses = F.cross_entropy(module(inputs).float().transpose(1, 2), targets, reduction="none")
    return losses.mean(1)


SIDE, UNITS = (16, 16) if CUDA else (5, 2)


def images(units: int, side: int = SIDE) -> Batch:
    return torch.randn(units, 3, side, side), torch.arange(units) % 4


def sequences(units: int) -> Batch:
    return torch.randn(units, 5, 24), torch.arange(units) % 4


VOCABULARY, WIDTH = (1000, 128) if CUDA else (40, 24)


def text(units: int) -> Batch:
    return torch.randint(0, VOCABULARY, (units, 6)), torch.randint(0, VOCABULARY, (units, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Any]] = {
    "standardised": (standardised, images, cross_entropy),
    "wide-resnet": (lambda: wide_resnet(10, 1, 4, groups=4), images, cross_entropy),
    "plain": (plain, images, cross_entropy),
    "smooth": (lambda: plain(nn.SiLU), images, cross_entropy),
    "sequence": (Positions, sequences, cross_entropy),
    "language": (lambda: Language(VOCABULARY, WIDTH), text, next_tokens),
}


@functools.cache  # with what the probe found out
def make(name: str, units: int = UNITS, autocast: torch.dtype | None = None) -> tuple[Objective, Batch]:
    torch.manual_seed(0)
    module, batch, loss = MODELS[name]
    inputs, targets = (t.to(DEVICE) for t in batch(units))
    return Objective(module().to(DEVICE), loss, autocast), (inputs, targets)


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter is bundled with others: what only large ones do happens at the interpreter's sizes too."""
    monkeypatch.setattr(factored, "SMALL", 16)
    monkeypatch.setattr(passes, "SMALL", 16)


def like(params: dict[str, Tensor], seed: int, size: float = 1.0, *, positive: bool = False) -> Gradient:
    """`oracle.like` on any device."""
    on_cpu = oracle.like({n: p.cpu() for n, p in params.items()}, seed, positive=positive)
    return Gradient({n: size * t.to(DEVICE) for n, t in on_cpu.items()})


def clip_of(kind: str, params: dict[str, Tensor], norm: float) -> Clip:
    origin = like(params, 1, 0.3) if "origin" in kind else None
    return Clip(norm, origin=origin, scale=like(params, 2, positive=True) if "scale" in kind else None)


def moves(params: dict[str, Tensor], count: int, size: float = 0.1) -> Offsets:
    return [dict(like(params, 10 + k, size)) for k in range(count)]


def different_views(views: int) -> Callable[[Any], Any] | None:
    """Which must differ, else their mean would be one of them."""
    if views == 1:
        return None

    def augment(batch: Any) -> Any:
        x = batch[0]
        view = torch.arange(len(x), device=x.device) % views
        if x.is_floating_point():
            return x * (1 + 0.3 * view).reshape(-1, *[1] * (x.ndim - 1)), *batch[1:]
        return (x + view[:, None]) % VOCABULARY, *batch[1:]

    return augment


# ------------------------------------------------------------------------------------------------ what is summed


def known(objective: Objective, batch: Any) -> Any:
    """The trace; in plain PyTorch where kernels are slow."""
    with kernels.using(kernels.Use.AUTO if CUDA else kernels.Use.NEVER):
        return Probe.of(objective).trace(objective.parameters(), batch)


def collect(
    objective: Objective,
    batch: Any,
    clip: Clip,
    *,
    ordinary: Any = None,
    views: int = 1,
    offsets: Offsets | None = None,
    augment: Callable[[Any], Any] | None = None,
    performance: Performance | None = None,
) -> Addends:
    performance = performance or Performance()
    found = known(objective, batch if ordinary is None else ordinary)
    with kernels.using(USE), exact_products(performance, recurring=False):
        return per_unit(
            objective,
            objective.parameters(),
            batch,
            found,
            count=len(batch[0]),
            clip=clip,
            origin=clip.origin,
            scale=clip.scale,
            views=views,
            offsets=offsets,
            augment=augment,
            performance=performance,
        )


def gradients_of(contribution: Contribution) -> Tensor:
    """(U, *shape) float64, from the numbers that are kept."""
    if isinstance(contribution, Tied):
        return gradients_of(contribution.read) + gradients_of(contribution.used)
    if isinstance(contribution, Outer):
        a = contribution.a if contribution.one_hot else contribution.a.double()
        return Outer(a, contribution.b.double(), contribution.outputs).dense()
    if isinstance(contribution, Convolution):
        c = contribution
        assert not c.earlier
        return Convolution(c.x.double(), c.dy.double(), c.weight.double(), c.geometry, c.units).dense()
    if isinstance(contribution, Bundled):
        bundle, place = contribution._bundle, contribution._place
        rows = torch.split(bundle._rows.rows[:, 0], bundle.sizes, 1)[place]
        return rows.double().reshape(-1, *contribution._shape)
    assert isinstance(contribution, Rows)
    rows, s = contribution.rows.double(), contribution.standardisation
    rows = rows if s is None else Standardisation(s.directions.double(), s.scales.double()).mapped(rows)
    return contribution.order.from_rows(rows)


def summed(addends: Addends, clip: Clip, *, by_kernel: bool = True) -> Tensor:
    """(U, all entries) float64: what is multiplied by the factor and summed."""
    parts = []
    for name, contribution in addends.contributions.items():
        if isinstance(contribution, Dense):
            parts.append(contribution.gradients.double().flatten(1))  # shifted already
            continue
        if isinstance(contribution, Rows) and not by_kernel:
            parts.append(contribution.rows.double().flatten(1))  # mapped and shifted already
            continue
        rows = gradients_of(contribution)
        rows = rows if clip.origin is None else rows - clip.origin[name].double()
        rows = rows if clip.scale is None else rows * clip.scale[name].double()
        parts.append(rows.flatten(1))
    return torch.cat(parts, 1)


def assert_bounded(addends: Addends, clip: Clip, *, by_kernel: bool = True, most: float = ROUNDED) -> Tensor:
    """Every unit's addend is at most C long; returns the true lengths of the vectors."""
    vectors = summed(addends, clip, by_kernel=by_kernel)
    lengths = vectors.norm(dim=1)
    used = addends.factors.float().double()
    not_finite = ~torch.isfinite(vectors).all(1)
    assert not used[not_finite].any(), "a unit that is not finite must add nothing"
    contributed = torch.where(not_finite, 0.0, used * lengths)
    assert bool((contributed <= clip.norm * most).all()), f"{float(contributed.max()) / clip.norm - 1:.1e} above C"
    return lengths


def assert_added_one_by_one(addends: Addends, clip: Clip, performance: Performance) -> None:
    """The same of what the weighted sums themselves put out for one unit at a time."""
    lengths = []
    for unit in range(len(addends.factors)):
        alone = torch.zeros_like(addends.factors)
        alone[unit] = addends.factors[unit]
        with kernels.using(USE), exact_products(performance, recurring=False):
            sums = [c.weighted_sum(alone, 1 << 20).double() for c in addends.contributions.values()]
        lengths.append(torch.stack([t.square().sum() for t in sums]).sum().sqrt())
    longest = float(torch.stack(lengths).max())
    assert longest <= clip.norm * ROUNDED, f"{longest / clip.norm - 1:.1e} above C"


def total(objective: Objective, batch: Any, clip: Clip, **options: Any) -> dict[str, Tensor]:
    known(objective, batch)
    with kernels.using(USE):
        return clipped_sum(objective, objective.parameters(), batch, clip=clip, **options)


# ------------------------------------------------------------------------------------------------ 1. the norm
PASSES = [(1, False), (3, False), (3, True)]


def assert_tight(addends: Addends, clip: Clip) -> None:
    truth = summed(addends, clip).norm(dim=1)
    ratio = addends.norms / truth
    assert float(ratio.min()) >= 1 - 1e-12, f"{1 - float(ratio.min()):.1e} below the norm of what is summed"
    # Norms from factors are raised by a bound on their rounding, which is larger than that of stored rows.
    from_factors = any(isinstance(c, Outer | Convolution | Tied) for c in addends.contributions.values())
    above = float(ratio.max()) - 1
    assert above <= (5e-5 if from_factors else 1e-5), f"{above:.1e} above the norm of what is summed"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("views", "moved"), PASSES, ids=["one view", "views", "offsets"])
@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("name", ["standardised", "plain", "sequence", "language"])
def test_the_norm_is_that_of_what_is_summed(name: str, kind: str, views: int, moved: bool) -> None:
    objective, batch = make(name)
    params = objective.parameters()
    clip = clip_of(kind, params, 0.1)
    offsets = moves(params, views) if moved else None
    augment = different_views(views)
    addends = collect(objective, batch, clip, views=views, offsets=offsets, augment=augment)
    assert_tight(addends, clip)
    assert_bounded(addends, clip)


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("name", ["sequence", "language"])
def test_the_norm_of_large_parameters(name: str, kind: str) -> None:
    """They are not bundled: their norms come from factors where that is possible, else as rows."""
    objective, batch = make(name)
    clip = clip_of(kind, objective.parameters(), 0.1)
    addends = collect(objective, batch, clip)
    assert not isinstance(addends.contributions[next(iter(objective.parameters()))], Bundled)
    assert_tight(addends, clip)
    assert_bounded(addends, clip)


def test_mutant_a_norm_of_rows_before_they_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Rows.prepare

    def unmapped(self: Rows, shift: Any) -> Tensor:
        kept, self.standardisation = self.standardisation, None
        squared = prepare(self, shift)
        self.standardisation = kept
        return squared

    objective, batch = make("standardised")
    clip = Clip(0.1)
    assert_tight(collect(objective, batch, clip), clip)
    monkeypatch.setattr(Rows, "prepare", unmapped)
    with pytest.raises(AssertionError, match="the norm of what is summed"):
        assert_tight(collect(objective, batch, clip), clip)


# ------------------------------------------------------------------------------------------------ 2. the bound

HALF = torch.bfloat16


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize(
    ("name", "large"),
    [("sequence", False), ("sequence", True), ("language", False), ("language", True), ("standardised", False)],
)
def test_half_precision_keeps_the_bound(name: str, kind: str, large: bool, request: pytest.FixtureRequest) -> None:
    if large:
        request.getfixturevalue("everything_is_large")
    objective, batch = make(name, autocast=HALF)
    clip = clip_of(kind, objective.parameters(), 0.01)
    addends = collect(objective, batch, clip)
    lengths = assert_bounded(addends, clip)
    assert bool((addends.factors * lengths >= 0.99 * clip.norm).all()), "clipped more than needed"
    assert_added_one_by_one(addends, clip, Performance())


def add_up(module: nn.Module, batch: Batch) -> Tensor:
    """The gradient with respect to the module's output is the batch's second tensor."""
    x, dy = batch
    return (module(x).float() * dy).flatten(1).sum(1)


NASTY = {"ordinary": 1.0, "huge": 1e6, "tiny": 1e-20, "cancels": 1.0, "nan": torch.nan, "inf": torch.inf}


def drawn(dice: random.Random) -> tuple[str, nn.Module, tuple[int, ...]]:
    """A small random model, in words, itself and its input's shape."""
    k, stride, padding = dice.choice([1, 2, 3, 5]), dice.choice([1, 2]), dice.choice([0, 1, 2])
    inputs, hidden, side = dice.choice([3, 16, 20]), dice.choice([8, 16]), dice.randint(5, 8)
    kind = dice.choice(["standardised", "standardised", "plain", "linear"])
    words = f"{kind} {inputs}-{hidden} k{k} s{stride} p{padding} on {side}"
    if kind == "linear":
        return words, nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 5)), (side, inputs)
    options = {"stride": stride, "padding": padding, "bias": dice.random() < 0.5}
    if kind == "standardised":
        body = [WSConv2d(inputs, hidden, k, **options), GroupNormAct(4, hidden), WSConv2d(hidden, 8, 1)]
    else:
        body = [nn.Conv2d(inputs, hidden, k, **options), nn.GroupNorm(4, hidden), nn.ReLU(), nn.Conv2d(hidden, 8, 1)]
    return words, nn.Sequential(*body), (inputs, side, side)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(80 if CUDA else 10))
def test_no_row_adds_more_than_the_clip_norm(seed: int) -> None:
    """Random models and modes; rows that are huge, tiny, cancel between views, or are not finite."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    words, module, shape = drawn(dice)
    autocast, kind = (HALF if seed % 2 else None), CLIPS[seed // 2 % 4]
    performance = Performance(kernels=dice.random() < 0.8)
    views, moved = dice.choice([1, 2, 3]), dice.random() < 0.4
    mode = f"{words}, {autocast}, {kind}, {performance.kernels=}, {views=}, {moved=}"
    objective = Objective(module.to(DEVICE), add_up, autocast)
    params = objective.parameters()
    x = torch.randn(len(NASTY), *shape, device=DEVICE)
    dy = torch.randn(len(NASTY), *module(x).shape[1:], device=DEVICE)
    ordinary = (x.clone(), dy.clone())
    sizes = torch.tensor(list(NASTY.values()), device=DEVICE)
    dy *= torch.nan_to_num(sizes, 1.0, 1.0).reshape(-1, *[1] * (dy.ndim - 1))
    x[-2:] = sizes[-2:].reshape(-1, *[1] * (x.ndim - 1))  # everywhere: strides leave some columns unread
    place = list(NASTY).index("cancels")

    def augment(batch: Batch) -> Batch:
        """The second view of one unit is the opposite of its first, but for a little."""
        x, dy = batch
        if moved or views == 1:
            return batch
        sign = torch.ones(len(dy), device=dy.device)
        sign[place * views + 1] = -(1 - 2e-7)
        return x, dy * sign.reshape(-1, *[1] * (dy.ndim - 1))

    offsets = moves(params, views) if moved else None
    known_rows = {"ordinary": ordinary, "views": views, "offsets": offsets, "augment": augment}
    clip = clip_of(kind, params, dice.choice([1e-3, 0.5]))
    addends = collect(objective, (x, dy), clip, performance=performance, **known_rows)
    lengths = assert_bounded(addends, clip, by_kernel=performance.kernels)
    assert not addends.factors[-2:].any(), mode
    assert bool((addends.factors[:2] > 0).all()), mode
    assert float(lengths[1] * addends.factors[1]) >= 0.99 * clip.norm, mode
    assert_added_one_by_one(addends, clip, performance)
    with kernels.using(USE), exact_products(performance, recurring=False):
        ours = dict(addends.sums(1 << 20))
    without = collect(objective, (x[:-2], dy[:-2]), clip, performance=performance, **known_rows)
    with kernels.using(USE), exact_products(performance, recurring=False):
        clean = dict(without.sums(1 << 20))
    error = oracle.relative_error(ours, clean)
    assert error <= (1e-2 if autocast else 1e-5), f"{mode}: rows that are not finite moved others by {error:.1e}"


@pytest.mark.usefixtures("everything_is_large")
def test_mutant_a_clip_factor_rounded_to_half(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.kernels import outer

    weighted_sum = outer.weighted_sum

    def rounded(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
        return weighted_sum(a, b, factors.to(a.dtype).double())

    objective, batch = make("sequence", autocast=HALF)
    clip = Clip(0.01)
    addends = collect(objective, batch, clip)
    assert any(isinstance(c, Outer) and c.b.dtype == HALF for c in addends.contributions.values())
    assert_added_one_by_one(addends, clip, Performance())
    monkeypatch.setattr(outer, "weighted_sum", rounded)
    with pytest.raises(AssertionError, match="above C"):
        assert_added_one_by_one(addends, clip, Performance())


# ------------------------------------------------------------------------------------------------ 3. and 4. sums


def by_autograd(objective: Objective, batch: Any, layers: kernels.Use = kernels.Use.NEVER) -> dict[str, Tensor]:
    """The gradient of the summed losses, in the objective's own precision and without our kernels."""
    leaves = {name: p.clone().requires_grad_() for name, p in objective.parameters().items()}
    with kernels.using(layers), exact_products(Performance(), recurring=False):
        losses = objective.losses(leaves, batch)
        found = torch.autograd.grad(losses.sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("autocast", [None, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["standardised", "wide-resnet", "smooth", "sequence", "language"])
def test_without_a_clip_the_sum_is_autograds(name: str, autocast: torch.dtype | None) -> None:
    objective, batch = make(name, autocast=autocast)
    ours = total(objective, batch, Clip(1e9))
    # Another GroupNorm rounds otherwise, which flips ReLUs in bfloat16: there autograd has the layers' kernels too.
    layers = USE if name == "wide-resnet" and autocast is not None else kernels.Use.NEVER
    allowed = 1e-5 if autocast is None else 1e-2
    assert oracle.relative_error(ours, by_autograd(objective, batch, layers)) <= allowed


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("name", ["sequence", "language"])
def test_sums_of_large_half_factors_are_autograds(name: str) -> None:
    objective, batch = make(name, autocast=HALF)
    assert oracle.relative_error(total(objective, batch, Clip(1e9)), by_autograd(objective, batch)) <= 1e-2


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["plain", "origin+scale"])
@pytest.mark.parametrize("name", ["standardised", "smooth", "sequence", "language"])
def test_offsets_like_without_kernels_and_like_the_reference(name: str, kind: str) -> None:
    objective, batch = make(name)
    params = objective.parameters()
    clip, offsets = clip_of(kind, params, 0.1), moves(params, 2)
    ours = total(objective, batch, clip, views=2, offsets=offsets)
    slow = total(objective, batch, clip, views=2, offsets=offsets, performance=Performance(kernels=False))
    with kernels.using(kernels.Use.NEVER), exact_products(Performance(), recurring=False):
        truth = reference.clipped_sum(objective, params, batch, clip=clip, offsets=offsets)
    assert oracle.relative_error(ours, truth) <= 1e-5
    # Without our kernels a GPU's library adds the rows of an embedding in an order of its own: 1.7e-5 was seen.
    assert oracle.relative_error(ours, slow) <= (3e-5 if CUDA else 1e-5)


# ------------------------------------------------------------------------------------------------ 5. padding


@pytest.mark.thinned(3)
@pytest.mark.parametrize("autocast", [None, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smooth", "sequence", "language"])
def test_padding_adds_nothing(name: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five units in parts of sixteen: one of four, and one alone that is padded to two."""
    objective, batch = make(name, 5, autocast)
    params = objective.parameters()
    clip = clip_of("origin", params, 0.1)
    cut: list[tuple[int, int]] = []

    def watched(start: int, count: int, size: int, *, on_gpu: bool) -> tuple[int, int]:
        stop, padded = _next_part(start, count, size, on_gpu=on_gpu)
        cut.append((stop - start, padded))
        return stop, padded

    monkeypatch.setattr(engine, "_next_part", watched)
    ours = total(objective, batch, clip, performance=Performance(micro_batch=16))
    assert cut == [(4, 4), (1, 2)]
    alone = total(objective, batch, clip, performance=Performance(micro_batch=1))
    assert cut[2:] == [(1, 1)] * 5
    assert oracle.relative_error(ours, alone) <= (1e-5 if autocast is None else 1e-2)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, 100, 1024])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 64, 1000, 1025])
def test_parts_cover_every_unit_once(count: int, size: int) -> None:
    start, sizes = 0, [max(1, size >> i) for i in range(4)]
    while start < count:
        stop, padded = _next_part(start, count, size, on_gpu=True)
        assert start < stop <= count
        assert padded in sizes
        assert stop - start == padded or (stop == count and (padded == sizes[-1] or stop - start >= 0.75 * padded))
        start = stop
    assert start == count


@pytest.mark.parametrize("size", [1, 2, 7, 32, 100, 1024])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000, 1025])
def test_parts_on_a_cpu_are_whole_or_a_multiple_of_32(count: int, size: int) -> None:
    start = 0
    while start < count:
        stop, padded = _next_part(start, count, size, on_gpu=False)
        assert padded == size or (stop == count and padded % 32 == 0 and padded < size)
        assert 0 <= padded - (stop - start) < 32
        start = stop
    assert start == count


# ------------------------------------------------------------------------------------------------ 6. undeclared halves


def test_half_precision_that_is_not_declared_is_refused() -> None:
    """`tests/test_leaks.py` has the linear case without kernels."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(DEVICE, HALF):
            return cross_entropy(module, batch)

    torch.manual_seed(0)
    objective = Objective(plain(nn.SiLU).to(DEVICE), loss)
    with kernels.using(USE), pytest.raises(UnsupportedModel):
        clipped_sum(objective, objective.parameters(), tuple(t.to(DEVICE) for t in images(3, 6)), clip=Clip(1.0))


# ------------------------------------------------------------------------------------------------ 7. memory, graphs


def test_too_large_a_micro_batch_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, batch = make("sequence", 7)
    clip = clip_of("origin", objective.parameters(), 0.1)
    truth = total(objective, batch, clip)
    objective = Objective(objective.module, objective.loss)  # whose probe knows no size yet
    asked = []

    def scarce(*args: Any, count: int, **options: Any) -> Addends:
        asked.append(count)
        if count > 2:
            raise torch.OutOfMemoryError("simulated")
        return per_unit(*args, count=count, **options)

    known(objective, batch)
    monkeypatch.setattr(engine, "per_unit", scarce)
    assert oracle.relative_error(total(objective, batch, clip), truth) <= 1e-5
    assert set(Probe.of(objective).sizes.values()) <= {1, 2, 3}
    assert asked[0] > 2
    assert max(asked[2:]) <= 3
    with pytest.raises(torch.OutOfMemoryError):  # a size that was asked for is kept
        total(objective, batch, clip, performance=Performance(micro_batch=4))


@NEEDS_CUDA
def test_the_micro_batch_comes_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = make("standardised", 64)[0].module, make("standardised", 64)[1]
    chosen, sums = [], []
    for free in (None, 8 << 20, 1 << 20):
        objective = Objective(module, cross_entropy)
        if free is not None:
            monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        sums.append(total(objective, batch, Clip(0.1)))
        (size,) = Probe.of(objective).sizes.values()
        chosen.append(size)
        assert size & (size - 1) == 0
    assert chosen[0] >= chosen[1] > chosen[2]
    for ours in sums[1:]:
        assert oracle.relative_error(ours, sums[0]) <= 1e-5


@NEEDS_CUDA
@pytest.mark.parametrize("autocast", [None, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "origin+scale"])
@pytest.mark.parametrize("name", ["standardised", "plain", "sequence", "language"])
def test_a_graph_gives_what_its_kernels_give(name: str, kind: str, autocast: torch.dtype | None) -> None:
    made, _ = make(name, 8, autocast)
    objective = Objective(made.module, made.loss, autocast)
    start = objective.parameters()
    for step, moved in itertools.product(range(5), (False, True)):
        torch.manual_seed(step)
        batch = tuple(t.to(DEVICE) for t in MODELS[name][1](6 + step % 3))
        params = {n: p + 0.01 * step * torch.randn_like(p) for n, p in start.items()}
        norm = 0.1
        origin = like(params, step, 0.3) if "origin" in kind else None
        clip = Clip(norm, origin=origin, scale=like(params, 9 + step, positive=True) if "scale" in kind else None)
        options: dict[str, Any] = {"views": 2}
        if moved:
            options["offsets"] = [dict(like(params, 20 + 2 * step + k, 0.1)) for k in range(2)]
        found = [
            clipped_sum(
                objective, params, batch, clip=clip, performance=Performance(cuda_graph=graph, micro_batch=8), **options
            )
            for graph in (True, False)
        ]
        assert oracle.relative_error(*found) <= (1e-5 if autocast is None else 1e-2)
    assert Probe.of(objective).graphs._recorded, "nothing was recorded"


@NEEDS_CUDA
def test_an_lstm_is_recorded() -> None:
    torch.manual_seed(0)
    objective = Objective(WordLSTM(40, hidden=16).to(DEVICE), next_word)
    start = objective.parameters()
    for step in range(5):
        words = torch.randint(40, (6 + step % 3, 5), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        params = {n: p + 0.01 * step * torch.randn_like(p) for n, p in start.items()}
        found = [
            clipped_sum(
                objective,
                params,
                (words, words.flip(1)),
                clip=Clip(0.1),
                performance=Performance(cuda_graph=graph, micro_batch=8),
            )
            for graph in (True, False)
        ]
        assert oracle.relative_error(*found) <= 1e-5
    assert Probe.of(objective).graphs._recorded, "nothing was recorded"


class Waits(nn.Module):
    """Looks at a number on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 1e6:
            raise ArithmeticError
        return self.layer(x).mean(1)


@NEEDS_CUDA
def test_a_model_that_waits_for_the_gpu_runs_without_a_graph() -> None:
    torch.manual_seed(0)
    objective = Objective(Waits().to(DEVICE), cross_entropy)
    params = objective.parameters()
    performance = Performance(cuda_graph=True, micro_batch=8)

    def ask(step: int) -> None:
        torch.manual_seed(step)
        batch = tuple(t.to(DEVICE) for t in sequences(8))
        ours = clipped_sum(objective, params, batch, clip=Clip(0.1), performance=performance)
        with exact_products(performance, recurring=False):  # vmap would not let it look
            truth = reference.clipped_sum(
                Objective(objective.module.layer, mean_logits), unnested(params), batch, clip=Clip(0.1)
            )
        assert oracle.relative_error(unnested(ours), truth) <= 1e-5

    ask(0)
    with pytest.warns(UserWarning, match="waits for the GPU"):
        ask(1)
    for step in (2, 3, 4):
        ask(step)


def mean_logits(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]).mean(1), batch[1], reduction="none")


def unnested(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("layer."): p for n, p in params.items()}


# ------------------------------------------------------------------------------------------------ found in review


@pytest.mark.usefixtures("everything_is_large")
def test_a_unit_that_would_overflow_on_the_way_adds_zero_and_spoils_nothing() -> None:
    """Its norm is finite in float64, its products are not in float32."""
    objective = Objective(nn.Linear(24, 40, bias=False), add_up, autocast=torch.bfloat16)
    x, dy = torch.randn(3, 16, 24, device=DEVICE), torch.randn(3, 16, 40, device=DEVICE)
    objective.module.to(DEVICE)
    known(objective, (x, dy))
    without = total(objective, (x[:2], dy[:2]), Clip(1.0))
    x[2], dy[2] = 8e18, 8e18
    with_it = total(objective, (x, dy), Clip(1.0))
    assert oracle.relative_error(with_it, without) <= 1e-6


def test_rows_decide_once_who_maps_them() -> None:
    objective, batch = make("standardised")
    params = objective.parameters()
    clip = clip_of("origin", params, 0.5)
    addends = collect(objective, batch, clip)
    before = {n: c.weighted_sum(addends.factors, 8) for n, c in addends.contributions.items()}
    with kernels.contractions(False):
        after = {n: c.weighted_sum(addends.factors, 8) for n, c in addends.contributions.items()}
    assert oracle.relative_error(after, before) <= 1e-6


def test_a_large_origin_is_taken_off_in_float64() -> None:
    """Many units near a large origin: what is left is their own addends, not the rounding of so many origins."""
    origin = 300 * torch.randn(1, 40, device=DEVICE) / 40**0.5
    rows = origin + 0.01 * torch.randn(400, 1, 40, device=DEVICE)
    with kernels.using(USE):
        whole = Rows(rows.contiguous(), Order((1, 40), channels_last=False))
        shift = Shift(origin, None)
        whole.prepare(shift)
        sums = whole.weighted_sum(torch.ones(400, dtype=torch.float64, device=DEVICE), 8)
    truth = (rows.double() - origin.double()).sum(0)
    assert float((sums - truth).norm()) <= 1e-6 * float(truth.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("everything_is_large")
def test_outputs_that_are_padded_for_the_tensor_cores(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(nn.Linear(24, 41, bias=bias).to(DEVICE), add_up, autocast=torch.bfloat16)
    batch = torch.randn(3, 5, 24, device=DEVICE), torch.randn(3, 5, 41, device=DEVICE)
    known(objective, batch)
    for kind in CLIPS:
        clip = clip_of(kind, objective.parameters(), 0.5)
        plain = total(objective, batch, clip)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "_LARGE", 16)
            assert oracle.relative_error(total(objective, batch, clip), plain) <= 1e-5  # longer chains, larger bounds


@pytest.mark.parametrize("frozen", [False, True])
def test_an_inner_bias_per_image(frozen: bool) -> None:
    """What it is made of has its gradients row by row, whether the normalisation is private too or frozen."""
    torch.manual_seed(0)
    module = Conditioned().to(DEVICE)
    module.norm.requires_grad_(not frozen)
    objective = Objective(module, cross_entropy)
    batch = torch.randn(5, 3, 6, 6, device=DEVICE), torch.tensor([0, 1, 2, 0, 1], device=DEVICE)
    params = objective.parameters()
    truth = oracle.one_by_one(objective, params, batch, 5)
    for kind in CLIPS:
        clip = clip_of(kind, params, 0.1)
        wanted = {n: g.sum(0) for n, g in oracle.clipped(truth, clip).items()}
        assert oracle.relative_error(total(objective, batch, clip), wanted) <= 1e-5


def test_an_inner_bias_that_loses_its_rows_where_there_is_one() -> None:
    """One per channel in a micro-batch of one image, where the rule for one that is a parameter looks at it."""

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.shift = WSConv2d(3, 8, 3), GroupNormAct(4, 8, "silu"), nn.Linear(3, 8)
            self.out = nn.Linear(8, 3)
            self.register_buffer("known", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.conv(x), self.known)
            return self.out(self.norm(h, self.shift(x.mean((2, 3))).squeeze(0)).square().mean((2, 3)))

    torch.manual_seed(0)
    objective = Objective(Squeezed().to(DEVICE), cross_entropy)
    batch = torch.randn(5, 3, 6, 6, device=DEVICE), torch.tensor([0, 1, 2, 0, 1], device=DEVICE)
    params = objective.parameters()
    wanted = {n: g.sum(0) for n, g in oracle.one_by_one(objective, params, batch, 5).items()}
    for micro_batch in (None, 1):
        ours = clipped_sum(objective, params, batch, clip=Clip(1e6), performance=Performance(micro_batch=micro_batch))
        assert oracle.relative_error(ours, wanted) <= 1e-5


def test_one_standardised_weight_at_two_sizes_and_several_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = WSConv2d(16, 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.tanh(self.conv(x)))

    objective = Objective(Twice().to(DEVICE), add_up)
    batch = torch.randn(2, 16, 7, 7, device=DEVICE), torch.randn(2, 16, 3, 3, device=DEVICE)
    known(objective, batch)
    offsets = moves(objective.parameters(), 2)
    for clip in (Clip(0.1), clip_of("origin+scale", objective.parameters(), 0.1)):
        ours = total(objective, batch, clip, views=2, offsets=offsets)
        portable = total(objective, batch, clip, views=2, offsets=offsets, performance=Performance(kernels=False))
        assert oracle.relative_error(ours, portable) <= 1e-5


def test_a_parameter_that_is_one_number() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.size = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.size

    objective = Objective(Scaled().to(DEVICE), cross_entropy)
    batch = torch.randn(4, 6, device=DEVICE), torch.tensor([0, 1, 2, 3], device=DEVICE)
    ours = total(objective, batch, Clip(0.1))
    assert (
        oracle.relative_error(ours, total(objective, batch, Clip(0.1), performance=Performance(kernels=False))) < 1e-5
    )


def test_the_state_that_a_recording_depends_on_is_seen() -> None:
    """Without a GPU: a mask that is replaced, a temperature that moves, a list by a name that only an LSTM's means."""

    class Masked(nn.Linear):
        mask, temperature = torch.ones(4), 1.0

    module = Masked(4, 2)
    factor = [1.0]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(module, batch) * factor[0]

    first = state_of(module, loss)
    assert state_of(module, loss) == first
    module.mask = torch.zeros(4)
    second = state_of(module, loss)
    module.temperature = 2.0
    third = state_of(module, loss)
    module._flat_weights = [torch.ones(4)]
    fourth = state_of(module, loss)
    assert len({first, second, third, fourth}) == 4


def test_an_lstm_that_lent_weights_is_in_the_state_it_was_in() -> None:
    """It makes a new list of the same weights then; a recording of its step must be found again."""
    torch.manual_seed(0)
    module = WordLSTM(30, hidden=8)
    objective = Objective(module, next_word)
    words = torch.randint(30, (5, 6))
    before = state_of(module)
    clipped_sum(objective, objective.parameters(), (words, words), clip=Clip(1.0))
    assert state_of(module) == before


@pytest.mark.parametrize("drawn", [230, 250, 290])
def test_a_small_batch_is_one_part_whatever_its_size(drawn: int) -> None:
    """What a Poisson sample of 250 rarely exceeds is padded to: latency, not work, is what small parts cost a GPU."""
    size = memory._all_or_power_of_two(10_000, Poisson(size=50_000, batch_size=250).largest())
    assert _next_part(0, drawn, size, on_gpu=True) == (drawn, size)
    assert memory._all_or_power_of_two(200, 298) == 128
