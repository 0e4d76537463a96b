"""The strategies' contract, and what each of them prefers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato import Budget, NotPrivateSeed, Objective, Private, Public, cross_entropy
from sfumato.errors import InvalidArgument
from sfumato.privacy.mechanisms import DiscreteLaplace
from sfumato.selection import (
    DiversePublic,
    Entropy,
    KCenter,
    Margin,
    NearPrivate,
    Random,
    Released,
    Strategy,
    TopK,
    entropy,
    fine_tune,
    margin,
)

STRATEGIES: dict[str, Strategy] = {
    "random": Random(seed=3),
    "entropy": Entropy(),
    "margin": Margin(),
    "k-center": KCenter(seed=3),
    "diverse": DiversePublic(components=3, seed=3),
    "diverse by margin": DiversePublic(components=3, uncertainty=margin, each=3),
    "near": NearPrivate(components=3),
    "near, top k": NearPrivate(components=3, voters=TopK()),
}
WIDTH = 6


def clusters(rows: int, kinds: int = 5, seed: int = 0, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Rows around well separated centres, and which centre each has."""
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.eye(max(kinds, WIDTH))[:kinds, :WIDTH]
    kind = torch.randint(kinds, (rows,), generator=generator)
    return centres[kind] + spread * torch.randn(rows, WIDTH, generator=generator), kind


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 4))


def identity() -> nn.Module:
    """Logits are scores of the first two columns; the embedding is the row itself."""
    head = nn.Linear(WIDTH, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2, WIDTH))
    return nn.Sequential(head)


def door(rows: Tensor, near: NearPrivate, pca: float = 0.5, support: float = 0.2, seed: int = 0) -> Private:
    private = Private(rows, name="p", size=300, budget=Budget(120.0, 1e-4), seed=NotPrivateSeed(seed))
    private.plan(*near.lines(private, pca=pca, support=support))
    return private


def chosen(strategy: Strategy, model: Released, pool: Public, n: int) -> Tensor:
    ask = door(clusters(300, seed=9)[0], strategy).ask if isinstance(strategy, NearPrivate) else None
    return strategy(model, pool, n, ask)


# ------------------------------------------------------------------------------------------------ one contract


@pytest.mark.parametrize("n", [1, 7, 60, 120])
@pytest.mark.parametrize("name", STRATEGIES)
def test_n_distinct_rows_come_out_the_same_each_time(name: str, n: int) -> None:
    model, pool = Released(classifier()), Public(clusters(120)[0])
    indices = chosen(STRATEGIES[name], model, pool, n)
    assert indices.dtype == torch.int64
    assert indices.shape == (n,)
    assert len(indices.unique()) == n
    assert 0 <= int(indices.min()) <= int(indices.max()) < 120
    again = chosen(STRATEGIES[name], Released(classifier()), Public(clusters(120)[0]), n)
    assert torch.equal(indices, again)


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_rows_are_still_distinct_indices(name: str) -> None:
    strategy = STRATEGIES[name]
    strategy = dataclasses.replace(strategy, bound=1.0) if isinstance(strategy, NearPrivate) else strategy
    indices = chosen(strategy, Released(classifier()), Public(torch.ones(40, WIDTH)), 15)
    assert len(indices.unique()) == 15


@pytest.mark.parametrize("n", [0, 41, 2.0])
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_impossible_number_is_refused(name: str, n: Any) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"n={n} must be a whole number from 1 to 40")):
        STRATEGIES[name](Released(classifier()), Public(torch.rand(40, WIDTH)), n, None)


@pytest.mark.parametrize("strategy", [Random(), KCenter(), DiversePublic(components=2)])
def test_the_seed_decides(strategy: Any) -> None:
    model, pool = Released(classifier()), Public(clusters(200, spread=2.0)[0])
    others = [dataclasses.replace(strategy, seed=s)(model, pool, 20).tolist() for s in range(4)]
    assert len({tuple(found) for found in others}) > 1


@pytest.mark.parametrize("name", [name for name, s in STRATEGIES.items() if not isinstance(s, NearPrivate)])
def test_most_strategies_never_ask(name: str) -> None:
    def refuse(question: object) -> None:
        raise AssertionError

    STRATEGIES[name](Released(classifier()), Public(clusters(100)[0]), 10, refuse)


@pytest.mark.parametrize("name", ["near", "near, top k"])
def test_near_private_asks_exactly_what_its_lines_say(name: str) -> None:
    near, asked = STRATEGIES[name], []
    assert isinstance(near, NearPrivate)
    private = door(clusters(300, seed=9)[0], near)

    def ask(question: Any) -> Any:
        asked.append(question.kind())
        return private.ask(question)

    near(Released(classifier()), Public(clusters(120)[0]), 10, ask)
    assert asked == [line.question.kind() for line in near.lines(private, pca=1.0, support=1.0)]
    assert asked == ["Gram", "TopKHistogram" if name != "near" else "Histogram"]
    assert private._plan is not None
    assert private._plan.remaining() == 0
    noises = [type(m.noise).__name__ for m in private._plan.mechanisms]
    assert noises == ["Gaussian", DiscreteLaplace.__name__]


def test_near_private_says_what_is_missing() -> None:
    model, pool = Released(classifier()), Public(clusters(100)[0])
    with pytest.raises(InvalidArgument, match=r"give ask=private\.ask"):
        NearPrivate(components=3)(model, pool, 5)
    private = door(clusters(300)[0], NearPrivate())
    for near in (NearPrivate(components=6), NearPrivate(components=0), NearPrivate(components=3, uncertain=0.5)):
        with pytest.raises(InvalidArgument, match=r"components=\d must be a whole number from 1 to 5|uncertain=0.5"):
            near(model, pool, 5, private.ask)
    assert private._plan is not None
    assert private._plan.taken == 0


# ------------------------------------------------------------------------------------------------ what they prefer


def test_uncertain_rows_come_first() -> None:
    logits = torch.tensor([[5.0, 0.0], [1.0, 0.9], [0.0, 3.0], [0.5, 0.5]])
    rows = torch.cat([logits, torch.zeros(4, WIDTH - 2)], 1)
    model, pool = Released(identity()), Public(rows)
    assert Entropy()(model, pool, 4).tolist() == [3, 1, 2, 0]
    assert Margin()(model, pool, 4).tolist() == [3, 1, 2, 0]
    tied = Public(rows[[3, 0, 3, 3]])
    assert Margin()(model, tied, 3).tolist() == [0, 2, 3]  # of equals the first


def test_entropy_and_margin_agree_with_their_definitions() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    assert entropy(logits).numpy() == pytest.approx(-(p * np.log(p)).sum(1))
    ordered = np.sort(logits.numpy(), 1)
    assert margin(logits).numpy() == pytest.approx(ordered[:, -2] - ordered[:, -1])
    assert float(entropy(torch.tensor([[0.0, -torch.inf]]))) == 0.0
    assert bool(entropy(torch.tensor([[0.0, torch.nan]])).isnan().all())


def radius(points: Tensor, indices: Tensor) -> float:
    return float(torch.cdist(points, points[indices]).amin(1).max())


def test_k_center_covers_better_than_chance_and_is_the_greedy_one() -> None:
    rows, _ = clusters(2000, spread=1.0)
    model, pool = Released(identity()), Public(rows)
    for n in (1, 10, 300):
        ours = radius(rows, KCenter()(model, pool, n))
        by_chance = [radius(rows, Random(seed=s)(model, pool, n)) for s in range(5)]
        assert n == 1 or ours < min(by_chance)
    found = KCenter(seed=1)(model, pool, 40).tolist()
    points, slow = rows.double(), found[:1]
    while len(slow) < 40:  # Gonzalez as it is printed
        slow.append(int(torch.cdist(points, points[slow]).amin(1).argmax()))
    assert found == slow


def test_diverse_public_takes_the_middle_of_many_clusters() -> None:
    rows, kind = clusters(1000, kinds=6, spread=0.3)
    model, pool = Released(classifier(), embedding="0"), Public(rows)
    found = DiversePublic(uncertain=1000, components=6, each=4, seed=0)(model, pool, 24)
    assert torch.bincount(kind[found], minlength=6).tolist() == [4] * 6
    assert sorted(kind[found[:6]].tolist()) == list(range(6))  # the best of each comes first
    centres = torch.stack([rows[kind == k].mean(0) for k in range(6)])
    assert float((rows[found] - centres[kind[found]]).norm(dim=1).mean()) < 0.5 * float(
        (rows - centres[kind]).norm(dim=1).mean()
    )


def test_diverse_public_looks_at_uncertain_rows_only() -> None:
    rows, _ = clusters(400, spread=1.0)
    model, pool = Released(classifier()), Public(rows)
    likely = set(Entropy()(model, pool, 40).tolist())
    assert set(DiversePublic(uncertain=2.0, components=3)(model, pool, 20).tolist()) <= likely


def test_near_private_leaves_out_what_is_far_from_private_rows() -> None:
    """Half of the pool is pollution in a corner of its own; private rows are nowhere near it."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(300, WIDTH, generator=generator)
    polluted = torch.randn(300, WIDTH, generator=generator) * 0.5
    polluted[:, 3] += 8.0
    pool, model = Public(torch.cat([clean, polluted])), Released(identity())
    private_rows = torch.randn(300, WIDTH, generator=generator)
    for voters in (NearPrivate().voters, TopK(k=150)):
        near = NearPrivate(components=4, voters=voters)
        found = near(model, pool, 20, door(private_rows, near).ask)
        assert float((found >= 300).double().mean()) < 0.05
    diverse = DiversePublic(components=4)(model, pool, 20)
    assert float((diverse >= 300).double().mean()) > 0.3


def test_without_noise_near_private_is_the_printed_algorithm() -> None:
    """Against NumPy: eigenvectors, and nearest neighbours by brute force; public mean and bound as we choose them."""
    pool_rows, private_rows = clusters(150, seed=1, spread=1.0)[0], clusters(300, seed=2, spread=1.0)[0]
    near, n = NearPrivate(components=2, bound=100.0), 12
    private = door(private_rows, near)
    found = near(Released(identity()), Public(pool_rows), n, lambda q: q.exact(private._sample(np.arange(300))))

    pool, own = pool_rows.double().numpy(), private_rows.double().numpy()
    mean = pool.mean(0)
    exact = (own - mean).T @ (own - mean)
    P = np.linalg.eigh(exact)[1][:, -2:]
    score = entropy(pool_rows[:, :2]).numpy()
    likely = np.argsort(-score, kind="stable")[: 10 * n]
    votes = own[entropy(private_rows[:, :2]).numpy() >= np.quantile(score, 0.8)]
    gaps = np.linalg.norm(((votes - mean) @ P)[:, None] - ((pool[likely] - mean) @ P)[None], axis=2)
    counts = np.bincount(gaps.argmin(1), minlength=len(likely))
    wanted = likely[np.argsort(-counts, kind="stable")[:n]]
    assert found.tolist() == wanted.tolist()


# ------------------------------------------------------------------------------------------------ the released model


def test_views_are_row_by_row_in_eval_mode_and_of_a_copy() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4)).train()
    released, rows = Released(module, batch_size=16), torch.rand(30, 64)
    together = released.views((rows, torch.zeros(30)))
    assert module.training
    for i in (0, 7, 29):
        alone = released.views(rows[i : i + 1])
        assert torch.equal(alone.embeddings[0], together.embeddings[i])  # to the bit: rounding, too, is its own
        assert torch.equal(alone.logits[0], together.logits[i])
    with torch.no_grad():
        module[3].weight.zero_()
    assert torch.equal(released.views(rows).logits, together.logits)
    assert released.views(rows[:0]).embeddings.shape == (0, 32)


def test_the_pools_views_are_computed_once() -> None:
    calls = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return self.head(x)  # type: ignore[no-any-return]

    model, pool = Released(Counting()), Public(torch.rand(100, WIDTH))
    for strategy in (Entropy(), Margin(), KCenter()):
        strategy(model, pool, 5)
    assert len(calls) == 1


def test_embeddings_are_inputs_of_the_named_layer() -> None:
    module, rows = classifier().eval(), torch.rand(3, WIDTH)
    assert torch.equal(Released(module, embedding="0").views(rows).embeddings, rows)
    assert torch.allclose(Released(module).views(rows).embeddings, torch.relu(module[0](rows)), atol=1e-6)
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    assert Released(image, embedding="1").views(torch.rand(5, 1, 4, 4)).embeddings.shape == (5, 8)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Released(classifier(), embedding="head"), "embedding='head' is not a layer"),
        (lambda: Released(nn.ReLU()), "module has no nn.Linear"),
        (lambda: Released(classifier(), batch_size=0), "batch_size=0 must be"),
        (lambda: Released(nn.Linear(2, 3)).views({"a": torch.rand(1, 2)}), "rows must be a tensor of inputs"),
        (lambda: Released(nn.Linear(2, 3)).views(torch.rand(1, 5, 2)), "logits (rows, classes)"),
        (lambda: Released(_shared()).views(torch.rand(4, 3)), "run once per pass"),
    ],
)
def test_models_that_do_not_fit_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        make()


def _shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, layer)


def test_a_diverged_model_is_told_of() -> None:
    module = classifier()
    with torch.no_grad():
        module[3].bias.fill_(torch.nan)
    with pytest.raises(InvalidArgument, match="it has diverged"):
        Entropy()(Released(module), Public(torch.rand(20, WIDTH)), 3)


def test_fine_tuning_on_labelled_rows_helps() -> None:
    rows, kind = clusters(400, kinds=4, spread=0.5)
    objective = Objective(classifier(), cross_entropy)
    held_out, labels = clusters(200, kinds=4, seed=5, spread=0.5)

    def accuracy() -> float:
        return float((objective.module.eval()(held_out).argmax(1) == labels).double().mean())

    before = accuracy()
    losses = fine_tune(objective, Public((rows, kind), seed=0), epochs=20, learning_rate=0.05)
    assert len(losses) == 20 * 4
    assert accuracy() > max(0.9, before)
    assert len(fine_tune(objective, Public((rows[:7], kind[:7]), seed=0), epochs=2)) == 2
    with pytest.raises(InvalidArgument, match="epochs=0"):
        fine_tune(objective, Public((rows, kind)), epochs=0)
