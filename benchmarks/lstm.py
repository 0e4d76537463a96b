"""How much a private step of paper 003's LSTM costs beside the plain step of the same batch.

    python -m benchmarks.lstm --out benchmarks/results/lstm.json
    python -m benchmarks.lstm --device cuda --rows 250
    python -m benchmarks.lstm --table                              # Markdown from the stored results

The plain step is that of `nn.LSTM`, whose forward and backward passes are one fused kernel each (oneDNN's on a CPU,
cuDNN's on a GPU): the fastest that torch has. Methods take turns in one process, so that whatever else the machine is
doing falls on all alike. A ratio is the median over rounds of (a step of the method) / (a plain step of the same
round): of CPU time on a CPU, of the clock on a GPU; its spread is the distance between the quartiles.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine import add_output_options, machine, write_json
from benchmarks.peers import METHODS
from benchmarks.worker import relative_error
from benchmarks.workloads import Batch
from sfumato.gradients import Clip
from sfumato.gradients.reference import clipped_sum
from sfumato.models.lstm import WordLSTM
from sfumato.objective import Objective
from sfumato.text import next_word

RESULTS = Path(__file__).parent / "results" / "lstm.json"
WORDS, LENGTH = 8000, 35
CLIP, GOAL, TOLERANCE = 1.0, 3.0, 1e-3
SHOWN = ("plain", "sfumato", "sfumato-origin")

Row = dict[str, Any]


def sentences(rows: int, device: torch.device) -> Batch:
    """Words as frequent as Zipf says: rows of real text repeat some of theirs, which costs and saves nothing here."""
    rng = np.random.default_rng(0)
    words = torch.from_numpy(np.minimum(rng.zipf(1.3, (rows, LENGTH + 1)), WORDS) - 1).to(device)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def check(name: str, device: torch.device) -> None:
    """Compare with vmap on four rows and a small model, where every gradient is clipped and where none is."""
    module = WordLSTM(50, hidden=12).to(device)
    batch = tuple(t % 50 for t in sentences(4, device))
    objective = Objective(module, next_word)
    for clip in (0.1, 1e4):
        expected = clipped_sum(objective, objective.parameters(), batch, clip=Clip(clip))
        error = relative_error(METHODS[name](module, next_word, clip, 2)(batch), expected)
        if not error < TOLERANCE:
            raise SystemExit(f"{name} is wrong: its clipped sum differs from vmap's by {error:.2g} of its norm.")


def measure(rows: int, rounds: int, device: torch.device) -> list[Row]:
    torch.manual_seed(0)
    module, batch = WordLSTM(WORDS).to(device), sentences(rows, device)
    for name in SHOWN[1:]:
        check(name, device)
    steps = {name: METHODS[name](module, next_word, CLIP, 8) for name in SHOWN}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for step in steps.values():
        step(batch)
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            turns[name].append(timed(step, batch, clock, device))
    result = []
    for name, seconds in turns.items():
        ratios = [own / plain for own, plain in zip(seconds, turns["plain"], strict=True)]
        result.append(
            {
                "method": name,
                "ratio": round(float(np.median(ratios)), 3),
                "spread": round(float(np.subtract(*np.percentile(ratios, [75, 25]))), 3),
                "seconds": round(float(np.median(seconds)), 4),
                "words_per_second": round(rows * LENGTH / float(np.median(seconds))),
            }
        )
    return result


def timed(step: Callable[[Batch], Any], batch: Batch, clock: Callable[[], float], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock()

    start = now()
    step(batch)
    return now() - start


def markdown(results: dict[str, Any]) -> str:
    m = results["machine"]
    lines = ["| | a step / the plain step | words a second |", "| --- | --- | --- |"]
    for row in results["rows"]:
        lines.append(
            f"| {row['method']} | {row['ratio']:.2f} ± {row['spread'] / 2:.2f} | {row['words_per_second']:,} |"
        )
    where = f"{m['device']}, {m['threads']} threads, torch {m['torch']}, load {m['load']}"
    return "\n".join([*lines, "", f"{results['batch']} rows of {LENGTH} words, {results['rounds']} rounds. {where}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="one by default: others would wait for each other")
    parser.add_argument("--device", default="cpu")
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = measure(options.rows, options.rounds, device)
    facts = machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else facts["cpu"]
    facts |= {"device": name, "threads": options.threads, "load": round(os.getloadavg()[0], 1)}
    results = {"machine": facts, "batch": options.rows, "rounds": options.rounds, "rows": rows}
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    table = Table(title=f"A private step of the LSTM beside the plain one (goal: {GOAL:g})")
    for column in ("method", "ratio", "spread", "seconds", "words/s"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["method"], *(str(row[k]) for k in ("ratio", "spread", "seconds", "words_per_second")))
    Console().print(table)


if __name__ == "__main__":
    main()
