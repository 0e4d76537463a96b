"""Objective perturbation (Kifer, Smith and Thakurta 2012) and AMP (Iyengar et al. 2019), for linear models.

A random linear term is added to what is minimised, inside the door, and only the minimiser leaves:

    w(b) = argmin sum_i loss(<w, x_i>, y_i) + Lambda / 2 |w|^2 + <b, w>,   b ~ N(0, sigma^2 I).

Adjacency: replace-one. Let the loss be convex, L-Lipschitz and beta-smooth in the score, and |x| <= 1.

*Why it is private.* (1) b is a function of w: b(w) = -sum_i slope_i x_i - Lambda w. It is strongly monotone and
Lipschitz, hence one to one, and w has the density N(b(w)) det(H(w) + Lambda I) with H = sum_i curvature_i x_i x_i^T. A
slope may have kinks (Huber): outside of a null set of w no score is at one, and the area formula needs no more.

(2) Exchange the row x for y. What all the others share is M >= Lambda I, and either row adds a matrix of rank one: the
ratio of determinants is (1 + a x^T M^-1 x) / (1 + c y^T M^-1 y) with a and c in [0, beta], so its logarithm is within
kappa = log(1 + beta / Lambda). This uses that the model is linear: else the rank could be as high as the dimension.

(3) The exponents differ by (2 <b, g> + |g|^2) / (2 sigma^2), where g = s x - r y with |s|, |r| <= L. Here g depends on
w, hence on b, so <b, g> is not Gaussian; but the expression is convex in (s, r), hence largest at a corner of the
square, where g is +-L (x + y) or +-L (x - y). Shorter rows only shrink the square, so let |x| = |y| = 1: the two are
orthogonal, of lengths 2 L cos and 2 L sin of some angle. With m = 2 L / sigma, a corner of length sqrt(t) sigma and
either sign exceeds tau with probability h(t) = 2 Q(z), z = tau / sqrt(t) - sqrt(t) / 2. Where z >= sqrt(2), also
t h'(t) >= z phi(z) >= 2 Q(z) = h(t), so h(t) / t grows, and h(t1) + h(t2) <= h(t1 + t2): no angle is worse than none.
Integrated over tau >= epsilon' = epsilon - kappa this is

    delta(epsilon) <= 2 G(m, epsilon')   if   epsilon' >= m^2 / 2 + sqrt(2) m,   that is z >= sqrt(2) at t = m^2,

and G(m, .) is the profile of the Gaussian mechanism that moves by m standard deviations. The 2 is for both signs.

*AMP.* Nobody has a real b, nor finds w exactly. The b that is used is within some distance of a real one, and a point
whose gradient, with it, is small is near its minimiser: if the two add up to gamma, the point is within gamma / Lambda
of the w of the real b. So given that w, two neighbours' points are at most 2 gamma / Lambda apart, and Gaussian noise
against that distance, with a small share (epsilon_2, delta_2) of the budget, hides the difference: together (epsilon,
delta). Without that noise anyone who knows both neighbours could compute the b of either, and see which one float64 can
have drawn: the minimiser itself is therefore not on offer.

gamma is a bound, whatever the rows: it grows with how long a minimiser can be, which for our own losses is taken from
their never being negative, and for others from their slopes alone. It has the rounding of b, that of the gradient that
is looked at before a point may leave (|b| is taken to be at most sqrt(width) + 16 standard deviations, which fails with
probability 1e-55), and as much again for the solver. *What is left to trust.* Descent gets there within `steps`, by a
proof about real numbers; where float64 does not, which the room in gamma makes hard to bring about, -b / Lambda leaves
instead, the answer without any rows. No unsolved point leaves, but that this happened is itself not covered by the
proof, nor is the time it took.

Deviations: sigma is the least that (3) allows, where Kifer et al. have L sqrt(8 log(2 / delta) + 4 epsilon) / epsilon
for rows that are added or removed and kappa = epsilon / 2; gamma is what float64 can reach.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from scipy.special import log_ndtr, ndtr
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from sfumato.erm.base import Classifier, Learned, Regressor
from sfumato.erm.losses import Huber, HuberisedHinge, Logistic, Loss, Needs
from sfumato.erm.minimise import minimise
from sfumato.erm.rows import Rows
from sfumato.erm.sealed import (
    NORMAL_STEP,
    ROUNDING,
    ULP,
    SealedEstimator,
    SealedLinear,
    check_targets,
    summed,
    summing_error,
)
from sfumato.errors import InvalidArgument
from sfumato.privacy.mechanisms import Adjacency, Noise, SealedGaussian
from sfumato.private import Private
from sfumato.questions import Exact, Sample

_OUTPUT_SHARE = 0.01  # of epsilon and delta, for AMP's noise on the weights: they are solved so well that it is enough
_CURVATURE_SHARE = 0.05  # of epsilon, for kappa where l2=0: a little more Lambda, for little more noise than without
_LEAST_L2 = 1e-6  # what can still be solved in float64
_MOST_STEPS = 100_000
_NEVER_NEGATIVE = (Logistic, HuberisedHinge, Huber)


def gaussian_profile(mu: float, epsilon: float) -> float:
    """An upper bound, to about twelve digits, on the delta of a Gaussian that moves by mu standard deviations."""
    above = float(ndtr(mu / 2 - epsilon / mu))
    return above * (1 + 1e-12) - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))


@lru_cache(maxsize=256)
def largest_shift(epsilon: float, delta: float, *, objective: bool) -> float:
    """The largest m with (epsilon, delta)-DP: of a Gaussian, or of the minimiser, epsilon being its epsilon'."""
    signs = 2 if objective else 1
    # m^2 / 2 + sqrt(2) m <= epsilon; a Gaussian has no such condition.
    high = math.log(2 * epsilon / (math.sqrt(2) + math.sqrt(2 + 2 * epsilon)) if objective else 100 * (1 + epsilon))
    if signs * gaussian_profile(math.exp(high), epsilon) <= delta:
        return math.exp(high)
    low = high - 1.0
    while signs * gaussian_profile(math.exp(low), epsilon) > delta:
        low -= high - low
    while high - low > 1e-9:
        middle = (low + high) / 2
        if signs * gaussian_profile(math.exp(middle), epsilon) <= delta:
            low = middle
        else:
            high = middle
    return math.exp(low)


def least_l2(loss: Loss, n: int, epsilon: float, share: float) -> float:
    """The least l2 = Lambda / n for which kappa takes at most that share of epsilon."""
    assert loss.smoothness is not None, "Needs has refused it"
    return max(_LEAST_L2, loss.smoothness / (n * math.expm1(min(share * epsilon, 700.0))))


@dataclass(frozen=True, kw_only=True, eq=False)
class ApproximateMinimum(SealedLinear):
    """A point near the minimiser of the perturbed objective, with noise. (epsilon, delta)-DP under replace-one.

    Ask it with the noise that it names itself, `charged`. kappa may take up to half of epsilon, which sets a floor for
    `l2`: Lambda = n l2 >= beta / (exp(epsilon / 2) - 1), slightly below the 2 beta / epsilon of Kifer et al.
    """

    n: int
    epsilon: float
    delta: float

    replace_factor: ClassVar[float] = 0.0
    releases: ClassVar[int] = 2
    inside: ClassVar[int] = 1  # b, whose density the proof is about; AMP's noise on the weights leaves

    @classmethod
    def law(cls, scale: float) -> Noise:
        raise InvalidArgument(f"noise={scale} does not say what {cls.kind()} costs: use the question's own `charged`.")

    @property
    def unit(self) -> float:
        return self.L * ROUNDING

    @property
    def charged(self) -> SealedGaussian:
        """The least noise that the proof allows, and what it costs."""
        self._check_conditions()
        return SealedGaussian(
            self._sigma / self.L, epsilon=self.epsilon, delta=self.delta, adjacency=Adjacency.REPLACE_ONE
        )

    @cached_property
    def _sigma(self) -> float:
        assert self.loss.smoothness is not None
        kappa = math.log1p(self.loss.smoothness / self.Lambda)
        left = self.epsilon * (1 - _OUTPUT_SHARE) - kappa
        return 2 * self.L / largest_shift(left, self.delta * (1 - _OUTPUT_SHARE), objective=True)

    @property
    def Lambda(self) -> float:  # noqa: N802 (the papers' symbol)
        return self.n * self.l2

    @property
    def _longest_b(self) -> float:
        return self._sigma * ROUNDING * (math.sqrt(self.width) + 16)

    @cached_property
    def reach(self) -> float:
        """No minimiser is longer: Lambda w balances n slopes and b; and J(w) <= J(0), where no loss is below zero."""
        b = self._longest_b
        by_slopes = (self.n * self.L + b) / self.Lambda
        if type(self.loss) not in _NEVER_NEGATIVE:  # nobody else's word is needed for it
            return 1.01 * by_slopes
        ends = torch.tensor([-self.target_bound, self.target_bound], dtype=torch.float64)
        at_zero = self.n * float(self.loss.value(torch.zeros_like(ends), ends).max())
        by_value = 2 * b / self.Lambda + math.sqrt(2 * at_zero / self.Lambda)
        return 1.01 * min(by_value, by_slopes)

    @cached_property
    def rounding(self) -> float:
        """The most by which the computed gradient, of the sum over all rows, is off while |w| <= reach."""
        slopes = self.n * (self._slope_error(self.reach) + summing_error(self.n) * self.L)
        return 1.01 * (slopes + 4 * ULP * (self.n * self.L + self.Lambda * self.reach + self._longest_b))

    @property
    def gamma(self) -> float:
        """Bounds the gradient, with a real b, of what the solver gives: what it looks like, and what it may hide."""
        b = math.sqrt(self.width) * self._sigma * ROUNDING * NORMAL_STEP
        scaled = 2 * ULP * self.Lambda * self.reach  # the weights, on their way to the noise
        return 2 * self.rounding + b + scaled

    @cached_property
    def steps(self) -> int:
        """Of accelerated descent, from any point within reach to a gradient of norm rounding / 2.

        |gradient|^2 <= 2 S (J - min J), and k steps make what is in the brackets, at first at most 2 (S + Lambda)
        reach^2, smaller by (1 - sqrt(Lambda / S))^k: Theorem 2.2.3 of Nesterov (2004).
        """
        S = self._steepest
        ratio = 16 * S * (S + self.Lambda) * (self.reach / self.rounding) ** 2
        return math.ceil(math.sqrt(S / self.Lambda) * math.log(ratio))

    @property
    def _steepest(self) -> float:
        assert self.loss.smoothness is not None
        return self.n * self.loss.smoothness + self.Lambda

    @property
    def output_noise(self) -> float:
        """The standard deviation on the weights, against 2 gamma / Lambda."""
        mu = largest_shift(self.epsilon * _OUTPUT_SHARE, self.delta * _OUTPUT_SHARE, objective=False)
        return 2 * self.gamma / self.Lambda / mu

    def check(self, sample: Sample) -> None:
        super().check(sample)
        self._check_conditions()

    def _check_conditions(self) -> None:
        Needs(smooth=True).check(self.loss, self.kind())
        check_targets(self.loss, self.target_bound)
        _check_unbounded(self.loss, self.kind())
        _check_l2(self.l2, self.loss, self.n, self.epsilon)
        if self.steps > _MOST_STEPS:
            raise InvalidArgument(
                f"l2={self.l2} makes {self.loss} too hard to minimise, by up to {self.steps} steps: raise it, or use a "
                "smoother loss."
            )

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        b: Tensor = noisy(torch.zeros(self.width, dtype=torch.float64))
        w = self._solved(self._rows(sample), b)
        # The door has one standard deviation, that of b: the weights are scaled so that it means output_noise.
        scale = self.charged.scale * self.unit / self.output_noise
        return self._projected(noisy(w * scale) / scale)

    def _gradient(self, w: Tensor, rows: Rows, b: Tensor) -> Tensor:
        return summed(rows.X, self._slopes(w, rows)) + self.Lambda * w + b

    def _is_solution(self, w: Tensor, rows: Rows, b: Tensor) -> bool:
        """Not so if anything is not a number."""
        return float(w.norm()) <= self.reach and float(self._gradient(w, rows, b).norm()) <= self.rounding

    def _solved(self, rows: Rows, b: Tensor) -> Tensor:
        """A point whose gradient was found to be at most `rounding`, or -b / Lambda, which no row has a part in."""
        without_rows = -b / self.Lambda
        w = self._newton(without_rows, rows, b)
        if not float(w.norm()) <= self.reach:
            w = without_rows
        w = self._descended(w, rows, b)
        return w if self._is_solution(w, rows, b) else without_rows

    def _newton(self, w: Tensor, rows: Rows, b: Tensor) -> Tensor:
        try:
            with warnings.catch_warnings():  # a warning would tell of private rows
                warnings.simplefilter("ignore", ConvergenceWarning)
                # Lambda / 2 |w|^2 + <b, w> is, but for a constant, Lambda / 2 |w + b / Lambda|^2.
                within = (self.rounding / self.n) ** 2 / (2 * self.l2)
                w = minimise(self.loss, rows, strength=self.l2, centre=w, tolerance=within).w
            return self._polished(w, rows, b)
        except RuntimeError:  # torch.linalg.LinAlgError: the Hessian was not positive in float64
            return w

    def _polished(self, w: Tensor, rows: Rows, b: Tensor) -> Tensor:
        """Newton's steps while they halve the gradient; `minimise` compares values, whose digits run out sooner."""
        gradient = self._gradient(w, rows, b)
        while self.rounding < (norm := float(gradient.norm())) < math.inf and self.width <= self.n:
            hessian = (rows.X.T * self.loss.curvature(rows.X @ w, rows.y)) @ rows.X
            hessian.diagonal().add_(self.Lambda)
            there = w - torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(hessian))[:, 0]
            gradient = self._gradient(there, rows, b)
            if not float(gradient.norm()) < norm / 2:
                break
            w = there
        return w

    def _descended(self, w: Tensor, rows: Rows, b: Tensor) -> Tensor:
        """Accelerated gradient descent gets there from anywhere, where Newton's method gives no guarantee."""
        root = math.sqrt(self.Lambda / self._steepest)
        ahead = w
        for _ in range(self.steps):
            if self._is_solution(w, rows, b):
                break
            there = ahead - self._gradient(ahead, rows, b) / self._steepest
            w, ahead = there, there + (there - w) * ((1 - root) / (1 + root))
        return w


def _check_unbounded(loss: Loss, solver: str) -> None:
    if loss.lipschitz is None:
        raise InvalidArgument(
            f"loss={loss} is not Lipschitz outside of a ball, and {solver} looks for its minimum everywhere: use "
            "Logistic or HuberisedHinge for classes, Huber for numbers."
        )


def _check_l2(l2: float, loss: Loss, n: int, epsilon: float) -> None:
    floor = least_l2(loss, n, epsilon, 0.5)
    if not l2 >= floor * (1 - 1e-6):  # the noise is that of the true kappa; here a last digit does not matter
        raise InvalidArgument(
            f"l2={l2} must be at least {floor:.4g} for {loss}, n={n} and epsilon={epsilon:g}, which keeps the density "
            "of the minimiser even: raise it, or leave it out."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class _ObjectivePerturbation(SealedEstimator):
    def _loss(self) -> Loss:
        loss = super()._loss()
        _check_unbounded(loss, type(self).__name__)
        return loss

    def _rows(self, X: Any, y: Any, X_public: Any, y_public: Any) -> tuple[Rows, Rows | None]:
        rows, public = super()._rows(X, y, X_public, y_public)
        n = len(rows.y) + (0 if public is None else len(public.y))
        if self.l2 and n:  # n is public under replace-one; refused before the door opens
            _check_l2(self.l2, self._loss(), n, self.epsilon)
        return rows, public

    def _learn(self, private: Private, public: Rows | None, loss: Loss, width: int) -> Learned:
        n = private.size
        question = ApproximateMinimum(
            loss=loss,
            width=width,
            L=self._lipschitz(loss),
            l2=self.l2 or least_l2(loss, n, self.epsilon, _CURVATURE_SHARE),
            radius=self.radius,
            target_bound=self.target_bound,
            n=n,
            epsilon=self.epsilon * (1 - 1e-9),  # the accountant's last digit
            delta=self.delta,
        )
        law = question.charged
        note = f"epsilon={law.epsilon:g}, delta={law.delta:g} by its own proof under {law.adjacency}"
        w, epsilon = self._ask_once(private, question, law, note)
        self.l2_ = question.l2
        return Learned(w, 1, epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class ObjectivePerturbationClassifier(Classifier, _ObjectivePerturbation):
    """Objective perturbation for two classes: noise in what is minimised. Public rows join the private ones.

    Beside the arguments of `PrivateLinear` and `SealedEstimator`:

    Args:
        l2: 0 takes what suits epsilon, see `l2_`; a number below what the proof needs is refused.

    The hinge is refused, since its gradient jumps: use `HuberisedHinge`. The square loss is refused, since its slopes
    have no bound. `radius` is applied after the noise. Adjacency: replace-one.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (5000, 3))
    >>> model = ObjectivePerturbationClassifier(epsilon=1.0).fit(X, X[:, 0] > 0)
    >>> bool(0.999 < model.epsilon_ <= 1.0), bool(model.score(X, X[:, 0] > 0) > 0.8)
    (True, True)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class ObjectivePerturbationRegressor(Regressor, _ObjectivePerturbation):
    """Objective perturbation for linear regression, by default with the Huber loss.

    See `ObjectivePerturbationClassifier`.
    """

    _default_loss = Huber()  # type: ignore[assignment]
