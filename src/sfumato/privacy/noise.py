"""The one place where noise is drawn: `privatize` adds it, a `NoiseSource` supplies it.

What an answer is worth rests on noise that nobody can predict, repeat or divide out. So:

* Noise comes from a cipher in counter mode keyed by the operating system, never from a seed: AES-128 where the
  processor has it in hardware (as fast as numpy's own generator), ChaCha20 elsewhere. The key is set as it is.
* The state is never saved, copied or shared: two answers with the same noise would differ by the exact private change.
* Sampling has its own cipher and key, so what is known of the batches says nothing about the noise.

Floating point. Sums and noise are float64, and the noisy sum is rounded to a fixed public grid, a power of two some
2^20 times finer than the noise. Rounding is post-processing; it hides most of the low bits through which floating-point
noise betrays the exact value, but not provably all: it *reduces* that risk. The discrete noises, for counts, have none.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt
import torch
from randomgen import AESCounter, ChaCha
from torch import Tensor

from sfumato import kernels
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.privacy.discrete import discrete_gaussian, discrete_laplace
from sfumato.privacy.mechanisms import DiscreteGaussian, DiscreteLaplace, Gaussian, Noise
from sfumato.privacy.normals import Normals

_GRID_BITS = 20
# Adding and subtracting it rounds a float64 to an integer. So does torch.round, but that shares even a few thousand
# entries among all cores and then waits for the slowest.
_TO_INTEGER = 1.5 * 2.0**52
# Entries added at a time, so that a large model needs no second copy of itself: on the host few enough to stay in the
# cache and on one core (the draw is what takes time), on a device enough to be worth a launch.
_CHUNK_HOST, _CHUNK_DEVICE = 2**14, 2**22
_AHEAD_FROM = 2**14  # below this a draw takes less time than starting a thread
_HAS_AES = bool(AESCounter(key=0).use_aesni)  # in software AES is four times slower than ChaCha


@dataclass(frozen=True)
class NotPrivateSeed:
    """Makes noise and sampling repeatable, hence not private: for tests, audits and debugging only.

    Repeats on machines of the same kind only; a forked child always leaves the seeded stream.
    """

    seed: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidArgument(f"seed={self.seed} must not be negative.")


class _Secret(np.random.Generator):
    """A numpy generator that can be neither saved nor copied."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SfumatoError("A noise or sampling generator cannot be saved or copied: noise must never be repeated.")

    def __getstate__(self) -> NoReturn:
        self.__reduce_ex__(None)


def _cipher(key: npt.NDArray[np.uint64] | None = None) -> Any:
    """A counter-mode cipher under 128 (AES) or 256 (ChaCha) bits from the operating system, or under a known key."""
    if _HAS_AES:
        return AESCounter(key=secrets.randbits(128) if key is None else key[:2])
    return ChaCha(key=secrets.randbits(256) if key is None else key, rounds=20)


class NoiseSource:
    """Where noise and samples come from. The door makes one; algorithms never hold it.

    `draw_ahead` draws the noise of the next answer in a thread while the step computes. It changes nothing but time and
    memory (8 bytes per entry of the answer).
    `device_generator` draws Gaussian noise for CUDA tensors on the GPU, by ChaCha20 under a new secret key of 256 bits
    for each answer: for answers so large that the host would be slower. Without Triton the host draws all the same.
    """

    def __init__(
        self, seed: NotPrivateSeed | None = None, *, draw_ahead: bool = True, device_generator: bool = False
    ) -> None:
        if not (seed is None or isinstance(seed, NotPrivateSeed)):
            raise InvalidArgument(
                f"seed={seed!r} must be None: only NotPrivateSeed(...), which is not private, repeats."
            )
        self._private = seed is None
        self._draw_ahead = draw_ahead
        self._device_generator = device_generator
        self._sampling = _Secret(_cipher())
        self._key(seed)
        _SOURCES.add(self)

    def _key(self, seed: NotPrivateSeed | None = None) -> None:
        """Fresh, independent keys, and nothing kept that was drawn before."""
        keys: Any = [None] * 3
        if seed is not None:
            keys = [s.generate_state(4, np.uint64) for s in np.random.SeedSequence(seed.seed).spawn(3)]
        self._lock = threading.Lock()
        self._normals = Normals(_Secret(_cipher(keys[0])))
        self._integers = _Secret(_cipher(keys[1]))  # apart from the normals, which may have been drawn ahead
        self._sampling.bit_generator.state = _cipher(keys[2]).state  # in place: samplers may hold the generator
        self._last = 0

    @property
    def private(self) -> bool:
        """False if the noise can be repeated from a seed."""
        return self._private

    @property
    def sampling(self) -> np.random.Generator:
        """The generator for samplers; independent of the noise."""
        return self._sampling

    def close(self) -> None:
        """Stops drawing ahead. The source stays usable."""
        with self._lock:
            self._normals.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SfumatoError(
            "A NoiseSource cannot be saved, copied or pickled, since noise must never be repeated: make a new one."
        )

    def __getstate__(self) -> NoReturn:
        self.__reduce_ex__(None)

    @contextmanager
    def _answering(self, total: int, device: torch.device) -> Iterator[Callable[[int], Tensor]]:
        """Lends one answer a function from a size to that many standard normals; the sizes are to make up `total`."""
        pinned = device.type == "cuda"
        with self._lock:
            if self._device_generator and kernels.usable(torch.empty(0, device=device)):
                yield _device_normals(device, self._integers.integers(0, 2**32, size=8, dtype=np.uint32))
                return

            def normals(size: int) -> Tensor:
                # Asynchronous but safe: torch reuses pinned memory only after the copies from it have ended.
                parts = [part.to(device, non_blocking=True) for part in self._normals.take(size, pinned=pinned)]
                return parts[0] if len(parts) == 1 else torch.cat(parts)

            yield normals
            before, self._last = self._last, total
            if self._draw_ahead and before == total >= _AHEAD_FROM:  # asked twice: it will be asked again
                self._normals.draw_ahead(total, pinned=pinned)

    def _discrete(self, noise: Noise, scale: float, size: int) -> Tensor:
        draw = discrete_gaussian if isinstance(noise, DiscreteGaussian) else discrete_laplace
        with self._lock:
            return torch.from_numpy(draw(scale, size, self._integers))


def _device_normals(device: torch.device, key: npt.NDArray[np.uint32]) -> Callable[[int], Tensor]:
    """Normals by ChaCha20 under this key, on the device; no counter is used twice."""
    from sfumato.kernels import chacha

    words = torch.from_numpy(key.view(np.int32)).to(device)
    first = 0

    def drawn(size: int) -> Tensor:
        nonlocal first
        start, first = first, first + chacha.blocks(size)
        return chacha.normals(words, start, size)

    return drawn


# A forked child holds a copy of every generator: it gets new keys before it can draw.
_SOURCES: weakref.WeakSet[NoiseSource] = weakref.WeakSet()


def _after_fork() -> None:
    for source in list(_SOURCES):
        source._key()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@overload
def privatize(
    exact: Tensor,
    *,
    unit: float,
    noise: Noise,
    source: NoiseSource,
    dtype: torch.dtype | None = None,
    symmetric: bool = False,
    inside: bool = False,
) -> Tensor: ...
@overload
def privatize(
    exact: npt.NDArray[Any],
    *,
    unit: float,
    noise: Noise,
    source: NoiseSource,
    dtype: torch.dtype | None = None,
    symmetric: bool = False,
    inside: bool = False,
) -> npt.NDArray[Any]: ...
@overload
def privatize(
    exact: Mapping[str, Tensor],
    *,
    unit: float,
    noise: Noise,
    source: NoiseSource,
    dtype: torch.dtype | None = None,
    symmetric: bool = False,
    inside: bool = False,
) -> dict[str, Tensor]: ...
def privatize(
    exact: Tensor | npt.NDArray[Any] | Mapping[str, Tensor],
    *,
    unit: float,
    noise: Noise,
    source: NoiseSource,
    dtype: torch.dtype | None = None,
    symmetric: bool = False,
    inside: bool = False,
) -> Tensor | npt.NDArray[Any] | dict[str, Tensor]:
    """`exact` plus fresh noise: the only function that adds noise. Once per answer, after the ledger was charged.

    Args:
      exact: the sum, over one batch, of the units' contributions. A mapping is one answer, with noise on all its
        entries. Left unchanged.
      unit: the most that one privacy unit can contribute to `exact` as a whole: in L2 norm for the Gaussians, in L1
        norm for the discrete Laplace.
      noise: the law; its standard deviation (for the Laplace its scale) is `noise.scale * unit`.
      source: where the noise comes from.
      dtype: of the answer, for Gaussian noise; float64 by default, whatever that of `exact` is: a sum is wider if it
        was taken in parts, and so would say that many took part. The discrete noises take integers and answer in int64.
      symmetric: `exact` is a symmetric matrix and `unit` bounds its Frobenius norm. The noisy matrix is symmetrised,
        which is post-processing: the noise has standard deviation s on the diagonal and s/sqrt(2) off it, half the
        variance of the usual recipe of drawing the upper triangle and mirroring it, at the same cost.
      inside: the noise is not released but used by a sealed method, whose proof is about its density: it is not rounded
        to the grid, on which anyone who knows both neighbours could recognise it.

    Formal guarantee: if `exact` moves by at most `unit` between neighbours, the answer is that of the (discrete)
    Gaussian or Laplace mechanism of noise multiplier `noise.scale`, up to float64 arithmetic as the module says.

    A non-finite entry counts as zero. The engine never passes one on; if it did, the bound on `exact` would be void and
    no choice here could restore it, but an exception or a NaN would show one person's row to all, so neither leaves.
    """
    if not isinstance(noise, Gaussian | DiscreteGaussian | DiscreteLaplace):
        raise InvalidArgument(f"noise={noise!r} must be Gaussian, DiscreteGaussian or DiscreteLaplace.")
    if not isinstance(source, NoiseSource):
        raise InvalidArgument(f"source={source!r} must be a NoiseSource.")
    if not (math.isfinite(unit) and unit > 0):
        raise InvalidArgument(f"unit={unit} must be positive and finite: bound what one privacy unit can contribute.")
    if isinstance(exact, Mapping):
        tensors, names = list(exact.values()), list(exact)
    else:
        tensors, names = [torch.tensor(exact) if isinstance(exact, np.ndarray) else exact], []
    if not all(isinstance(t, Tensor) for t in tensors):
        raise InvalidArgument(f"exact={type(exact).__name__} must be a tensor, an array or a mapping to tensors.")
    if inside and (symmetric or not isinstance(noise, Gaussian)):
        raise InvalidArgument(f"inside=True is for plain Gaussian noise, not for {noise!r} with symmetric={symmetric}.")

    scale = _product_rounded_up(noise.scale, unit)
    if not tensors:
        noisy = []
    elif not isinstance(noise, Gaussian):
        if dtype is not None or symmetric:
            raise InvalidArgument(f"noise={noise!r} takes neither dtype nor symmetric: it answers in int64.")
        noisy = _add_discrete(tensors, noise, scale, source)
    elif symmetric:
        noisy = _add_symmetric(tensors, scale, source, dtype)
    else:
        noisy = _add_gaussian(tensors, scale, source, dtype, rounded=not inside)

    if isinstance(exact, Mapping):
        return dict(zip(names, noisy, strict=True))
    return noisy[0].numpy() if isinstance(exact, np.ndarray) else noisy[0]


@lru_cache(maxsize=64)
def _product_rounded_up(scale: float, unit: float) -> float:
    """scale * unit, rounded to a float that is not smaller: never less noise than was charged."""
    product = float(scale) * float(unit)
    if not 2.0**-900 < product < 2.0**900:
        raise InvalidArgument(f"unit={unit} times the noise's scale={scale} is beyond float64: rescale the question.")
    return product if Fraction(product) >= Fraction(scale) * Fraction(unit) else math.nextafter(product, math.inf)


def _add_gaussian(
    tensors: Sequence[Tensor], std: float, source: NoiseSource, dtype: torch.dtype | None, *, rounded: bool = True
) -> list[Tensor]:
    device = _one_device(tensors)
    work = torch.device("cpu") if _widest(device) is torch.float32 else device
    grid = math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)  # std / 2^21 < grid <= std / 2^20

    kind, sizes = dtype or _widest(device), [t.numel() for t in tensors]
    flats = [t.detach().reshape(-1) for t in tensors]
    with source._answering(sum(sizes), work) as normals:

        def noised(x: Tensor, size: int) -> Tensor:  # in units of the grid, a power of two, so that scaling is exact
            x.div_(grid).nan_to_num_(0.0, 0.0, 0.0).add_(normals(size), alpha=std / grid)
            return (x.add_(_TO_INTEGER).sub_(_TO_INTEGER) if rounded else x).mul_(grid)

        if len(flats) == 1 and 0 < sizes[0] <= _CHUNK_HOST:  # for a short vector, pieces take longer than noise
            x = noised(flats[0].to(work).to(torch.float64, copy=True), sizes[0])
            return [x.to(kind).to(device).view(tensors[0].shape)]
        groups = _grouped(flats, _CHUNK_HOST if work.type == "cpu" else _CHUNK_DEVICE)
        lengths = [sum(map(len, group)) for group in groups]
        noisy = torch.empty(sum(sizes), dtype=kind, device=work)
        for group, part in zip(groups, torch.split(noisy, lengths), strict=True):
            x = torch.empty(len(part), dtype=torch.float64, device=work)
            torch.cat([piece.to(work) for piece in group], out=x)
            part.copy_(noised(x, len(part)))
    return [y.view(t.shape) for y, t in zip(torch.split(noisy.to(device), sizes), tensors, strict=True)]


def _grouped(flats: Sequence[Tensor], chunk: int) -> list[list[Tensor]]:
    """Consecutive pieces in groups of at most `chunk` entries: large tensors are cut, small ones share an addition."""
    groups: list[list[Tensor]] = []
    room = 0
    for flat in flats:
        for piece in torch.split(flat, chunk):
            if len(piece) > room:
                groups.append([])
                room = chunk
            if len(piece):
                groups[-1].append(piece)
                room -= len(piece)
    return groups


def _add_symmetric(
    tensors: Sequence[Tensor], std: float, source: NoiseSource, dtype: torch.dtype | None
) -> list[Tensor]:
    for t in tensors:
        if t.ndim != 2 or t.shape[0] != t.shape[1]:
            raise InvalidArgument(f"exact has shape {tuple(t.shape)}, but symmetric=True needs a square matrix.")
    kind = dtype or _widest(_one_device(tensors))
    return [((noisy + noisy.T) / 2).to(kind) for noisy in _add_gaussian(tensors, std, source, None)]


def _add_discrete(tensors: Sequence[Tensor], noise: Noise, scale: float, source: NoiseSource) -> list[Tensor]:
    _one_device(tensors)
    for t in tensors:
        if t.dtype.is_floating_point or t.dtype.is_complex:
            raise InvalidArgument(f"exact has dtype {t.dtype}, but noise={noise!r} needs integers: count in int64.")
    drawn = source._discrete(noise, scale, sum(t.numel() for t in tensors))
    shares = torch.split(drawn, [t.numel() for t in tensors])
    return [t.detach().to(torch.int64) + z.view(t.shape).to(t.device) for t, z in zip(tensors, shares, strict=True)]


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64


def _one_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise InvalidArgument(f"exact lies on {sorted(map(str, devices))}: move all of it to one device.")
    return devices.pop()
