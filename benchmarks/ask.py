"""What the door costs: a step of WRN-16-4 through `Private.ask`, beside the same step without ledger or secure noise.

Both steps gather the same rows and take the same clipped sum. One then asks: it checks the question, counts the answer
in a ledger file, keeps the public generators apart, and adds noise from a cipher, rounded to a grid. The other adds
`torch.randn` and counts nothing. They are timed in turns, so that a busy machine hurts both alike; the overhead is the
median of the ratios of neighbours. On the CPU the time that all threads used is compared as well: other programs do not
change it. The ledger is written ahead, in slabs, so the first answers are left out.

    python -m benchmarks.ask                                          # small batches, on the CPU
    python -m benchmarks.ask --device cuda --batch 4096 --views 16    # in bfloat16
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato import Budget, Clip, Gradient, GradientMean, Objective, Planned, Private, cross_entropy
from sfumato.gradients import Performance
from sfumato.models.wide_resnet import wide_resnet

NOISE, RATE, GOAL = 50.0, 0.1, 0.05
STORED = Path(__file__).parent / "results" / "ask.json"


class Steps:
    """One model and one batch, behind a door with a ledger in a file, and the two ways to take a step."""

    def __init__(self, options: argparse.Namespace, ledger: Path) -> None:
        device = torch.device(options.device)
        torch.manual_seed(0)
        module = wide_resnet(depth=16, width=options.width).to(device)
        autocast = torch.bfloat16 if device.type == "cuda" else None
        self.objective = Objective(module, cross_entropy, autocast=autocast)
        images = torch.rand(options.batch, 3, 32, 32, device=device)
        if device.type == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (options.batch,), device=device)
        self.private = Private(
            (images, labels),
            name="images",
            size=options.batch,
            objective=self.objective,
            ledger=ledger,
            budget=Budget(100.0, 0.5 / options.batch),
            device_noise=options.device_noise,
            performance=Performance(micro_batch=options.micro_batch),
        )
        steps = 2 * options.rounds + 4 * options.warmup
        self.private.plan(Planned(GradientMean, NOISE, self.private.everyone(), steps))
        self.optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        self.views, self.everyone, self.size = options.views, np.arange(options.batch), options.batch

    def _question(self) -> GradientMean:
        return GradientMean(self.objective.parameters(), Clip(1.0), views=self.views)

    def _update(self, answer: Gradient) -> None:
        answer.write_to(self.objective.module)
        self.optimizer.step()

    def asked(self) -> None:
        self._update(self.private.ask(self._question()))

    def plain(self) -> None:
        question = self._question()
        exact = question.exact(self.private._sample(self.everyone, largest=self.size))
        assert isinstance(exact, dict)
        std = NOISE * question.unit
        self._update(Gradient({n: (t + std * torch.randn_like(t)) / self.size for n, t in exact.items()}))


def timed(step: Callable[[], None], synchronise: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of all threads together."""
    synchronise()
    start = time.perf_counter(), time.process_time()
    step()
    synchronise()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    synchronise: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(options, Path(folder) / "ledger.db")
        for _ in range(options.warmup):
            steps.asked(), steps.plain()
        times: dict[str, list[tuple[float, float]]] = {"asked": [], "plain": []}
        for turn in range(options.rounds):
            pair: list[tuple[str, Callable[[], None]]] = [("asked", steps.asked), ("plain", steps.plain)]
            for name, step in pair if turn % 2 else reversed(pair):  # who goes first changes, since it may matter
                times[name].append(timed(step, synchronise))
        steps.private.close()
    clock, threads = (
        [asked[kind] / plain[kind] for asked, plain in zip(times["asked"], times["plain"], strict=True)]
        for kind in (0, 1)
    )
    (low, high), overhead = band(clock), statistics.median(clock) - 1
    low_cpu, high_cpu = band(threads)
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": f"WRN-16-{options.width}",
        "parameters": sum(p.numel() for p in steps.objective.parameters().values()),
        "precision": "bfloat16" if cuda else "float32",
        "batch": options.batch,
        "views": options.views,
        "noise": "ChaCha20 on the device" if options.device_noise else "cipher on the host",
        "rounds": options.rounds,
        "seconds_asked": statistics.median(t for t, _ in times["asked"]),
        "seconds_plain": statistics.median(t for t, _ in times["plain"]),
        "overhead": overhead,
        "overhead_low": low - 1,
        "overhead_high": high - 1,
        "overhead_cpu_time": None if cuda else statistics.median(threads) - 1,
        "overhead_cpu_time_low": None if cuda else low_cpu - 1,
        "overhead_cpu_time_high": None if cuda else high_cpu - 1,
        "goal": GOAL,
        "met": overhead < GOAL,
    }


def band(ratios: list[float]) -> tuple[float, float]:
    """A 95 % confidence band of the median, by ranks: no law is assumed."""
    ordered, n = sorted(ratios), len(ratios)
    away = int(np.ceil(0.98 * np.sqrt(n)))
    return ordered[max(0, n // 2 - away)], ordered[min(n - 1, n // 2 + away)]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| device | batch x views | noise | seconds, plain | asked | overhead |", "| --- " * 6 + "|"]
    for r in rows:
        band = f"{100 * r['overhead']:.1f} % ({100 * r['overhead_low']:.1f} to {100 * r['overhead_high']:.1f})"
        seconds = f"{r['seconds_plain']:.4f} | {r['seconds_asked']:.4f}"
        lines.append(f"| {r['device']} | {r['batch']} x {r['views']} | {r['noise']} | {seconds} | {band} |")
    return "\n".join(lines)


def stored(row: dict[str, Any], path: Path = STORED) -> None:
    """Keep it, in the place of a row of the same kind if there is one."""
    kind = ("device", "batch", "views", "noise")
    rows = json.loads(path.read_text()) if path.exists() else []
    others = [r for r in rows if any(r[k] != row[k] for k in kind)]
    path.write_text(json.dumps([*others, row], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a private step with and without ledger and secure noise.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--device-noise", action="store_true", help="draw noise on the GPU")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--store", action="store_true", help="also put it among the stored rows")
    options = parser.parse_args()
    found = measure(options)
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    if options.store:
        stored(found)
    print(text)


if __name__ == "__main__":
    main()
