"""Several processes, one training: each holds its own private rows, the first one holds the ledger and draws the noise.

All processes are one trust domain: what leaves it is what leaves the door. They go through the door's steps together:

1. Each checks the question with rows of its own; if one refuses it, all do.
2. The first process charges the ledger, once, and all learn of success or refusal before anything is drawn.
3. Each samples its own units with its own secret generator. Poisson sampling decides unit by unit, so that all of them
   together draw the Poisson sample of the whole. Each sums what its units contribute.
4. The sums are added up in the first process, in float64 as those of micro-batches are; it adds noise, once, and sends
   the noisy answer to all. (An all-reduce is a reduce and a broadcast: the noise goes between the two.)

A unit lives in one process only, so what it can move the sum by is what it can move it by in one process.
"""

from sfumato.distributed.processes import Processes, ProcessLost

__all__ = ["ProcessLost", "Processes"]
