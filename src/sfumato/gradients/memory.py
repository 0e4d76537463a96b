"""How many units go through the model at once: a choice of time and memory that changes nothing else.

On a CPU what fits into caches is foreseen from shapes. On a GPU a first micro-batch of modest size is watched, and its
memory says how many units fit into what is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sfumato import kernels
from sfumato.gradients.clip import Clip
from sfumato.gradients.factored import outer_ghost_pays
from sfumato.gradients.modes import Trace
from sfumato.gradients.passes import Performance
from sfumato.gradients.rules import convolution

STEP = 32  # units by which micro-batches on a CPU differ: vector instructions leave nothing over
_SHARE = 0.6  # of a GPU's free memory; some is lost between blocks, and cuDNN tries with more
_FIRST_SHARE = 0.1  # what is foreseen may be a few times too little


def unit_bytes(
    found: Trace, params: Mapping[str, Tensor], clip: Clip, performance: Performance, fold: int, width: int
) -> tuple[int, int]:
    """What one unit's instantiated gradients take, and its activations, of `width` bytes a number."""

    def instantiated(name: str, p: Tensor) -> bool:
        positions = found.positions.get(name)
        if p.ndim == 4 and kernels.contracts(p):
            return True
        if performance.ghost is not None or positions is None or (clip.scale is not None and positions * fold > 1):
            return performance.ghost is not True or positions is None
        pays = outer_ghost_pays if p.ndim == 2 else convolution.ghost_pays
        return not pays(positions * fold, p.shape[0], p[0].numel())

    gradients = sum(p.numel() * p.element_size() for name, p in params.items() if instantiated(name, p))
    return gradients, 2 * found.outputs * fold * width  # inputs and gradients of every use


def first_micro_batch(unit: tuple[int, int], params: Mapping[str, Tensor], performance: Performance, count: int) -> int:
    """As many units as are sure to fit, of `count` at most."""
    gradients, activations = unit
    device = next(iter(params.values())).device
    if device.type == "cuda":
        return _all_or_power_of_two(int(_FIRST_SHARE * free_memory(device) / max(1, gradients + activations)), count)
    # A part costs some passes over the parameters, whatever its size: models with many get larger parts.
    room = performance.activation_bytes + 25 * sum(p.numel() * p.element_size() for p in params.values())
    most = max(1, min(performance.instantiated_bytes // max(1, gradients), room // max(1, activations)))
    size = math.ceil(count / math.ceil(count / most))
    stepped = math.ceil(size / STEP) * STEP
    # What fits is an estimate: a little more is better than half as much.
    return size if size < STEP else stepped if stepped <= 1.25 * most else stepped - STEP


class Gauge:
    """Watches, from when it is made, what a micro-batch takes of a GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def micro_batch(self, units: int, count: int) -> int:
        """How many of `count` units fit, if `units` took what was seen: all, or a power of two, so that sizes recur."""
        taken = torch.cuda.max_memory_allocated(self._device) - self._before
        return _all_or_power_of_two(int(_SHARE * free_memory(self._device) * units / max(1, taken)), count)


def free_memory(device: torch.device) -> int:
    """Bytes that torch could use, those included that it keeps for later."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _all_or_power_of_two(most: int, count: int) -> int:
    return count if most >= count else 1 << max(0, most.bit_length() - 1)
