"""The per-example gradient engine: clipped sums of per-example gradients. Knows nothing of noise or papers."""

from sfumato.gradients.clip import Clip
from sfumato.gradients.engine import Units, clipped_sum
from sfumato.gradients.gradient import Gradient
from sfumato.gradients.passes import Performance

__all__ = ["Clip", "Gradient", "Performance", "Units", "clipped_sum"]
