"""The tabular generator: columns, correlations and labels are kept, and nothing but a `Public` is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.synthesis.tables import _hermite, _latent_correlations, _ranks, fit_table

ROWS = 4000


def mixed(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two classes of other marginals and correlations: lognormal, integer, binary, a code of three, zeros and more."""
    rng = np.random.default_rng(seed)
    y = (np.arange(rows) % 4 == 0).astype(int)
    sign = np.where(y == 1, -1, 1)
    common = rng.normal(size=rows)
    z = [common * 0.8 + rng.normal(size=rows) * 0.6 for _ in range(5)]
    wealth = np.exp(z[0] + y)
    age = np.rint(40 + 10 * z[1] * sign)
    owner = (z[2] > 0.5 - y).astype(float)
    region = np.array([7.0, 2.0, 5.0])[np.digitize(z[3], [-0.5, 0.8])]  # ordered 7 < 2 < 5 by what they go with
    gain = np.where(z[4] > 0.7, 100 * (z[4] - 0.7), 0.0)
    return torch.from_numpy(np.column_stack([wealth, age, owner, region, gain])), torch.from_numpy(y)


@pytest.fixture(scope="module")
def both() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    X, y = mixed()
    made, labels = fit_table(Public((X, y)), categorical=[3]).sample(2 * ROWS, seed=1)
    return X, y, made, labels


# ------------------------------------------------------------------------------------------------ what is kept


def test_the_columns_of_every_class_are_distributed_as_they_were(both: Any) -> None:
    X, y, made, labels = both
    for label in (0, 1):
        real, drawn = X[y == label].numpy(), made[labels == label].numpy()
        # the margins are the sample's own, so only the drawn rows' sampling error is left
        allowed = 2.5 / np.sqrt(len(drawn)) + 1 / len(real)
        for column in (0, 1, 4):
            values = np.unique(real[:, column])
            shares = [(np.searchsorted(np.sort(t[:, column]), values, "right") / len(t)) for t in (real, drawn)]
            assert np.abs(shares[0] - shares[1]).max() < allowed, (label, column)
        for column in (2, 3):
            for value in np.unique(real[:, column]):
                assert (drawn[:, column] == value).mean() == pytest.approx(
                    (real[:, column] == value).mean(), abs=allowed
                )


def test_values_stay_valid(both: Any) -> None:
    X, _, made, _ = both
    assert made.dtype == X.dtype
    assert set(made[:, 2].tolist()) == {0.0, 1.0}
    assert set(made[:, 3].tolist()) == {2.0, 5.0, 7.0}
    assert torch.equal(made[:, 1], made[:, 1].round())
    assert bool((made >= X.min(0).values).all())
    assert bool((made <= X.max(0).values).all())
    assert (made[:, 4] == 0).double().mean() == pytest.approx((X[:, 4] == 0).double().mean().item(), abs=0.03)
    assert len(set(made[:, 0].tolist()) - set(X[:, 0].tolist())) > ROWS  # numbers are not only repeated


def test_the_rank_correlations_of_every_class_are_kept(both: Any) -> None:
    X, y, made, labels = both
    order = {7.0: 0.0, 2.0: 1.0, 5.0: 2.0}
    for label in (0, 1):
        found = []
        for table in (X[y == label].numpy().copy(), made[labels == label].numpy().copy()):
            table[:, 3] = [order[v] for v in table[:, 3]]
            found.append(stats.spearmanr(table).statistic)
        few = int((y == label).sum())
        assert np.abs(found[0] - found[1]).max() < 4 / np.sqrt(few), label
        assert np.abs(found[0][np.triu_indices(5, 1)]).min() > 0.2  # there is something to keep
    assert found[0][0, 1] < -0.3  # of class 1; in class 0 it is positive


def test_pooling_the_classes_would_have_been_found() -> None:
    """The tests above can fail: one copula for both classes has neither's correlations."""
    X, y = mixed()
    made = fit_table(Public(X), categorical=[3]).sample(2 * ROWS, seed=1)
    real = [stats.spearmanr(X[y == label, :2].numpy()).statistic for label in (0, 1)]
    found = stats.spearmanr(made[:, :2].numpy()).statistic
    assert min(abs(found - r) for r in real) > 4 / np.sqrt(ROWS / 4)


def test_labels_have_their_share_and_can_be_asked_for() -> None:
    X, y = mixed(400)
    generator = fit_table(Public((X, y)))
    rows, labels = generator.sample(10, seed=0)
    assert (rows.shape, labels.dtype) == ((10, 5), y.dtype)
    assert int(labels.sum()) in (2, 3)
    wanted = torch.tensor([1, 0, 1, 1])
    assert torch.equal(generator.sample(labels=wanted, seed=0)[1], wanted)
    wealthy = generator.sample(labels=[1] * 500, seed=0)[0][:, 0].median()
    assert wealthy > 1.5 * generator.sample(labels=[0] * 500, seed=0)[0][:, 0].median()
    with pytest.raises(InvalidArgument, match=r"labels has 3: the table has the classes 0, 1"):
        generator.sample(labels=[3])


def test_seeds_decide() -> None:
    generator = fit_table(Public(mixed(200)))
    assert torch.equal(generator.sample(50, seed=3)[0], generator.sample(50, seed=3)[0])
    assert not torch.equal(generator.sample(50, seed=3)[0], generator.sample(50, seed=4)[0])


def test_combinations_of_columns_stay_among_those_that_were_seen() -> None:
    """A one-hot coded variable is one variable: drawn column by column, it would have none or two ones."""
    rng = np.random.default_rng(0)
    which = rng.choice(4, size=1000, p=[0.4, 0.3, 0.2, 0.1])
    X = torch.from_numpy(np.column_stack([np.eye(4)[which], which + rng.normal(size=1000)])).float()
    together = fit_table(Public(X), categorical=[(0, 1, 2, 3)]).sample(3000, seed=0)
    assert torch.equal(together[:, :4].sum(1), torch.ones(3000))
    assert together[:, :4].mean(0).tolist() == pytest.approx(np.bincount(which) / 1000, abs=0.04)
    place = together[:, :4].argmax(1).numpy()
    assert stats.spearmanr(place, together[:, 4]).statistic == pytest.approx(
        stats.spearmanr(which, X[:, 4]).statistic, abs=0.06
    )
    apart = fit_table(Public(X)).sample(3000, seed=0)
    assert (apart[:, :4].sum(1) != 1).double().mean() > 0.1


def test_a_number_to_predict_is_one_more_column() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 2))
    y = X[:, 0] - 2 * X[:, 1] + rng.normal(size=2000)
    rows, target = fit_table(Public((X, y)), classes=False).sample(4000, seed=0)
    assert rows.shape == (4000, 2)
    weights = np.linalg.lstsq(rows.numpy(), target.numpy(), rcond=None)[0]
    assert weights == pytest.approx([1, -2], abs=0.15)


# ------------------------------------------------------------------------------------------------ the copula


def test_latent_correlations_of_continuous_columns_have_a_closed_form() -> None:
    """Pearson 1907: rho = 2 sin(pi r_s / 6)."""
    rng = np.random.default_rng(0)
    values = rng.multivariate_normal([0, 0, 0], [[1, 0.7, -0.9], [0.7, 1, -0.5], [-0.9, -0.5, 1]], size=3000)
    expected = 2 * np.sin(np.pi / 6 * stats.spearmanr(values).statistic)
    assert _latent_correlations(np.exp(values)) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("rho", [-0.8, 0.3, 0.9])
def test_latent_correlations_of_binary_columns_are_tetrachoric(rho: float) -> None:
    """Shares of a table of two by two, computed from the bivariate normal law."""
    cuts = (0.3, -0.8)
    law = stats.multivariate_normal([0, 0], [[1, rho], [rho, 1]])
    both_low = float(law.cdf(cuts))
    low = stats.norm.cdf(cuts)
    counts = np.rint(1e5 * np.array([[both_low, low[0] - both_low], [low[1] - both_low, 1 - low.sum() + both_low]]))
    cells = np.array([[0, 0], [0, 1], [1, 0], [1, 1]]).repeat(counts.reshape(-1).astype(int), axis=0)
    assert _latent_correlations(cells.astype(float))[0, 1] == pytest.approx(rho, abs=2e-3)


def test_the_series_holds_the_variance() -> None:
    for column in (np.arange(500.0), np.repeat([0.0, 1.0], [300, 200]), np.rint(np.linspace(0, 5, 99))):
        ranks = _ranks(column[:, None])[:, 0]
        assert np.square(_hermite(ranks)).sum() == pytest.approx(ranks.var(), rel=1e-9)


def test_a_column_and_its_copy_stay_together() -> None:
    rng = np.random.default_rng(0)
    number, flag = rng.normal(size=500), rng.random(500) < 0.3
    X = np.column_stack([number, number, flag, flag, ~flag]).astype(float)
    made = fit_table(Public(X), shrinkage=0.0).sample(1000, seed=0).numpy()
    assert np.abs(made[:, 0] - made[:, 1]).max() < 0.01
    assert (made[:, 2] == made[:, 3]).all()
    assert (made[:, 2] + made[:, 4] == 1).all()


def test_full_shrinkage_makes_columns_independent() -> None:
    X, y = mixed()
    made, _ = fit_table(Public((X, y)), shrinkage=1.0).sample(ROWS, labels=None, seed=0)
    inside = stats.spearmanr(made[:, [0, 2]].numpy()).statistic
    real = stats.spearmanr(X[:, [0, 2]].numpy()).statistic
    assert inside < real - 0.2


def test_few_rows_and_constant_columns_are_fitted_too() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(12, 20)), np.full(12, 3.0)])
    y = np.array([0] * 6 + [1] * 5 + [2])
    rows, labels = fit_table(Public((X, y))).sample(60, seed=0)
    assert bool(torch.isfinite(rows).all())
    assert torch.equal(rows[:, -1], torch.full((60,), 3.0, dtype=torch.float64))
    assert torch.equal(rows[labels == 2][0], torch.from_numpy(X[-1]))  # all that is known of this class


# ------------------------------------------------------------------------------------------------ the rest


def test_the_public_data_that_comes_out_and_where_it_is_from() -> None:
    X, y = mixed(200)
    generator = fit_table(Public((X, y)), categorical=[3])
    public = generator.public(30, seed=0)
    assert isinstance(public, Public)
    assert len(public) == 30
    assert torch.equal(public.batch()[0], generator.sample(30, seed=0)[0])
    assert public.provenance["seed"] == 0
    assert "no private data" in public.provenance["statement"]
    assert public.provenance["generator"] == generator.provenance
    assert generator.provenance["rows"] == 200
    again = fit_table(Public((X.clone(), y)), categorical=[3]).provenance
    assert generator.provenance == again
    X[-1, 0] += 1e-9
    other = fit_table(Public((X, y)), categorical=[3]).provenance
    assert generator.provenance["sha256"] != other["sha256"]


def test_only_a_public_is_taken() -> None:
    X, y = mixed(100)
    private = Private((X, y), name="clinic", size=100, budget=Budget(1.0, 1e-3))
    for data in (private, (X, y), X):
        with pytest.raises(InvalidArgument, match="must be a Public"):
            fit_table(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: fit_table(Public(torch.rand(9, 2, 2))), "shapes"),
        (lambda: fit_table(Public(torch.rand(9, 2)), categorical=[2]), "categorical=\\[2\\]"),
        (lambda: fit_table(Public(torch.rand(9, 2)), categorical=[0, (0, 1)]), "at most once"),
        (lambda: fit_table(Public(torch.rand(9, 2)), shrinkage=2.0), "shrinkage=2.0"),
        (lambda: fit_table(Public((torch.rand(9, 2), torch.rand(9)))), "classes=False"),
        (lambda: fit_table(Public(torch.rand(9, 2))).sample(0), "n=0"),
        (lambda: fit_table(Public(torch.rand(9, 2))).sample(labels=[1]), "labels"),
    ],
)
def test_nonsense_is_refused(call: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        call()
