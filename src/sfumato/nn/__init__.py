"""Layers for private image models. Any module of torch can be trained; these are fast and suit clipping."""

from sfumato.nn.layers import GroupNormAct, Pixels, WSConv2d

__all__ = ["GroupNormAct", "Pixels", "WSConv2d"]
