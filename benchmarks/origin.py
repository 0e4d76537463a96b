"""What clipping around an origin costs: a step of DOPE-SGD beside one of DP-SGD, the public gradient apart.

Both steps ask the same door about the same rows, draw noise and move the weights; one clips around the gradient of
public rows, taken before. They take turns in one process, since one process is faster than the next by the
memory it happens to get; the cost is the median of the ratios of neighbours.

    python -m benchmarks.origin                                           # the four workloads, on the CPU
    python -m benchmarks.origin --device cuda --batch 4096 --views 16     # WRN-16-4 in bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ask import NOISE, RATE, band, timed
from benchmarks.workloads import WORKLOADS
from sfumato import Budget, Gradient, GradientMean, Objective, Planned, Private, Public, cross_entropy
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.models.wide_resnet import wide_resnet

PUBLIC_ROWS, GOAL = 64, 1.05
STORED = Path(__file__).parent / "results" / "origin.json"
Row = dict[str, Any]


class Steps:
    """One model and one batch behind a door, and the two ways to take a step."""

    def __init__(self, objective: Objective, batch: tuple[Tensor, ...], views: int, ledger: Path, steps: int) -> None:
        self.objective, self.views = objective, views
        self.private = Private(
            batch,
            name="rows",
            size=len(batch[0]),
            objective=objective,
            ledger=ledger,
            budget=Budget(100.0, 0.5 / len(batch[0])),
        )
        self.private.plan(Planned(GradientMean, NOISE, self.private.everyone(), steps))
        self.optimizer = torch.optim.SGD(objective.module.parameters(), lr=RATE)
        public = Public(tuple(t[:PUBLIC_ROWS] for t in batch), objective=objective)  # made up, like the private rows
        self.origin = public.gradient(objective.parameters()).clipped(1.0)

    def dp_sgd(self) -> None:
        self._step(None)

    def dope_sgd(self) -> None:
        self._step(self.origin)

    def _step(self, origin: Gradient | None) -> None:
        params = self.objective.parameters()
        answer = dp_sgd(params, None, self.private.ask, clip=1.0, views=self.views, origin=origin)
        answer.write_to(self.objective.module)
        self.optimizer.step()


def measure(name: str, objective: Objective, batch: tuple[Tensor, ...], *, views: int, rounds: int) -> Row:
    cuda, warmup = batch[0].is_cuda, 3
    synchronise: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(objective, batch, views, Path(folder) / "ledger.db", 2 * (rounds + warmup))
        for _ in range(warmup):
            steps.dp_sgd(), steps.dope_sgd()
        plain, around = [], []
        for turn in range(rounds):
            pair = [(steps.dp_sgd, plain), (steps.dope_sgd, around)]
            for step, times in pair if turn % 2 else reversed(pair):  # who goes first changes, since it may matter
                times.append(timed(step, synchronise)[0 if cuda else 1])
        steps.private.close()
    ratios = [b / a for a, b in zip(plain, around, strict=True)]
    low, high = band(ratios)
    return {
        "workload": name,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "batch": len(batch[0]),
        "views": views,
        "rounds": rounds,
        "seconds_dp_sgd": statistics.median(plain),
        "seconds_dope_sgd": statistics.median(around),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "goal": GOAL,
        "met": statistics.median(ratios) <= GOAL,
    }


def on_cpu(name: str, rounds: int, batch_size: int | None = None) -> Row:
    workload = WORKLOADS[name]
    module, batch = workload.build(batch_size)
    return measure(name, Objective(module, workload.loss), batch, views=1, rounds=rounds)


def on_gpu(batch: int, views: int, rounds: int) -> Row:
    module: nn.Module = wide_resnet(depth=16, width=4).cuda()
    images = torch.rand(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device="cuda")
    objective = Objective(module, cross_entropy, autocast=torch.bfloat16)
    return measure("wrn-16-4", objective, (images, labels), views=views, rounds=rounds)


def markdown(rows: list[Row]) -> str:
    lines = ["| model | device | batch x views | DP-SGD, s | DOPE-SGD, s | ratio |", "| --- " * 6 + "|"]
    for r in rows:
        title = WORKLOADS[r["workload"]].title.split(",")[0] if r["workload"] in WORKLOADS else "WRN-16-4, bfloat16"
        device = r["device"] if r["threads"] is None else f"CPU, {r['threads']} thread{'s' if r['threads'] > 1 else ''}"
        seconds = f"{r['seconds_dp_sgd']:.4f} | {r['seconds_dope_sgd']:.4f}"
        ratio = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        lines.append(f"| {title} | {device} | {r['batch']} x {r['views']} | {seconds} | {ratio} |")
    return "\n".join(lines)


def stored(found: list[Row], path: Path = STORED) -> None:
    """Keep them, in the places of rows of the same kind."""
    kind = ("workload", "batch", "views")
    rows = json.loads(path.read_text()) if path.exists() else []
    others = [r for r in rows if all(any(r[k] != f[k] for k in kind) for f in found)]
    path.write_text(json.dumps([*others, *found], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step around an origin beside a step without one.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workloads", default="conv,wrn,mlp,lm", help="on the CPU: names, with commas between")
    parser.add_argument("--batch", type=int, default=4096, help="on a GPU")
    parser.add_argument("--views", type=int, default=16, help="on a GPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--store", action="store_true", help="also put them among the stored rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        found = [{**on_gpu(options.batch, options.views, options.rounds), "threads": None}]
    else:
        found = [on_cpu(name, options.rounds) for name in options.workloads.split(",")]
    if options.store:
        stored(found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
