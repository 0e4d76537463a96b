"""Sensitivity by neighbours: what one unit can do to a clipped sum, whatever its rows hold.

`Dictated` is a model whose per-example gradient is the example's own content, so that any gradient can be asked for:
zero, huge, equal to the origin, not a number. `Factors` dictates both factors of an outer product, so that float32
rounding can be attacked where norms come from factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Gradient, Performance, Units, clipped_sum
from sfumato.gradients.contributions import Contribution, Dense, Shift
from sfumato.gradients.factored import Outer
from sfumato.gradients.passes import Addends, per_unit
from sfumato.gradients.probe import Probe
from sfumato.gradients.rules.convolution import Convolution, Geometry
from sfumato.objective import Objective
from tests.gradients import layers, oracle

C = 0.7
EXACT, ROUNDED = 1 + 1e-9, 1 + 1e-6
WIDTH = 11  # entries of a dictated gradient: 5 by a product with the data, 6 by a matrix at two positions
PATHS = {
    "auto": Performance(),
    "ghost": Performance(ghost=True),
    "dense": Performance(ghost=False),
    "fallback": Performance(only_fallback=True),
    "small": Performance(micro_batch=2),
}


class Dictated(nn.Module):
    """The gradient of row i is row i: 5 numbers for `vector`, 6 for `matrix`."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(5))
        self.matrix = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        by_matrix = F.linear(x[:, 5:].reshape(-1, 2, 3), self.matrix)
        return (x[:, :5] * self.vector).sum(1) + by_matrix.diagonal(dim1=1, dim2=2).sum(1)


def dictated(dtype: torch.dtype = torch.float64) -> Objective:
    return Objective(Dictated().to(dtype), lambda module, x: module(x))


def as_gradient(row: Tensor) -> Gradient:
    return Gradient({"vector": row[:5], "matrix": row[5:].reshape(2, 3)})


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in a) ** 0.5)


ORIGIN = torch.linspace(-2.0, 3.0, WIDTH, dtype=torch.float64)
SCALE = torch.linspace(0.1, 4.0, WIDTH, dtype=torch.float64)
CLIPS = {
    "plain": Clip(C),
    "origin": Clip(C, origin=as_gradient(ORIGIN)),
    "far origin": Clip(C, origin=as_gradient(ORIGIN * 300)),
    "scale": Clip(C, scale=as_gradient(SCALE)),
    "origin and scale": Clip(C, origin=as_gradient(ORIGIN), scale=as_gradient(SCALE)),
    "normalised": Clip(C, stability=0.01),
    "normalised around a far origin": Clip(C, origin=as_gradient(ORIGIN * 300), stability=0.01),
}


def adversaries() -> dict[str, Tensor]:
    one = torch.eye(WIDTH, dtype=torch.float64)
    rows = {
        "zero": torch.zeros(WIDTH, dtype=torch.float64),
        "ones": torch.ones(WIDTH, dtype=torch.float64),
        "origin": ORIGIN.clone(),
        "aligned": 1e3 * ORIGIN,
        "against": -1e3 * ORIGIN,
        "almost the origin": ORIGIN * (1 + 1e-12),
        "far origin": 300 * ORIGIN,
        "huge": torch.full((WIDTH,), 1e30, dtype=torch.float64),
        "overflows": torch.full((WIDTH,), 1e200, dtype=torch.float64),
        "tiny": torch.full((WIDTH,), 1e-310, dtype=torch.float64),
    }
    for j in (0, 7):
        rows |= {f"+e{j}": 1e6 * one[j], f"-e{j}": -1e6 * one[j]}
        for name, bad in (("nan", torch.nan), ("inf", torch.inf), ("-inf", -torch.inf)):
            row = torch.ones(WIDTH, dtype=torch.float64)
            row[j] = bad
            rows[f"{name} at {j}"] = row
    return rows


ADVERSARIES = adversaries()
NOT_FINITE = [name for name, row in ADVERSARIES.items() if not torch.isfinite(row).all()]


def others(seed: int) -> dict[str, Tensor]:
    """What the rest of the data may be."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    return {
        "nobody": ordinary[:0],
        "ordinary": ordinary,
        "no gradients": torch.zeros(5, WIDTH, dtype=torch.float64),
        "at the origin": ORIGIN.expand(5, WIDTH).clone(),
        "hostile": torch.stack(list(ADVERSARIES.values())),
    }


def moved_sums(options: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(what was added, by how much the sum moved, by how much it moved when something else came instead)."""
    objective = dictated()
    params = objective.parameters()

    def total(rows: Tensor) -> dict[str, Tensor]:
        return clipped_sum(objective, params, rows, **options)

    for where, rest in others(0).items():
        before = total(rest)
        after = {name: total(torch.cat([rest[:2], row[None], rest[2:]])) for name, row in ADVERSARIES.items()}
        for name, sums in after.items():
            yield f"{name} to {where}", distance(sums, before), max(distance(sums, s) for s in after.values())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", CLIPS)
def test_an_example_moves_the_sum_by_at_most_the_clip_norm(kind: str, path: str) -> None:
    failures, largest = [], 0.0
    for what, added, replaced in moved_sums({"clip": CLIPS[kind], "performance": PATHS[path]}):
        largest = max(largest, added)
        if not (added <= C * EXACT and replaced <= 2 * C * EXACT):
            failures.append(f"{what}: {added / C} C added, {replaced / C} C replaced")
    assert not failures, failures
    assert largest >= 0.99 * C, "the test asks for nothing if no contribution comes near the bound"


@pytest.mark.parametrize("kind", ["plain", "origin and scale"])
@pytest.mark.parametrize("how", ["views", "offsets"])
def test_views_and_offsets_stay_inside_the_clip(kind: str, how: str) -> None:
    """Views are averaged before the clip: a row shown K times is still one person."""
    views = 3
    options: dict[str, Any] = {"clip": CLIPS[kind], "views": views}
    if how == "offsets":
        options["offsets"] = [
            {"vector": torch.ones(5).double() * k, "matrix": torch.ones(2, 3).double()} for k in (1, 2, 3)
        ]
    else:
        options["augment"] = lambda rows: rows * (1 + torch.arange(len(rows)).remainder(views)[:, None])
    failures = [
        f"{what}: {added / C} C, {replaced / C} C"
        for what, added, replaced in moved_sums(options)
        if not (added <= C * EXACT and replaced <= 2 * C * EXACT)
    ]
    assert not failures, failures


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", CLIPS)
def test_a_user_with_many_records_moves_the_sum_by_at_most_the_clip_norm(kind: str, reduction: str) -> None:
    """Users of one to three records, padded to three with weight zero by a record of their own."""
    objective = dictated()
    params = objective.parameters()
    names = list(ADVERSARIES)
    triples = [[names[i % len(names)], names[(7 * i + 3) % len(names)], "ones"][: 1 + i % 3] for i in range(24)]
    triples += [["ones"] * 3, ["+e0", "-e0"], ["huge"] * 3, ["aligned"] * 3, ["origin"] * 2]

    def user(records: list[Tensor]) -> tuple[Tensor, Tensor]:
        weight = 1.0 / len(records) if reduction == "mean" else 1.0
        rows = torch.stack(records + [records[0]] * (3 - len(records)))
        return rows, torch.tensor([weight] * len(records) + [0.0] * (3 - len(records)), dtype=torch.float64)

    def total(users: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        rows, weights = (torch.cat(parts) for parts in zip(*users, strict=True))
        return clipped_sum(objective, params, rows, clip=CLIPS[kind], units=Units(records=3, weights=weights))

    rest = [user(list(rows)) for rows in others(1)["ordinary"].split((1, 2, 3))]
    before = total(rest)
    after = {str(t): total([rest[0], user([ADVERSARIES[n] for n in t]), *rest[1:]]) for t in triples}
    added = {name: distance(sums, before) for name, sums in after.items()}
    assert max(added.values()) <= C * EXACT, max(added, key=added.__getitem__)
    assert max(distance(a, b) for a, b in itertools.combinations(after.values(), 2)) <= 2 * C * EXACT
    assert max(added.values()) >= 0.99 * C


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_a_row_that_is_not_finite_adds_exactly_nothing(kind: str, path: str, dtype: torch.dtype) -> None:
    objective = dictated(dtype)
    params = objective.parameters()
    rest = others(2)["ordinary"].to(dtype)
    # One micro-batch either way, else the number of rows decides where sums are rounded.
    performance = Performance(**{**vars(PATHS[path]), "micro_batch": 100})
    without = clipped_sum(objective, params, rest, clip=CLIPS[kind], performance=performance)
    bad = [ADVERSARIES[name].to(dtype) for name in NOT_FINITE]
    for row in bad:
        alone = clipped_sum(objective, params, row[None], clip=CLIPS[kind], performance=performance)
        assert all(not t.any() for t in alone.values())
    rows = torch.cat([rest[:3], torch.stack(bad), rest[3:]])
    with_them = clipped_sum(objective, params, rows, clip=CLIPS[kind], performance=performance)
    size = sum(float(t.double().square().sum()) for t in without.values()) ** 0.5
    assert distance(with_them, without) <= 8 * torch.finfo(dtype).eps * size


def test_a_not_finite_record_silences_its_user_and_nobody_else() -> None:
    objective = dictated()
    params = objective.parameters()
    rest = others(3)["ordinary"]
    weights = torch.ones(6, dtype=torch.float64)
    bad = rest.clone()
    bad[3, 4] = torch.nan  # the second user's second record
    units = Units(records=2, weights=weights)
    ours = clipped_sum(objective, params, bad, clip=CLIPS["origin"], units=units)
    kept = torch.cat([rest[:2], rest[4:]])
    truth = clipped_sum(objective, params, kept, clip=CLIPS["origin"], units=Units(records=2, weights=weights[:4]))
    assert distance(ours, truth) <= 1e-12


# ------------------------------------------------------------------------------------------------ real layers

LAYERS = ["mlp", "conv2d-groups", "conv-deep", "embedding", "group-norm", "lstm", "tied-head", "transformer-encoder",
          "own-parameters", "weight-standardised"]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", LAYERS)
def test_neighbours_through_real_layers(name: str) -> None:
    """Rows of size 1, 1e3 (clipped hard) and 1e200 (not finite inside), added one at a time to the others."""
    objective, batch = layers.make(name, torch.float64)
    params = objective.parameters()
    norm = 0.3 * float(Gradient(clipped_sum(objective, params, batch, clip=Clip(1e9))).norm())
    failures = []
    for clip in (Clip(norm), Clip(norm, origin=oracle.like(params, 1), scale=oracle.like(params, 2, positive=True))):
        rest = clipped_sum(objective, params, tree_map(lambda t: t[1:], batch), clip=clip)
        for size in (1.0, 1e3, 1e200, -1e200, float("nan")):

            def grow(t: Tensor, size: float = size) -> Tensor:
                return torch.cat([t[:1] * size, t[1:]]) if t.is_floating_point() else t

            moved = distance(clipped_sum(objective, params, tree_map(grow, batch), clip=clip), rest)
            if not moved <= norm * EXACT:
                failures.append(f"{size:g}: {moved / norm} C")
    assert not failures, failures


# ------------------------------------------------------------------------------------------------ float32


def summed_vectors(name: str, contribution: Contribution, clip: Clip) -> Tensor:
    """(U, entries) float64: what is multiplied by the factor and summed, from what is stored."""
    if isinstance(contribution, Dense):
        return contribution.gradients.double().flatten(1)  # already shifted: the very numbers that are summed
    if isinstance(contribution, Outer):
        a = contribution.a if contribution.one_hot else contribution.a.double()
        rows = Outer(a, contribution.b.double(), contribution.outputs).dense()
    else:
        assert isinstance(contribution, Convolution)
        c = contribution
        rows = Convolution(c.x.double(), c.dy.double(), c.weight.double(), c.geometry, c.units).dense()
    if clip.origin is not None:
        rows = rows - clip.origin[name].float().double()
    if clip.scale is not None:
        rows = rows * clip.scale[name].float().double()
    return rows.flatten(1)


def contributed(addends: Addends, clip: Clip) -> tuple[Tensor, Tensor]:
    """The true norm of every unit's addend and of its unclipped gradient, in float64."""
    squared = sum(summed_vectors(n, c, clip).square().sum(1) for n, c in addends.contributions.items())
    assert isinstance(squared, Tensor)
    size = squared.sqrt()
    return addends.factors.float().double() * size, size


def add_up(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient with respect to the module's output is the batch's second tensor."""
    x, dy = batch
    return (module(x) * dy).flatten(1).sum(1)


def fuzz(
    objective: Objective, batch: tuple[Tensor, Tensor], clip: Clip, performance: Performance
) -> tuple[Tensor, Tensor]:
    params = objective.parameters()
    ordinary = tuple(torch.randn(3, *t.shape[1:]) if t.is_floating_point() else t for t in batch)
    found = Probe.of(objective).trace(params, ordinary)
    addends = per_unit(
        objective,
        params,
        batch,
        found,
        count=len(batch[0]),
        clip=clip,
        origin=clip.origin,
        scale=clip.scale,
        performance=performance,
    )
    return contributed(addends, clip)


def lost_bits(*shape: int) -> Tensor:
    """One 1, then squares of just under half a unit in its last place: added one by one, they all get lost."""
    rows = torch.full(shape, 2.0**-12 * 0.99)
    rows[..., 0] = 1.0
    return rows


def biased(*shape: int) -> Tensor:
    """Equal positive numbers: their sum is rounded the same way again and again."""
    return torch.full(shape, float(torch.rand(()) + 1))


def cancelling(*shape: int) -> Tensor:
    """Positions that nearly cancel in pairs: factors far longer than the gradient."""
    rows = torch.randn(*shape)
    if rows.ndim > 2 and rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows[:, half : 2 * half] = -rows[:, :half] * (1 + 1e-5)
    return rows


DATA: dict[str, Callable[..., Tensor]] = {
    "random": torch.randn,
    "one sign": torch.rand,
    "equal": biased,
    "lost bits": lost_bits,
    "cancelling": cancelling,
}
SHAPES = [(1, 1, 7), (1, 3000, 5), (1, 300, 257), (2, 40, 600), (6, 3, 2500), (24, 16, 12), (64, 9, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", ["ghost", "dense"])
def test_float32_contributions_of_linear_layers(shape: tuple[int, int, int], path: str) -> None:
    R, outputs, inputs = shape
    torch.manual_seed(R)
    objective = Objective(nn.Linear(inputs, outputs, bias=False), add_up)
    failures, kept = [], []
    for kind, far in itertools.product(DATA, (0.0, 1.0, 30.0, 1000.0)):
        x = DATA[kind](3, R, inputs)
        dy = (
            cancelling(3, R, outputs)
            if kind == "random"
            else DATA["one sign" if kind == "cancelling" else kind](3, R, outputs)
        )
        if kind == "cancelling":
            dy[:, R // 2 : 2 * (R // 2)] = dy[:, : R // 2]
        for magnitude in (1.0, 1e-12, 1e12) if far == 0 else (1.0,):
            clip = Clip(1e-3)
            if far:
                first = torch.bmm(dy.transpose(1, 2), x)[0]  # the first unit's own gradient: the best origin there is
                size = float(first.norm())
                clip = Clip(size / far, origin=Gradient({"weight": first}))
            true, size_of = fuzz(objective, (x * magnitude, dy / magnitude), clip, PATHS[path])
            worst = float(true.max()) / clip.norm
            if not worst <= ROUNDED:
                failures.append(f"{kind}, origin {far} C away, times {magnitude:g}: {worst - 1:.1e} above C")
            if far == 0 and kind != "cancelling":
                kept.append(float((true / size_of.clamp_max(clip.norm)).min()))
    assert not failures, failures
    assert min(kept) > 0.99, "a clip that shortens too much is safe but useless"


@pytest.mark.parametrize("kind", DATA)
def test_float32_contributions_with_a_scale(kind: str) -> None:
    """The norm of s * (ab' - p) comes from products of squares, in long chains of additions."""
    failures = []
    for outputs, inputs in ((3, 100), (40, 384), (5, 2500), (2000, 3)):
        torch.manual_seed(inputs)
        objective = Objective(nn.Linear(inputs, outputs, bias=False), add_up)
        x, dy = DATA[kind](3, 1, inputs), DATA[kind](3, 1, outputs)
        for far in (0.0, 100.0):
            gradient = torch.bmm(dy.transpose(1, 2), x)[0]
            scale = Gradient(
                {"weight": torch.rand(outputs, inputs) + 0.5 if kind == "random" else torch.ones(outputs, inputs)}
            )
            origin = Gradient({"weight": gradient}) if far else None
            clip = Clip(float(gradient.norm()) / (far or 1e3), origin=origin, scale=scale)
            for path in ("ghost", "dense"):
                true, _ = fuzz(objective, (x, dy), clip, PATHS[path])
                if not float(true.max()) <= clip.norm * ROUNDED:
                    failures.append(f"{outputs}x{inputs}, {path}, {far}: {float(true.max()) / clip.norm - 1:.1e}")
    assert not failures, failures


@pytest.mark.parametrize("kind", DATA)
def test_float32_contributions_of_convolutions_and_tables(kind: str) -> None:
    """Convolutions hold dy with the channels far apart in memory: sums over them run in another order."""
    torch.manual_seed(0)
    make = DATA[kind]
    cases: list[tuple[nn.Module, Tensor, tuple[int, ...]]] = [
        (nn.Conv2d(12, 300, 3, bias=False), make(2, 12, 5, 4), (300, 3, 2)),
        (nn.Conv2d(300, 4, 1, bias=False), make(2, 300, 2, 3), (4, 2, 3)),
        (nn.Conv1d(40, 70, 3, stride=2, bias=False), make(2, 40, 9), (70, 4)),
        (nn.Conv2d(8, 16, 3, groups=2, bias=False), make(2, 8, 5, 5), (16, 3, 3)),
        (nn.Embedding(7, 500), torch.randint(0, 7, (2, 6)), (6, 500)),
    ]
    failures = []
    for module, x, shape in cases:
        dy = make(2, *shape)
        objective = Objective(module, add_up)
        params = objective.parameters()
        for path, far in itertools.product(("auto", "ghost", "dense"), (0.0, 300.0)):
            clip = Clip(1e-3)
            if far:
                first = oracle.one_by_one(objective, params, (x, dy), 1)["weight"][0]
                clip = Clip(max(float(first.norm()), 1e-6) / far, origin=Gradient({"weight": first}))
            true, _ = fuzz(objective, (x, dy), clip, PATHS[path])
            if not float(true.max()) <= clip.norm * ROUNDED:
                failures.append(
                    f"{type(module).__name__} {shape} {path} {far}: {float(true.max()) / clip.norm - 1:.1e}"
                )
    assert not failures, failures


def test_float32_factors_that_overflow_or_vanish() -> None:
    """A tiny factor times a huge one is an ordinary gradient, but its squares are zero and infinity."""
    failures = []
    for inputs in (1, 1000):
        objective = Objective(nn.Linear(inputs, 1, bias=False), add_up)
        for tiny, huge in itertools.product((1e-19, 2e-23, 1e-30), (1e10, 1e16, 1e18, 1e25)):
            for R, scaled, path in itertools.product((1, 2), (False, True), ("ghost", "dense")):
                x, dy = torch.full((2, R, inputs), huge), torch.full((2, R, 1), tiny)
                norm = R * tiny * huge * inputs**0.5 / 10
                scale = Gradient({"weight": torch.ones(1, inputs)}) if scaled else None
                true, _ = fuzz(objective, (x, dy), Clip(norm, scale=scale), PATHS[path])
                if not float(true.max()) <= norm * ROUNDED:
                    excess = f"{float(true.max()) / norm:.2g} C"
                    failures.append(f"{tiny:g} x {huge:g}, I={inputs}, R={R}, scaled={scaled}, {path}: {excess}")
    assert not failures, failures


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("kind", DATA)
def test_the_bound_on_a_norm_is_a_bound_in_any_memory_layout(kind: str, strided: bool) -> None:
    def lay(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1) if strided else t

    failures = []
    for length in (100, 256, 1000):
        torch.manual_seed(length)
        for name, contribution, truth in (
            ("dense", Dense(lay(rows := DATA[kind](4, length))), rows.double().norm(dim=1)),
            ("outer", *_outer(lay(DATA[kind](4, 3, length)), lay(DATA[kind](4, 3, 50)))),
            ("transposed", *_outer(lay(DATA[kind](4, 3, 50)), lay(DATA[kind](4, 3, length)))),
            ("single", *_outer(lay(DATA[kind](4, 1, length)), lay(DATA[kind](4, 1, length)))),
        ):
            bound = contribution.prepare(Shift(None, None)).sqrt()
            if not bool((truth <= bound * ROUNDED).all()):
                failures.append(f"{name} {length}: {float((truth / bound).max()) - 1:.1e}")
    assert not failures, failures


@pytest.mark.parametrize("path", ["auto", "dense"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(20, 10, bias=False), (20,)),
        (lambda: nn.Linear(20, 10, bias=False), (5, 20)),
        (lambda: nn.Conv2d(64, 32, 3, bias=False), (64, 3, 3)),
    ],
    ids=["linear", "positions", "convolution"],
)
def test_an_overflow_beside_an_origin_is_no_short_gradient(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], path: str
) -> None:
    """<g, p> overflows before |g|^2 does: minus infinity is no squared norm, and 0 least of all."""
    torch.manual_seed(0)
    objective = Objective(layer(), lambda module, x: module(x).flatten(1).square().sum(1))
    params, row = objective.parameters(), torch.rand(1, *shape)
    origin = Gradient(clipped_sum(objective, params, torch.rand(3, *shape), clip=Clip(1e9)))
    clip = Clip(1.0, origin=origin * (30 / float(origin.norm())))
    failures = []
    for exponent in torch.linspace(15, 22, 71).tolist():
        found = Gradient(clipped_sum(objective, params, row * 10**exponent, clip=clip, performance=PATHS[path]))
        if not float(found.norm()) <= ROUNDED:
            failures.append(f"10^{exponent:.1f}: {float(found.norm()):.2g} C")
    assert not failures, failures


def test_the_bound_on_a_convolutions_norm_holds_for_many_outputs_and_for_large_kernels() -> None:
    """Its Gram matrices add over inputs and over outputs, and one channel under a large kernel is a long chain, too."""
    failures = []
    lost = torch.full((2, 1000, 1, 1), 2.0**-12 * 0.99)
    lost[:, 0] = 1.0
    torch.manual_seed(0)
    x = torch.randn(2, 2, 1, 1)
    exact = Convolution(x.double(), lost.double(), torch.zeros(1000, 2, 1, 1).double(), _geometry(1), 2).dense()
    failures += _above_its_bound("outputs", x, lost, exact[0].float() * (1 - 3e-3))
    for channels, size, many, share in itertools.product((1, 3), (32, 64), (0.3, 2.0), (0.99, 1.5)):
        x = torch.full((1, channels, size, size), (2.0**-24 * share / many) ** 0.5)
        origin = torch.zeros(8, channels, size, size)
        origin[0] = -many * x[0]
        x[0, 0, 0, 0] = origin[0, 0, 0, 0] = 1.0
        dy = torch.zeros(1, 8, 1, 1)
        dy[0, 0] = 1.0
        failures += _above_its_bound(f"{channels} x {size} x {size}, {many}, {share}", x, dy, origin)
    assert not failures, failures


def _geometry(size: int) -> Geometry:
    return Geometry((size, size), (1, 1), (0, 0), (1, 1), 1)


def _above_its_bound(name: str, x: Tensor, dy: Tensor, origin: Tensor) -> list[str]:
    geometry, weight = _geometry(origin.shape[-1]), torch.zeros_like(origin)
    exact = Convolution(x.double(), dy.double(), weight.double(), geometry, len(x)).dense()
    truth = (exact - origin.double()).flatten(1).norm(dim=1)
    bound = Convolution(x, dy, weight, geometry, len(x)).prepare(Shift(origin, None)).sqrt()
    return (
        [] if bool((truth <= bound * ROUNDED).all()) else [f"{name}: {float((truth / bound).max()):.3f} of its bound"]
    )


@pytest.mark.parametrize("shape", [(2, 1), (9, 3)], ids=str)
def test_a_scale_does_not_magnify_what_a_tiny_factor_lost(shape: tuple[int, int]) -> None:
    """A factor so small that a clip factor rounds it up, beside one so large that it matters."""
    inputs, outputs = shape
    objective, failures = Objective(nn.Linear(inputs, outputs, bias=False), lambda m, b: (m(b[0]) * b[1]).sum(1)), []
    for s, norm in itertools.product((1.0, 1e3, 1e5, 1e7, 1e12), (0.01, 1.0)):
        clip = Clip(norm, scale=Gradient({"weight": torch.full((outputs, inputs), s)}))
        for size, share in itertools.product((1e16, 1e19, 1e30, 1e38, 3e38), (0.501, 0.6, 0.99, 1.1, 1.3)):
            tiny = norm / (share * s * size * (inputs * outputs) ** 0.5)  # so that the clip factor is the share
            row = torch.full((1, inputs), size), torch.full((1, outputs), max(1, round(tiny / 2**-149)) * 2.0**-149)
            found = clipped_sum(objective, objective.parameters(), row, clip=clip)["weight"].double().norm()
            if not float(found) <= norm * ROUNDED:
                failures.append(f"s={s:g}, C={norm:g}, {size:g}, {share}: {float(found) / norm:.6f} C")
    assert not failures, failures


@pytest.mark.parametrize("s", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_around_an_origin_a_scale_of_any_size_in_range_bounds(s: float) -> None:
    objective = Objective(nn.Linear(2, 2, bias=False), lambda m, b: (m(b[0]) * b[1]).sum(1))
    torch.manual_seed(0)
    a, b = torch.randn(1, 2), torch.randn(1, 2)
    origin = Gradient({"weight": a.T @ b / float((s * a.T @ b).norm())})
    for times, norm in itertools.product((-1.0, 0.5, 1.1, 2.0), (1e-3, 0.1, 1.0)):
        clip = Clip(norm, origin=origin, scale=Gradient({"weight": torch.full((2, 2), s)}))
        row = (times * b / float((s * a.T @ b).norm()), a)
        found = float(clipped_sum(objective, objective.parameters(), row, clip=clip)["weight"].double().norm())
        assert 0.99 * norm * min(1.0, abs(times - 1) / norm) <= found <= norm * ROUNDED


@pytest.mark.parametrize("s", [9e-13, 1.1e12, -2e12])
def test_a_scale_whose_norms_rounding_would_lose_is_refused(s: float) -> None:
    with pytest.raises(InvalidArgument, match=r"scale has entries outside 1e-12\.\.1e\+12"):
        Clip(1.0, scale=Gradient({"weight": torch.tensor([1.0, 0.0, s])}))
    Clip(1.0, scale=Gradient({"weight": torch.tensor([1.0, 0.0, -1e12, 1e-12], dtype=torch.float64)}))


def test_a_convolutions_bound_knows_how_many_positions_are_added_up() -> None:
    """Positions whose products are each rounded up in the sum, and lost in what Gram matrices tell."""
    torch.manual_seed(0)
    x, dy = torch.ones(1, 2, 45, 45), torch.full((1, 3, 45, 45), 1.02 * 2.0**-24)
    dy[..., 0, 0] = 1.0
    convolution = Convolution(x, dy, torch.zeros(3, 2, 1, 1), _geometry(1), 1)
    bound = float(convolution.prepare(Shift(None, None)).sqrt())
    found = convolution.weighted_sum(torch.ones(1, dtype=torch.float64), 1 << 20).double().norm()
    assert float(found) <= bound * ROUNDED


def _outer(a: Tensor, b: Tensor) -> tuple[Outer, Tensor]:
    truth = torch.bmm(a.double().transpose(1, 2), b.double()).flatten(1).norm(dim=1)
    return Outer(a, b, a.shape[2]), truth
