"""How sharp a minimum is: the largest eigenvalues of the Hessian, and its trace ("Improving private ...", table 4).

These look at rows freely, so the batch must be public.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.gradients.passes import Performance, check_losses, exact_products, rows_of
from sfumato.nn.modes import in_mode
from sfumato.objective import Batch, Objective

Params = Mapping[str, Tensor]


class Estimate(NamedTuple):
    """A random estimate and its own standard error."""

    mean: float
    standard_error: float


def top_eigenvalues(
    objective: Objective,
    params: Params,
    batch: Batch,
    count: int = 5,
    *,
    micro_batch: int = 256,
    tolerance: float = 1e-4,
    restarts: int = 300,
    seed: int = 0,
) -> list[float]:
    """The largest eigenvalues of the Hessian of the mean loss over public rows, largest first, by Lanczos iterations.

    `tolerance` is relative; within `restarts` of the iteration it must be reached, of which some ten are usual. Dropout
    is off (eval mode), and the parameters' own precision is computed in.

    >>> import torch
    >>> from sfumato import Objective
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False), lambda module, x: module(x)[:, 0].square() / 2)
    >>> [round(value, 3) for value in top_eigenvalues(objective, objective.parameters(), torch.eye(2) * 2, count=1)]
    [2.0]
    """
    hessian = _Hessian(objective, params, batch, micro_batch)
    if not isinstance(count, int) or not 1 <= count < hessian.size:
        raise InvalidArgument(
            f"count={count} must be a whole number from 1 to {hessian.size - 1}, below the number of parameters."
        )
    if not 0 <= tolerance < 1:
        raise InvalidArgument(f"tolerance={tolerance} must be a relative error between 0 and 1, such as 1e-4.")
    if not isinstance(restarts, int) or restarts < 1:
        raise InvalidArgument(f"restarts={restarts} must be a whole number of at least 1.")
    first = np.random.default_rng(seed).uniform(-1, 1, hessian.size)
    operator = LinearOperator((hessian.size, hessian.size), matvec=hessian.times, dtype=np.float64)
    try:
        with hessian.measured():
            if not hessian.times(first).any():  # of a random vector, so all of the Hessian is zero; ARPACK cannot begin
                return [0.0] * count
            values = eigsh(
                operator, k=count, which="LA", v0=first, tol=tolerance, maxiter=restarts, return_eigenvectors=False
            )
    except ArpackNoConvergence as error:
        raise InvalidArgument(
            f"tolerance={tolerance} was not reached in {restarts} restarts: raise either, or use float64 parameters."
        ) from error
    return sorted((float(value) for value in values), reverse=True)


def trace(
    objective: Objective, params: Params, batch: Batch, samples: int = 32, *, micro_batch: int = 256, seed: int = 0
) -> Estimate:
    """The trace of the Hessian of the mean loss over public rows: Hutchinson's mean of <v, H v>, v of random signs.

    >>> import torch
    >>> from sfumato import Objective
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False), lambda module, x: module(x)[:, 0].square() / 2)
    >>> trace(objective, objective.parameters(), torch.eye(2) * 2, samples=4)  # of a diagonal, so that signs are moot
    Estimate(mean=4.0, standard_error=0.0)
    """
    if not isinstance(samples, int) or samples < 2:
        raise InvalidArgument(f"samples={samples} must be a whole number of at least 2, for a standard error.")
    hessian = _Hessian(objective, params, batch, micro_batch)
    rng = np.random.default_rng(seed)
    with hessian.measured():
        probes = (rng.choice([-1.0, 1.0], hessian.size) for _ in range(samples))
        found = np.array([probe @ hessian.times(probe) for probe in probes])
    return Estimate(float(found.mean()), float(found.std(ddof=1) / math.sqrt(samples)))


class _Hessian:
    """Products of the Hessian of the mean loss with vectors, by differentiating twice, part by part of the batch."""

    def __init__(self, objective: Objective, params: Params, batch: Batch, micro_batch: int) -> None:
        if not params:
            raise InvalidArgument("params is empty: give those to differentiate by, such as objective.parameters().")
        if not isinstance(micro_batch, int) or micro_batch < 1:
            raise InvalidArgument(f"micro_batch={micro_batch} must be a whole number of at least 1.")
        self._rows = rows_of(batch)
        if not self._rows:
            raise InvalidArgument("batch has no rows: a mean over none has no curvature.")
        self._objective, self._batch, self._at_once = objective.exactly(), batch, micro_batch
        self._leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        self.size = sum(p.numel() for p in params.values())

    def times(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """H v. Vectors and the sum over the parts are float64; a part is computed in the parameters' precision."""
        leaves = list(self._leaves.values())
        flat = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1)))
        given = zip(torch.split(flat, [p.numel() for p in leaves]), leaves, strict=True)
        v = [part.to(p.device, p.dtype).reshape(p.shape) for part, p in given]
        total = torch.zeros(self.size, dtype=torch.float64, device=leaves[0].device)
        for part in self._parts():
            with torch.enable_grad():
                losses = self._objective.losses(self._leaves, part)
                check_losses(losses, rows_of(part))
                gradient = torch.autograd.grad(
                    losses.sum() / self._rows, leaves, create_graph=True, materialize_grads=True
                )
                slope = torch.stack([(g * t).sum() for g, t in zip(gradient, v, strict=True)]).sum()
            if slope.requires_grad:  # else the loss is linear in the parameters
                products = torch.autograd.grad(slope, leaves, materialize_grads=True)
                total += torch.cat([t.reshape(-1).double() for t in products])
        result: NDArray[np.float64] = total.cpu().numpy()
        if not np.isfinite(result).all():
            raise InvalidArgument(
                "params give a curvature that is not finite: measure where the loss and its gradient are."
            )
        return result

    def _parts(self) -> Iterator[Batch]:
        device = next(iter(self._leaves.values())).device
        for start in range(0, self._rows, self._at_once):
            rows = slice(start, start + self._at_once)
            yield tree_map(lambda t, rows=rows: t[rows].to(device) if isinstance(t, Tensor) else t, self._batch)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Eval mode, and only operations that can be differentiated twice, in full precision."""
        exact = exact_products(Performance(kernels=False), recurring=False)
        evaluated = in_mode(self._objective.module, training=False)
        with evaluated, exact, kernels.using(kernels.Use.NEVER), sdpa_kernel(SDPBackend.MATH):
            yield
