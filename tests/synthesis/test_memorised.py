"""Copies are found, near-copies too, and new draws are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from sfumato.errors import InvalidArgument
from sfumato.public import Public
from sfumato.synthesis.features import Features
from sfumato.synthesis.memorised import memorised

IMAGES = torch.from_numpy(load_digits().images[:, None] * 15.9).to(torch.uint8)
PUBLIC, FRESH = IMAGES[:900], IMAGES[900:]


def test_copies_are_found_with_their_rows_and_fresh_digits_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-8, 9, (20, 1, 8, 8), generator=generator)
    noised = (PUBLIC[100:120].int() + noise).clamp(0, 255).to(torch.uint8)
    made = torch.cat([PUBLIC[:10], FRESH[:200], noised])
    found = memorised(made, Public(PUBLIC))
    assert sorted(found.copies.tolist()) == [*range(10), *range(210, 230)]
    assert set(found.copies[:10].tolist()) == set(range(10))  # the nearest first
    assert found.neighbours[found.copies].sort().values.tolist() == [*range(10), *range(100, 120)]
    assert found.distances[:10].max() == pytest.approx(0, abs=1e-6)
    assert found.share == 30 / 230
    assert found.within < 0.01
    assert found.by == "pixels"


def test_distances_and_ratios_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    made, public = rng.normal(size=(7, 2)), rng.normal(size=(12, 2))
    found = memorised(made, public)
    for i, row in enumerate(made):
        far = [np.linalg.norm(row - other) for other in public]
        j = int(np.argmin(far))
        apart = min(np.linalg.norm(public[j] - other) for k, other in enumerate(public) if k != j)
        assert int(found.neighbours[i]) == j
        assert float(found.distances[i]) == pytest.approx(far[j], rel=1e-9)
        assert float(found.ratios[i]) == pytest.approx(far[j] / apart, rel=1e-9)


def test_the_share_within_is_that_of_each_row_beside_the_others() -> None:
    rng = np.random.default_rng(1)
    public = np.concatenate([rng.normal(size=(30, 2)), rng.normal(size=(5, 2))])
    public = np.concatenate([public, public[:3] + 1e-4])  # near-copies in the public data itself
    found = memorised(rng.normal(size=(4, 2)), public)
    alone = [memorised(public[i : i + 1], np.delete(public, i, 0)).share for i in range(len(public))]
    assert found.within == pytest.approx(np.mean(alone), abs=1e-12)
    assert found.within >= 6 / 38


def test_rows_that_are_there_twice_count_once() -> None:
    """Otherwise nothing could be nearer to such a row than its twin, and its near-copies would pass."""
    public = torch.cat([PUBLIC, PUBLIC[:50]])
    made = (PUBLIC[:50].int() + 2).clamp(0, 255).to(torch.uint8)
    found = memorised(made, public)
    assert found.share == 1
    assert found.neighbours.tolist() == list(range(50))


def test_other_features_see_other_copies() -> None:
    """By the mean of each image, a mirrored copy is a copy; by pixels it is not, unless mirrored rows are given."""
    mirrored = PUBLIC[:20].flip(-1)
    profile = Features("rows of the image, summed", lambda images: images.double().sum(3).flatten(1))
    assert memorised(mirrored, PUBLIC).share == 0
    found = memorised(mirrored, PUBLIC, features=profile)
    assert (found.share, found.by) == (1, "rows of the image, summed")
    assert memorised(mirrored, torch.cat([PUBLIC, PUBLIC.flip(-1)])).share == 1


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="different rows"):
        memorised(PUBLIC[:2], PUBLIC[:1].repeat(5, 1, 1, 1))
    with pytest.raises(InvalidArgument, match="threshold=1"):
        memorised(PUBLIC, PUBLIC, threshold=1)
    with pytest.raises(InvalidArgument, match="same size"):
        memorised(PUBLIC[:, :, :4], PUBLIC)
