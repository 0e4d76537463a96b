"""PDA-DPMD, exact (Amid et al. 2022, paper 003, Algorithm 1), for linear models: the public loss is the mirror map.

Line 4 moves from theta_t to where grad Psi = grad Psi(theta_t) - eta (g_t + b_t): far where the public loss is flat,
little where it is steep. There the public rows know the answer already, and noise would do most harm. Line numbers are
the paper's. Deviations:

1. Rows are clipped, and sums are divided by the declared batch (lines 1 and 3 print neither).
2. The noise is planned by PLD: line 1 has 2.6 times more at epsilon 1, under add-remove with all rows in every step.
3. Psi has a regulariser, without which few public rows do not make it strongly convex (appendix E: "a small constant").
   It is divided by its least curvature alpha at theta_0, so that eta means what it means in DP-SGD (appendix E).
4. Batches may be sampled. The result is the last iterate; `average=1` is line 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.budgets import PlannedAllowance
from sfumato.erm.descent import Average, Descent
from sfumato.erm.losses import Loss, Needs, Square
from sfumato.erm.questions import LinearGradientMean
from sfumato.erm.rows import Array, Rows
from sfumato.errors import InvalidArgument
from sfumato.mirror_map import MirrorMap
from sfumato.privacy.budget import Budget
from sfumato.private import Private

_SMALL = 1000  # rows or columns: matrices up to that size may be factorised again and again
_SPARSE = 0.1  # share of entries that are not zero, below which sparse products are faster
_EXACT = 1e-8  # of a mirror step's length in the gradient's space
_STRENGTHS, _FOLDS = (1e-3, 1e-2, 1e-1, 1.0, 10.0), 5

_Step = Callable[[Tensor, Tensor], Tensor]


class LinearMap(MirrorMap):
    """Psi(w) = mean loss of public rows + strength / 2 |w|^2.

    Its Hessian X' D X / n + strength I is factorised on its smaller side (with fewer rows than columns, by Woodbury's
    identity): once for the square loss, whose D is constant, and again at every point where it is small; else
    conjugate gradients do.

    >>> rows = Rows(torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> LinearMap(Square(), rows, strength=1.0).moved(torch.zeros(2).double(), torch.ones(2).double(), 1e-8)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    def __init__(self, loss: Loss, rows: Rows, strength: float) -> None:
        self.least, self._loss, self._rows = strength, loss, rows
        self._few = rows.X.shape[0] < rows.X.shape[1]
        self._small = min(rows.X.shape) <= _SMALL
        self._quadratic = isinstance(loss, Square)
        sparse = not self._small and int(torch.count_nonzero(rows.X)) < _SPARSE * rows.X.numel()
        self._sparse = csr_array(rows.X.numpy()) if sparse else None
        self._factor: Tensor | None = None

    def minimum(self) -> Tensor:
        zero = torch.zeros(self._rows.X.shape[1], dtype=torch.float64)
        down = -self.gradient(zero)
        if self._quadratic and not self._small:  # for one point alone, a factor is not worth its while
            return super().solve(zero, down, tolerance=_EXACT)
        return self.moved(zero, down, _EXACT)

    def gradient(self, theta: Tensor) -> Tensor:
        y = self._rows.y
        return self._combined(self._loss.slope(self._scores(theta), y) / len(y)) + self.least * theta

    def hessian(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        d = self._weights(theta)
        return lambda vector: self._combined(d * self._scores(vector)) + self.least * vector

    def moved(self, theta: Tensor, by: Tensor, tolerance: float) -> Tensor:
        if self._quadratic:  # one Newton step is exact
            return theta + self.solve(theta, by, tolerance=tolerance)
        return super().moved(theta, by, tolerance)

    def solve(self, theta: Tensor, wanted: Tensor, *, tolerance: float) -> Tensor:
        if not self._quadratic and not self._small:
            return super().solve(theta, wanted, tolerance=tolerance)
        d = self._weights(theta)
        if not self._quadratic or self._factor is None:
            self._factor = torch.linalg.cholesky(self._smaller_side(d))
        if not self._few:
            return torch.cholesky_solve(wanted[:, None], self._factor)[:, 0]
        # With A = sqrt(D / n) X: (A' A + s I)^-1 = (I - A' (A A' + s I)^-1 A) / s
        inner = torch.cholesky_solve((d.sqrt() * self._scores(wanted))[:, None], self._factor)[:, 0]
        return (wanted - self._combined(d.sqrt() * inner)) / self.least

    def least_curvature(self, theta: Tensor) -> float:
        """alpha: the least eigenvalue of the Hessian at theta, to within a part in a thousand."""
        width = self._rows.X.shape[1]
        if self._few:
            return self.least
        if self._small:
            return float(torch.linalg.eigvalsh(self._smaller_side(self._weights(theta)))[0])

        def inverse(vector: Array) -> Array:
            return self.solve(theta, torch.from_numpy(vector.ravel()), tolerance=1e-6).numpy()

        start = np.random.default_rng(0).uniform(-1, 1, width)
        operator = LinearOperator((width, width), matvec=inverse, dtype=np.float64)
        (largest,) = eigsh(operator, k=1, which="LA", ncv=8, tol=1e-3, v0=start, return_eigenvectors=False)
        return 1 / float(largest)

    def _scores(self, theta: Tensor) -> Tensor:
        """X theta."""
        return self._rows.X @ theta if self._sparse is None else torch.from_numpy(self._sparse @ theta.numpy())

    def _combined(self, weights: Tensor) -> Tensor:
        """X' weights."""
        return weights @ self._rows.X if self._sparse is None else torch.from_numpy(self._sparse.T @ weights.numpy())

    def _weights(self, theta: Tensor) -> Tensor:
        """The diagonal of D / n."""
        y = self._rows.y
        return self._loss.curvature(y if self._quadratic else self._scores(theta), y) / len(y)

    def _smaller_side(self, d: Tensor) -> Tensor:
        """A A' + s I, or A' A + s I."""
        if self._sparse is not None:
            A = self._sparse.multiply(d.sqrt().numpy()[:, None]).tocsr()
            matrix = torch.from_numpy((A @ A.T if self._few else A.T @ A).toarray())
        else:
            dense = self._rows.X * d.sqrt()[:, None]
            matrix = dense @ dense.T if self._few else dense.T @ dense
        matrix.diagonal().add_(self.least)
        return matrix


def chosen_strength(loss: Loss, public: Rows, unit: float) -> float:
    """One of `_STRENGTHS`, times `unit`: the one with which some public rows predict the others best."""
    folds = min(_FOLDS, len(public.y))
    if folds < 2:
        return _STRENGTHS[-1] * unit

    def held_out(strength: float) -> float:
        total = 0.0
        for fold in range(folds):
            out = torch.arange(len(public.y)) % folds == fold  # every fifth, as rows are often sorted by class
            psi = LinearMap(loss, Rows(public.X[~out], public.y[~out]), strength)
            total += float(loss.value(public.X[out] @ psi.minimum(), public.y[out]).sum())
        return total

    return min((strength * unit for strength in _STRENGTHS), key=held_out)


@dataclass(kw_only=True, eq=False, repr=False)
class _MirrorDescent(Descent):
    mirror: str = "public"
    strength: float | None = None

    _needs = Needs(smooth=True)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.mirror not in ("public", "euclidean"):
            raise InvalidArgument(f"mirror={self.mirror!r} must be 'public' or 'euclidean'.")
        if self.strength is not None and not (math.isfinite(self.strength) and self.strength > 0):
            raise InvalidArgument(
                f"strength={self.strength} must be positive: it makes the mirror map strongly convex."
            )
        if self.radius is not None and self.mirror == "public":
            raise InvalidArgument(
                f"radius={self.radius} is a Euclidean projection, and not the mirror map's: leave it out, or use "
                "mirror='euclidean'."
            )

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        theta, step = self._start(public, loss, width)
        iterates, sampler = Average(self.average), self._sampler(private.size)
        budget = Budget(self.epsilon, self.delta)
        T = int(self.max_iter)
        with PlannedAllowance(private, LinearGradientMean, sampler, budget=budget, steps=T) as allowance:
            for _ in range(T):  # line 2
                g = allowance.ask(LinearGradientMean(loss, theta, self.clip), allowance.noise)  # line 3, and b_t
                theta = step(theta, g)  # line 4
                iterates.add(theta)
        return Learned(iterates.result(), T, allowance.epsilon)  # line 6

    def _start(self, public: Rows | None, loss: Loss, width: int) -> tuple[Tensor, _Step]:
        """Line 1: theta_0, and how to move from there."""
        if public is None:
            return torch.zeros(width, dtype=torch.float64), self._moved
        psi = LinearMap(loss, public, self.l2 + self._strength(loss, public))
        theta = psi.minimum()
        if self.mirror == "euclidean":
            return theta, self._moved
        eta_alpha = self.learning_rate * psi.least_curvature(theta)
        return theta, lambda theta, g: psi.moved(theta, -eta_alpha * (g + self.l2 * theta), _EXACT)

    def _strength(self, loss: Loss, public: Rows) -> float:
        """In units of the mean eigenvalue that the public Hessian has at the most."""
        assert loss.smoothness is not None
        unit = max(1e-12, loss.smoothness * float(public.X.square().mean()))
        return chosen_strength(loss, public, unit) if self.strength is None else self.strength * unit


@dataclass(kw_only=True, eq=False, repr=False)
class MirrorDescentClassifier(Classifier, _MirrorDescent):
    """Exact mirror descent for two classes: starts where the public loss is least, and steps along its curvature.

    Beside the arguments of `PrivateLinear` and `Descent`:

    Args:
        learning_rate: eta. Where the public loss is flattest a step is eta times the gradient, elsewhere it is shorter.
        mirror: "public", or "euclidean", which starts there and then takes plain steps: warm-start DP-SGD.
        strength: of the mirror map's regulariser, in multiples of the mean eigenvalue of the public Hessian. None
            chooses it by cross-validation among the public rows.

    Its settings are not those of `TunedDescent`, whose learning rate is for steps alike in all directions (at most 0.5
    for figure 1 of the paper, which takes 6e4): here the best one grows with how unlike the public curvatures are.
    The hinge is refused, since it has no curvature: use `HuberisedHinge`. Without public rows it is plain DP-SGD.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (3000, 4))
    >>> y = X[:, 0] + X[:, 1] > 0
    >>> model = MirrorDescentClassifier(epsilon=1.0, max_iter=60)
    >>> model = model.fit(X[50:], y[50:], X_public=X[:50], y_public=y[:50])
    >>> bool(model.score(X, y) > 0.9), bool(0.9 < model.epsilon_ <= 1.0)
    (True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class MirrorDescentRegressor(Regressor, _MirrorDescent):
    """Exact mirror descent for linear regression; see `MirrorDescentClassifier`. Scale targets to about [-1, 1]."""
