"""One step of each method: `method(module, loss, clip, chunk)` returns `step(batch) -> {parameter name: tensor}`.

Every private step returns the sum over the batch of the per-example gradients clipped to norm `clip`: no noise, no
optimiser step. Each peer is called as its documentation says, through its own clipping code, and is spared what the
request does not need (Opacus's copy of the summed gradient in ghost mode, for one). Peers are imported inside their
method, so that one that is not installed costs one row of the table and nothing else.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.workloads import Batch, Loss

Step = Callable[[Batch], dict[str, Tensor]]
Method = Callable[[nn.Module, Loss, float, int], Step]


def plain(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    """The reference: forward and backward of the mean loss, nothing private."""
    named = dict(module.named_parameters())

    def step(batch: Batch) -> dict[str, Tensor]:
        module.zero_grad(set_to_none=True)
        loss(module, batch).mean().backward()
        return {name: p.grad for name, p in named.items()}

    return step


def sfumato(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    from sfumato.gradients import Clip, clipped_sum
    from sfumato.objective import Objective

    objective = Objective(module, loss)
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return lambda batch: clipped_sum(objective, parameters, batch, clip=Clip(clip))


def sfumato_origin(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    """Clipping around an origin, as DOPE-SGD does; the public gradient it takes for one is not part of the step.

    The origin is so short that the sum is still the one all methods are checked for; the work is the same.
    """
    from sfumato.gradients import Clip, clipped_sum
    from sfumato.objective import Objective
    from sfumato.public import Public

    objective = Objective(module, loss)
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    around: list[Clip] = []

    def step(batch: Batch) -> Any:
        if not around:
            origin = Public(batch, objective=objective).gradient(parameters, 16)
            around.append(Clip(clip, origin=origin.clipped(1e-7)))
        return clipped_sum(objective, parameters, batch, clip=around[0])

    return step


def opacus_hooks(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    from opacus import GradSampleModule

    return _opacus_instantiated(module, GradSampleModule(module, loss_reduction="sum"), loss, clip)


def opacus_expanded(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    return _opacus_instantiated(module, GradSampleModuleExpandedWeights(module, loss_reduction="sum"), loss, clip)


def _opacus_instantiated(module: nn.Module, wrapped: nn.Module, loss: Loss, clip: float) -> Step:
    from opacus.optimizers import DPOptimizer

    named = dict(module.named_parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(named.values(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=None,
        loss_reduction="sum",
    )

    def step(batch: Batch) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss(wrapped, batch).sum().backward()
        optimizer.clip_and_accumulate()
        clipped = {name: p.summed_grad for name, p in named.items()}
        optimizer.zero_grad(set_to_none=True)
        return clipped

    return step


def opacus_ghost(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    named = dict(module.named_parameters())
    wrapped = GradSampleModuleFastGradientClipping(
        module, loss_reduction="sum", max_grad_norm=clip, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(named.values(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=None,
        loss_reduction="sum",
    )

    def step(batch: Batch) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(wrapped, optimizer, loss(wrapped, batch), "sum").backward()
        return {name: p.grad for name, p in named.items()}

    return step


def opake(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    from opake.dpsgd.clipping import clipped_grad

    # Micro-batches of at most 8: the fastest of 8, 32, 128 and the whole batch on the workloads swept.
    gradient, state = clipped_grad(
        _example_loss(module, loss), batch_argnums=(1, 2), clipping_norm=clip, microbatch_size=min(chunk, 8)
    )
    parameters = _detached(module)
    return lambda batch: gradient(parameters, *batch, state=state)[0].pytree


def vmap_whole(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    """`torch.func` on the whole batch: what anybody can write in ten lines, and the judge of the other methods."""
    gradients = vmap(grad(_example_loss(module, loss)), in_dims=(None, 0, 0))
    parameters = _detached(module)

    def step(batch: Batch) -> dict[str, Tensor]:
        rows = gradients(parameters, *batch)
        squares = sum(g.flatten(1).square().sum(1) for g in rows.values())
        factors = (clip / squares.sqrt()).clamp(max=1.0)
        return {name: torch.einsum("i,i...->...", factors, g) for name, g in rows.items()}

    return step


def vmap_chunked(module: nn.Module, loss: Loss, clip: float, chunk: int) -> Step:
    whole = vmap_whole(module, loss, clip, chunk)

    def step(batch: Batch) -> dict[str, Tensor]:
        parts = zip(*(t.split(chunk) for t in batch), strict=True)
        total = whole(next(parts))
        for part in parts:
            for name, value in whole(part).items():
                total[name] += value
        return total

    return step


def _detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def _example_loss(module: nn.Module, loss: Loss) -> Callable[..., Tensor]:
    def example_loss(parameters: dict[str, Tensor], *example: Tensor) -> Tensor:
        def call(*inputs: Tensor) -> Tensor:
            return functional_call(module, parameters, inputs)

        return loss(call, tuple(t.unsqueeze(0) for t in example)).squeeze(0)

    return example_loss


METHODS: dict[str, Method] = {
    "plain": plain,
    "sfumato": sfumato,
    "sfumato-origin": sfumato_origin,
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": opacus_ghost,
    "opacus-ew": opacus_expanded,
    "opake": opake,
    "vmap": vmap_whole,
    "vmap-chunked": vmap_chunked,
}


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "sfumato", "opacus", "opake"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
