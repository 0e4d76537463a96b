"""How the convolution kernel cuts its work: tuned on one H200 for the layers of WRN-16-4, and a rule for the rest.

A program holds `taps` accumulators of block_out x block_in and walks over the positions in blocks. What it keeps in
shared memory is `stages` blocks of dy and of x; what it keeps in registers is mostly the accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FLAT_BELOW = 16
"""With fewer input channels than the least side of a matrix product, taps and channels share one dimension."""

LEAST = 16
"""The least side of a matrix product in Triton."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Configuration:
    """Sizes of one program. `taps` of a kernel row share a load of dy: one, or three; `block_in` is over channels.

    With fewer than FLAT_BELOW channels, block_in is over taps and channels together, and `taps` is one.
    """

    block_out: int
    block_in: int
    block_positions: int
    taps: int
    warps: int
    stages: int

    def shared_bytes(self, element: int) -> int:
        """What the pipelined loads take, with `element` bytes per number."""
        return self.stages * self.block_positions * (self.block_out + self.taps * self.block_in) * element

    def accumulators(self) -> int:
        """Registers per thread that hold partial sums."""
        return self.block_out * self.block_in * self.taps // (32 * self.warps)


# (input channels, output channels, kernel, stride), in bfloat16. Found by search over the sizes above.
TUNED: dict[tuple[int, int, Pair, Pair], Configuration] = {
    (3, 16, (3, 3), (1, 1)): Configuration(16, 32, 64, 1, 4, 3),
    (16, 64, (1, 1), (1, 1)): Configuration(64, 16, 64, 1, 4, 4),
    (16, 64, (3, 3), (1, 1)): Configuration(64, 16, 64, 3, 4, 3),
    (64, 64, (3, 3), (1, 1)): Configuration(64, 64, 64, 3, 4, 4),
    (64, 128, (1, 1), (2, 2)): Configuration(128, 64, 64, 1, 4, 3),
    (64, 128, (3, 3), (2, 2)): Configuration(128, 64, 32, 3, 8, 4),
    (128, 128, (3, 3), (1, 1)): Configuration(128, 128, 32, 3, 8, 4),
    (128, 256, (1, 1), (2, 2)): Configuration(128, 128, 64, 1, 8, 3),
    (128, 256, (3, 3), (2, 2)): Configuration(128, 128, 64, 1, 8, 3),
    (256, 256, (3, 3), (1, 1)): Configuration(128, 128, 64, 1, 4, 3),
}


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def block(n: int) -> int:
    """A power of two between 16 and 128 that covers n; above 128, the one of 128 and 64 that overshoots less."""
    if n <= 128:
        return max(LEAST, power_of_two(n))
    return min((128, 64), key=lambda size: (-n % size, -size))


def untuned(inputs: int, outputs: int, kernel: Pair) -> Configuration:
    """Accumulators of at most 96 registers a thread, and at most 96 KiB of shared memory in bfloat16."""
    flat = inputs < FLAT_BELOW
    block_out, block_in = block(outputs), block(inputs * kernel[0] * kernel[1] if flat else inputs)
    # Three taps load dy once instead of three times, where three accumulators still leave room in the registers.
    taps = 3 if kernel[1] == 3 and not flat and block_out * block_in <= 64 * 64 else 1
    warps = 8 if block_out * block_in * taps >= 128 * 128 else 4
    return Configuration(block_out, block_in, 64, taps, warps, 3)


def configuration(
    inputs: int, outputs: int, kernel: Pair, stride: Pair, dtype: torch.dtype, positions: int
) -> Configuration:
    """The configuration for one layer whose units have `positions` output positions each."""
    wide = dtype == torch.float32  # twice the bytes, so half the positions
    chosen = TUNED.get((inputs, outputs, kernel, stride))
    # Splitting float32 into three products takes registers too: beside the largest accumulators they would spill.
    if chosen is None or (wide and chosen.accumulators() > 96):
        chosen = untuned(inputs, outputs, kernel)
    positions = min(chosen.block_positions // 2 if wide else chosen.block_positions, power_of_two(positions))
    return replace(chosen, block_positions=max(LEAST, positions))
