"""Output perturbation (Zhang, Zheng, Mou and Wang 2017; for minimisers, Chaudhuri, Monteleoni and Sarwate 2011).

The weights are learned from all rows without noise, inside the door; only the last ones leave, with Gaussian noise in
proportion to how far one exchanged row can move them. Adjacency: replace-one. With n rows, |x| <= 1:

- T steps of gradient descent on a convex, beta-smooth, L-Lipschitz loss + l2 / 2 |w|^2. One step with eta <= 2 / (beta
  + l2) multiplies the distance of two points by at most c = max(|1 - eta l2|, |1 - eta (beta + l2)|) <= 1, and the
  exchanged row adds 2 eta L / n. So Delta = (2 eta L / n) (1 + c + ... + c^(T-1)): 2 eta L T / n without l2, and never
  more than 2 L / (l2 n) for small steps.
- The minimiser with l2 > 0 moves by at most 2 L / (l2 n). Floating point finds it up to a gradient of norm tau, hence
  within tau / l2: Delta = (2 L / n + 2 tau) / l2. That the gradient is so small, half of tau being left to rounding, is
  made sure of before anything leaves. Descent gets there within `steps`; where float64 does not, zeros leave instead,
  which is not covered by the proof.

Deviation: the noise is that of the analytic Gaussian mechanism, not of the classical formula.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.losses import Huber, Loss
from sfumato.erm.minimise import minimise
from sfumato.erm.rows import Rows
from sfumato.erm.sealed import ROUNDING, SealedEstimator, SealedLinear, check_rate, largest_rate, summed
from sfumato.errors import InvalidArgument
from sfumato.private import Private
from sfumato.questions import Exact, Sample

_LEAST_L2 = 1e-5  # gradient descent, where it is needed, takes about 1 / l2 steps
_TAU = 1e-3  # of L / n: the share of the sensitivity that is spent on not solving exactly


@dataclass(frozen=True, kw_only=True, eq=False)
class DescentWeights(SealedLinear):
    """The weights after T steps of projected gradient descent from zero."""

    n: int
    eta: float
    T: int

    def check(self, sample: Sample) -> None:
        super().check(sample)
        check_rate(self.eta, self.loss, self.l2)

    @property
    def unit(self) -> float:
        assert self.loss.smoothness is not None
        c = max(abs(1 - self.eta * self.l2), abs(1 - self.eta * (self.loss.smoothness + self.l2)))
        # Rounding may leave c a little below or above 1, where the steps neither gain nor lose.
        grown = self.T if c > 1 - 1e-12 else -math.expm1(self.T * math.log(c)) / (1 - c) if c > 0 else 1.0
        return self.eta * self.L / self.n * grown * ROUNDING

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        rows = self._rows(sample)
        w = torch.zeros(self.width, dtype=torch.float64)
        for _ in range(self.T):
            gradient = summed(rows.X, self._slopes(w, rows)) / self.n
            w = self._projected(torch.add(w * (1 - self.eta * self.l2), gradient, alpha=-self.eta))
        return self._projected(noisy(w))


@dataclass(frozen=True, kw_only=True, eq=False)
class Minimiser(SealedLinear):
    """The least mean loss + l2 / 2 |w|^2, up to a gradient of norm tau."""

    n: int

    @property
    def tau(self) -> float:
        return _TAU * self.L / self.n

    @property
    def unit(self) -> float:
        return (self.L / self.n + self.tau) / self.l2 * ROUNDING

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        rows = self._rows(sample)
        return self._projected(noisy(self._projected(self._solved(rows))))

    @property
    def reach(self) -> float:
        """No minimiser is longer, since l2 w balances slopes."""
        return 1.01 * self.L / self.l2

    @property
    def steps(self) -> int:
        """Of gradient descent, from any point within reach to a gradient of norm tau / 4: each of them shrinks it."""
        assert self.loss.smoothness is not None
        steepest = self.loss.smoothness + self.l2
        return math.ceil(steepest / self.l2 * math.log(8 * steepest * self.reach / self.tau))

    def _solved(self, rows: Rows) -> Tensor:
        assert self.loss.smoothness is not None
        zeros = torch.zeros(self.width, dtype=torch.float64)
        w = self._newton(zeros, rows)
        if not float(w.norm()) <= self.reach:
            w = zeros
        # Newton's method comes without a guarantee; gradient descent gets there from anywhere.
        for _ in range(self.steps):
            if float((step := self._gradient(w, rows)).norm()) <= self.tau / 2:
                return w
            w = w - step / (self.loss.smoothness + self.l2)
        return zeros

    def _newton(self, w: Tensor, rows: Rows) -> Tensor:
        try:
            with warnings.catch_warnings():  # a warning would tell of private rows
                warnings.simplefilter("ignore", ConvergenceWarning)
                return minimise(self.loss, rows, strength=self.l2, centre=w, tolerance=self.tau**2 / (16 * self.l2)).w
        except RuntimeError:  # torch.linalg.LinAlgError: the Hessian was not positive in float64
            return w

    def _gradient(self, w: Tensor, rows: Rows) -> Tensor:
        return summed(rows.X, self._slopes(w, rows)) / self.n + self.l2 * w


@dataclass(kw_only=True, eq=False, repr=False)
class _OutputPerturbation(SealedEstimator):
    max_iter: int | None = 50
    learning_rate: float | None = None

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.max_iter is None:
            if not self.l2 >= _LEAST_L2:
                raise InvalidArgument(
                    f"l2={self.l2} must be at least {_LEAST_L2} for max_iter=None: it keeps the minimiser in its place."
                )
        elif self.max_iter < 1:
            raise InvalidArgument(f"max_iter={self.max_iter} must be None or a whole number of at least 1.")

    def _loss(self) -> Loss:
        loss = super()._loss()
        if self.max_iter is None and loss.lipschitz is None:
            raise InvalidArgument(
                f"loss={loss} is Lipschitz inside a ball only, and max_iter=None solves without one: give max_iter."
            )
        check_rate(self._rate(loss), loss, self.l2)
        return loss

    def _rate(self, loss: Loss) -> float:
        return largest_rate(loss, self.l2) / 2 if self.learning_rate is None else self.learning_rate

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        shared: dict[str, Any] = {
            "loss": loss,
            "width": width,
            "L": self._lipschitz(loss),
            "l2": self.l2,
            "radius": self.radius,
            "target_bound": self.target_bound,
            "n": private.size,
        }
        question: SealedLinear = (
            Minimiser(**shared)
            if self.max_iter is None
            else DescentWeights(**shared, eta=self._rate(loss), T=self.max_iter)
        )
        w, epsilon = self._ask_once(private, question)
        return Learned(w, self.max_iter or 1, epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class OutputPerturbationClassifier(Classifier, _OutputPerturbation):
    """Output perturbation for two classes: noise on the last weights only. Public rows join the private ones.

    Beside the arguments of `PrivateLinear` and `SealedEstimator`:

    Args:
        max_iter: steps of gradient descent on all rows; None solves to the minimum, which needs l2 > 0.
        learning_rate: of those steps, at most 2 / (smoothness + l2); None is half of that.

    The hinge is refused, since its gradient jumps: use `HuberisedHinge`. Adjacency: replace-one.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (5000, 3))
    >>> model = OutputPerturbationClassifier(epsilon=2.0, max_iter=None, l2=0.02).fit(X, X[:, 0] > 0)
    >>> bool(1.9 < model.epsilon_ <= 2.0), bool(model.score(X, X[:, 0] > 0) > 0.7)
    (True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class OutputPerturbationRegressor(Regressor, _OutputPerturbation):
    """Output perturbation for linear regression, by default with the Huber loss; see `OutputPerturbationClassifier`."""

    _default_loss = Huber()  # type: ignore[assignment]
