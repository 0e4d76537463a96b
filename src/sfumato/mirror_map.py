"""A convex public loss as a mirror map: its gradient, and the inverse of its Hessian by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sfumato.errors import InvalidArgument
from sfumato.public import Public

_NEWTON_STEPS, _CG_STEPS, _HALVINGS = 50, 200, 30


class MirrorMap:
    """Psi(theta) = (mean loss of all public rows) / strength + |theta|^2 / 2, on flat vectors in float64.

    All rows go through in one piece: it is made for small convex models.
    """

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

    def where_gradient_is(self, target: Tensor, start: Tensor, tolerance: Tensor) -> Tensor:
        """Newton's method; a step that does not bring the gradient nearer to its target is halved."""
        theta, residual = start, target - self.gradient(start)
        for _ in range(_NEWTON_STEPS):
            if residual.norm() <= tolerance:
                return theta
            step = self._solve(theta, residual, steps=_CG_STEPS, tolerance=0.1)
            for _ in range(_HALVINGS):
                nearer = target - self.gradient(theta + step)
                if nearer.norm() < residual.norm():
                    theta, residual = theta + step, nearer
                    break
                step = step / 2
            else:
                break  # as near as float precision comes
        if residual.norm() > 100 * tolerance:
            raise InvalidArgument("The mirror step was not found: lower step_size, raise strength or use float64.")
        return theta

    def _solve(self, theta: Tensor, wanted: Tensor, *, steps: int, tolerance: float) -> Tensor:
        """x with H x = wanted, where H is the Hessian at theta: conjugate gradients, as no eigenvalue is below 1."""
        times = self._hessian(theta)
        x, residual, enough = torch.zeros_like(wanted), wanted, tolerance * wanted.norm()
        direction, squared = residual, residual.dot(residual)
        for _ in range(steps):
            if squared.sqrt() <= enough:
                break
            curved = times(direction)
            curvature = direction.dot(curved)
            if not curvature > 0.5 * direction.dot(direction):
                raise InvalidArgument(
                    "The public loss is not convex at these parameters, so it is no mirror map: use a linear model, or "
                    "MirrorDescent, which is of first order."
                )
            along = squared / curvature
            x, residual = x + along * direction, residual - along * curved
            squared, before = residual.dot(residual), squared
            direction = residual + squared / before * direction
        return x

    def _slopes(self, theta: Tensor, *, again: bool = False) -> tuple[Tensor, Tensor]:
        """theta as a leaf and grad Psi there, to be differentiated again if wanted."""
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            psi = self._objective.losses(self.named(leaf), self._rows).double().mean() / self._strength
            psi = psi + leaf.dot(leaf) / 2
            (slope,) = torch.autograd.grad(psi, leaf, create_graph=again)
        return leaf, slope

    def _hessian(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        leaf, slope = self._slopes(theta, again=True)

        def times(vector: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(slope, leaf, vector, retain_graph=True)
            return product

        return times
