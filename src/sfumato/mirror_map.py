"""Strongly convex functions as mirror maps: where a step in the gradient's space ends, by Newton's method.

`MirrorMap` is what exact mirror descent needs of any; `ObjectiveMap` is the loss of a small model on public rows.
Linear models have their own, in closed form (`erm.mirror_descent`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.public import Public

_NEWTON_STEPS, _CG_STEPS, _BISECTIONS = 200, 1000, 40


class MirrorMap(ABC):
    """Psi, on vectors of float64. No eigenvalue of its Hessian is below `least`."""

    least: float

    @abstractmethod
    def gradient(self, theta: Tensor) -> Tensor: ...

    @abstractmethod
    def hessian(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """The Hessian at theta, as what it makes of a vector."""

    def moved(self, theta: Tensor, by: Tensor, tolerance: float) -> Tensor:
        """Where grad Psi is that at theta plus `by`, up to tolerance * |by|: Newton's method on Psi - <target, .>."""
        target, residual, near = self.gradient(theta) + by, by, tolerance * by.norm()
        for _ in range(_NEWTON_STEPS):
            if residual.norm() <= near:
                return theta
            step = self.solve(theta, residual, tolerance=0.1)
            along = self._along(theta, step, residual, target)
            if along is None:
                break  # as near as float precision comes
            theta, residual = along
        if residual.norm() > 100 * near:
            raise InvalidArgument("The mirror step was not found: take shorter steps, raise strength or use float64.")
        return theta

    def _along(self, theta: Tensor, step: Tensor, residual: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
        """A point along the step, and target - grad Psi there: half as far from the target, or downhill all the way.

        As Psi is convex, the way down to a point is downhill if it still is so there; no value of Psi is needed, whose
        rounding would end the search too early. Losses whose curvature jumps need more than steps that are halved.
        """
        steepest, low, high = residual.dot(step), 0.0, 1.0
        t = 1.0
        for _ in range(_BISECTIONS):
            there = theta + t * step
            left = target - self.gradient(there)
            slope = left.dot(step)
            if left.norm() <= residual.norm() / 2 or (slope >= 0 and (t == 1 or slope <= steepest / 2)):
                return there, left
            low, high = (t, high) if slope >= 0 else (low, t)
            t = (low + high) / 2
        return None

    def solve(self, theta: Tensor, wanted: Tensor, *, tolerance: float) -> Tensor:
        """x with H x = wanted, up to tolerance * |wanted|, where H is the Hessian at theta: conjugate gradients."""
        times = self.hessian(theta)
        x, residual, enough = torch.zeros_like(wanted), wanted, tolerance * wanted.norm()
        direction, squared = residual, residual.dot(residual)
        for _ in range(_CG_STEPS):
            if squared.sqrt() <= enough:
                break
            curved = times(direction)
            curvature = direction.dot(curved)
            if not curvature > 0.5 * self.least * direction.dot(direction):
                raise InvalidArgument(
                    "The public loss is not convex at these parameters, so it is no mirror map: use a linear model, or "
                    "MirrorDescent, which is of first order."
                )
            along = squared / curvature
            x, residual = x + along * direction, residual - along * curved
            squared, before = residual.dot(residual), squared
            direction = residual + squared / before * direction
        return x


class ObjectiveMap(MirrorMap):
    """Psi(theta) = (mean loss of all public rows) / strength + |theta|^2 / 2, by automatic differentiation.

    All rows go through in one piece: it is made for small convex models.
    """

    least = 1.0

    def __init__(self, public: Public, params: Mapping[str, Tensor], strength: float) -> None:
        if public.objective is None:
            raise InvalidArgument("objective is missing: give Public(..., objective=Objective(module, loss)).")
        self._objective, self._strength = public.objective, strength
        self._like = {n: p.detach() for n, p in params.items()}
        device = next(iter(params.values())).device
        self._rows = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, public.batch())

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[n].double().reshape(-1) for n in self._like])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The entries as tensors of the parameters' shapes and types."""
        parts = torch.split(flat, [p.numel() for p in self._like.values()])
        return {n: part.reshape(p.shape).to(p.dtype) for (n, p), part in zip(self._like.items(), parts, strict=True)}

    def gradient(self, theta: Tensor) -> Tensor:
        return self._slopes(theta)[1].detach()

    def hessian(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        leaf, slope = self._slopes(theta, again=True)

        def times(vector: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(slope, leaf, vector, retain_graph=True)
            return product

        return times

    def _slopes(self, theta: Tensor, *, again: bool = False) -> tuple[Tensor, Tensor]:
        """theta as a leaf and grad Psi there, to be differentiated again if wanted."""
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            psi = self._objective.losses(self.named(leaf), self._rows).double().mean() / self._strength
            psi = psi + leaf.dot(leaf) / 2
            (slope,) = torch.autograd.grad(psi, leaf, create_graph=again)
        return leaf, slope
