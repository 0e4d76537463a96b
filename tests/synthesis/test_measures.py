"""Measures of synthetic data against closed forms, loops by hand, and clouds whose answer is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.models.efficientnet_lite import efficientnet_lite0
from sfumato.models.efficientnet_lite import features as pooled
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.synthesis import measures
from sfumato.synthesis.features import Features, lite0_classes, lite0_features, pixel_features
from sfumato.synthesis.measures import Measured, cas, fid, inception_score, precision, recall
from sfumato.synthesis.memorised import memorised
from sfumato.warmup import warm_up


def rows_with(mean: Any, covariance: Any, count: int, seed: int) -> Tensor:
    """Rows whose sample mean and covariance are exactly these."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(count, len(mean)))
    raw -= raw.mean(0)
    white = raw @ np.linalg.inv(np.linalg.cholesky(np.cov(raw.T))).T
    return torch.from_numpy(white @ np.linalg.cholesky(np.asarray(covariance)).T + np.asarray(mean))


def random_covariance(dimension: int, seed: int) -> Any:
    a = np.random.default_rng(seed).normal(size=(dimension, dimension))
    return a @ a.T + 0.1 * np.eye(dimension)


# ------------------------------------------------------------------------------------------------ Fréchet distance


@pytest.mark.parametrize("seed", [0, 1])
def test_fid_is_the_distance_of_the_two_gaussians(seed: int) -> None:
    mean_a, mean_b = np.array([1.0, -2.0, 0.5]), np.array([0.0, 1.0, 2.0])
    a, b = random_covariance(3, seed), random_covariance(3, seed + 10)  # they do not commute
    root = linalg.sqrtm(a @ b).real
    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(a + b - 2 * root)
    found = fid(rows_with(mean_a, a, 50, seed), rows_with(mean_b, b, 80, seed + 5), features=pixel_features())
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert (found.by, found.synthetic, found.reference) == ("pixels", 50, 80)


def test_fid_of_independent_columns_is_a_sum_of_squares() -> None:
    """W_2 between diagonal Gaussians: squared differences of means and of deviations."""
    a = rows_with([0.0, 0.0], np.diag([4.0, 9.0]), 40, 0)
    b = rows_with([3.0, 0.0], np.diag([1.0, 25.0]), 40, 1)
    assert fid(a, b, features=pixel_features()).value == pytest.approx(9 + (2 - 1) ** 2 + (3 - 5) ** 2, rel=1e-9)


def test_fid_is_symmetric_and_zero_for_equal_samples() -> None:
    a, b = torch.randn(60, 5), 2 * torch.randn(30, 5) + 1
    assert fid(a, b, features=pixel_features()).value == pytest.approx(
        fid(b, a, features=pixel_features()).value, rel=1e-10
    )
    assert fid(a, a[torch.randperm(60)], features=pixel_features()).value == pytest.approx(0, abs=1e-9)
    assert fid(a, b, features=pixel_features()).value > 1


def test_fid_of_fewer_rows_than_features_has_no_root_of_a_singular_matrix() -> None:
    """Both ways to write C = L L' agree: padding features with zeros changes nothing."""
    a, b = torch.randn(6, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    wide = [torch.cat([t, torch.zeros(len(t), 40)], 1) for t in (a, b)]
    assert fid(*wide, features=pixel_features()).value == pytest.approx(
        fid(a, b, features=pixel_features()).value, rel=1e-9
    )


# ------------------------------------------------------------------------------------------------ precision, recall


def by_loops(queries: Any, centres: Any, k: int) -> float:
    """Equations 1 to 3 of Kynkäänniemi et al. as they are written."""
    covered = 0
    for q in queries:
        for i, c in enumerate(centres):
            others = sorted(np.linalg.norm(c - o) for j, o in enumerate(centres) if j != i)
            if np.linalg.norm(q - c) <= others[k - 1]:
                covered += 1
                break
    return covered / len(queries)


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_are_the_papers(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(k)
    made, real = rng.normal(size=(25, 2)), rng.normal(size=(30, 2)) + 1.5
    monkeypatch.setattr(measures, "_BLOCK", 7 * 30)  # several blocks, the last one ragged
    found = [f(made, real, features=pixel_features(), k=k).value for f in (precision, recall)]
    assert found == [by_loops(made, real, k), by_loops(real, made, k)]
    assert 0 < found[0] < 1
    assert 0 < found[1] < 1


def test_a_dropped_mode_lowers_recall_and_stray_rows_lower_precision() -> None:
    rng = np.random.default_rng(0)

    def modes(count: int, *centres: float) -> Any:
        return np.concatenate([rng.normal(size=(count, 2)) * 0.3 + centre for centre in centres])

    real = modes(200, 0.0, 10.0)
    good, dropped = modes(200, 0.0, 10.0), modes(400, 0.0)
    stray = np.concatenate([modes(150, 0.0, 10.0), modes(50, 5.0, 15.0)])
    table = {
        name: tuple(f(made, real, features=pixel_features()).value for f in (precision, recall))
        for name, made in {"good": good, "dropped": dropped, "stray": stray}.items()
    }
    assert min(table["good"]) > 0.9
    assert table["dropped"][0] > 0.9
    assert table["dropped"][1] == pytest.approx(0.5, abs=0.03)
    assert table["stray"][0] == pytest.approx(0.75, abs=0.05)
    assert table["stray"][1] > 0.9


def test_equal_samples_have_both() -> None:
    rows = torch.randn(40, 3)
    assert (
        precision(rows, rows, features=pixel_features()).value
        == recall(rows, rows, features=pixel_features()).value
        == 1
    )


# ------------------------------------------------------------------------------------------------ inception score

LOGITS = Features("the rows themselves", lambda rows: rows)


def by_hand(shares: Any) -> float:
    of_all = shares.mean(0)
    return float(np.exp(np.mean([sum(p * np.log(p / q) for p, q in zip(row, of_all, strict=True)) for row in shares])))


def test_the_inception_score_is_its_formula() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(4), size=12)
    found = inception_score(np.log(shares) + 3, classifier=LOGITS)  # logits are shares up to a constant
    assert found.value == pytest.approx(by_hand(shares), rel=1e-12)
    assert (found.by, found.spread) == ("the rows themselves", None)
    split = inception_score(np.log(shares), classifier=LOGITS, splits=3)
    parts = [by_hand(shares[i : i + 4]) for i in (0, 4, 8)]
    assert split.value == pytest.approx(np.mean(parts), rel=1e-12)
    assert split.spread == pytest.approx(np.std(parts), rel=1e-9)


def test_the_inception_score_lies_between_one_and_the_number_of_classes() -> None:
    certain = 1e4 * torch.eye(5, dtype=torch.float64).repeat(3, 1)  # shares of exactly zero
    assert inception_score(certain, classifier=LOGITS).value == pytest.approx(5, rel=1e-12)
    assert inception_score(certain[:1].repeat(9, 1), classifier=LOGITS).value == pytest.approx(1, rel=1e-12)


# ------------------------------------------------------------------------------------------------ accuracy score


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.images[:, None] * 15.9).to(torch.uint8), torch.from_numpy(data.target).long()


def classifier() -> Objective:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)]
    return Objective(nn.Sequential(*layers), cross_entropy)


def test_real_digits_teach_and_shuffled_ones_do_not() -> None:
    images, labels = digits()
    images = images / 255
    held_out = Public((images[1000:], labels[1000:]))
    train = partial(warm_up, steps=150, batch_size=50, learning_rate=0.1)
    scores = []
    for given in (labels[:1000], labels[:1000][torch.randperm(1000, generator=torch.Generator().manual_seed(0))]):
        objective = classifier()
        scores.append(cas(objective, Public((images[:1000], given), seed=0), held_out, train=train))
        objective.module.eval()
        right = (objective.module(images[1000:]).argmax(1) == labels[1000:]).double().mean().item()
        assert scores[-1].value == pytest.approx(right, abs=1e-12)  # and dropout was off
    assert scores[0].value > 0.88
    assert scores[1].value < 0.3
    assert (scores[0].by, scores[0].synthetic, scores[0].reference) == ("Sequential", 1000, 797)


def test_cas_leaves_the_modes_alone_and_wants_labels() -> None:
    images, labels = digits()
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))
    module[1].eval()
    public = Public((images / 255, labels))
    cas(Objective(module, cross_entropy), public, public, train=partial(warm_up, steps=1))
    assert [part.training for part in (module, *module)] == [True, True, False, True]
    with pytest.raises(InvalidArgument, match="rows, labels"):
        cas(Objective(module, cross_entropy), Public(images), public, train=partial(warm_up, steps=1))


# ------------------------------------------------------------------------------------------------ features


def test_pixels_of_bytes_and_of_floats_agree() -> None:
    images, _ = digits()
    assert torch.equal(pixel_features()(images[:9]), pixel_features()(images[:9].double() / 255))


def test_efficientnet_is_plugged_in_by_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = efficientnet_lite0(resolution=32)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    found = lite0_features(tmp_path / "weights.pth", resolution=32, batch_size=2)
    expected = pooled(network, images.expand(-1, 3, -1, -1))
    assert torch.allclose(found(images).float(), expected, rtol=1e-4, atol=1e-5)
    logits = lite0_classes(tmp_path / "weights.pth", resolution=32)
    assert logits(images).shape == (5, 1000)
    assert fid(images, images, features=found).by == "EfficientNet-Lite0 features at 32 pixels"


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda rows: rows.sum(), "shape"),
        (lambda rows: rows[:1], "1"),
        (lambda rows: rows / 0, "NaN or infinite"),
    ],
)
def test_features_that_are_none_are_refused(function: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        Features("odd", function)(torch.ones(4, 2))


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "measure",
    [
        lambda data, rows: fid(data, rows, features=pixel_features()),
        lambda data, rows: fid(rows, data, features=pixel_features()),
        lambda data, rows: precision(rows, data, features=pixel_features()),
        lambda data, rows: recall(rows, data, features=pixel_features()),
        lambda data, rows: inception_score(data, classifier=LOGITS),
        lambda data, rows: memorised(rows, data),
        lambda data, rows: cas(classifier(), data, Public(rows), train=warm_up),
        lambda data, rows: cas(classifier(), Public((rows, rows[:, 0].long())), data, train=warm_up),
    ],
)
def test_private_data_is_refused_with_the_way_through_the_door(measure: Any) -> None:
    rows = torch.rand(20, 3)
    private = Private(rows, name="clinic", size=20, budget=Budget(1.0, 1e-3))
    with pytest.raises(InvalidArgument, match=r"private\.ask\(NoisyMean"):
        measure(private, rows)


def test_a_public_and_what_is_in_it_measure_the_same() -> None:
    images, labels = digits()
    made, real = Public((images[:50], labels[:50])), Public((images[50:], labels[50:]))
    assert fid(made, real, features=pixel_features()) == fid(images[:50], images[50:], features=pixel_features())


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: fid(torch.rand(1, 3), torch.rand(9, 3), features=pixel_features()), "synthetic has 1 rows"),
        (lambda: precision(torch.rand(9, 3), torch.rand(3, 3), features=pixel_features()), "reference has 3 rows"),
        (lambda: precision(torch.rand(9, 3), torch.rand(9, 3), features=pixel_features(), k=0), "k=0"),
        (lambda: fid(torch.rand(9, 3), torch.rand(9, 4), features=pixel_features()), "3 features and reference rows 4"),
        (lambda: inception_score(torch.rand(9, 3), classifier=LOGITS, splits=10), "splits=10"),
        (lambda: fid("rows", torch.rand(9, 4), features=pixel_features()), "synthetic=str"),
        (lambda: Features("", lambda rows: rows), "name"),
    ],
)
def test_nonsense_is_refused(call: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        call()


def test_a_result_says_what_it_is() -> None:
    text = str(Measured(measure="inception score", value=9.1, by="LeNet", synthetic=50_000, spread=0.2))
    assert text == "inception score 9.1 ± 0.2 by LeNet (50,000 synthetic rows)"
