"""Losses against autograd, and their constants against what they do on a fine grid."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import hinge_loss

from sfumato.erm.losses import Hinge, Huber, HuberisedHinge, Logistic, Loss, Needs, Square
from sfumato.errors import InvalidArgument

LOSSES: list[Loss] = [Logistic(), Hinge(), HuberisedHinge(), HuberisedHinge(0.1), Square(), Huber(), Huber(0.3)]


def scores(loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Away from kinks, where derivatives jump; 1e-7 steps for the numeric constants."""
    z = torch.linspace(-4, 4, 2001, dtype=torch.float64) + 0.000123
    y = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(1001)[:2001]
    return z, y if loss.classification else y * 0.7


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_slopes_and_curvatures_are_derivatives(loss: Loss) -> None:
    z, y = scores(loss)
    z.requires_grad_()
    (slope,) = torch.autograd.grad(loss.value(z, y).sum(), z)
    assert torch.allclose(loss.slope(z, y), slope, atol=1e-12)
    if loss.smoothness is None:
        assert not loss.curvature(z, y).any()
        return
    (curvature,) = torch.autograd.grad(loss.slope(z, y).sum(), z)
    assert torch.allclose(loss.curvature(z.detach(), y), curvature, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_constants_hold_and_are_not_generous(loss: Loss) -> None:
    z, y = scores(loss)
    if loss.lipschitz is not None:
        steepest = float(loss.slope(z * 10, y).abs().max())
        assert 0.99 * loss.lipschitz <= steepest <= loss.lipschitz * (1 + 1e-12)
    step = 1e-6
    bends = (loss.slope(z + step, y) - loss.slope(z, y)).abs() / step
    if loss.smoothness is None:
        dense = torch.linspace(0.99, 1.01, 10001, dtype=torch.float64)
        assert float((loss.slope(dense, torch.ones(())).diff() / dense.diff()).abs().max()) > 1e4
    else:
        assert 0.99 * loss.smoothness <= float(bends.max()) <= loss.smoothness * (1 + 1e-6)


def test_square_is_lipschitz_in_a_ball_only() -> None:
    bound = Square().lipschitz_within(3.0, 1.0)
    worst = Square().slope(torch.tensor(3.0), torch.tensor(-1.0))  # w = 3 x, |x| = 1
    assert bound == float(worst)
    with pytest.raises(InvalidArgument, match="project the weights"):
        Square().lipschitz_within(float("inf"), 1.0)
    assert Huber(0.3).lipschitz_within(1e9, 1e9) == 0.3


def test_the_huberised_hinge_lies_within_a_quarter_of_h_above_the_hinge() -> None:
    z, y = scores(Hinge())
    for h in (0.5, 0.05):
        above = HuberisedHinge(h).value(z, y) - Hinge().value(z, y)
        assert float(above.min()) >= -1e-12
        assert float(above.max()) <= h / 4 + 1e-12
        one = torch.ones(1, dtype=torch.float64)
        assert float(HuberisedHinge(h).value(one, one)) == pytest.approx(h / 4)


def test_the_hinge_is_scikit_learns() -> None:
    z, y = scores(Hinge())
    assert float(Hinge().value(z, y).mean()) == pytest.approx(hinge_loss(y.numpy(), z.numpy()))


def test_the_logistic_loss_neither_overflows_nor_vanishes_too_early() -> None:
    z = torch.tensor([-800.0, 800.0, 30.0], dtype=torch.float64)
    y = torch.ones(3, dtype=torch.float64)
    assert torch.equal(Logistic().value(z, y)[:2], torch.tensor([800.0, 0.0], dtype=torch.float64))
    assert float(Logistic().slope(z, y)[2]) == pytest.approx(-9.357622968839299e-14, rel=1e-9)


def test_solvers_refuse_before_they_start() -> None:
    with pytest.raises(InvalidArgument, match=r"not smooth, which output perturbation needs: use HuberisedHinge"):
        Needs(smooth=True).check(Hinge(), "output perturbation")
    with pytest.raises(InvalidArgument, match=r"not twice differentiable.*use Logistic"):
        Needs(twice_differentiable=True).check(HuberisedHinge(), "objective perturbation")
    with pytest.raises(InvalidArgument, match=r"not twice differentiable.*use Square"):
        Needs(twice_differentiable=True).check(Huber(), "objective perturbation")
    with pytest.raises(InvalidArgument, match=r"unbounded slopes.*use Huber, or give a projection radius"):
        Needs(lipschitz=True).check(Square(), "objective perturbation")
    Needs(lipschitz=True).check(Square(), "objective perturbation", radius=1.0)
    Needs(lipschitz=True, smooth=True, twice_differentiable=True).check(Logistic(), "anything")


@pytest.mark.parametrize("make", [lambda: HuberisedHinge(0.0), lambda: Huber(-1.0), lambda: Huber(float("nan"))])
def test_widths_must_be_positive(make: type[Loss]) -> None:
    with pytest.raises(InvalidArgument, match="must be positive"):
        make()
