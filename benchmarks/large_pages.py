"""What memory in large pages is worth on a CPU: a step with them beside the same step without.

    python -m benchmarks.large_pages --out benchmarks/results/large_pages.json
    python -m benchmarks.large_pages --table                              # Markdown from the stored results

A training takes and gives back the same hundreds of megabytes in every step, and the system clears and maps every page
anew. Torch asks for pages of 2 MiB instead of 4 KiB where `THP_MEM_ALLOC_ENABLE=1` is in the environment before its
first allocation, as the `sfumato` command has it. The two take turns, each in a process of its own; a gain is the
median over rounds of (CPU time without) / (CPU time with). It changes no number that is computed.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.engine import START_S, Worker, add_output_options, machine, names, write_json
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results" / "large_pages.json"
SWITCH = "THP_MEM_ALLOC_ENABLE"
METHODS = ("plain", "sfumato")

Row = dict[str, Any]


def worker(workload: str, method: str, *, large: bool) -> Worker:
    """A process that was started with or without large pages; torch reads the switch once, at its first allocation."""
    before = os.environ.pop(SWITCH, None)
    try:
        os.environ[SWITCH] = "1" if large else "0"
        return Worker(workload, method)
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def measure(workload: str, method: str, rounds: int) -> Row:
    pair = {large: worker(workload, method, large=large) for large in (False, True)}
    try:
        for process in pair.values():
            process.answer(START_S)
            process.ask(1)  # what is loaded once
        seconds = {large: [] for large in pair}
        for _ in range(rounds):
            for large, process in pair.items():
                seconds[large].append(process.ask(1)["cpu"])
    finally:
        for process in pair.values():
            process.stop()
    gains = [small / large for small, large in zip(seconds[False], seconds[True], strict=True)]
    return {
        "workload": workload,
        "method": method,
        "gain": round(float(np.median(gains)), 3),
        "spread": round(float(np.subtract(*np.percentile(gains, [75, 25]))), 3),
        "cpu_seconds": round(float(np.median(seconds[False])), 4),
        "cpu_seconds_large": round(float(np.median(seconds[True])), 4),
    }


def markdown(results: dict[str, Any]) -> str:
    rows = {(row["workload"], row["method"]): row for row in results["rows"]}
    shown = [w for w in WORKLOADS if (w, "sfumato") in rows]
    lines = ["| | " + " | ".join(WORKLOADS[w].title for w in shown) + " |", "| --- |" + " --- |" * len(shown)]
    for method in METHODS:
        cells = (rows[w, method] for w in shown)
        lines.append(f"| {method} | " + " | ".join(f"{r['gain']:.2f} ± {r['spread'] / 2:.2f}" for r in cells) + " |")
    m = results["machine"]
    where = f"{m['cpu']}, {m['threads']} threads, torch {m['torch']}"
    lines += ["", f"Median of {results['rounds']} rounds ± half the distance between quartiles. {where}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    chosen = names(options.workloads, WORKLOADS)
    rows = [measure(workload, method, options.rounds) for workload in chosen for method in METHODS]
    results = {"machine": machine(), "rounds": options.rounds, "rows": rows}
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    table = Table(title="CPU time of a step without large pages / with them")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
