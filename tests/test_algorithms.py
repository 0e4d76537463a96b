"""The contract: one table of algorithms, one list of properties. A new algorithm is one more row."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sfumato.algorithms
from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.exact_mirror import ExactMirror
from sfumato.algorithms.extended import Extended, shares
from sfumato.algorithms.method import algorithm
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.public_step import public_step
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.errors import InvalidArgument
from sfumato.gradients import Clip, Gradient, Performance, clipped_sum
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.private import Planned, Private
from sfumato.public import Public
from sfumato.questions import GradientMean

WIDTH, CLASSES, ROWS, PUBLIC, STEPS = 4, 3, 12, 10, 5
NEVER = 10**9

Row = Callable[..., Any]
# (what `dp_sgd` at the bottom is given) -> method
ALGORITHMS: dict[str, Row] = {
    "dp_sgd": lambda **how: partial(dp_sgd, **how),
    "normalised": lambda clip=1.0, **how: partial(dp_sgd, clip=Clip(clip, stability=0.1), **how),
    "dope_sgd": lambda **how: partial(dope_sgd, public_batch=6, **how),
    "dope_sgd, line search": lambda **how: partial(dope_sgd, public_batch=6, step_size=0.3, **how),
    "shrunk_origin": lambda **how: ShrunkOrigin(public_batch=6, method=partial(dp_sgd, **how)),
    "mirror_descent": lambda **how: MirrorDescent(decay_steps=3, public_batch=6, method=partial(dp_sgd, **how)),
    "mirror_descent, line search": lambda **how: MirrorDescent(
        decay_steps=3, public_batch=6, step_size=0.3, method=partial(dp_sgd, **how)
    ),
    "ada_dps": lambda **how: AdaDPS(public_batch=6, method=partial(dp_sgd, **how)),
    "weight_multiplicity": lambda views=2, **how: partial(weight_multiplicity, views=views, public_batch=5, **how),
    "extended": lambda **how: Extended(private_batch=8, public_batch=4, method=partial(dp_sgd, **how)),
    "extended, bounded": lambda **how: Extended(
        private_batch=8, public_batch=4, public_clip=0.2, method=partial(dp_sgd, **how)
    ),
    "exact_mirror": lambda **how: ExactMirror(step_size=0.3, strength=3.0, method=partial(dp_sgd, **how)),
    "all of them": lambda views=2, **how: AdaDPS(
        public_batch=6,
        method=MirrorDescent(
            decay_steps=3,
            public_batch=6,
            public_clip=0.3,
            method=Extended(
                private_batch=8,
                public_batch=4,
                public_clip=0.3,
                method=ShrunkOrigin(
                    public_batch=6,
                    step_size=0.3,
                    method=partial(weight_multiplicity, views=views, public_batch=5, **how),
                ),
            ),
        ),
    ),
}
# With these, what an algorithm adds to DP-SGD is nothing.
COLLAPSED: dict[str, Row] = {
    "shrunk_origin": lambda clip: ShrunkOrigin(origin_clip=1e-12, method=partial(dp_sgd, clip=clip)),
    "dope_sgd": lambda clip: partial(dope_sgd, origin_clip=1e-12, clip=clip),
    "mirror_descent": lambda clip: MirrorDescent(decay_steps=math.inf, method=partial(dp_sgd, clip=clip)),
    "mirror_descent at alpha 1": lambda clip: MirrorDescent(
        decay_steps=1, alpha_min=1.0, method=partial(dp_sgd, clip=clip)
    ),
    "ada_dps": lambda clip: AdaDPS(damping=1e9, method=partial(dp_sgd, clip=clip)),
    "weight_multiplicity": lambda clip: partial(weight_multiplicity, views=1, radius=1e-12, clip=clip),
    "exact_mirror": lambda clip: ExactMirror(step_size=0.3, strength=1e6, method=partial(dp_sgd, clip=clip)),
    "extended": lambda clip: Extended(private_batch=NEVER, public_batch=1, method=partial(dp_sgd, clip=clip)),
}


def rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    inputs[:, 0] += labels
    return inputs.to(dtype), labels


def objective(dtype: torch.dtype = torch.float64) -> Objective:
    torch.manual_seed(3)
    return Objective(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype), cross_entropy)


def public(of: Objective, dtype: torch.dtype = torch.float64) -> Public:
    return Public(rows(PUBLIC, 1, dtype), objective=of, seed=0)


def exactly(of: Objective, data: tuple[Tensor, Tensor]) -> Callable[[GradientMean], Gradient]:
    """What the door would answer on a full batch, without noise."""

    def ask(q: GradientMean) -> Gradient:
        total = clipped_sum(of, q.params, data, clip=q.clip, views=q.views, augment=q.augment, offsets=q.offsets)
        return q.release(total, len(data[1]))

    return ask


def door(of: Objective, data: tuple[Tensor, Tensor], **options: Any) -> Private:
    """Its noise repeats itself, so that two doors differ by their data alone."""
    private = Private(
        data, name="d", size=ROWS, objective=of, budget=Budget(50.0, 1e-3), seed=NotPrivateSeed(7), **options
    )
    private.plan(Planned(GradientMean, 2.0, private.everyone(), 50))
    return private


def walk(method: Any, of: Objective, ask: Callable[..., Any], steps: int = STEPS, start: Any = None) -> Any:
    """Some steps of plain gradient descent; the last update, the parameters and the state."""
    way, seen = algorithm(method), public(of, next(iter(of.parameters().values())).dtype)
    params = {n: p.clone() for n, p in of.parameters().items()}
    state, update = way.init(params) if start is None else start, None
    for _ in range(steps):
        update, state = way.step(state, params, seen, ask)
        params = {n: p - 0.3 * update[n] for n, p in params.items()}
    return update, params, state


def spied(ask: Callable[..., Any]) -> tuple[Callable[..., Any], list[GradientMean]]:
    """The same, and what it was asked."""
    asked: list[GradientMean] = []
    return lambda question: [asked.append(question), ask(question)][1], asked


class Direction(nn.Module):
    """A row is its own gradient."""

    def __init__(self, entries: int = 40) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(entries, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def direction(p: Tensor) -> tuple[Objective, Public]:
    """An objective, and public rows whose gradient is p."""
    of = Objective(Direction(len(p)), lambda module, x: module(x))
    return of, Public(p.expand(4, -1).clone(), objective=of)


def apart(a: Any, b: Any) -> float:
    return float((Gradient(a) - Gradient(b)).norm())


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("clip", [0.3, 1e6])
@pytest.mark.parametrize("name", COLLAPSED)
def test_collapses_into_dp_sgd(name: str, clip: float) -> None:
    of = objective()
    ask = exactly(of, rows(ROWS, 2))
    _, wanted, _ = walk(partial(dp_sgd, clip=clip), of, ask)
    _, found, _ = walk(COLLAPSED[name](clip), of, ask)
    assert apart(found, wanted) < 1e-5
    assert apart(wanted, of.parameters()) > 0.05  # something moved


@pytest.mark.parametrize(("clip", "stability"), [(1e-3, 1e-12), (1e6, 1e6)], ids=["all long", "all short"])
def test_normalising_is_clipping_where_all_gradients_are(clip: float, stability: float) -> None:
    of = objective()
    ask = exactly(of, rows(ROWS, 2))
    _, wanted, _ = walk(partial(dp_sgd, clip=clip), of, ask)
    _, found, _ = walk(partial(dp_sgd, clip=Clip(clip, stability=stability)), of, ask)
    assert apart(found, wanted) < 1e-5 * apart(wanted, of.parameters())


@pytest.mark.parametrize("name", ["dp_sgd", "dope_sgd", "shrunk_origin"])
def test_without_a_bound_it_is_gradient_descent(name: str) -> None:
    of, data = objective(), rows(ROWS, 2)
    _, found, _ = walk(ALGORITHMS[name](clip=1e6), of, exactly(of, data))
    params = of.parameters()
    for _ in range(STEPS):
        g = Public(data, objective=of).gradient(params)
        params = {n: p - 0.3 * g[n] for n, p in params.items()}
    assert apart(found, params) < 1e-9


def test_dope_with_a_tiny_clip_follows_the_public_gradient() -> None:
    of = objective()
    method = partial(dope_sgd, clip=1e-9, origin_clip=math.inf, public_batch=None)
    update, *_ = walk(method, of, exactly(of, rows(ROWS, 2)), steps=1)
    assert apart(update, public(of).gradient(of.parameters())) < 1e-8


def test_mirror_descent_ends_on_the_public_gradient_and_asks_no_more() -> None:
    of, asked = objective(), []

    def ask(question: GradientMean) -> Gradient:
        asked.append(question)
        return exactly(of, rows(ROWS, 2))(question)

    method = MirrorDescent(decay_steps=3, public_batch=None)
    update, *_ = walk(method, of, ask, steps=7)
    assert len(asked) == method.answers(7) == 3
    _, before, _ = walk(method, of, ask, steps=6)
    assert apart(update, public(of).gradient(before)) < 1e-12
    assert [round(method.alpha(t), 4) for t in (0, 1, 2, 3, 100)] == [1.0, 0.866, 0.5, 0.0, 0.0]
    assert all(MirrorDescent(decay_steps=2000, alpha_min=0.25).alpha(t) >= 0.25 for t in range(0, 9600, 100))


def test_the_extended_batch_is_the_mean_over_all_its_rows() -> None:
    """Everything together, unclipped, is the gradient of the union."""
    of, data = objective(), rows(ROWS, 2)
    method = Extended(private_batch=ROWS, public_batch=PUBLIC, method=partial(dp_sgd, clip=1e6))
    update, *_ = walk(method, of, exactly(of, data), steps=1)
    both = tuple(torch.cat(parts) for parts in zip(data, rows(PUBLIC, 1), strict=True))
    assert apart(update, Public(both, objective=of).gradient(of.parameters())) < 1e-9
    assert shares(4096, 48_000, 40_000) == (2234, 1862)


def scale_by_hand(p: Gradient, v: dict[str, Tensor], damping: float) -> Gradient:
    size = torch.cat([t.flatten() for t in v.values()]).mean().sqrt()
    inverse = {n: 1 / (t.sqrt() / size + damping) for n, t in v.items()}
    longer = float(p.norm() / Gradient({n: inverse[n] * p[n] for n in p}).norm())
    return Gradient({n: longer * t for n, t in inverse.items()})


def test_ada_dps_scales_before_the_clip_by_hand() -> None:
    of, data = objective(), rows(ROWS, 2)
    params, clip = of.parameters(), 0.3
    update, *_ = walk(
        AdaDPS(public_batch=None, damping=0.5, method=partial(dp_sgd, clip=clip)), of, exactly(of, data), 1
    )
    p = public(of).gradient(params)
    scale = scale_by_hand(p, {n: t.square() for n, t in p.items()}, 0.5)
    total = {n: torch.zeros_like(t) for n, t in params.items()}
    for i in range(ROWS):
        g = Public(tuple(t[i : i + 1] for t in data), objective=of).gradient(params)
        x = Gradient({n: scale[n] * g[n] for n in g})
        c = min(1.0, clip / float(x.norm()))
        total = {n: total[n] + c * x[n] / ROWS for n in x}
    assert apart(update, total) < 1e-9


def test_ada_dps_remembers_earlier_public_batches() -> None:
    of = objective()
    ask, asked = spied(exactly(of, rows(ROWS, 2)))
    walk(AdaDPS(public_batch=6, damping=0.5, memory=0.7), of, ask, steps=2)
    twin = public(of)
    first, second = (twin.gradient(q.params, 6) for q in asked)
    v = {n: 0.7 * 0.3 * first[n].square() + 0.3 * second[n].square() for n in first}
    assert asked[1].clip.scale is not None
    assert apart(asked[1].clip.scale, scale_by_hand(second, v, 0.5)) < 1e-9


def test_ada_dps_without_a_public_gradient_scales_by_one() -> None:
    of, hint = direction(torch.zeros(5, dtype=torch.float64))
    ask, asked = spied(lambda q: Gradient({"w": torch.ones(5)}))
    way = AdaDPS(damping=0.25)
    way.step(way.init(of.parameters()), of.parameters(), hint, ask)
    assert asked[0].clip.scale is not None
    assert torch.allclose(asked[0].clip.scale["w"], torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize(
    "inner",
    [
        partial(Extended, private_batch=ROWS, public_batch=ROWS),
        partial(MirrorDescent, decay_steps=2, public_batch=None),
    ],
    ids=["extended", "mirror_descent"],
)
def test_public_gradients_that_join_are_scaled_as_the_private_ones(inner: Callable[..., Any]) -> None:
    """Public and private rows are the same and nothing is clipped: it is all scale * gradient."""
    of, data = objective(), rows(ROWS, 2)
    same, params = Public(data, objective=of), of.parameters()
    ask, asked = spied(exactly(of, data))
    way = AdaDPS(damping=0.1, method=inner(method=partial(dp_sgd, clip=1e6)))
    state = way.init(params)
    for _ in range(2):  # the first step of a mixture is private
        update, state = way.step(state, params, same, ask)
    scale, g = asked[1].clip.scale, same.gradient(params)
    assert scale is not None
    assert apart(update, {n: scale[n] * g[n] for n in g}) < 1e-9
    assert float(update.dot(g) / (update.norm() * g.norm())) < 0.9  # the scale is seen


def test_weights_are_moved_uphill_by_one_public_batch_each() -> None:
    of, radius = objective(), 0.2
    ask, asked = spied(exactly(of, rows(ROWS, 2)))
    walk(partial(weight_multiplicity, views=3, radius=radius, public_batch=5), of, ask, steps=1)
    twin, found = public(of), asked[0].offsets
    assert found is not None
    for v in found:
        g = twin.gradient(of.parameters(), 5)
        assert apart(v, g * (radius / float(g.norm()))) < 1e-12
    assert min(apart(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 0.01


def test_the_answer_is_shortened_and_the_public_gradient_is_not() -> None:
    p, answer = torch.tensor([3.0, 0.0]).double(), torch.tensor([6.0, 8.0]).double()
    of, hint = direction(p)
    way = MirrorDescent(decay_steps=2, answer_clip=0.5, method=partial(dp_sgd, clip=1e6))
    state = way.init(of.parameters())
    for alpha in (1.0, 0.5**0.5):
        update, state = way.step(state, of.parameters(), hint, lambda q: Gradient({"w": answer}))
        assert torch.allclose(update["w"], alpha * answer / 20 + (1 - alpha) * p)


def test_the_exact_mirror_step_solves_the_papers_equation() -> None:
    """On linear regression, theta - eta Hn^-1 g in closed form; on softmax regression, equation by equation."""
    torch.manual_seed(0)
    x, g = torch.randn(30, 6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    strength, eta = 0.01, 0.7
    squares = Objective(nn.Linear(6, 1, bias=False).double(), lambda m, x: (m(x[:, :6])[:, 0] - x[:, 6]).square())
    hint = Public(torch.cat([x, torch.randn(30, 1, dtype=torch.float64)], 1), objective=squares)
    method = ExactMirror(step_size=eta, strength=strength, tolerance=1e-9)
    u, _ = method.step(None, squares.parameters(), hint, lambda q: Gradient({"weight": g}))
    H = 2 * x.T @ x / 30 + strength * torch.eye(6, dtype=torch.float64)
    Hn = H / torch.linalg.eigvalsh(H).min()  # at its smallest eigenvalue 1
    assert torch.linalg.eigvalsh(H).min() > 5 * strength  # here the data alone is strongly convex
    assert torch.allclose(u["weight"].T, strength * torch.linalg.solve(H, g.T), atol=1e-8)
    assert float(u.norm()) <= float(g.norm())
    assert torch.nn.functional.cosine_similarity(u["weight"], torch.linalg.solve(Hn, g.T).T) > 1 - 1e-6

    of = Objective(nn.Linear(WIDTH, CLASSES).double(), cross_entropy)
    noisy = Gradient({n: torch.randn_like(p) for n, p in of.parameters().items()})
    seen, theta = public(of), of.parameters()
    u, _ = method.step(None, theta, seen, lambda q: noisy)
    moved = {n: p - eta * u[n] for n, p in theta.items()}
    for n in theta:
        before, after = (seen.gradient(at)[n] / strength + at[n] for at in (theta, moved))
        assert torch.allclose(after, before - eta * noisy[n], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_mirror_step_on_a_nearly_flat_map(seed: int) -> None:
    torch.manual_seed(seed)
    strength, eta = 1e-3, 100.0
    of = Objective(nn.Linear(WIDTH, CLASSES).double(), cross_entropy)
    g = Gradient({n: torch.randn_like(p) for n, p in of.parameters().items()})
    g = g * (10 / float(g.norm()))
    seen, theta = public(of), of.parameters()
    u, _ = ExactMirror(step_size=eta, strength=strength).step(None, theta, seen, lambda q: g)
    moved = {n: p - eta * u[n] for n, p in theta.items()}
    before, after = (seen.gradient(at) * (1 / strength) + Gradient(at) for at in (theta, moved))
    assert apart(after, before - g * eta) <= 1e-3 * eta * 10
    assert 0 < apart(moved, theta) <= eta * 10 * (1 + 1e-6)


def test_a_loss_that_is_not_convex_is_no_mirror_map() -> None:
    of = objective()
    with pytest.raises(InvalidArgument, match="not convex"):
        walk(ExactMirror(step_size=50.0, strength=1e-4), of, exactly(of, rows(ROWS, 2)), steps=20)


# ------------------------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_neighbour_moves_the_update_by_at_most_the_clip(name: str) -> None:
    """Through the door, under both adjacencies, from a state that has seen answers; extreme rows among them."""
    clip, data, failures, largest = 0.7, rows(ROWS, 2), [], 0.0
    *_, state = walk(ALGORITHMS[name](clip=clip), objective(), exactly(objective(), data), steps=2)

    def update(data: tuple[Tensor, Tensor]) -> Gradient:
        of = objective()
        u, *_ = walk(ALGORITHMS[name](clip=clip), of, door(of, data).ask, steps=1, start=state)
        return u

    before = update(data)
    for extreme in (0.0, 1.0, 1e6, -1e6, math.nan):
        more = (
            torch.cat([data[0], torch.full((1, WIDTH), extreme, dtype=torch.float64)]),
            torch.cat([data[1], data[1][:1]]),
        )
        added = apart(update(more), before)
        replaced = apart(update(tuple(t[1:] for t in more)), before)
        largest = max(largest, added)
        # The scale of AdaDPS is part of the clipped vector, so the bound is the same.
        if not (added <= clip / ROWS * (1 + 1e-6) and replaced <= 2 * clip / ROWS * (1 + 1e-6)):
            failures.append(f"{extreme}: {added * ROWS / clip} and {replaced * ROWS / clip} times the bound")
    assert not failures, failures
    assert largest > 0.2 * clip / ROWS  # the test asks for something


@pytest.mark.parametrize("name", ALGORITHMS)
def test_private_data_is_reached_through_ask_alone(name: str) -> None:
    """It asks as often as it says, only questions about gradients, and all it knows else is public."""
    of, asked = objective(), []

    def ask(question: Any) -> Gradient:
        asked.append(question)
        return Gradient({n: torch.full_like(p, 0.01 * len(asked)) for n, p in question.params.items()})

    method = ALGORITHMS[name](clip=0.7)
    _, once, _ = walk(method, of, ask)
    assert len(asked) == algorithm(method).answers(STEPS) <= STEPS
    assert {type(question) for question in asked} == {GradientMean}
    assert {question.clip.norm for question in asked} == {0.7}
    asked.clear()
    _, again, _ = walk(method, of, ask)
    assert apart(once, again) == 0.0


def test_all_of_them_make_one_question() -> None:
    of, asked = objective(), []

    def ask(question: GradientMean) -> Gradient:
        asked.append(question)
        return exactly(of, rows(ROWS, 2))(question)

    walk(ALGORITHMS["all of them"](clip=0.7, views=2), of, ask, steps=2)
    assert len(asked) == 2
    assert all(q.clip.origin is not None and q.clip.scale is not None for q in asked)
    assert all(q.offsets is not None and len(q.offsets) == q.views == 2 for q in asked)


# ------------------------------------------------------------------------------------------------ engineering


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_type_and_place_of_the_parameters_are_kept(name: str, dtype: torch.dtype) -> None:
    of = objective(dtype)
    update, *_ = walk(ALGORITHMS[name](), of, exactly(of, rows(ROWS, 2, dtype)))
    assert {t.dtype for t in update.values()} == {dtype}
    assert update.keys() == of.parameters().keys()
    assert all(bool(torch.isfinite(t).all()) for t in update.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_state_that_was_saved_goes_on_as_if_nothing_had_happened(name: str) -> None:
    of, method = objective(), ALGORITHMS[name]()
    way, ask = algorithm(method), exactly(of, rows(ROWS, 2))

    def continued(interrupted: bool) -> dict[str, Tensor]:
        seen, params = public(of), {n: p.clone() for n, p in of.parameters().items()}
        state = way.init(params)
        for step in range(STEPS):
            if interrupted and step == 2:
                kept = io.BytesIO()
                torch.save(state, kept)
                kept.seek(0)
                state, drawn = torch.load(kept, weights_only=True), seen.random_state
                seen = public(of)
                seen.random_state = drawn
            update, state = way.step(state, params, seen, ask)
            params = {n: p - 0.3 * update[n] for n, p in params.items()}
        return params

    assert apart(continued(True), continued(False)) == 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_views_and_micro_batches(name: str) -> None:
    """Views are made and averaged inside; how rows are cut into passes changes nothing."""
    method = ALGORITHMS[name](views=3, augment=shifted)
    found = []
    for size in (None, 1, 5):
        of = objective()
        torch.manual_seed(0)
        performance = Performance(micro_batch=size)
        found.append(walk(method, of, door(of, rows(ROWS, 2), performance=performance).ask)[1])
    assert max(apart(f, found[0]) for f in found[1:]) < 1e-9
    of = objective()
    _, without, _ = walk(ALGORITHMS[name](views=3), of, door(of, rows(ROWS, 2)).ask)
    assert apart(without, found[0]) > 1e-4  # the views are seen


def shifted(batch: Any) -> Any:
    """Another view of a row that depends on the row alone, so that micro-batches cannot matter."""
    inputs, labels = batch
    return inputs + 0.5 * inputs.roll(1, 1), labels


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in ("dp_sgd", "normalised")])
def test_without_public_data_it_says_so(name: str) -> None:
    of = objective()
    way = algorithm(ALGORITHMS[name]())
    state = way.init(of.parameters())
    if name.startswith("mirror_descent"):  # its first step has alpha 1, and needs none
        _, state = way.step(state, of.parameters(), None, exactly(of, rows(ROWS, 2)))
    with pytest.raises(InvalidArgument, match="public"):
        way.step(state, of.parameters(), None, exactly(of, rows(ROWS, 2)))


def test_an_algorithm_is_a_short_file() -> None:
    folder = Path(sfumato.algorithms.__file__).parent
    lengths = {p.name: len(p.read_text().splitlines()) for p in folder.glob("*.py") if p.stem != "method"}
    assert len(lengths) > 8
    assert not {name: n for name, n in lengths.items() if n > 60}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MirrorDescent(decay_steps=0),
        lambda: MirrorDescent(decay_steps=5, alpha_min=1.5),
        lambda: MirrorDescent(decay_steps=5, answer_clip=0.0),
        lambda: MirrorDescent(decay_steps=5, answer_clip=-1.0),
        lambda: MirrorDescent(decay_steps=5, public_clip=0.0),
        lambda: Extended(private_batch=5, public_batch=5, public_clip=-1.0),
        lambda: walk(partial(dope_sgd, origin_clip=-1), objective(), lambda q: None),
        lambda: walk(ShrunkOrigin(origin_clip=-1), objective(), lambda q: None),
        lambda: walk(partial(dope_sgd, step_size=0.0), objective(), lambda q: None),
        lambda: walk(ShrunkOrigin(step_size=math.inf), objective(), lambda q: None),
        lambda: walk(MirrorDescent(decay_steps=1, step_size=-1.0), objective(), lambda q: Gradient(q.params)),
        lambda: AdaDPS(damping=0.0),
        lambda: AdaDPS(memory=1.0),
        lambda: ShrunkOrigin(memory=-0.1),
        lambda: Extended(private_batch=0, public_batch=5),
        lambda: Clip(1.0, stability=0.0),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument, match="must"):
        wrong()


@pytest.mark.parametrize("own", ["origin", "scale"])
def test_a_clip_brings_no_origin_or_scale_of_its_own(own: str) -> None:
    params = objective().parameters()
    ask, asked = spied(lambda q: Gradient(params))
    with pytest.raises(InvalidArgument, match="of its own"):
        dp_sgd(params, None, ask, clip=Clip(1.0, **{own: Gradient(params)}))  # type: ignore[arg-type]
    assert not asked


def test_somebodys_own_object_says_how_often_it_asks() -> None:
    class Own:
        def init(self, params: Any) -> Any: ...

        def step(self, state: Any, params: Any, public: Any, ask: Any, **handed: Any) -> Any: ...

        def answers(self, steps: int) -> int:
            return steps // 3

    assert algorithm(Own()).answers(12) == 4
    assert AdaDPS(method=Own()).answers(12) == 4
    assert algorithm(dp_sgd).answers(12) == 12


# ------------------------------------------------------------------------------------------------ origins


# Of many answers that all held the public gradient twice.
SURE = {"means": torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64), "below": None}


@pytest.mark.parametrize(
    ("method", "state"),
    [
        (partial(dope_sgd, origin_clip=0.05), None),
        (ShrunkOrigin(origin_clip=0.05), SURE),
    ],
    ids=["dope_sgd", "shrunk_origin"],
)
@pytest.mark.parametrize("size", [7.0, 0.1])
def test_the_step_that_the_origin_makes_is_bounded_under_a_scale(method: Any, state: Any, size: float) -> None:
    of = objective()
    ask, asked = spied(exactly(of, rows(ROWS, 2)))
    torch.manual_seed(0)
    scale = Gradient({n: size * (1 + torch.rand_like(p)) for n, p in of.parameters().items()})
    algorithm(method).step(state, of.parameters(), public(of), ask, scale=scale)
    assert asked[0].clip.origin is not None
    assert float((scale * asked[0].clip.origin).norm()) == pytest.approx(0.05)


@pytest.mark.parametrize("size", [7.0, 0.1])
@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (Extended(private_batch=3, public_batch=1, public_clip=0.05), 0.25),
        (MirrorDescent(decay_steps=1, public_clip=0.05), 1.0),
    ],
    ids=["extended", "mirror_descent"],
)
def test_public_gradients_that_join_are_bounded_under_a_scale(method: Any, weight: float, size: float) -> None:
    of = objective()
    nothing = Gradient({n: torch.zeros_like(p) for n, p in of.parameters().items()})
    torch.manual_seed(0)
    scale = Gradient({n: size * (1 + torch.rand_like(p)) for n, p in of.parameters().items()})
    state = method.init(of.parameters())
    for _ in range(2):  # the first step of a mixture is private
        update, state = method.step(state, of.parameters(), public(of), lambda q: nothing, scale=scale)
    assert float(update.norm()) == pytest.approx(weight * 0.05)
    assert float((scale * public(of).gradient(of.parameters())).norm()) > 0.06  # without the bound it is longer


@pytest.mark.parametrize("caution", [0.0, 0.5, 2.0])
def test_what_the_shrunk_origin_remembers_after_two_steps_by_hand(caution: float) -> None:
    p = torch.tensor([1.0, 2.0, -1.0]).double()
    first, second = torch.tensor([1.0, 0.5, 0.0]).double(), torch.tensor([0.0, -1.0, 4.0]).double()
    of, hint = direction(p)
    way, answers = ShrunkOrigin(memory=0.7, origin_clip=10.0, caution=caution), iter((first, second))
    ask, asked = spied(lambda q: Gradient({"w": next(answers)}))
    state = way.init(of.parameters())
    for _ in range(2):
        _, state = way.step(state, of.parameters(), hint, ask)
    share = 2 / 6  # <first, p> / <p, p>
    error = math.sqrt(0.3 / 1.7 * 0.3 * 2**2) / (0.3 * 6)  # nothing was expected of the first answer, and 2 came
    beta = max(0.0, share - caution * error)
    assert asked[1].clip.origin is not None
    assert torch.allclose(asked[1].clip.origin["w"], beta * p)
    along = -6 + beta * 6
    scatter = 0.7 * 0.3 * 2**2 + 0.3 * (along - share * 6) ** 2
    assert state["means"].tolist() == pytest.approx([0.7 * 0.3 * 2 + 0.3 * along, (0.7 * 0.3 + 0.3) * 6, scatter])


@pytest.mark.parametrize(
    "inner",
    [MirrorDescent(decay_steps=10), Extended(private_batch=1, public_batch=9)],
    ids=["mirror_descent", "extended"],
)
def test_public_gradients_mixed_in_below_are_no_evidence_for_the_origin(inner: Any) -> None:
    p = torch.tensor([0.6, 0.8]).double()
    of, hint = direction(p)
    way = ShrunkOrigin(memory=0.0, method=inner)
    state = way.init(of.parameters())
    for _ in range(10):
        update, state = way.step(state, of.parameters(), hint, lambda q: Gradient({"w": -p}))
        assert float(way.worth(state)[1]) == 0.0
    assert float(update["w"] @ p) > 0.5  # what is mixed in at last points the other way


def test_the_shrunk_origin_finds_how_much_public_data_is_worth() -> None:
    """g_i = a * p + spread: beta goes to a, also where almost every gradient is clipped; against p, to zero."""
    torch.manual_seed(0)
    p, spread = torch.randn(40, dtype=torch.float64), torch.randn(60, 40, dtype=torch.float64)
    p, spread = p / p.norm(), spread - spread.mean(0)
    of, hint = direction(p)
    for a, wanted in ((0.6, 0.6), (1.0, 1.0), (3.0, 1.0), (0.0, 0.0), (-0.5, 0.0)):
        for clip in (1.0, 20.0):  # most gradients are about 6 long
            way = ShrunkOrigin(public_batch=None, origin_clip=10.0, method=partial(dp_sgd, clip=clip))
            state, params, data = way.init(of.parameters()), of.parameters(), a * p + spread

            def ask(q: GradientMean, data: Tensor = data) -> Gradient:
                assert q.clip.origin is not None
                x = data - q.clip.origin["w"]
                return Gradient({"w": (x * (q.clip.norm / x.norm(dim=1, keepdim=True)).clamp_max(1.0)).mean(0)})

            for _ in range(400):
                _, state = way.step(state, params, hint, ask)
            assert float(way.worth(state)[1]) == pytest.approx(wanted, abs=0.15), (a, clip)


@pytest.mark.parametrize(("worth", "least", "most"), [(0.0, 0.0, 0.01), (0.6, 0.45, 0.6), (1.0, 0.85, 1.0)])
def test_chance_is_not_taken_for_worth(worth: float, least: float, most: float) -> None:
    """Answers hold so much of ever new public gradients, and noise: what is worth nothing is hardly ever an origin."""
    torch.manual_seed(0)
    used = {}
    for caution in (0.0, 2.0):
        way = ShrunkOrigin(public_batch=None, origin_clip=1.0, caution=caution)
        of, _ = direction(torch.ones(100).double())
        state, betas = way.init(of.parameters()), []
        for _ in range(600):
            p = torch.randn(100, dtype=torch.float64)
            answer = worth * p / p.norm() + 0.15 * torch.randn(100, dtype=torch.float64)
            _, hint = direction(p)

            def ask(q: GradientMean, answer: Tensor = answer) -> Gradient:
                assert q.clip.origin is not None
                return Gradient({"w": answer - q.clip.origin["w"]})

            betas.append(float(way.worth(state)[1]))
            _, state = way.step(state, of.parameters(), hint, ask)
        used[caution] = betas[20:]
    careful = torch.tensor(used[2.0])
    assert least <= float(careful.mean()) <= most
    if not worth:
        assert float((careful > 0).double().mean()) < 0.06  # beyond two standard errors
        assert sum(used[0.0]) > 5 * sum(used[2.0])  # what chance alone made of it


def test_the_public_step_is_bounded_where_plain_descent_blows_up() -> None:
    """From a sharp minimum, four plain steps on the public gradient diverge; those of DOPE-SGD stay near."""
    torch.manual_seed(0)
    of = Objective(nn.Linear(8, 1, bias=False), lambda module, x: 0.5 * (module(x[:, :8])[:, 0] - x[:, 8]).square())
    data = torch.randn(50, 9) * 8  # curvature about 64
    sharp = Public(data, objective=of)
    start = {"weight": torch.linalg.lstsq(data[:, :8], data[:, 8:]).solution.T + 1e-3}

    def after(update: Callable[[Any], Gradient]) -> float:
        params = start
        for _ in range(4):
            params = {"weight": params["weight"] - 0.5 * update(params)["weight"]}
        return apart(params, start)

    still = Gradient({"weight": torch.zeros(1, 8)})
    assert after(lambda params: sharp.gradient(params)) > 100
    assert after(lambda params: dope_sgd(params, sharp, lambda q: still, clip=1.0, origin_clip=math.inf)) > 100
    assert after(lambda params: dope_sgd(params, sharp, lambda q: still, clip=1.0)) <= 2.0 + 1e-6


# ------------------------------------------------------------------------------------------------ line search


class Bowl(nn.Module):
    """Its public loss is 0.5 * sum(curvature * w^2), plus `slope` * w, whatever the rows."""

    def __init__(self, w: Tensor, curvature: Tensor, slope: float = 0.0) -> None:
        super().__init__()
        self.w, self.curvature, self.slope = nn.Parameter(w), curvature, slope

    def forward(self, x: Tensor) -> Tensor:
        bowl: Tensor = (0.5 * self.curvature * self.w.square() + self.slope * self.w).sum()
        return bowl.expand(len(x))


def bowl(w: list[float], curvature: list[float], slope: float = 0.0) -> tuple[Objective, Public]:
    module = Bowl(torch.tensor(w).double(), torch.tensor(curvature).double(), slope)
    of = Objective(module, lambda m, x: m(x))
    return of, Public(torch.zeros(4, 1), objective=of)


@pytest.mark.parametrize("step_size", [0.05, 0.3, 50.0])
@pytest.mark.parametrize("scale", [None, [1.0, 4.0]])
@pytest.mark.parametrize("longest", [math.inf, 2.0])
def test_a_public_step_ends_at_the_lowest_place_on_its_line(
    step_size: float, scale: list[float] | None, longest: float
) -> None:
    """On a bowl the rule of the secant is exact: a step that would pass the lowest place ends there, others stay."""
    (of, hint), (w, h) = bowl([1.0, -2.0], [3.0, 7.0]), (torch.tensor([1.0, -2.0]), torch.tensor([3.0, 7.0]))
    s = torch.tensor(scale or [1.0, 1.0])
    g = h * w * min(1.0, longest / float((s * h * w).norm()))
    lowest = float((s * g) @ (h * w) / ((s * g) @ (h * s * g)))  # of the loss at w - t * s * g
    made = None if scale is None else Gradient({"w": s.double()})
    step = public_step(of.parameters(), hint, None, longest=longest, scale=made, step_size=step_size)
    assert torch.allclose(step["w"].float() * step_size, g * min(step_size, lowest), rtol=1e-5)


def test_a_public_step_that_ends_in_nonsense_is_not_taken() -> None:
    class Edge(Bowl):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.w.sum().sqrt()  # NaN where w is negative

    module = Edge(torch.tensor([1.0]).double(), torch.tensor([1.0]).double())
    of = Objective(module, lambda m, x: m(x))
    hint = Public(torch.zeros(4, 1), objective=of)
    assert float(public_step(of.parameters(), hint, None, step_size=100.0)["w"]) == 0.0
    assert float(public_step(of.parameters(), hint, None, step_size=0.1)["w"]) == 1.5


@pytest.mark.parametrize(
    "method",
    [
        partial(dope_sgd, origin_clip=math.inf, step_size=0.5),
        ShrunkOrigin(origin_clip=1e6, step_size=0.5),
        MirrorDescent(decay_steps=1e-9, step_size=0.5),
    ],
    ids=["dope_sgd", "shrunk_origin", "mirror_descent"],
)
def test_a_line_search_goes_down_where_plain_steps_blow_up(method: Any) -> None:
    """A narrow valley: the rate is 250 times too long for its walls."""
    of, hint = bowl([1.0, 1.0], [1000.0, 1.0])
    still, way = Gradient({"w": torch.zeros(2).double()}), algorithm(method)
    params, state = of.parameters(), SURE if isinstance(method, ShrunkOrigin) else way.init(of.parameters())
    losses = [float(hint.losses(params).mean())]
    for _ in range(5):
        update, after = way.step(state, params, hint, lambda q: still)
        state = SURE if isinstance(method, ShrunkOrigin) else after
        params = {"w": params["w"] - 0.5 * update["w"]}
        losses.append(float(hint.losses(params).mean()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]


def test_the_line_search_looks_at_another_public_batch() -> None:
    """The end of a step is not judged by the rows that chose the step."""
    of = objective()
    seen, twin, params = public(of), public(of), of.parameters()
    step = public_step(params, seen, 3, step_size=20.0)
    g = twin.gradient(params, 3)
    end = twin.gradient({n: p - 20.0 * g[n] for n, p in params.items()}, 3)
    first, last = float(g.dot(g)), float(end.dot(g))
    assert last < 0
    assert apart(step, g * (first / (first - last))) < 1e-12
