"""The process that runs one method on one workload, one turn at a time, as its parent orders.

A process of its own keeps the memory of one method from hiding that of another. CPU time is user plus system time of
all threads of the process, so that page faults and waiting threads are paid for by whoever causes them.
"""

import ctypes
import gc
import re
import resource
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import METHODS, vmap_whole
from benchmarks.workloads import WORKLOADS, Workload

CLIP = 1.0
TOLERANCE = 1e-3  # of the sum, in float32: two correct methods differ by rounding alone


def serve(parent: Connection, name: str, method: str, batch_size: int | None, threads: int) -> None:
    """Answer each message of the parent by one dictionary; any failure is answered as {"error": one sentence}."""
    warnings.simplefilter("ignore")  # the peers' own, about hooks and missing batching rules
    torch.set_num_threads(threads)
    try:
        workload = WORKLOADS[name]
        if method != "plain":
            check(workload, method)
        module, batch = workload.build(batch_size)
        step = METHODS[method](module, workload.loss, CLIP, workload.chunk)
        # The small step pays for what is loaded once (code, threads, tables), which is no part of a step's memory.
        step(tuple(t[:2] for t in batch))
        limit_memory()
        parent.send({"ready": True})
        while (turn := parent.recv()) is not None:
            parent.send(measure_memory(step, batch) if turn == "memory" else measure_time(step, batch, turn))
    except EOFError:
        pass  # the parent has gone
    except Exception as error:
        parent.send({"error": explain(error)})


def check(workload: Workload, method: str) -> None:
    """Compare with vmap on four examples, once where every gradient is clipped and once where none is."""
    for clip in (CLIP / 10, 1e4 * CLIP):
        module, batch = workload.build(4)
        expected = vmap_whole(module, workload.loss, clip, 4)(batch)
        found = METHODS[method](module, workload.loss, clip, 2)(batch)  # two chunks, so that chunking is checked too
        error = relative_error(found, expected)
        if not error < TOLERANCE:
            raise ValueError(f"wrong: the clipped sum differs from vmap's by {error:.2g} of its norm")


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if found.keys() != expected.keys():
        return float("inf")
    difference = sum((found[name].double() - g.double()).square().sum() for name, g in expected.items())
    return float((difference / sum(g.double().square().sum() for g in expected.values())).sqrt())


def measure_time(step: Callable[..., Any], batch: tuple[Tensor, ...], repeats: int) -> dict[str, float]:
    """Mean seconds of a step over one turn; more than one step where a step is too short for caches to warm."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        step(batch)
    return {"cpu": (time.process_time() - cpu) / repeats, "wall": (time.perf_counter() - wall) / repeats}


def measure_memory(step: Callable[..., Any], batch: tuple[Tensor, ...]) -> dict[str, float]:
    """Growth of the peak resident memory, in MiB, over two steps, from where model and data are loaded.

    Free memory is first given back to the system (`malloc_trim`) and the kernel's high-water mark is reset, so that
    nothing freed earlier can serve the step unseen. The second step counts too: it shows what the allocator keeps. A
    step that takes longer than five seconds is run once.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS, see proc(5)
    before = status_kib("VmRSS")
    seconds = measure_time(step, batch, 1)["wall"]
    if seconds < 5:
        seconds = measure_time(step, batch, 1)["wall"]
    return {"memory": (status_kib("VmHWM") - before) / 1024, "seconds": seconds}


def limit_memory() -> None:
    """Let a step that asks for more than the machine has fail with a message, before the kernel kills somebody."""
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    limit = 1024 * (status_kib("VmSize") + int(0.9 * available))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def status_kib(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if "can't allocate memory" in str(error) or isinstance(error, MemoryError):
        return "out of memory"
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return (first if first.startswith("wrong") else f"{type(error).__name__}: {first}")[:160]
