"""Extended training (Nasr et al. 2023, appendix A): public rows join the batch.

They have a sampler of their own, are not clipped one by one and carry no noise. A private row's rate is then smaller
for the same batch, and that smaller rate is what the door draws and charges: the private sampler's, and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.algorithms.method import Ask, Params, scaled
from sfumato.algorithms.public_step import public_step
from sfumato.algorithms.upon import Upon
from sfumato.errors import InvalidArgument
from sfumato.gradients import Gradient
from sfumato.public import Public


@dataclass(frozen=True, kw_only=True)
class Extended(Upon):
    """The mean over a batch of `private_batch` expected private and `public_batch` public rows."""

    private_batch: float
    public_batch: int
    public_clip: float | None = None  # the longest mean of the public rows' gradients, by default as it is

    def __post_init__(self) -> None:
        if not (self.private_batch > 0 and self.public_batch > 0):
            raise InvalidArgument(
                f"private_batch={self.private_batch} and public_batch={self.public_batch} must be positive."
            )
        if self.public_clip is not None and not self.public_clip > 0:
            raise InvalidArgument(f"public_clip={self.public_clip} must be positive, or None.")

    def step(self, state: Any, params: Params, public: Public | None, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        private, state = super().step(state, params, public, ask, **handed)
        share = self.private_batch / (self.private_batch + self.public_batch)
        joining = public_step(params, public, self.public_batch, self.public_clip, scale=handed.get("scale"))
        return share * private + (1 - share) * scaled(joining, handed), state


def shares(batch: int, private_size: int, public_size: int) -> tuple[int, int]:
    """How many private and public rows a batch holds if it is drawn from both alike."""
    private = round(batch * private_size / (private_size + public_size))
    return private, batch - private
