"""The cosine with the public gradient: right on average, and its band holds the truth as often as it says."""

from __future__ import annotations

import torch

from sfumato.diagnostics import cosine
from sfumato.gradients import Gradient
from tests.statistics import binomial_p

TRIALS = 400


def covered(true_cosine: float, length: float, noise: float, entries: int = 300) -> tuple[int, float, float]:
    """How often the band holds the true cosine, the mean of the estimates, and the mean width of the band."""
    generator = torch.Generator().manual_seed(int(1000 * (true_cosine + 2)) + int(100 * length))
    p, across = torch.zeros(entries, dtype=torch.float64), torch.zeros(entries, dtype=torch.float64)
    p[0], across[1] = 2.0, 1.0
    exact = length * (true_cosine * p / 2 + (1 - true_cosine**2) ** 0.5 * across)
    public, held, middles, widths = Gradient({"w": p}), 0, [], []
    for _ in range(TRIALS):
        drawn = exact + noise * torch.randn(entries, generator=generator, dtype=torch.float64)
        middle, low, high = cosine(Gradient({"w": drawn}), public, noise).tolist()
        assert -1 <= low <= middle <= high <= 1
        held += low <= true_cosine <= high
        middles.append(middle)
        widths.append(high - low)
    return held, sum(middles) / TRIALS, sum(widths) / TRIALS


def test_the_band_holds_the_true_cosine() -> None:
    for true in (-0.9, -0.3, 0.0, 0.5, 0.95):
        for length in (0.3, 1.0, 5.0):  # against noise of 0.05 * sqrt(300) = 0.87 in all
            held, middle, width = covered(true, length, 0.05)
            assert binomial_p(held, TRIALS, 0.95) > 1e-6 or held > 0.95 * TRIALS, (true, length, held)
            if length >= 1.0:
                assert abs(middle - true) < 0.05
                assert width < 0.6  # it says something


def test_noise_in_proportion_does_not_pass_for_agreement() -> None:
    """The naive cosine of the noisy gradient would be far too small."""
    entries, noise = 20_000, 0.05
    p = torch.ones(entries, dtype=torch.float64)
    exact = 0.02 * p  # length 2.8 under noise of length 7.1
    drawn = Gradient({"w": exact + noise * torch.randn(entries, generator=torch.Generator().manual_seed(0)).double()})
    naive = float(drawn.dot(Gradient({"w": p})) / (drawn.norm() * p.norm()))
    middle, low, _ = cosine(drawn, Gradient({"w": p}), noise).tolist()
    assert naive < 0.5
    assert middle > 0.9
    assert low > 0.8


def test_where_nothing_can_be_said_the_band_says_so() -> None:
    drawn = Gradient({"w": torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()})
    middle, low, high = cosine(drawn, Gradient({"w": torch.ones(1000).double()}), 1.0).tolist()
    assert low < 0 < high
    assert high - low > 1.0
    assert -1 <= middle <= 1
