"""What the peers do for the two workloads of `benchmarks.gpu`: a whole private step each, in their best case.

Each builder makes a `Job` whose step goes over so many examples: clipped sum, noise, SGD. An example of the image
workload has K views, whose gradients are averaged inside the clip. No peer has views: vmap and Opake take the mean over
them inside the example's loss, and Opacus's per-row gradients are averaged before its optimiser sees them.

vmap runs our own network, which is plain PyTorch under function transforms. Opacus and Opake run it or the cheaper one
without weight standardisation, for which Opacus has no rule of its own: whichever they are faster on.

Peers are imported inside their builder, so that one that is not installed costs one row of the table and nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks import gpt2
from benchmarks.workloads import WideBlock, WideResNet

Batch = tuple[Tensor, ...]
RATE = 1e-3  # of the SGD step: small, so that weights stay those of a fresh network


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how large. `tiny` is for testing the harness on a CPU."""

    device: str = "cuda"
    tiny: bool = False

    @property
    def views(self) -> int:
        return 2 if self.tiny else 16

    @property
    def width(self) -> int:
        return 1 if self.tiny else 4

    @property
    def public(self) -> int:
        """Rows of the public gradient."""
        return 4 if self.tiny else 256

    @property
    def sizes(self) -> gpt2.Sizes:
        return gpt2.TINY if self.tiny else gpt2.SMALL

    def autocast(self, enabled: bool = True) -> AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def images(self, n: int, views: int = 0) -> Batch:
        side = 8 if self.tiny else 32
        x = torch.randn((n, views, 3, side, side) if views else (n, 3, side, side), device=self.device)
        return x, torch.randint(10, (n,), device=self.device)

    def sequences(self, n: int) -> Batch:
        return gpt2.sequences(n, self.sizes, self.device)


@dataclass(kw_only=True)
class Job:
    """`step(n)` is one whole step over n examples of `views` images each."""

    step: Callable[[int], object]
    micro: int | None  # examples per pass, None where the engine chooses
    views: int = 1
    note: str = ""
    tf32: bool = True
    autotune: bool = True  # cuDNN tries its algorithms; on the many shapes of vmap that takes longer than it saves
    beside: Callable[[int], object] | None = None  # a step that differs in one thing only, timed in turns with this one

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Set around every step, since jobs of different precision take turns.

        By `set_float32_matmul_precision`, as the engine does: torch refuses to read what was set in two ways.
        """
        cudnn = torch.backends.cudnn
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        cudnn.allow_tf32, cudnn.benchmark = self.tf32, self.autotune
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            cudnn.allow_tf32, cudnn.benchmark = before[1:]


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def our_wide_resnet(setting: Setting) -> nn.Module:
    from sfumato.models.wide_resnet import wide_resnet

    return wide_resnet(depth=16, width=setting.width, outputs=10).to(setting.device)


class StandardisedConv2d(nn.Conv2d):
    """Weight standardisation, written out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        norm = (centred.square().sum((1, 2, 3), keepdim=True) + 1e-4).rsqrt()
        return F.conv2d(x, self.gain * centred * norm, None, self.stride, self.padding)


def wide_resnet(setting: Setting, *, standardised: bool = False) -> nn.Module:
    """Of torch's own layers: ours but for the scale of the pixels, if standardised."""
    module = WideResNet()
    if setting.width != 4:  # the same network, thinner
        widths = [16, *(w * setting.width for w in (16, 16, 32, 32, 64, 64))]
        strides = (1, 1, 2, 1, 2, 1)
        module.blocks = nn.Sequential(*map(WideBlock, widths, widths[1:], strides))
        module.norm, module.head = nn.GroupNorm(16, widths[-1]), nn.Linear(widths[-1], 10)
    for parent in list(module.modules()) if standardised else []:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d:
                sizes = (child.in_channels, child.out_channels, child.kernel_size, child.stride, child.padding)
                setattr(parent, name, StandardisedConv2d(*sizes, bias=False))
    return module.to(setting.device)


def _network(standardised: bool) -> str:
    return "our network, with weight standardisation" if standardised else "without weight standardisation"


# ------------------------------------------------------------------------------------------------ per-example functions


def vmap_images(setting: Setting, *, micro: int, standardised: bool = True) -> Job:
    return _vmap_job(setting, *_image_example(setting, standardised), micro, setting.views, _network(standardised))


def vmap_sequences(setting: Setting, *, micro: int) -> Job:
    return _vmap_job(setting, *_sequence_example(setting), micro, 1, f"{gpt2.UNTIED}; attention written out")


def opake_images(setting: Setting, *, micro: int, standardised: bool = True) -> Job:
    from opake.dpsgd.clipping import clipped_grad

    module, loss, sample = _image_example(setting, standardised)
    gradient, state = clipped_grad(loss, batch_argnums=(1, 2), clipping_norm=1.0, microbatch_size=micro)
    parameters = _detached(module)

    def step(n: int) -> None:
        _noisy_sgd(parameters, gradient(parameters, *_rows(data, n), state=state)[0].pytree, n)

    data = sample(micro)
    note = f"Opake {installed('opake')}; {_network(standardised)}"
    return Job(step=step, micro=micro, views=setting.views, note=note, autotune=False)


Example = tuple[nn.Module, Callable[..., Tensor], Callable[[int], Batch]]


def _image_example(setting: Setting, standardised: bool) -> Example:
    module = our_wide_resnet(setting) if standardised else wide_resnet(setting)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with setting.autocast():
            logits = functional_call(module, parameters, (x,))
        return F.cross_entropy(logits.float(), y.expand(len(x)))

    return module, loss, lambda n: setting.images(n, setting.views)


def _sequence_example(setting: Setting) -> Example:
    module = gpt2.GPT2(**setting.sizes, fused=False).to(setting.device)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with setting.autocast():
            logits = functional_call(module, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(logits.float().squeeze(0), y)

    return module, loss, setting.sequences


def _vmap_job(
    setting: Setting,
    module: nn.Module,
    loss: Callable[..., Tensor],
    sample: Callable[[int], Batch],
    micro: int,
    views: int,
    note: str,
) -> Job:
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    parameters = _detached(module)
    data = sample(micro)

    def step(n: int) -> None:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for _ in range(n // micro):
            rows = gradients(parameters, *data)
            squares = sum(g.flatten(1).square().sum(1) for g in rows.values())
            factors = (1 / squares.sqrt()).clamp(max=1.0)
            for name in list(rows):
                g = rows.pop(name)
                total[name].add_((factors @ g.flatten(1)).view_as(total[name]))
        _noisy_sgd(parameters, total, n)

    return Job(step=step, micro=micro, views=views, note=note, autotune=False)


def _rows(data: Batch, n: int) -> Batch:
    """n rows, by repeating those that are there."""
    return tuple(t.repeat(-(-n // len(t)), *(1,) * (t.ndim - 1))[:n] for t in data)


def _detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@torch.no_grad()
def _noisy_sgd(parameters: dict[str, Tensor], total: dict[str, Tensor], n: int) -> None:
    for name, p in parameters.items():
        p.sub_(total[name] + torch.randn_like(p), alpha=RATE / n)


# ------------------------------------------------------------------------------------------------ Opacus


def opacus_images(setting: Setting, *, micro: int, standardised: bool = False, autocast: bool = True) -> Job:
    """Standardised convolutions go through Opacus's fallback to torch.func, all other layers through its own rules."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module, views = wide_resnet(setting, standardised=standardised), setting.views
    wrapped = GradSampleModule(module, loss_reduction="sum")
    parameters = list(module.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=RATE),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    images, labels = setting.images(micro * views)

    def step(n: int) -> None:
        for _ in range(n // micro):  # as its virtual steps: clip each chunk, then noise once
            with setting.autocast(autocast):
                logits = wrapped(images)
            F.cross_entropy(logits.float(), labels, reduction="sum").backward()
            for p in parameters:
                p.grad_sample = p.grad_sample.view(micro, views, *p.shape).mean(1)
            optimizer.clip_and_accumulate()
            for p in parameters:
                p.grad_sample = p.grad = None
        optimizer.add_noise()
        optimizer.original_optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    precision = "bf16" if autocast else "tf32"
    note = f"Opacus {installed('opacus')} hooks, {precision}; {_network(standardised)}"
    return Job(step=step, micro=micro, views=views, note=note)


def opacus_ghost_sequences(setting: Setting, *, micro: int, autocast: bool = True) -> Job:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = gpt2.GPT2(**setting.sizes).to(setting.device)
    wrapped = GradSampleModuleFastGradientClipping(
        module, loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=RATE),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    data = setting.sequences(micro)

    def step(n: int) -> None:
        for _ in range(n // micro):  # a step each: its ghost clipping cannot accumulate
            optimizer.zero_grad(set_to_none=True)
            with setting.autocast(autocast):
                losses = gpt2.token_loss(wrapped, data)
            DPTensorFastGradientClipping(wrapped, optimizer, losses, "sum").backward()
            optimizer.step()

    precision = "bf16" if autocast else "tf32"
    note = f"Opacus {installed('opacus')}, {precision}; {gpt2.UNTIED}"
    return Job(step=step, micro=micro, note=note)
