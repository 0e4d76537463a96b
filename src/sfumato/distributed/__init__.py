"""Several processes, one training: what they share, and how, is told in `processes`."""

from sfumato.distributed.processes import Processes, ProcessLost

__all__ = ["ProcessLost", "Processes"]
