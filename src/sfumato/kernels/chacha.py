"""Standard normals from the ChaCha20 cipher (Bernstein 2008), in float64, drawn where they are needed.

The cipher's block function turns a secret key and a counter into 16 words of 32 bits. Two of them make a number of 53
bits in (0, 1], a pair of those two normals, by Box and Muller: 8 normals to a block, none beyond 8.6.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128  # counters per program
TWO_PI = tl.constexpr(2 * math.pi)


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _uniform(low, high):
    """53 bits of two words, in (0, 1]."""
    bits = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)) >> 11
    return (bits.to(tl.float64) + 1.0) * (1.0 / 9007199254740992.0)


@triton.jit
def _store_pair(out_ptr, place, size, w0, w1, w2, w3):
    radius = tl.sqrt(-2.0 * tl.log(_uniform(w0, w1)))
    angle = TWO_PI * _uniform(w2, w3)
    tl.store(out_ptr + place, radius * tl.cos(angle), mask=place < size)
    tl.store(out_ptr + place + 1, radius * tl.sin(angle), mask=place + 1 < size)


@triton.jit(do_not_specialize=["first", "size"])
def _normals(key_ptr, out_ptr, first, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = (index + first).to(tl.uint64)
    none = tl.zeros([BLOCK], tl.uint32)
    # The constants spell "expand 32-byte k".
    s0, s1, s2, s3 = none + 0x61707865, none + 0x3320646E, none + 0x79622D32, none + 0x6B206574
    s4, s5 = none + tl.load(key_ptr + 0).to(tl.uint32), none + tl.load(key_ptr + 1).to(tl.uint32)
    s6, s7 = none + tl.load(key_ptr + 2).to(tl.uint32), none + tl.load(key_ptr + 3).to(tl.uint32)
    s8, s9 = none + tl.load(key_ptr + 4).to(tl.uint32), none + tl.load(key_ptr + 5).to(tl.uint32)
    s10, s11 = none + tl.load(key_ptr + 6).to(tl.uint32), none + tl.load(key_ptr + 7).to(tl.uint32)
    s12, s13 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, none, none
    for _ in range(10):  # double rounds
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    place = index * 8
    _store_pair(out_ptr, place, size, x0 + s0, x1 + s1, x2 + s2, x3 + s3)
    _store_pair(out_ptr, place + 2, size, x4 + s4, x5 + s5, x6 + s6, x7 + s7)
    _store_pair(out_ptr, place + 4, size, x8 + s8, x9 + s9, x10 + s10, x11 + s11)
    _store_pair(out_ptr, place + 6, size, x12 + s12, x13 + s13, x14, x15)


def blocks(size: int) -> int:
    """Counters that `size` normals take."""
    return -(-size // 8)


def normals(key: Tensor, first: int, size: int) -> Tensor:
    """`size` standard normals in float64, from counter `first` on; the key is 8 words of 32 bits, as int32."""
    out = torch.empty(size, dtype=torch.float64, device=key.device)
    if size:
        _normals[(triton.cdiv(blocks(size), _BLOCK),)](key, out, first, size, _BLOCK, num_warps=4)
    return out


def normals_slowly(words: np.ndarray, size: int) -> np.ndarray:
    """The same normals from the cipher's own words (uint64, little-endian pairs of its words)."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53
    radius, angle = np.sqrt(-2 * np.log(uniform[0::2])), 2 * np.pi * uniform[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:size]
