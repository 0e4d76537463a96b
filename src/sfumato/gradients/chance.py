"""A model without its chance: dropout is left out, and a random number is always the same one.

What is drawn for a row depends on how many rows there are: batches of different sizes could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_torch: Any = torch  # of which some are private


def _filled(func: Any, value: float, *args: Any, **kwargs: Any) -> Tensor:
    """What the function gives, with one value throughout."""
    with torch.no_grad():
        out: Tensor = func(*args, **kwargs)
        return out.fill_(value) if args and out is args[0] else torch.full_like(out, value)


def _lowest(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of whole numbers between two bounds, or below one."""
    bounds = [value for value in args if isinstance(value, int)]
    return _filled(func, kwargs.get("low", bounds[0] if len(bounds) > 1 else 0), *args, **kwargs)


def _uniform(out: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _filled(Tensor.fill_, low + 0.75 * (high - low), out, 0.0)


def _normal_in_place(out: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _filled(Tensor.fill_, mean + 0.5 * std, out, 0.0)


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    near = mean + 0.5 * std
    if isinstance(near, Tensor):
        return near.detach()
    options.pop("generator", None)
    return torch.full(size, near, **options)


def _likeliest(weights: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:
    order = weights.argsort(dim=-1, descending=True)
    return order[..., torch.arange(num_samples, device=order.device) % order.shape[-1]]


def _in_order(n: int, **options: Any) -> Tensor:
    options.pop("generator", None)
    return torch.arange(n, **options)


def _unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    return (logits / tau).softmax(dim)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return F.scaled_dot_product_attention(**{**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0})


def _projected_attention(*args: Any, **kwargs: Any) -> Any:
    return F.multi_head_attention_forward(*args, **{**kwargs, "training": False})


def _recurrent(func: Any, *args: Any) -> Any:
    """Of whose arguments only dropout is a fraction."""
    return func(*(0.0 if isinstance(value, float) else value for value in args))


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_HALVES = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
_REPLACED: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_DROPOUTS, _torch.dropout, _torch.feature_dropout, _torch.alpha_dropout), _unchanged),
    # The mean of such a draw, or near it.
    **dict.fromkeys((torch.poisson, _torch._standard_gamma, _torch._sample_dirichlet), _unchanged),
    **{func: partial(_filled, func, 0.5) for func in _HALVES},
    **{func: partial(_filled, func, 0.5) for func in (Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_)},
    **{func: partial(_filled, func, 1.0) for func in (torch.bernoulli, Tensor.bernoulli)},
    **{func: partial(_filled, func, 1.0) for func in (Tensor.bernoulli_, Tensor.geometric_)},
    **{func: partial(_lowest, func) for func in (torch.randint, torch.randint_like, Tensor.random_)},
    **{func: partial(_recurrent, func) for func in (_torch.lstm, _torch.gru, _torch.rnn_tanh, _torch.rnn_relu)},
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _likeliest),
    Tensor.uniform_: _uniform,
    Tensor.normal_: _normal_in_place,
    torch.normal: _normal,
    torch.randperm: _in_order,
    F.gumbel_softmax: _gumbel_softmax,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _projected_attention,
}


class WithoutChance(TorchFunctionMode):
    """Runs the model so, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        """Whether there was anything to be replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met = self.met or func in _REPLACED
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))
