"""Convex minimisation on rows that may be looked at: mean loss + strength / 2 |w - centre|^2, to a proven tolerance.

Newton's method in at most as many dimensions as there are rows. For the hinge, whose kinks Newton cannot see, the
huberised hinge is sharpened until the duality gap of the true problem closes.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sfumato.erm.losses import Hinge, HuberisedHinge, Loss
from sfumato.erm.rows import Rows
from sfumato.errors import InvalidArgument

_NEWTON_STEPS = 200


class Minimum(NamedTuple):
    """The minimiser, how far its value can be above the least one, and how many Newton steps it took."""

    w: Tensor
    gap: float
    steps: int


def mean_gradient(loss: Loss, w: Tensor, rows: Rows) -> Tensor:
    """The gradient of the mean loss."""
    return loss.slope(rows.X @ w, rows.y) @ rows.X / len(rows.y)


def minimise(loss: Loss, rows: Rows, *, strength: float, centre: Tensor, tolerance: float = 1e-10) -> Minimum:
    """The least mean loss + strength / 2 |w - centre|^2, within `tolerance` of the least value.

    >>> rows = Rows(torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    >>> float(minimise(Hinge(), rows, strength=2.0, centre=torch.zeros(1, dtype=torch.float64)).w.round(decimals=4))
    0.5
    """
    if not strength > 0:
        raise InvalidArgument(f"strength={strength} must be positive, or there may be no minimiser.")
    problem = _Problem(rows, strength, centre)
    v, steps = torch.zeros(problem.A.shape[1], dtype=torch.float64), 0
    if loss.smoothness is not None:
        v, gap, steps = problem.newton(loss, v, tolerance)
    else:
        h, gap = 1.0, float("inf")
        while gap > tolerance and h > tolerance / 100:
            v, _, more = problem.newton(HuberisedHinge(h), v, min(tolerance, h / 100))
            v, gap, steps = v, problem.hinge_gap(v, h), steps + more
            h /= 4
    if gap > tolerance:
        warnings.warn(
            f"The minimum was found to {gap:.1e} instead of {tolerance:.1e}.", ConvergenceWarning, stacklevel=2
        )
    return Minimum(problem.point(v), gap, steps)


class _Problem:
    """F(v) = mean loss(b + A v, y) + strength / 2 |v|^2, where w = centre + Q v and Q spans the rows if few."""

    def __init__(self, rows: Rows, strength: float, centre: Tensor) -> None:
        self.y, self.strength, self.centre = rows.y, strength, centre
        self.b = rows.X @ centre
        few = rows.X.shape[0] < rows.X.shape[1]
        self.Q = torch.linalg.qr(rows.X.T).Q if few else None  # w - centre has no part outside the span of the rows
        self.A = rows.X @ self.Q if self.Q is not None else rows.X

    def point(self, v: Tensor) -> Tensor:
        return self.centre + (v if self.Q is None else self.Q @ v)

    def value(self, loss: Loss, v: Tensor) -> float:
        return float(loss.value(self.b + self.A @ v, self.y).mean() + self.strength / 2 * v.dot(v))

    def newton(self, loss: Loss, v: Tensor, tolerance: float) -> tuple[Tensor, float, int]:
        """Damped Newton; F - min F <= |grad F|^2 / (2 strength), since F is strongly convex."""
        rows, gap, value = len(self.y), float("inf"), self.value(loss, v)
        for step in range(_NEWTON_STEPS):
            z = self.b + self.A @ v
            gradient = loss.slope(z, self.y) @ self.A / rows + self.strength * v
            gap = float(gradient.dot(gradient)) / (2 * self.strength)
            if gap <= tolerance:
                return v, gap, step
            hessian = (self.A.T * (loss.curvature(z, self.y) / rows)) @ self.A
            hessian.diagonal().add_(self.strength)
            move = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(hessian))[:, 0]
            along, slope = 1.0, float(gradient.dot(move))
            while (there := self.value(loss, v - along * move)) > value - 1e-4 * along * slope and along > 1e-10:
                along /= 2
            if there >= value:  # rounding: no further progress in float64
                return v, gap, step
            v, value = v - along * move, there
        return v, gap, _NEWTON_STEPS

    def hinge_gap(self, v: Tensor, h: float) -> float:
        """Primal minus dual value of the true hinge problem, the dual point being the slopes of the huberised one."""
        z = self.b + self.A @ v
        dual = HuberisedHinge(h).slope(z, self.y) / len(self.y)  # -a_i y_i, with a_i in [0, 1/n]
        pulled = dual @ self.A
        best = -dual @ self.y - (-dual).dot(self.b) - pulled.dot(pulled) / (2 * self.strength)
        return max(0.0, self.value(Hinge(), v) - float(best))
