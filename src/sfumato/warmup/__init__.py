"""Plain training on public data, and how sharp the minimum is that it finds: costs no privacy."""

from sfumato.warmup.curvature import top_eigenvalues, trace
from sfumato.warmup.loop import warm_up
from sfumato.warmup.rotation import rotation_pretrain
from sfumato.warmup.sam import Sam

__all__ = ["Sam", "rotation_pretrain", "top_eigenvalues", "trace", "warm_up"]
