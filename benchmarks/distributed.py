"""How much faster several processes are: the same private step, of the same expected batch, by 1, 2, 4, ... processes.

    python -m benchmarks.distributed --out benchmarks/results/distributed.json
    python -m benchmarks.distributed --processes 1,2,4,8 --batch 8        # a machine with 8 GPUs, 8 times the batch
    python -m benchmarks.distributed --table                              # Markdown from the stored results

Every measurement is a `torchrun` of its own: gloo with one thread per process on CPUs, NCCL where each process has its
own GPU. A step is a whole one: charge, Poisson sample, clipped sum, sum over processes, noise, answer, optimiser. The
numbers of processes take turns, and a speed-up is the median over these rounds. On a machine that others use too, the
time of the cores (CPU time of all processes) says more than the clock; the load is stored beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine import add_output_options, machine, names, write_json
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results" / "distributed.json"
ROOT = Path(__file__).parent.parent
BATCHES = {"conv": 512, "mlp": 4096}
ROWS = 4  # batches that the private data holds
WARM_UP = 2
NOISE, CLIP = 4.0, 1.0

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------ in each process


def work(name: str, batch: int, steps: int, target: Path) -> None:
    from sfumato import Budget, Clip, GradientMean, Objective, Private
    from sfumato.distributed import Processes

    torch.set_num_threads(1)
    with Processes() as processes:
        workload = WORKLOADS[name]
        module, rows = workload.build(ROWS * batch)
        module.to(processes.device)
        objective = Objective(module, workload.loss)
        private = Private(
            tuple(t[processes.mine].to(processes.device) for t in rows),
            name="rows",
            size=ROWS * batch,
            objective=objective,
            budget=Budget(50.0, 1e-6),
            processes=processes,
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        private.plan((GradientMean, NOISE, private.poisson(batch), WARM_UP + steps))

        def step() -> None:
            private.ask(GradientMean(objective.parameters(), Clip(CLIP))).write_to(module)
            optimizer.step()

        def ended() -> tuple[float, float]:
            if processes.device.type == "cuda":
                torch.cuda.synchronize()
            processes.total(0)
            return time.perf_counter(), time.process_time()

        for _ in range(WARM_UP):
            step()
        wall, cpu = ended()
        for _ in range(steps):
            step()
        wall, cpu = (after - before for after, before in zip(ended(), (wall, cpu), strict=True))
        processes.check_same(objective.parameters())
        microseconds = processes.total(round(1e6 * cpu / steps))  # of all of them
        if processes.leads:
            gpu = torch.cuda.get_device_name() if processes.device.type == "cuda" else None
            found = {"seconds": wall / steps, "cpu_seconds": 1e-6 * microseconds, "gpu": gpu}
            found["parameters"] = sum(p.numel() for p in module.parameters())
            target.write_text(json.dumps(found))


# ------------------------------------------------------------------------------------------------ around them


def torchrun(name: str, count: int, batch: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        options = ["--work", name, "--batch", str(batch), "--steps", str(steps), "--target", str(target)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*launch, "-m", "benchmarks.distributed", *options]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{count} processes failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def measure(name: str, counts: list[int], *, batch: int, steps: int, rounds: int) -> list[Row]:
    turns: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for round_ in range(rounds):
        for count in counts:
            turns[count].append(torchrun(name, count, batch, steps))
            print(f"{name}, round {round_ + 1}, {count}: {turns[count][-1]['seconds']:.3f} s", file=sys.stderr)
    return [summary(name, count, batch, turns[count], turns[counts[0]], counts[0]) for count in counts]


def summary(
    name: str, count: int, batch: int, turns: list[dict[str, Any]], base: list[dict[str, Any]], fewest: int
) -> Row:
    """Speed-up over the fewest processes, turn by turn; efficiency is its share of what the hardware allows."""
    speedups = [one["seconds"] / turn["seconds"] for one, turn in zip(base, turns, strict=True)]
    work_ratios = [one["cpu_seconds"] / turn["cpu_seconds"] for one, turn in zip(base, turns, strict=True)]
    units = torch.cuda.device_count() or os.cpu_count() or 1
    possible = min(count, units) / min(fewest, units)
    return {
        "workload": name,
        "processes": count,
        "batch": batch,
        "parameters": turns[0]["parameters"],
        "gpu": turns[0]["gpu"],
        "seconds": round(statistics.median(t["seconds"] for t in turns), 4),
        "cpu_seconds": round(statistics.median(t["cpu_seconds"] for t in turns), 4),
        "speedup": round(statistics.median(speedups), 3),
        "slowest": round(min(speedups), 3),
        "fastest": round(max(speedups), 3),
        "efficiency": round(statistics.median(speedups) / possible, 3),
        "cpu_efficiency": round(statistics.median(work_ratios), 3),
        "rounds": len(turns),
    }


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| workload | processes | s per step | speed-up | share of the ideal | CPU time of all, s | its growth |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        title = WORKLOADS[row["workload"]].title.split(",")[0]
        title += f", {row['parameters'] / 1e6:.1f}M parameters, batch {row['batch']}"
        spread = f"{row['speedup']:.2f} [{row['slowest']:.2f}, {row['fastest']:.2f}]"
        lines.append(
            f"| {title} | {row['processes']} | {row['seconds']:.3f} | {spread} | {row['efficiency']:.2f} | "
            f"{row['cpu_seconds']:.3f} | {1 / row['cpu_efficiency']:.2f} |"
        )
    facts, first = results["machine"], results["rows"][0]
    where = first["gpu"] or f"{facts['cpu']}, {facts['cores']} cores, one thread per process"
    load = facts["load_before"]
    busy = (
        f" (the load average was {load:g} when they began: where others compute, trust the CPU time)"
        if load > 0.5
        else ""
    )
    lines += [
        "",
        "The same whole private step, of the same expected batch, by several processes. Speed-up over one: median "
        f"[least, most] of {first['rounds']} rounds{busy}. The ideal is the number of processes, or of cores or GPUs "
        f"where there are fewer. {where}; torch {facts['torch']}.",
    ]
    return "\n".join(lines)


def console(results: dict[str, Any]) -> None:
    table = Table(title="A private step by several processes")
    for column in ("workload", "processes", "seconds", "speedup", "efficiency", "cpu_seconds", "cpu_efficiency"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in results["rows"]:
        table.add_row(*(str(row[column.header]) for column in table.columns))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--workloads", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="multiply the expected batches by this")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.batch, options.steps, options.target)
        return
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    chosen = list(BATCHES) if options.workloads is None else names(options.workloads, BATCHES)
    counts = [int(count) for count in options.processes.split(",")]
    rows: list[Row] = []
    load = round(os.getloadavg()[1], 1)
    for name in chosen:
        batch = BATCHES[name] * options.batch
        rows += measure(name, counts, batch=batch, steps=options.steps, rounds=options.rounds)
    results = {"machine": machine() | {"threads": 1, "load_before": load}, "rows": rows}
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        console(results)


if __name__ == "__main__":
    main()
