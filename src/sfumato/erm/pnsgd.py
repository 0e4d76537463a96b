"""PNSGD, projected noisy SGD in one pass (Feldman, Mironov, Talwar and Thakurta 2018), for linear models.

w <- P(w - eta (slope x + l2 w) + N(0, eta^2 sigma^2)), one row after the other, private rows first and public ones
last, and only the last w leaves. Adjacency: replace-one.

*Why it is private.* Let X and X' be the runs on neighbours that differ in the row of step t, driven by the same noise;
before step t they are the same, and k = n + 1 - t steps are left. With eta <= 2 / (beta + l2) no later step moves two
points apart, and step t at most 2 eta L. Between them let Y run, from Y = X' before step t, by
Y <- (1 - s) phi'(Y) + s phi(X) + noise, where phi and phi' are the steps of the two runs. With s = 1/k, 1/(k-1), ..., 1
each shift s (phi(X) - phi'(Y)) has norm at most a = 2 eta L / k, and Y ends at X. So each step of Y is one of X' that
was shifted by at most a, and by something fixed before the noise of standard deviation eta sigma: all of them together
are a Gaussian mechanism with (sensitivity / noise)^2 = k a^2 / (eta sigma)^2 = 4 L^2 / (sigma^2 k). Its divergence of
order alpha, 2 alpha L^2 / (sigma^2 k), is that of Feldman et al.; that it bounds the whole trade-off, so that PLD may
be used, is due to Bok, Su and Altschuler (2024). The worst private row is the last one, k = n_pub + 1.

*Rounding.* Noise before the last step is not released, so it does not pass as post-processing: float64's normals, and
its steps, are off. Let X and X' be the sums before they are rounded, with real noise. They determine what was drawn, so
what float64 does to noise and sum is part of the next step, which thereby is no longer phi but within some e of it:
`error`, a bound for all rows. Let phi^(X) be what X and its past do, and Y <- (1 - s) phi'(Y) + s phi^(X) + noise,
which still ends at X. Each shift now is s |phi^(X) - phi'(Y)| + e, the last term since Y, too, is driven by what X' and
its past do; and the distance grows by e in each step. With the same s all shifts are at most 2 eta L / k + e (2 + log
k). The door's own rounding follows the last noise, and is post-processing. `error` takes |w| and noise to be within
bounds that fail with probability 1e-40.

In the door's words: under replace-one a question of unit u and noise multiplier z moves by 2 u against noise z u. With
u = sqrt(k) (eta L / k + e (1 + log(k) / 2)), the larger of k = n_pub + 1 and k = n (in between it is smaller), this is
the mechanism above, and but for e, sigma = z L / sqrt(n_pub + 1).

Without public rows the last row has no company, k = 1, and nothing is gained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.losses import Huber, HuberisedHinge, Logistic, Loss, Square
from sfumato.erm.rows import Array, Rows
from sfumato.erm.sealed import NORMAL_STEP, ROUNDING, ULP, SealedEstimator, SealedLinear, check_rate, largest_rate
from sfumato.errors import InvalidArgument
from sfumato.privacy.mechanisms import Gaussian
from sfumato.private import Private
from sfumato.questions import Exact, Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class OnePass(SealedLinear):
    """The last of one pass's iterates; the last `n_pub` rows are public."""

    eta: float
    n_pub: int
    n: int
    z: float

    # All the noise before the last step is drawn in one go, and that of the last step is added by the door itself.
    releases: ClassVar[int] = 2
    inside: ClassVar[int] = 1

    @property
    def charged(self) -> Gaussian:
        return Gaussian(self.z)

    def check(self, sample: Sample) -> None:
        super().check(sample)
        check_rate(self.eta, self.loss, self.l2)
        if not 0 <= self.n_pub < self.n:
            raise InvalidArgument(
                f"n_pub={self.n_pub} must be at least 0 and below n={self.n}: the last rows are public."
            )
        if self.unit > 2 * self._without_error:
            raise InvalidArgument(f"n={self.n} steps with noise z={self.z} round too much in float64: lower either.")

    @property
    def unit(self) -> float:
        return max(
            math.sqrt(k) * (self.eta * self.L / k + self.error * (1 + math.log(k) / 2)) * ROUNDING
            for k in (self.n_pub + 1, self.n)
        )

    @property
    def _without_error(self) -> float:
        return self.eta * self.L / math.sqrt(self.n_pub + 1)

    @property
    def error(self) -> float:
        """How far one step, its noise included, is at most from what it would be in real numbers."""
        std = 2 * self.z * self._without_error  # at most, see `check`
        noise = std * (math.sqrt(self.width) + 16)
        longest = self.radius or self.n * self.eta * self.L + math.sqrt(self.n) * noise
        sums = (self.width + 8) * (longest + noise) + 4 * self.eta * self.L
        return self.eta * self._slope_error(longest) + ULP * sums + math.sqrt(self.width) * std * NORMAL_STEP

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        rows = self._rows(sample)
        order = torch.from_numpy(_order(len(rows.y) - self.n_pub, len(rows.y)))
        noise = noisy(torch.zeros(len(rows.y) - 1, self.width, dtype=torch.float64)).numpy()
        # One short row at a time: numpy has a tenth of torch's overhead, and Python's own numbers less than that.
        X, y, w = rows.X[order].numpy(), rows.y[order].tolist(), np.zeros(self.width)
        for x, target, z in zip(X, y, noise, strict=False):  # the shortest, the noise, ends it: all steps but one
            self._move(w, x, target)
            w += z
            if self.radius is not None and (norm := math.sqrt(w.dot(w))) > self.radius:
                w *= self.radius / norm
        self._move(w, X[-1], y[-1])
        return self._projected(noisy(torch.from_numpy(w)))

    def _move(self, w: Array, x: Array, y: float) -> None:
        """One step, in place, without its noise and projection."""
        slope = min(self.L, max(-self.L, self._slope(float(x.dot(w)), y)))
        if self.l2 > 0:
            w *= 1 - self.eta * self.l2
        w -= (self.eta * slope) * x

    @cached_property
    def _slope(self) -> Callable[[float, float], float]:
        return slope_of_numbers(self.loss)


def slope_of_numbers(loss: Loss) -> Callable[[float, float], float]:
    """`loss.slope` of one score and one target; for losses of our own without torch, which takes 20 times longer."""
    if type(loss) is Logistic:
        return lambda z, y: -y / (1 + math.exp(min(y * z, 700.0)))
    if type(loss) is HuberisedHinge:
        h = loss.h
        return lambda z, y: -y * min(1.0, max(0.0, (1 + h - y * z) / (2 * h)))
    if type(loss) is Square:
        return lambda z, y: 2 * (z - y)
    if type(loss) is Huber:
        delta = loss.delta
        return lambda z, y: min(delta, max(-delta, z - y))
    return lambda z, y: float(loss.slope(*torch.tensor([z, y], dtype=torch.float64)))


def _order(n_private: int, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Private rows in an order that is the same for all tables of that size (many are sorted), then the public ones."""
    return np.concatenate([np.random.default_rng(0).permutation(n_private), np.arange(n_private, n)])


@dataclass(kw_only=True, eq=False, repr=False)
class _PNSGD(SealedEstimator):
    learning_rate: float | None = None

    def _loss(self) -> Loss:
        loss = super()._loss()
        if self.learning_rate is not None:
            check_rate(self.learning_rate, loss, self.l2)
        return loss

    def _rate(self, loss: Loss, n: int, n_pub: int, width: int, z: float) -> float:
        """R / (G sqrt(n)), where G^2 is what a noisy gradient can have in the mean, and R the radius, or 1."""
        if self.learning_rate is not None:
            return self.learning_rate
        G = self._lipschitz(loss) * math.sqrt(1 + width * z**2 / (n_pub + 1))
        return min(largest_rate(loss, self.l2), (self.radius or 1.0) / (G * math.sqrt(n)))

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        n, n_pub = private.size, 0 if public is None else len(public.y)
        z = self._noise()
        question = OnePass(
            loss=loss,
            width=width,
            L=self._lipschitz(loss),
            l2=self.l2,
            radius=self.radius,
            target_bound=self.target_bound,
            eta=self._rate(loss, n, n_pub, width, z),
            n_pub=n_pub,
            n=n,
            z=z,
        )
        w, epsilon = self._ask_once(private, question, question.charged)
        return Learned(w, n, epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class PNSGDClassifier(Classifier, _PNSGD):
    """PNSGD for two classes: one noisy pass over all rows, public ones last, of which only the last weights leave.

    Beside the arguments of `PrivateLinear` and `SealedEstimator`:

    Args:
        learning_rate: at most 2 / (smoothness + l2); None is radius / sqrt(n (L^2 + width sigma^2)), or that bound.

    The hinge is refused, since its gradient jumps: use `HuberisedHinge`. Adjacency: replace-one.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (3000, 3))
    >>> y = X[:, 0] > 0
    >>> model = PNSGDClassifier(epsilon=4.0).fit(X[500:], y[500:], X[:500], y[:500])
    >>> model.n_iter_, bool(3.9 < model.epsilon_ <= 4.0), bool(model.score(X, y) > 0.7)
    (3000, True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class PNSGDRegressor(Regressor, _PNSGD):
    """PNSGD for linear regression, by default with the Huber loss; see `PNSGDClassifier`."""

    _default_loss = Huber()  # type: ignore[assignment]
