"""All functions with a rule of their own. A new layer is a new row here, not a change of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from sfumato.gradients.rules import convolution, embedding, linear, normalisation, recurrence, standardised
from sfumato.gradients.rules.call import Call

TABLE: Mapping[Any, Callable[[Call], Any]] = {
    **linear.TABLE,
    **convolution.TABLE,
    **embedding.TABLE,
    **normalisation.TABLE,
    **standardised.TABLE,
    **recurrence.TABLE,
}

# Functions whose parameter's gradient is a sum of outer products, with the size of one output vector given the
# parameter's shape: what the engine needs to foresee memory.
FACTORED: Mapping[Any, Callable[[tuple[int, ...]], int]] = {
    **dict.fromkeys(convolution.TABLE, lambda shape: shape[0]),
    **dict.fromkeys(embedding.TABLE, lambda shape: shape[1]),
    **dict.fromkeys(linear.TABLE, lambda shape: shape[1]),
    **dict.fromkeys(recurrence.TABLE, lambda shape: shape[1]),
    F.linear: lambda shape: shape[0],
}
