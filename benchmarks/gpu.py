"""Images and sequences per second of private and plain training on one GPU: Sfumato, its peers, and the ceiling.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json      # everything, under six minutes on an H200
    python -m benchmarks.gpu --workloads gpt2 --methods sfumato,opacus-ghost --json
    python -m benchmarks.gpu --tiny --device cpu                    # does the harness work?
    python -m benchmarks.gpu --table                                # Markdown from the stored results

Workloads: "wrn-16-4" (GroupNorm, weight standardisation, 32x32 images, 16 views per example, 4096 examples per step),
whose ceiling is ordinary bfloat16 training with the Triton GroupNorm; and "gpt2" (124M parameters, 256 tokens), whose
ceiling is the faster of eager and compiled bfloat16 training of Hugging Face's module. Peers cannot run that module:
"untied" rows are the network that they run. A step is whole: gradients, noise and the SGD update; augmentation is left
out. Of a method's variants (examples per pass, memory layout, a peer's network) the fastest in a short trial counts.
Then the method's step and one of the reference are timed in turns, and a ratio is the median over these rounds.

A method that fails becomes a row with an "error". Rows are written after every method; what torch.compile takes long
over comes last, and after --limit seconds the rest is left out: --resume measures it another time.
"""

import argparse
import gc
import json
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from benchmarks import gpt2
from benchmarks import gpu_peers as peers
from benchmarks.gpu_peers import RATE, Batch, Job, Setting, installed

RESULTS = Path(__file__).parent / "results" / "gpu.json"
STEP_S = 2.0  # a timed step of a slow method covers fewer examples, so as to last no longer
METHOD_S, LATE_S = 80.0, 100.0  # longest time for one method, and for one that torch.compile takes long over
LIMIT_S = 330.0  # for all
CLOSE_ROUNDS = 6  # at least, where a step is compared with one that hardly differs

NO_TIME, TOO_LONG = "not measured: no time was left", "no result within"

Row = dict[str, Any]


class NotMeasured(Exception):
    """The message is the reason, in one short sentence."""


class BrokenDevice(Exception):
    """After some errors CUDA answers nothing more in this process."""


# ------------------------------------------------------------------------------------------------ plain training


class FusableGroupNorm(nn.GroupNorm):
    """Written out, so that a compiler makes one kernel of it and the activation; statistics in float32."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        groups = x.float().view(n, self.num_groups, c // self.num_groups, h, w)
        variance, mean = torch.var_mean(groups, dim=(2, 3, 4), keepdim=True, correction=0)
        normal = ((groups - mean) * torch.rsqrt(variance + self.eps)).view(n, c, h, w)
        return (normal * self.weight.view(1, c, 1, 1) + self.bias.view(1, c, 1, 1)).to(x.dtype)


def plain_images(
    setting: Setting,
    *,
    micro: int,
    channels_last: bool = False,
    autocast: bool = False,
    tf32: bool = True,
    compiled: bool = False,
) -> Job:
    module = peers.wide_resnet(setting, standardised=True)
    for parent in list(module.modules()) if compiled else []:
        for name, child in list(parent.named_children()):
            if type(child) is nn.GroupNorm:
                setattr(parent, name, FusableGroupNorm(child.num_groups, child.num_channels).to(setting.device))
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    return _plain_job(
        setting,
        module,
        _laid_out(setting.images(micro), channels_last),
        label_loss,
        autocast=autocast,
        tf32=tf32,
        compiled=compiled,
        note="channels_last" if channels_last else "",
    )


def ceiling_images(setting: Setting, *, micro: int) -> Job:
    module = peers.our_wide_resnet(setting)  # which makes its images channels-last
    note = "bf16, channels_last, Triton GroupNorm+ReLU, cuDNN's algorithms tried out"
    return _plain_job(setting, module, _laid_out(setting.images(micro), True), label_loss, autocast=True, note=note)


def plain_sequences(setting: Setting, *, micro: int, untied: bool = False, compiled: bool = False) -> Job:
    return _plain_job(
        setting,
        _gpt2(setting, untied=untied),
        setting.sequences(micro),
        gpt2.token_loss,
        autocast=True,
        compiled=compiled,
        note=gpt2.UNTIED if untied else "",
    )


def _gpt2(setting: Setting, *, untied: bool) -> nn.Module:
    build = gpt2.GPT2 if untied else gpt2.hugging_face
    return build(**setting.sizes).to(setting.device)


def label_loss(module: Callable[..., Tensor], batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(module(x), y, reduction="none")


def _laid_out(batch: Batch, channels_last: bool) -> Batch:
    x, y = batch
    return (x.contiguous(memory_format=torch.channels_last), y) if channels_last else batch


def _plain_job(
    setting: Setting,
    module: nn.Module,
    data: Batch,
    loss: Callable[[Callable[..., Any], Batch], Tensor],
    *,
    autocast: bool,
    tf32: bool = True,
    compiled: bool = False,
    note: str = "",
) -> Job:
    """Always with cuDNN's algorithms tried out, as Sfumato's engine does."""

    def mean_loss(*batch: Tensor) -> Tensor:
        with setting.autocast(autocast):
            return loss(module, batch).mean()

    micro = len(data[0])
    # On a CPU only the harness is tried, and a compiler may be missing.
    backend = "inductor" if setting.device == "cuda" else "aot_eager"
    forward = torch.compile(mean_loss, dynamic=False, backend=backend) if compiled else mean_loss
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step(n: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(n // micro):
            (forward(*data) * (micro / n)).backward()
        optimizer.step()

    return Job(step=step, micro=micro, note=note, tf32=tf32, autotune=True)


# ------------------------------------------------------------------------------------------------ Sfumato


def sfumato_images(
    setting: Setting,
    *,
    micro: int | None,
    examples: int,
    kernels: bool = True,
    public: bool = False,
    origin: bool = False,
    multiplicity: bool = False,
) -> Job:
    from sfumato import Objective, cross_entropy

    module = peers.our_wide_resnet(setting)
    objective = Objective(module, cross_entropy, autocast=torch.bfloat16)
    return _private_job(
        setting,
        objective,
        _laid_out(setting.images(examples), True),
        micro=micro,
        views=setting.views,
        kernels=kernels,
        public=_laid_out(setting.images(setting.public), True) if public or origin else None,
        origin_given=origin,
        multiplicity=multiplicity,
        device_noise=False,
    )


def sfumato_sequences(
    setting: Setting,
    *,
    micro: int | None,
    examples: int,
    untied: bool = False,
    public: bool = False,
    device_noise: bool = True,
) -> Job:
    from sfumato import Objective

    return _private_job(
        setting,
        Objective(_gpt2(setting, untied=untied), gpt2.token_loss, autocast=torch.bfloat16),
        setting.sequences(examples),
        micro=micro,
        note=gpt2.UNTIED if untied else "",
        public=setting.sequences(min(setting.public, 16)) if public else None,
        device_noise=device_noise,
    )


def _private_job(
    setting: Setting,
    objective: Any,
    data: Batch,
    *,
    micro: int | None,
    views: int = 1,
    kernels: bool = True,
    public: Batch | None = None,
    origin_given: bool = False,
    multiplicity: bool = False,
    device_noise: bool,
    note: str = "",
) -> Job:
    """clipped_sum, noise and SGD. The gradient of `public` rows is the origin, computed in every step unless given.

    A job with a given origin has beside it the same step without one.
    """
    from sfumato import Clip, Gradient, Public
    from sfumato.gradients import Performance, clipped_sum
    from sfumato.privacy.mechanisms import Gaussian
    from sfumato.privacy.noise import NoiseSource, privatize

    module, initial = objective.module, objective.parameters()
    performance = Performance(micro_batch=micro) if kernels else Performance(micro_batch=micro, kernels=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    source = NoiseSource(device_generator=device_noise)
    door = None if public is None else Public(public, objective=objective)
    given = door.gradient(initial) if door is not None and origin_given else None
    offsets = None
    if multiplicity:  # what a step along a public gradient would be in size; making them is not timed
        offsets = [{n: 1e-3 * torch.randn_like(p) for n, p in initial.items()} for _ in range(views)]

    def step(n: int, *, around: bool = True) -> None:
        params = objective.parameters()
        origin = None
        if around and door is not None:
            origin = door.gradient(params) if given is None else given
        clip = Clip(1.0, origin=origin)
        batch = tuple(t[:n] for t in data)
        exact = clipped_sum(objective, params, batch, clip=clip, views=views, offsets=offsets, performance=performance)
        noisy = privatize(exact, unit=clip.norm, noise=Gaussian(1.0), source=source)
        answer = Gradient({name: (t / n).to(params[name].dtype) for name, t in noisy.items()})
        clip.restore(answer).write_to(module)
        optimizer.step()

    notes = [note, "" if kernels else "the engine in plain PyTorch, but for the GroupNorm kernel"]
    if public is not None:
        inside = "given" if origin_given else "computed in every step"
        notes.append(f"origin: the gradient of {len(public[0])} public rows, {inside}")
    notes.append(f"{views} parameter offsets, given" if multiplicity else "")
    notes.append("noise drawn on the GPU" if device_noise else "noise drawn by AES on the host")
    beside = partial(step, around=False) if given is not None else None
    return Job(step=step, micro=micro, views=views, note="; ".join(filter(None, notes)), beside=beside)


# ------------------------------------------------------------------------------------------------ what is measured


@dataclass(frozen=True, kw_only=True)
class Method:
    build: Callable[..., Job]
    variants: tuple[dict[str, Any], ...]  # arguments of build: the fastest counts
    fallbacks: tuple[dict[str, Any], ...] = ()  # tried if no variant works
    examples: int  # in a timed step
    whole_batch: bool = False  # build takes the number of examples
    late: bool = False  # after all that are not
    extra: bool = False  # only if asked for by name

    def jobs(self, setting: Setting, *, fallbacks: bool = False) -> Iterator[tuple[str, Callable[[], Job], int]]:
        """Each variant's name, its builder and the number of examples of a short trial."""
        whole = self.whole(setting)
        seen = []
        for variant in self.fallbacks if fallbacks else self.variants:
            arguments = dict(variant)
            name = ", ".join(f"{key}={'auto' if value is None else value}" for key, value in variant.items())
            if setting.tiny and arguments["micro"] is not None:
                arguments["micro"] = 2
            if self.whole_batch:
                arguments["examples"] = whole
            if arguments not in seen:
                seen.append(arguments)
                yield name, partial(self.build, setting, **arguments), arguments["micro"] or -(-whole // 4)

    def whole(self, setting: Setting) -> int:
        return 4 if setting.tiny else self.examples


def _micro(*sizes: int | None, **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"micro": size, **more} for size in sizes)


def _ours(build: Callable[..., Job], examples: int, *sizes: int | None, extra: bool = False, **more: Any) -> Method:
    variants = _micro(*sizes)
    return Method(build=partial(build, **more), variants=variants, examples=examples, whole_batch=True, extra=extra)


def _networks(*sizes: int) -> tuple[dict[str, Any], ...]:
    """For a peer: both networks, since it is not to be judged on the one it is slower on."""
    return (*_micro(*sizes, standardised=False), *_micro(*sizes, standardised=True))


# The order in which they run: the reference, ours, the peers, what takes long.
WRN: dict[str, Method] = {
    "ceiling": Method(build=ceiling_images, variants=_micro(4096, 8192, 16384, 32768), examples=65536),
    "sfumato": _ours(sfumato_images, 4096, 512, 1024, None),
    "sfumato-origin": _ours(sfumato_images, 4096, 512, 1024, origin=True),
    "sfumato-dope": _ours(sfumato_images, 4096, 512, 1024, public=True),
    "sfumato-multiplicity": _ours(sfumato_images, 4096, 1024, None, multiplicity=True),
    "sfumato-dope-multiplicity": _ours(sfumato_images, 4096, 1024, None, public=True, multiplicity=True),
    "sfumato-portable": _ours(sfumato_images, 4096, 256, None, kernels=False),
    "opacus": Method(
        build=peers.opacus_images, variants=_networks(64, 128, 256), fallbacks=_micro(64, autocast=False), examples=512
    ),
    "vmap": Method(build=peers.vmap_images, variants=_micro(32, 128, 256), examples=512),
    "vmap-plain-conv": Method(
        build=partial(peers.vmap_images, standardised=False), variants=_micro(32, 128, 256), examples=512, extra=True
    ),
    "opake": Method(build=peers.opake_images, variants=_networks(64, 128, 256), examples=512),
    "plain-bf16": Method(
        build=partial(plain_images, autocast=True),
        variants=(*_micro(4096), *_micro(4096, channels_last=True)),
        examples=16384,
    ),
    "plain-tf32": Method(
        build=plain_images, variants=(*_micro(4096), *_micro(4096, channels_last=True)), examples=8192
    ),
    "plain-fp32": Method(build=partial(plain_images, tf32=False), variants=_micro(4096), examples=4096),
    "plain-bf16-compiled": Method(
        build=partial(plain_images, autocast=True, compiled=True, channels_last=True),
        variants=_micro(8192),
        examples=32768,
        late=True,
    ),
}
GPT2: dict[str, Method] = {
    "plain-bf16": Method(build=plain_sequences, variants=_micro(32, 64, 128), examples=256),
    "sfumato": _ours(sfumato_sequences, 256, 32, 64, None),
    "sfumato-untied": _ours(sfumato_sequences, 256, 32, 64, None, untied=True),
    "plain-bf16-untied": Method(
        build=partial(plain_sequences, untied=True), variants=_micro(32, 64, 128), examples=256
    ),
    "opacus-ghost": Method(
        build=peers.opacus_ghost_sequences,
        variants=_micro(32, 64, 128, 256),
        fallbacks=_micro(64, autocast=False),
        examples=256,
    ),
    "sfumato-dope": _ours(sfumato_sequences, 256, 32, 64, public=True),
    "sfumato-host-noise": _ours(sfumato_sequences, 256, 64, device_noise=False, extra=True),
    "vmap": Method(build=peers.vmap_sequences, variants=_micro(4, 16), examples=32),
    "plain-bf16-compiled": Method(
        build=partial(plain_sequences, compiled=True), variants=_micro(64), examples=256, late=True
    ),
}
WORKLOADS = {"wrn-16-4": WRN, "gpt2": GPT2}
REFERENCES = {"wrn-16-4": "ceiling", "gpt2": "plain-bf16"}  # timed in turns with every other method
CEILINGS = ("plain-bf16", "plain-bf16-compiled")  # GPT-2's ceiling is the faster of these
UNTIED = ("plain-bf16-untied", "sfumato-untied", "opacus-ghost", "vmap")  # GPT-2 as the peers have it
ORDER = [
    "plain-fp32",
    "plain-tf32",
    "plain-bf16",
    "plain-bf16-untied",
    "plain-bf16-compiled",
    "ceiling",
    "vmap",
    "vmap-plain-conv",
    "opacus",
    "opacus-ghost",
    "opake",
    "sfumato-portable",
    "sfumato",
    "sfumato-untied",
    "sfumato-host-noise",
    "sfumato-origin",
    "sfumato-dope",
    "sfumato-multiplicity",
    "sfumato-dope-multiplicity",
]


@dataclass(frozen=True)
class Goal:
    """The method's speed is at least so many times that of another."""

    workload: str
    method: str
    least: float
    of: str


GOALS = [
    Goal("wrn-16-4", "sfumato", 0.85, "ceiling"),
    Goal("wrn-16-4", "sfumato", 6, "opacus"),
    Goal("wrn-16-4", "sfumato", 6, "vmap"),
    Goal("wrn-16-4", "sfumato-origin", 0.98, "sfumato"),
    Goal("wrn-16-4", "sfumato-multiplicity", 0.65, "ceiling"),
    Goal("wrn-16-4", "sfumato-portable", 0.30, "ceiling"),
    Goal("gpt2", "sfumato", 0.6, "plain-bf16"),
    Goal("gpt2", "sfumato-untied", 0.6, "plain-bf16-untied"),
    Goal("gpt2", "sfumato-untied", 2, "opacus-ghost"),
]


# ------------------------------------------------------------------------------------------------ measuring


def rate(job: Job, examples: int, device: str, step: Callable[[int], object] | None = None) -> float:
    """Images (or sequences) per second of one step: the job's, or the one beside it."""
    _synchronize(device)
    start = time.perf_counter()
    with job.numerics():
        (step or job.step)(examples)
    _synchronize(device)
    return examples * job.views / (time.perf_counter() - start)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _reserved(device: str) -> int:
    """What torch holds of the GPU's memory when nothing is cached; that of recordings (CUDA graphs) is in it."""
    _free(device)
    return torch.cuda.memory_reserved() if device == "cuda" else 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises where the block has not ended by then; only in the main thread, the only one that signals reach."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise NotMeasured(f"{TOO_LONG} {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Chosen:
    """A method's fastest variant, how many examples its timed steps take, and images per second of all that ran."""

    job: Job
    examples: int
    trials: dict[str, float | None]  # None: it fails


def choose(method: Method, setting: Setting) -> Chosen:
    """The fastest of the variants that work; the first one's failure is raised if none does."""
    best: Job | None = None
    fastest, failure = 0.0, None
    trials: dict[str, float | None] = {}
    for name, build, trial, fallback in [
        (*job, late) for late in (False, True) for job in method.jobs(setting, fallbacks=late)
    ]:
        if fallback and best is not None:
            break
        job = None
        try:
            job = build()
            rate(job, trial, setting.device)  # compiles, tunes and allocates
            speed = rate(job, trial, setting.device)
            if trial * job.views / speed < STEP_S / 4:
                speed = max(speed, rate(job, trial, setting.device))
        except NotMeasured:
            if best is None:
                raise
            break  # out of time: what was found so far will do
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {error}"
            speed = 0.0
        trials[name] = round(speed, 1) or None
        # Outside the block: until it ends, the error holds on to the memory of its frames.
        if speed == 0:
            _check_device(setting.device, failure or "")
        elif speed > fastest:
            best, fastest = job, speed
        del job
        _free(setting.device)
    if best is None:
        raise NotMeasured(failure or "no variant was given")
    whole, part = method.whole(setting), best.micro or 1
    if setting.tiny:
        return Chosen(best, whole, trials)
    affordable = int(fastest / best.views * STEP_S) // part * part
    return Chosen(best, max(part, min(whole, affordable)), trials)


def settle(job: Job, examples: int, device: str, step: Callable[[int], object] | None = None) -> None:
    """Warms up: until a step is no longer faster than those before; at least twice, since noise is drawn ahead."""
    best = rate(job, examples, device, step)
    if examples * job.views / best > STEP_S / 2:
        return
    for _ in range(5):
        speed = rate(job, examples, device, step)
        if speed < 1.01 * best:
            break
        best = speed


def measure(method: Method, setting: Setting, reference: Chosen | None, rounds: int) -> tuple[Chosen, Row]:
    """One method's figures; its ratio is to the reference in the same round.

    Its memory is what torch reserves in the warm-up, when it is alone and nothing is cached, beyond what was reserved
    before it was built.
    """
    device = setting.device
    before = _reserved(device)
    chosen = choose(method, setting)
    job, examples = chosen.job, chosen.examples
    _free(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    settle(job, examples, device)
    memory = torch.cuda.max_memory_reserved() - before if device == "cuda" else 0
    turns: list[tuple[str, Callable[[], float]]] = [("own", lambda: rate(job, examples, device))]
    if reference is not None:
        turns.append(("reference", lambda: rate(reference.job, reference.examples, device)))
    if job.beside is not None:
        rounds = max(rounds, CLOSE_ROUNDS)
        settle(job, examples, device, job.beside)
        turns.append(("beside", lambda: rate(job, examples, device, job.beside)))
    speeds: dict[str, list[float]] = {name: [] for name, _ in turns}
    for i in range(rounds):
        for name, turn in turns if i % 2 else reversed(turns):  # so that a GPU that warms up slows none of them more
            speeds[name].append(turn())
    row: Row = {"images_per_s": round(float(np.median(speeds["own"])), 1)}
    if reference is not None:
        row["ratio"] = _ratio(speeds["own"], speeds["reference"])
    if job.beside is not None:
        row["ratio_to_sfumato"] = _ratio(speeds["own"], speeds["beside"])
    row |= {"memory_gib": round(memory / 2**30, 2), "batch": examples, "micro_batch": job.micro or "auto"}
    row |= {"views": job.views, "rounds": rounds, "trials": chosen.trials}
    return chosen, row | ({"note": job.note} if job.note else {})


def _ratio(mine: list[float], others: list[float]) -> float:
    return round(float(np.median(np.divide(mine, others))), 4)


def attempt(work: Callable[[], Any], device: str, seconds: float) -> Any:
    """What `work` returns, or a row with its error."""
    try:
        with time_limit(seconds):
            return work()
    except Exception as error:
        text = str(error) if isinstance(error, NotMeasured) else f"{type(error).__name__}: {error}"
        text = " ".join(text.split())[:300]
    _check_device(device, text)
    _free(device)
    return {"error": text}


def _check_device(device: str, text: str) -> None:
    try:
        _synchronize(device)
    except Exception:
        raise BrokenDevice(text) from None


class Session:
    """The rows so far, kept on file, and who is still to be measured."""

    def __init__(self, setting: Setting, rounds: int, out: Path | None, limit: float, rows: list[Row]) -> None:
        self.setting, self.rounds, self.out = setting, rounds, out
        self.start = time.perf_counter()
        self.limit = limit
        self.rows = {(row["workload"], row["method"]): row for row in rows}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def add(self, workload: str, method: str, row: Row) -> None:
        if workload == "gpt2" and "images_per_s" in row:
            row = row | {"tokens_per_s": round(row["images_per_s"] * self.setting.sizes["length"], 1)}
        self.rows[workload, method] = {"workload": workload, "method": method, **row, **machine(self.setting.device)}
        if "error" in row:
            text = f"error: {row['error']}"
        else:
            text = f"{row['images_per_s']:,.0f}/s, ratio {row.get('ratio', 1.0):.3f}, {row['memory_gib']:.1f} GiB, "
            text += f"batch {row['batch']}, micro-batch {row['micro_batch']}"
        print(f"[{self.seconds:6.1f} s] {workload} {method}: {text}", file=sys.stderr, flush=True)
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.finished(), indent=1) + "\n")

    def finished(self) -> list[Row]:
        return finished(list(self.rows.values()))

    def run(self, workload: str, names: list[str], *, late: bool) -> None:
        """Measures those of the methods that have no row yet."""
        todo = [n for n in names if (workload, n) not in self.rows and WORKLOADS[workload][n].late == late]
        if not todo:
            return
        reference = self._reference(workload)
        for name in todo:
            if (workload, name) in self.rows:
                continue  # the reference, by now
            left = self.limit - self.seconds
            if left <= 0:
                self.add(workload, name, {"error": NO_TIME})
                continue
            method = WORKLOADS[workload][name]

            def work(method: Method = method) -> Row:
                return measure(method, self.setting, reference, self.rounds)[1]

            start = time.perf_counter()
            try:
                row = attempt(work, self.setting.device, min(LATE_S if method.late else METHOD_S, left))
            except BrokenDevice as error:
                self.add(workload, name, {"error": str(error)})
                raise
            self.add(workload, name, row | {"took_s": round(time.perf_counter() - start, 1)})
            _free(self.setting.device)

    def _reference(self, workload: str) -> Chosen | None:
        name = REFERENCES[workload]
        device = self.setting.device

        def work() -> tuple[Chosen, Row]:
            method = WORKLOADS[workload][name]
            if (workload, name) not in self.rows:
                chosen, row = measure(method, self.setting, None, self.rounds)
                return chosen, row | {"ratio": 1.0}
            chosen = choose(method, self.setting)
            settle(chosen.job, chosen.examples, device)
            return chosen, {}

        left = self.limit - self.seconds
        if left <= 0:
            return None
        start = time.perf_counter()
        try:
            answer = attempt(work, device, min(METHOD_S, left))
        except BrokenDevice as error:
            self.add(workload, name, {"error": str(error)})
            raise
        chosen, row = answer if isinstance(answer, tuple) else (None, answer)
        if (workload, name) not in self.rows:
            self.add(workload, name, row | {"took_s": round(time.perf_counter() - start, 1)})
        return chosen


def finished(rows: list[Row]) -> list[Row]:
    """In the order of the table; with GPT-2's ceiling, the faster of its plain rows, and its ratios to that.

    "ratio_to_plain_bf16" is to plain training of the same network; "ratio_to_reference" is what was measured in turns.
    """
    kept = [dict(row) for row in rows if (row["workload"], row["method"]) != ("gpt2", "ceiling")]
    ours = {row["method"]: row for row in kept if row["workload"] == "gpt2" and "ratio" in row}
    for row in ours.values():
        row.setdefault("ratio_to_reference", row.get("ratio_to_plain_bf16", row["ratio"]))
    for row in ours.values():
        plain = ours.get("plain-bf16-untied" if row["method"] in UNTIED else "plain-bf16")
        row.pop("ratio_to_plain_bf16", None)
        if plain is not None:
            row["ratio_to_plain_bf16"] = round(row["ratio_to_reference"] / plain["ratio_to_reference"], 4)
    candidates = [ours[name] for name in CEILINGS if name in ours]
    if candidates:
        best = max(candidates, key=lambda r: r["ratio_to_reference"])
        for row in ours.values():
            row["ratio"] = round(row["ratio_to_reference"] / best["ratio_to_reference"], 4)
        same = {key: value for key, value in best.items() if key not in ("took_s", "trials")}
        kept.append({**same, "method": "ceiling", "note": f"the faster plain training, {best['method']}"})
    return sorted(kept, key=lambda r: (list(WORKLOADS).index(r["workload"]), ORDER.index(r["method"])))


def machine(device: str) -> Row:
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda or "none",
        "opacus": installed("opacus"),
        "opake": installed("opake"),
    }


# ------------------------------------------------------------------------------------------------ tables


def reached(goal: Goal, rows: list[Row]) -> float | None:
    """How many times the other's speed it is."""
    return times(rows, goal.workload, goal.method, goal.of)


def times(rows: list[Row], workload: str, method: str, other: str) -> float | None:
    """One method's speed as a multiple of another's.

    As measured in turns with the other, or else by both ratios to the reference, which took turns with each.
    """
    mine, theirs = ({r["method"]: r for r in rows if r["workload"] == workload}.get(m, {}) for m in (method, other))
    if f"ratio_to_{other}" in mine:
        return float(mine[f"ratio_to_{other}"])
    return mine["ratio"] / theirs["ratio"] if "ratio" in mine and "ratio" in theirs else None


def console_table(rows: list[Row]) -> Table:
    table = Table(title="Training on one GPU")
    for column in ("workload", "method", "images/s", "of the ceiling", "GiB", "batch", "goal"):
        table.add_column(column, justify="left" if column in ("workload", "method", "goal") else "right")
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1]["workload"] != row["workload"]
        if "error" in row:
            table.add_row(row["workload"], row["method"], "[red]fails[/]", end_section=last)
            continue
        goals = []
        for goal in GOALS:
            if (goal.workload, goal.method) == (row["workload"], row["method"]):
                value = reached(goal, rows)
                colour = "yellow" if value is None else "green" if value >= goal.least else "red"
                shown = "?" if value is None else f"{value:.2f}"
                goals.append(f"[{colour}]{shown} >= {goal.least:g} x {goal.of}[/]")
        table.add_row(row["workload"], row["method"], *_cells(row), "\n".join(goals), end_section=last)
    return table


def _cells(row: Row) -> list[str]:
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "?"
    views = f" x {row['views']}" if row["views"] > 1 else ""
    batch = f"{row['batch']}{views} ({row['micro_batch']})"
    return [f"{row['images_per_s']:,.0f}", ratio, f"{row['memory_gib']:.1f}", batch]


TITLES = {
    "wrn-16-4": ("WRN-16-4, 32x32 images, 16 views per example", "images/s"),
    "gpt2": ("GPT-2, 124M parameters, 256 tokens", "sequences/s"),
}


FACTS = (("torch", "torch"), ("Triton", "triton"), ("CUDA", "cuda"))


def markdown(rows: list[Row]) -> str:
    """A table per workload, with the notes and the goals below."""
    lines: list[str] = []
    for workload, (title, unit) in TITLES.items():
        mine = [row for row in rows if row["workload"] == workload]
        if not mine:
            continue
        lines += [f"**{title}**", "", f"| method | {unit} | of the ceiling | memory, GiB |"]
        lines += ["| --- | --- | --- | --- |"]
        for row in mine:
            cells = ["-", "-", "-"] if "error" in row else _cells(row)[:3]
            lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
        lines += ["", *(f"- {note}" for note in _notes(mine)), *(f"- {text}" for text in _goals(workload, rows)), ""]
    if rows:
        m = rows[0]
        facts = [f"{name} {m[key]}" for name, key in FACTS if key in m]
        lines.append(f"Whole steps with noise and SGD, without augmentation. {', '.join([m['gpu'], *facts])}.")
    return "\n".join(lines)


def _notes(rows: list[Row]) -> list[str]:
    """Each remark once, with the methods that it is about; then what was not measured."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for part in filter(None, row.get("note", "").split("; ")):
            about.setdefault(part, []).append(row["method"])
    notes = [f"{', '.join(methods)}: {part}." for part, methods in about.items()]
    return notes + [f"{row['method']}: {row['error']}." for row in rows if "error" in row]


def _goals(workload: str, rows: list[Row]) -> Iterator[str]:
    known = [(goal, reached(goal, rows)) for goal in GOALS if goal.workload == workload]
    for title, wanted in (("Goals reached", True), ("**Goals missed**", False)):
        texts = [
            f"{goal.method} {value:.2f} x {goal.of} (at least {goal.least:g})"
            for goal, value in known
            if value is not None and (value >= goal.least) is wanted
        ]
        if texts:
            yield f"{title}: {', '.join(texts)}."


# ------------------------------------------------------------------------------------------------ command line


def selected(text: str | None, workload: str) -> list[str]:
    known = WORKLOADS[workload]
    if text is None:
        return [name for name, method in known.items() if not method.extra]
    return [name for name in known if name in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--methods", help="by default all but " + ", ".join(_extras()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, to try the harness")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which the rest is left out")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, after every method")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out that are not for want of time")
    parser.add_argument(
        "--table", nargs="?", type=Path, const=RESULTS, help="print a stored file as Markdown, and stop"
    )
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return

    workloads = options.workloads.split(",")
    every = {name for methods in WORKLOADS.values() for name in methods}
    unknown = [w for w in workloads if w not in WORKLOADS]
    unknown += [m for m in (options.methods or "").split(",") if m and m not in every]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Known: {', '.join([*WORKLOADS, *ORDER])}.")
    warnings.simplefilter("ignore")  # the peers', about secure mode and hooks
    stored = json.loads(options.out.read_text()) if options.resume and options.out and options.out.exists() else []
    stored = [row for row in stored if not row.get("error", "").startswith((NO_TIME, TOO_LONG))]
    gc.freeze()  # the many objects of all that was imported, which every collection would look at again
    setting = Setting(device=options.device, tiny=options.tiny)
    session = Session(setting, options.rounds, options.out, options.limit, stored)
    try:
        for late in (False, True):
            for workload in workloads:
                session.run(workload, selected(options.methods, workload), late=late)
                _free(setting.device)
    except BrokenDevice:
        if options.out is None or arguments is not None:
            print("The device answers nothing more in this process; with --out, a new one would measure the rest.")
        else:
            left = str(max(1.0, options.limit - session.seconds))
            command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--resume", "--limit", left]
            os.execv(sys.executable, command)

    rows = session.finished()
    took = [f"{r['workload']} {r['method']} {r['took_s']:.0f} s" for r in session.rows.values() if "took_s" in r]
    print(f"{session.seconds:.0f} s in all. {', '.join(took)}.", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(console_table(rows))
    for row in rows:
        if "error" in row:
            console.print(escape(f"{row['method']} on {row['workload']}: {row['error']}"))


def _extras() -> list[str]:
    return sorted({name for methods in WORKLOADS.values() for name, method in methods.items() if method.extra})


if __name__ == "__main__":
    main()
