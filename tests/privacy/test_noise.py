"""The noise: its law, that nobody can repeat it, and that the knobs change nothing but time."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from randomgen import AESCounter, ChaCha
from scipy import stats

from sfumato import kernels
from sfumato.data.samplers import Poisson
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.privacy import noise as module
from sfumato.privacy import normals as row
from sfumato.privacy.mechanisms import DiscreteGaussian, DiscreteLaplace, Gaussian, Noise
from sfumato.privacy.noise import NoiseSource, NotPrivateSeed, privatize
from tests.statistics import FALSE_ALARM, correlation_p, counts_p, mean_p, normal_p, smallest, variance_p

UNIT, SCALE = 0.7, 1.3
STD = UNIT * SCALE


def exact():
    """Two tensors of 40,000 entries, enough to see 5% of the standard deviation, of different shape, dtype and size."""
    return {
        "weight": torch.linspace(-3, 3, 40_000, dtype=torch.float64).view(200, 200),
        "bias": torch.zeros(40_000, dtype=torch.float32),
    }


def steps(source, count=3, scale=SCALE, values=None):
    """The noise alone, by step and tensor."""
    values = exact() if values is None else values
    answers = [
        privatize(values, unit=UNIT, noise=Gaussian(scale), source=source, dtype=torch.float64) for _ in range(count)
    ]
    return [{name: (a[name] - values[name]).numpy() for name in values} for a in answers]


def flat(noise):
    return np.concatenate([x.ravel() for step in noise for x in step.values()])


@pytest.fixture(params=["private", "no draw-ahead", "ChaCha", "seeded"])
def source(request, monkeypatch):
    if request.param == "ChaCha":
        monkeypatch.setattr(module, "_HAS_AES", False)
    seed = NotPrivateSeed(secrets.randbits(64)) if request.param == "seeded" else None
    with_threads = NoiseSource(seed, draw_ahead=request.param != "no draw-ahead")
    yield with_threads
    with_threads.close()


# ---- the law


def test_gaussian_law_per_tensor_and_step(source):
    """Variance, mean and normality of each tensor in each step. False alarm 1e-6; 0.95 and 1.05 x the std are seen."""
    for factor in (1.0, 0.95, 1.05):
        parts = [x for step in steps(source, scale=factor * SCALE) for x in step.values()]
        variances = [variance_p(x, STD) for x in parts]
        if factor == 1.0:
            others = [test(x, STD) for x in parts for test in (mean_p, normal_p)]
            assert smallest(variances + others) > FALSE_ALARM
        else:
            assert max(variances) < FALSE_ALARM
            assert normal_p(np.concatenate([x.ravel() for x in parts]), STD) < FALSE_ALARM
    assert mean_p(parts[0] + 0.06 * STD, STD) < FALSE_ALARM


def test_steps_and_tensors_are_uncorrelated(source):
    """Also entries next to each other. False alarm 1e-6; noise that is used twice, even in part, is seen."""
    noise = steps(source, count=4)
    parts = [x.ravel() for step in noise for x in step.values()]
    pairs = [(x, y) for i, x in enumerate(parts) for y in parts[:i]] + [(x[:-1], x[1:]) for x in parts]
    assert smallest(correlation_p(x, y) for x, y in pairs) > FALSE_ALARM
    assert correlation_p(parts[0], parts[1] + 0.1 * parts[0]) < FALSE_ALARM


def test_sources_are_independent_of_each_other():
    """Made anew, nothing comes back. False alarm 1e-6; two sources of one seed are seen."""
    rows = [flat(steps(NoiseSource(), count=1)) for _ in range(4)]
    assert smallest(correlation_p(x, y) for i, x in enumerate(rows) for y in rows[:i]) > FALSE_ALARM
    one, two = (flat(steps(NoiseSource(NotPrivateSeed(5)), count=1)) for _ in range(2))
    assert correlation_p(one, two) < FALSE_ALARM
    np.testing.assert_array_equal(one, two)


def test_sampling_is_independent_of_noise(source):
    """Three ciphers with keys of their own; samples taken in between do not change the noise. False alarm 1e-6."""
    noise = flat(steps(source, count=1))
    samples = source.sampling.standard_normal(len(noise))
    assert correlation_p(noise, samples) > FALSE_ALARM
    assert correlation_p(noise, noise + samples) < FALSE_ALARM
    assert variance_p(samples, 1.0) > FALSE_ALARM

    quiet, busy = NoiseSource(NotPrivateSeed(3)), NoiseSource(NotPrivateSeed(3))
    Poisson(size=100, batch_size=10).draw(100, busy.sampling)
    np.testing.assert_array_equal(flat(steps(quiet, 1)), flat(steps(busy, 1)))


def test_symmetric_law():
    """Std s on the diagonal, s/sqrt(2) off it. False alarm 1e-6; 0.95 and 1.05 x are seen on each."""
    d, source = 50, NoiseSource()
    gram = torch.arange(d * d, dtype=torch.float64).view(d, d)
    gram = gram + gram.T
    for factor in (1.0, 0.95, 1.05):
        answers = [
            privatize(gram, unit=UNIT, noise=Gaussian(factor * SCALE), source=source, symmetric=True)
            for _ in range(800)
        ]
        assert all(torch.equal(a, a.T) for a in answers)
        upper = torch.triu_indices(d, d, 1)
        diagonal = variance_p(np.concatenate([(a - gram).diagonal().numpy() for a in answers]), STD)
        beside = variance_p(np.stack([(a - gram)[upper[0], upper[1]].numpy() for a in answers]), STD / np.sqrt(2))
        if factor == 1.0:
            assert smallest([diagonal, beside]) > FALSE_ALARM
        else:
            assert max(diagonal, beside) < FALSE_ALARM


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_symmetric_is_float64_unless_something_else_is_asked_for(dtype):
    gram = torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=torch.float32)
    answer = privatize(gram, unit=1.0, noise=Gaussian(1e-9), source=NoiseSource(), symmetric=True, dtype=dtype)
    assert answer.dtype == (dtype or torch.float64)
    torch.testing.assert_close(answer.float(), gram)


@pytest.mark.parametrize("kind", [DiscreteGaussian, DiscreteLaplace])
def test_discrete_noise_on_counts(kind):
    """Integers, with scale * unit. False alarm 1e-6 (chi2 over cells); 0.95 and 1.05 x are seen."""
    counts = {"a": torch.arange(60_000).view(200, 300), "b": torch.zeros(60_000, dtype=torch.int32)}
    cells = np.arange(-300, 301)
    s = 2 * SCALE
    weight = np.exp(-(cells**2) / (2 * s * s)) if kind is DiscreteGaussian else np.exp(-np.abs(cells) / s)
    for factor, accepted in ((1.0, True), (0.95, False), (1.05, False)):
        answer = privatize(counts, unit=2, noise=kind(factor * SCALE), source=NoiseSource())
        assert all(a.dtype == torch.int64 for a in answer.values())
        drawn = np.concatenate([(answer[n] - counts[n]).numpy().ravel() for n in counts])
        p = counts_p(np.bincount(drawn + 300, minlength=601), weight / weight.sum())
        assert (p > FALSE_ALARM) is accepted


def test_noise_is_never_less_than_asked():
    """scale * unit is rounded up, where the nearest float lies below the product."""
    for scale, unit in [(0.1, 0.1), (1.3, 0.7), (2.0, 1.0), (1 / 3, 3.0), (0.7, 1e-5)]:
        product = module._product_rounded_up(scale, unit)
        assert product >= Fraction(scale) * Fraction(unit)
        assert product == pytest.approx(scale * unit, rel=1e-15)
    assert module._product_rounded_up(2.0, 1.5) == 3.0


# ---- the grid and the forms of an answer


def test_answers_lie_on_a_grid_that_does_not_depend_on_the_data():
    source = NoiseSource()
    grid = 2.0 ** (np.floor(np.log2(STD)) - 20)
    assert STD / 2**21 < grid <= STD / 2**20
    for value in (0.0, 1.0, 1 / 3, 1e-12, 12345.678, -4.5e9, 1e200):
        answer = privatize(
            torch.full((5000,), value, dtype=torch.float64), unit=UNIT, noise=Gaussian(SCALE), source=source
        )
        assert (answer / grid == (answer / grid).round()).all()
        if abs(value) < 5:  # the low bits, through which float noise tells 0 from 1 with certainty, are gone
            assert ((answer - 1) + 1 == answer).all()
    raw = np.random.default_rng().normal(0, STD, 5000)
    assert not ((raw - 1) + 1 == raw).all()


def test_rounding_to_the_grid_is_inert():
    """A fixed law of noise: the value is the rounded sum, no more than half a grid step away."""
    values = torch.randn(1000, dtype=torch.float64)
    answer = privatize(values, unit=UNIT, noise=Gaussian(SCALE), source=NoiseSource(NotPrivateSeed(1)))
    (normals,) = NoiseSource(NotPrivateSeed(1))._normals.take(1000, pinned=False)
    assert (answer - (values + STD * normals)).abs().max() <= STD / 2**21


def test_noise_that_stays_inside_is_not_rounded_and_has_the_same_law():
    zeros = torch.zeros(40_000, dtype=torch.float64)
    inside = privatize(zeros, unit=UNIT, noise=Gaussian(SCALE), source=NoiseSource(NotPrivateSeed(1)), inside=True)
    (normals,) = NoiseSource(NotPrivateSeed(1))._normals.take(40_000, pinned=False)
    assert (inside - STD * normals).abs().max() <= STD * 2.0**-49
    for bits in (20, 30, 40):  # no grid as coarse as these: the distances to its points are uniform
        steps_off = (inside / STD * 2.0**bits).numpy() % 1
        assert stats.kstest(steps_off, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forms(dtype):
    source, tiny = NoiseSource(), Gaussian(1e-9)
    values = torch.arange(6, dtype=dtype).view(2, 3)
    before = values.clone()
    answer = privatize(values, unit=1.0, noise=tiny, source=source)
    assert answer.dtype == torch.float64  # how wide the sum is may tell how many took part
    assert torch.equal(values, before)
    torch.testing.assert_close(answer, values.double())
    mapping = privatize(
        {"a": values, "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0, requires_grad=True)},
        unit=1.0,
        noise=tiny,
        source=source,
        dtype=torch.float32,
    )
    assert {n: tuple(t.shape) for n, t in mapping.items()} == {"a": (2, 3), "empty": (0, 4), "scalar": ()}
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in mapping.values())
    torch.testing.assert_close(mapping["a"], values.float())
    array = np.arange(4)
    array.flags.writeable = False
    np.testing.assert_allclose(privatize(array, unit=1.0, noise=tiny, source=source), array, atol=1e-7)
    assert isinstance(privatize(array, unit=1, noise=DiscreteLaplace(1.0), source=source), np.ndarray)
    assert privatize({}, unit=1.0, noise=tiny, source=source) == {}


def test_large_tensors_are_cut_and_small_ones_packed(monkeypatch):
    """Chunks are inert: the same seeded answer, bit by bit."""
    values = {"a": torch.rand(3, 5), "b": torch.rand(100), "c": torch.rand(7), "d": torch.rand(1), "e": torch.rand(31)}

    def ask():
        return privatize(values, unit=UNIT, noise=Gaussian(SCALE), source=NoiseSource(NotPrivateSeed(2)))

    whole = ask()
    monkeypatch.setattr(module, "_CHUNK_HOST", 16)
    for name, answer in ask().items():
        assert torch.equal(answer, whole[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inside", [False, True])
def test_one_short_tensor_gets_the_same_noise_as_its_pieces(dtype, inside):
    """Its own path is inert: the same seeded answer, bit by bit, of a vector whose entries do not lie side by side."""
    whole = torch.linspace(-3, 3, 240, dtype=dtype).view(2, 120).T[::2]
    whole[3, 1] = torch.nan
    before = whole.clone()
    pieces = {str(i): row for i, row in enumerate(whole)}
    a, b = (
        privatize(
            e,
            unit=UNIT,
            noise=Gaussian(SCALE),
            source=NoiseSource(NotPrivateSeed(5)),
            inside=inside,
            dtype=torch.float32,
        )
        for e in (whole, pieces)
    )
    assert torch.equal(a, torch.stack(list(b.values())))
    assert a.shape == whole.shape
    assert torch.equal(whole.nan_to_num(9.0), before.nan_to_num(9.0))


def test_non_finite_entries_count_as_zero():
    """They never raise and never leave; other entries are untouched."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.7e308, 5.0], dtype=torch.float64)
    answer = privatize(bad, unit=1.0, noise=Gaussian(1e-6), source=NoiseSource())
    torch.testing.assert_close(answer, torch.tensor([0, 0, 0, 0, 5.0], dtype=torch.float64), atol=1e-4, rtol=0)


# ---- nobody can repeat it


def test_private_says_whether_it_can_be_repeated():
    assert NoiseSource().private
    assert not NoiseSource(NotPrivateSeed(0)).private
    with pytest.raises(InvalidArgument, match="seed=0 must be None"):
        NoiseSource(0)
    with pytest.raises(InvalidArgument, match="seed=-1"):
        NotPrivateSeed(-1)


def test_ciphers_are_the_published_ones_and_take_the_key_as_it_is():
    """FIPS-197 appendix C.1, and the first ChaCha20 block of the zero key (RFC 8439, A.1)."""
    key = int.from_bytes(range(16), "little")
    counter = int.from_bytes(bytes.fromhex("00112233445566778899aabbccddeeff"), "little")
    aes = AESCounter(key=key, counter=counter)
    for hardware in {aes.use_aesni, False}:
        aes = AESCounter(key=key, counter=counter)
        aes.use_aesni = hardware
        assert aes.random_raw(2).tobytes().hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"
    chacha = ChaCha(key=0, rounds=20).random_raw(4).tobytes().hex()
    assert chacha == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"


@pytest.mark.parametrize(("has_aes", "bits"), [(True, 128), (False, 256)])
def test_keys_come_whole_from_the_operating_system(monkeypatch, has_aes, bits):
    asked = []

    def randbits(count):
        asked.append(count)
        return (len(asked) << (bits - 8)) + 5  # high bits matter too

    monkeypatch.setattr(module, "_HAS_AES", has_aes)
    monkeypatch.setattr(module.secrets, "randbits", randbits)
    source = NoiseSource()
    assert asked == [bits] * 4  # the first key of sampling is replaced at once
    cipher = AESCounter if has_aes else ChaCha
    for number, generator in ((2, source._normals._rng), (3, source._integers), (4, source.sampling)):
        expected = np.random.Generator(cipher(key=(number << (bits - 8)) + 5)).random(8)
        np.testing.assert_array_equal(generator.random(8), expected)


@pytest.mark.parametrize("save", [pickle.dumps, copy.copy, copy.deepcopy, lambda s: s.__getstate__()])
def test_state_cannot_be_saved(save):
    source = NoiseSource()
    for secret in (source, source.sampling, source._integers):
        with pytest.raises(SfumatoError, match="must never be repeated"):
            save(secret)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seed", [None, NotPrivateSeed(7)])
def test_forked_children_get_their_own_keys(seed):
    """Also while noise is being drawn ahead, and for a generator that was taken from the source before the fork."""
    source = NoiseSource(seed)
    for _ in range(2):
        privatize(torch.zeros(20_000), unit=1.0, noise=Gaussian(1.0), source=source)
    assert source._normals._thread is not None
    held = source.sampling

    def draw():
        noise = privatize(np.zeros(50), unit=1.0, noise=Gaussian(1.0), source=source)
        counts = privatize(np.zeros(50, dtype=np.int64), unit=1, noise=DiscreteGaussian(1e9), source=source)
        return np.concatenate([noise, counts, held.random(50)])

    seen = []
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child must not return into the test runner
            try:
                os.write(write, draw().tobytes())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            seen.append(np.frombuffer(pipe.read()))
        os.waitpid(pid, 0)
    seen.append(draw())
    assert all(len(s) == 150 for s in seen)
    for i, one in enumerate(seen):
        # Noise lies on a grid: two in 150 may be equal by chance, three are 5e-11. A key that is shared repeats 50.
        assert all(np.isin(one, other).sum() < 3 for other in seen[:i])


def test_a_thread_that_outlives_its_source_ends_before_the_process():
    """Else it is stopped inside C++, which now and then aborts the process."""
    script = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "sfumato-noise"]))
import torch
from sfumato.privacy.mechanisms import Gaussian
from sfumato.privacy.noise import NoiseSource, privatize
source = NoiseSource()
for _ in range(2):
    privatize(torch.zeros(2**23), unit=1.0, noise=Gaussian(1.0), source=source)
del source
assert any(t.name == "sfumato-noise" for t in threading.enumerate())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_no_number_is_handed_out_twice():
    """Answers of changing sizes, drawn ahead or not. Equal by chance: fewer than 4 but for 1e-12."""
    source = NoiseSource()
    sizes = [20_000] * 4 + [17_000, 30_000, 30_000, 100, 30_000, 20_000, 20_000, 20_000]
    noise = [
        privatize(np.zeros(n), unit=2.0**30, noise=Gaussian(2.0**30), source=source, dtype=torch.float64) for n in sizes
    ]
    drawn = np.concatenate(noise)
    # the grid of 2^-20 leaves chance equalities between single entries: look at entries with their neighbour
    neighbours = drawn[:-1] + 1j * drawn[1:]
    assert len(neighbours) - len(np.unique(neighbours)) < 4
    twice = np.concatenate([neighbours, neighbours[:100]])
    assert len(twice) - len(np.unique(twice)) >= 100


# ---- drawing ahead


def test_drawing_ahead_changes_nothing():
    """Bit by bit with a seed, over changing sizes and with counts in between; so the law is the same."""
    sizes = [30_000] * 4 + [100, 70_000, 20_000, 20_000, 20_000, 30_000, 30_000, 5]
    on, off = (NoiseSource(NotPrivateSeed(11), draw_ahead=ahead) for ahead in (True, False))
    ran = 0
    for n in sizes:
        answers = []
        for source in (on, off):
            one = privatize(torch.zeros(n), unit=1.0, noise=Gaussian(1.0), source=source)
            counts = privatize(torch.zeros(3, dtype=torch.int64), unit=1, noise=DiscreteGaussian(9.0), source=source)
            answers.append((one, counts))
        ran += on._normals._thread is not None
        assert off._normals._thread is None
        assert all(map(torch.equal, *answers))
    assert ran >= 5


def test_the_row_of_normals_is_one_stream(monkeypatch):
    """However it is cut and drawn ahead, what is taken is the generator's own row, each number once, in order."""
    monkeypatch.setattr(row, "_BLOCK", 40)
    rng = np.random.default_rng(secrets.randbits(64))
    normals = row.Normals(np.random.default_rng(4))
    taken = []
    for _ in range(300):
        if rng.random() < 0.5:
            normals.draw_ahead(int(rng.integers(0, 150)), pinned=False)
        taken += [part.numpy().copy() for part in normals.take(int(rng.integers(0, 60)), pinned=False)]
    taken = np.concatenate(taken)
    np.testing.assert_array_equal(taken, np.random.default_rng(4).standard_normal(len(taken)))


def test_a_block_that_was_not_filled_is_never_handed_out(monkeypatch):
    class Slow:
        """Fills one block, then waits until it is told to close."""

        def __init__(self):
            self.started, self.go = threading.Event(), threading.Event()

        def standard_normal(self, out):
            self.started.set()
            assert self.go.wait(10)
            out[:] = 1.0

    monkeypatch.setattr(row, "_BLOCK", 4)
    slow = Slow()
    normals = row.Normals(slow)
    normals.draw_ahead(12, pinned=False)
    thread = normals._thread
    assert slow.started.wait(10)
    closing = threading.Thread(target=normals.close)
    closing.start()
    while not normals._stop:
        pass
    slow.go.set()
    closing.join(10)
    assert not thread.is_alive()
    assert not normals._drawn
    assert torch.cat(normals.take(5, pinned=False)).tolist() == [1.0] * 5


def test_answers_from_several_threads_share_no_noise():
    source, answers = NoiseSource(), []

    def work():
        for _ in range(5):
            answers.append(privatize(np.zeros(20_000), unit=1.0, noise=Gaussian(1.0), source=source))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20
    pairs = ((x, y) for i, x in enumerate(answers) for y in answers[:i])
    assert smallest(correlation_p(x, y) for x, y in pairs) > FALSE_ALARM
    assert variance_p(np.concatenate(answers), 1.0) > FALSE_ALARM


def test_an_answer_that_fails_leaves_the_source_usable():
    source = NoiseSource()
    with pytest.raises(RuntimeError), source._answering(3, torch.device("cpu")):
        raise RuntimeError
    assert len(privatize(np.zeros(3), unit=1.0, noise=Gaussian(1.0), source=source)) == 3


def test_closed_and_forgotten_sources_leave_no_thread():
    source = NoiseSource()
    for _ in range(2):
        privatize(torch.zeros(50_000), unit=1.0, noise=Gaussian(1.0), source=source)
    thread = source._normals._thread
    source.close()
    assert not thread.is_alive()
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None


def test_a_process_ends_cleanly_while_noise_is_drawn():
    code = (
        "import torch\n"
        "from sfumato.privacy.noise import NoiseSource, privatize\n"
        "from sfumato.privacy.mechanisms import Gaussian\n"
        "source = NoiseSource()\n"
        "for _ in range(2): privatize(torch.zeros(4_000_000), unit=1., noise=Gaussian(1.), source=source)\n"
        "assert source._normals._thread.is_alive()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the device's own generator


@pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter; on a GPU the law is tested below")
def test_device_noise_has_a_new_key_for_every_answer_and_no_counter_twice():
    with kernels.using(kernels.Use.INTERPRETER):
        source = NoiseSource(device_generator=True)
        answers = [privatize(torch.zeros(40), unit=1.0, noise=Gaussian(1.0), source=source) for _ in range(2)]
        key = np.arange(8, dtype=np.uint32)
        draw = module._device_normals(torch.device("cpu"), key)
        parts = torch.cat([draw(8), draw(5), draw(16)])
        whole = module._device_normals(torch.device("cpu"), key)(32)
    assert not torch.equal(answers[0], answers[1])
    assert len(set(parts.tolist())) == len(parts)
    # Eight to a counter: what a counter has left is not used later.
    assert torch.equal(parts, torch.cat([whole[:13], whole[16:]]))


def test_device_generator_is_not_used_on_the_host():
    """Where there is no GPU the host's cipher draws, whatever was asked for."""
    values = torch.zeros(100)
    one, two = (NoiseSource(NotPrivateSeed(6), device_generator=choice) for choice in (True, False))
    a, b = (privatize(values, unit=1.0, noise=Gaussian(1.0), source=s) for s in (one, two))
    assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("device_generator", [False, True])
def test_gaussian_law_on_cuda(device_generator):
    """False alarm 1e-6; 0.95 and 1.05 x the std are seen."""
    source = NoiseSource(device_generator=device_generator)
    values = {name: t.cuda() for name, t in exact().items()}
    for factor in (1.0, 0.95, 1.05):
        parts = []
        for _ in range(4):
            answer = privatize(values, unit=UNIT, noise=Gaussian(factor * SCALE), source=source, dtype=torch.float64)
            assert all(a.is_cuda for a in answer.values())
            parts += [(answer[n] - values[n]).cpu().numpy() for n in values]
        if factor == 1.0:
            pairs = [(x, y) for i, x in enumerate(parts) for y in parts[:i]]
            assert smallest([variance_p(x, STD) for x in parts] + [correlation_p(*p) for p in pairs]) > FALSE_ALARM
        else:
            assert max(variance_p(x, STD) for x in parts) < FALSE_ALARM
    counts = torch.zeros(1000, dtype=torch.int64, device="cuda")
    assert privatize(counts, unit=1, noise=DiscreteLaplace(3.0), source=source).is_cuda
    gram = privatize(torch.zeros(9, 9, device="cuda"), unit=1, noise=Gaussian(3.0), source=source, symmetric=True)
    assert torch.equal(gram, gram.T)


@pytest.mark.gpu
def test_cuda_transfers_what_the_host_drew():
    """Also from pinned memory that is written again; to one step of the grid, since a device may fuse the addition."""
    host, device = NoiseSource(NotPrivateSeed(8)), NoiseSource(NotPrivateSeed(8))
    for n in [3_000_001] * 4 + [100, 5_000_000, 5_000_000, 5_000_000]:
        values = torch.ones(n, dtype=torch.float64)
        a = privatize(values, unit=1.0, noise=Gaussian(1.0), source=host)
        b = privatize(values.cuda(), unit=1.0, noise=Gaussian(1.0), source=device).cpu()
        assert (a - b).abs().max() <= 2.0**-20
        assert (a != b).sum() < 100


# ---- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": 0.0}, "unit=0.0 must be positive and finite"),
        ({"unit": float("inf")}, "unit=inf must be positive"),
        ({"unit": float("nan")}, "unit=nan must be positive"),
        ({"unit": 1e300}, "beyond float64"),
        ({"noise": 1.0}, "noise=1.0 must be Gaussian"),
        ({"noise": Noise(1.0)}, "must be Gaussian, DiscreteGaussian or DiscreteLaplace"),
        ({"source": np.random.default_rng(0)}, "must be a NoiseSource"),
        ({"noise": DiscreteGaussian(1.0)}, "count in int64"),
        ({"noise": DiscreteGaussian(1.0), "symmetric": True}, "neither dtype nor symmetric"),
        ({"symmetric": True}, "needs a square matrix"),
        ({"exact": [1.0]}, "exact=list must be a tensor"),
        ({"exact": {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}}, "move all of it to one device"),
    ],
)
def test_errors(change, message):
    arguments = {"exact": torch.zeros(2, 3), "unit": 1.0, "noise": Gaussian(1.0), "source": NoiseSource()} | change
    with pytest.raises(InvalidArgument, match=message):
        privatize(arguments.pop("exact"), **arguments)


def test_the_statistics_themselves_have_the_stated_size():
    """P-values under the right law are uniform: fewer than 1e-2 n of them below 1e-2, up to 1e-6 chance."""
    rng = np.random.default_rng(secrets.randbits(64))
    p = np.array([variance_p(rng.standard_normal(2000), 1.0) for _ in range(2000)])
    assert stats.kstest(p, "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(p**2, "uniform").pvalue < FALSE_ALARM


def test_callers_that_share_normals_get_each_number_once(monkeypatch):
    """Also while they are closed, as the end of the process does: what is drawn ahead is handed out once or dropped."""
    monkeypatch.setattr(row, "_BLOCK", 16)
    normals, taken = row.Normals(np.random.default_rng(5)), [[] for _ in range(3)]

    def work(mine):
        for _ in range(200):
            normals.draw_ahead(48, pinned=False)
            mine += [part.numpy().copy() for part in normals.take(20, pinned=False)]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        normals.close()
    drawn = np.concatenate([part for mine in taken for part in mine])
    assert len(drawn) == 3 * 200 * 20
    assert len(np.unique(drawn)) == len(drawn)
