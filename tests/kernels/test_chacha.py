"""Normals from ChaCha20 on the device: the cipher's own words, to the bit, and the right law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from randomgen import ChaCha
from scipy import stats

from sfumato import kernels

if not kernels.INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not kernels.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from sfumato.kernels.chacha import blocks, normals, normals_slowly

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210, 0xFFFFFFFFFFFFFFFF, 1], dtype=np.uint64)


def key_of(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy()).to(DEVICE)


def reference(first: int, size: int) -> np.ndarray:
    """By a cipher that we did not write: randomgen's ChaCha with 20 rounds."""
    cipher = ChaCha(key=KEY, counter=16 * first, rounds=20)  # which counts words
    return normals_slowly(cipher.random_raw(blocks(size) * 8), size)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 2500])  # up to 1024 are one program's
@pytest.mark.parametrize("first", [0, 3, 2**32 - 2])
def test_these_are_the_ciphers_words(first: int, size: int) -> None:
    ours = normals(key_of(KEY), first, size).cpu().numpy()
    assert ours.shape == (size,)
    np.testing.assert_allclose(ours, reference(first, size), rtol=1e-12, atol=1e-12)


def test_another_key_or_counter_gives_other_numbers() -> None:
    first = normals(key_of(KEY), 0, 64)
    other = KEY.copy()
    other[2] ^= np.uint64(1)
    assert not torch.equal(normals(key_of(other), 0, 64), first)
    later = normals(key_of(KEY), 4, 64)
    assert torch.equal(later[:32], first[32:])  # counters go on where they ended
    assert not torch.equal(later, first)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_law_is_the_normal_law() -> None:
    """The interpreter is slow: there the law is that of the cipher's words, to which the kernel's numbers are equal."""
    drawn = reference(10, 40_000) if kernels.INTERPRETED else normals(key_of(KEY), 10, 40_000).cpu().numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert stats.kstest(drawn * 1.05, "norm").pvalue < 1e-6  # it would see a wrong scale
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / 200
    assert abs(np.corrcoef(drawn[0::2] ** 2, drawn[1::2] ** 2)[0, 1]) < 5 / 140
