"""The engine against autograd on batches of one: layers x modes x precisions, through every path of the engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._pytree import tree_map

from sfumato.gradients import Clip, Performance, Units, clipped_sum, reference
from tests.gradients import layers, oracle

ROWS = 5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FORCED_GHOST = 1e-4  # ghost norms are inflated by a bound on their rounding; forced where they do not pay, by more
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, from the oracle
PATHS = {
    "auto": Performance(),
    "ghost": Performance(ghost=True),
    "dense": Performance(ghost=False),
    "fallback": Performance(only_fallback=True),
}


def median_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(
        torch.stack([g.double().reshape(len(g), -1).square().sum(1) for g in gradients.values()]).sum(0).sqrt().median()
    )


def clip_for(mode: str, params: dict[str, torch.Tensor], norm: float) -> Clip:
    origin = oracle.like(params, 1) if "origin" in mode else None
    scale = oracle.like(params, 2, positive=True) if "scale" in mode else None
    return Clip(norm, origin=origin, scale=scale, stability=norm / 3 if "normalised" in mode else None)


def total(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: g.sum(0) for n, g in rows.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", layers.TABLE)
def test_layer_in_every_mode(name: str, dtype: torch.dtype) -> None:
    objective, batch = layers.make(name, dtype)
    params = objective.parameters()
    gradients = oracle.one_by_one(objective, params, batch, ROWS)
    norm = median_norm(gradients)  # about half of the rows are clipped
    failures = []
    for mode in ("plain", "origin", "scale", "origin+scale", "normalised", "normalised origin"):
        clip = clip_for(mode, params, norm)
        truth = total(oracle.clipped(gradients, clip))
        for path, performance in PATHS.items():
            error = oracle.relative_error(
                clipped_sum(objective, params, batch, clip=clip, performance=performance), truth
            )
            forced = path == "ghost" and dtype == torch.float32
            if not error <= (FORCED_GHOST if forced else TOLERANCE[dtype]):
                failures.append(f"{mode}/{path}: {error:.1e}")
    for size in (1, 3, ROWS):
        clip = clip_for("origin+scale", params, norm)
        truth = total(oracle.clipped(gradients, clip))
        ours = clipped_sum(objective, params, batch, clip=clip, performance=Performance(micro_batch=size, ghost=False))
        if not (error := oracle.relative_error(ours, truth)) <= TOLERANCE[dtype]:
            failures.append(f"micro-batch {size}: {error:.1e}")
    assert not failures, failures


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", layers.TABLE)
def test_views_and_offsets(name: str, dtype: torch.dtype) -> None:
    """K views are averaged before the clip; with offsets view k is taken at w + v_k."""
    objective, batch = layers.make(name, dtype)
    params = objective.parameters()
    views = 3

    def another_view(rows: object) -> object:
        def move(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            k = torch.arange(len(t), dtype=t.dtype).remainder(views).reshape(-1, *[1] * (t.ndim - 1))
            return t * (1 + 0.1 * k)

        return tree_map(move, rows)

    repeated = tree_map(lambda t: t.repeat_interleave(views, 0), batch)
    rows = oracle.one_by_one(objective, params, another_view(repeated), ROWS * views)
    gradients = {n: g.double().reshape(ROWS, views, *g.shape[1:]).mean(1) for n, g in rows.items()}
    norm = median_norm(gradients)
    offsets = [dict(0.05 * oracle.like(params, 10 + k)) for k in range(views)]
    moved = [{n: p + v[n] for n, p in params.items()} for v in offsets]
    at_offsets = oracle.mean_of([oracle.one_by_one(objective, p, batch, ROWS) for p in moved])
    failures = []
    # How rows are cut into micro-batches is the same for all modes and precisions: one of each sees all sizes.
    modes = {"plain": (3,), "origin+scale": (1, 3, ROWS) if dtype == torch.float64 else (3,)}
    for (mode, sizes), path in itertools.product(modes.items(), ("dense", "auto", "fallback")):
        clip = clip_for(mode, params, norm)
        truth, at_offsets_truth = (total(oracle.clipped(g, clip)) for g in (gradients, at_offsets))
        for size in sizes:
            performance = Performance(micro_batch=size, ghost=PATHS[path].ghost, only_fallback=path == "fallback")
            options = {"clip": clip, "views": views, "performance": performance}
            seen = clipped_sum(objective, params, batch, augment=another_view, **options)
            error = oracle.relative_error(seen, truth)
            shifted = clipped_sum(objective, params, batch, offsets=offsets, **options)
            shifted_error = oracle.relative_error(shifted, at_offsets_truth)
            if not max(error, shifted_error) <= TOLERANCE[dtype]:
                failures.append(f"{mode}/{path}/{size}: views {error:.1e} offsets {shifted_error:.1e}")
    assert not failures, failures


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "conv-deep", "tied-head", "transformer-encoder", "own-parameters"])
def test_users_are_reduced_before_the_clip(name: str, reduction: str) -> None:
    """Five rows as two users of two records (one padded to two): the user's gradient is clipped, not the record's."""
    objective, batch = layers.make(name, torch.float64)
    params = objective.parameters()
    rows = tree_map(lambda t: torch.cat([t[:3], t[:1]]), batch)  # user 0: rows 0, 1; user 1: row 2 and padding
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0]) * (torch.tensor([0.5, 0.5, 1.0, 1.0]) if reduction == "mean" else 1)
    gradients = oracle.one_by_one(objective, params, rows, 4)
    users = {
        n: (g * weights.reshape(-1, *[1] * (g.ndim - 1))).reshape(2, 2, *g.shape[1:]).sum(1)
        for n, g in gradients.items()
    }
    clip = clip_for("origin", params, median_norm(users) * 0.8)
    truth = total(oracle.clipped(users, clip))
    for performance in (Performance(), Performance(micro_batch=1), Performance(ghost=False)):
        units = Units(records=2, weights=weights)
        ours = clipped_sum(objective, params, rows, clip=clip, units=units, performance=performance)
        assert oracle.relative_error(ours, truth) <= 1e-10


@pytest.mark.parametrize("name", ["mlp", "conv2d", "tied-head", "weight-standardised"])
def test_slow_twin_agrees(name: str) -> None:
    objective, batch = layers.make(name, torch.float64)
    params = objective.parameters()
    clip = clip_for("origin+scale", params, 0.3)
    offsets = [dict(0.05 * oracle.like(params, 10 + k)) for k in range(2)]
    ours = clipped_sum(objective, params, batch, clip=clip, views=2, offsets=offsets)
    twin = reference.clipped_sum(objective, params, batch, clip=clip, offsets=offsets)
    assert oracle.relative_error(ours, twin) <= 1e-10


def test_nothing_is_left_on_the_model() -> None:
    objective, batch = layers.make("transformer-encoder", torch.float32)
    before = {name: sorted(vars(m)) for name, m in objective.module.named_modules()}
    state = {n: t.clone() for n, t in objective.module.state_dict().items()}
    clipped_sum(objective, objective.parameters(), batch, clip=Clip(1.0))
    assert {name: sorted(vars(m)) for name, m in objective.module.named_modules()} == before
    for name, p in objective.module.named_parameters():
        assert p.grad is None
        assert torch.equal(p, state[name])
        assert not vars(p)


def test_no_clip_is_plain_training() -> None:
    objective, batch = layers.make("conv-deep", torch.float64)
    params = objective.parameters()
    ours = clipped_sum(objective, params, batch, clip=Clip(float("inf")))
    loss = objective.loss(objective.module, batch).sum()
    plain = torch.autograd.grad(loss, list(objective.module.parameters()))
    assert oracle.relative_error(ours, dict(zip(params, plain, strict=True))) <= 1e-12


def test_an_empty_batch_sums_to_zero() -> None:
    objective, batch = layers.make("mlp", torch.float32)
    empty = tree_map(lambda t: t[:0], batch)
    ours = clipped_sum(objective, objective.parameters(), empty, clip=Clip(1.0))
    assert all(not t.any() for t in ours.values())
