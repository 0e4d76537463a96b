"""How much a private step costs beside the plain step of the same batch, for Sfumato and its peers, on a CPU.

    python -m benchmarks.engine --out benchmarks/results/engine.json     # everything, about ten minutes on two cores
    python -m benchmarks.engine --workloads mlp,lm --methods sfumato,opacus-ghost --json
    python -m benchmarks.engine --table                                   # Markdown from the stored results

The methods of one workload live in processes of their own and take turns, so that whatever else the machine is doing
falls on all alike; only one of them computes at a time. A ratio is the median over rounds of (a step of the method) /
(a step of "plain" in the same round), and its spread the distance between the quartiles. Memory is the growth of peak
resident memory from where model and data are loaded, over that of the plain step.
"""

import argparse
import json
import math
import os
import platform
import re
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers import METHODS, versions
from benchmarks.worker import serve
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results" / "engine.json"
THREADS = min(2, os.cpu_count() or 1)
TURN_S = 0.3  # a turn repeats steps shorter than this
BUDGET_S = 15.0  # wall time of one method's turns on one workload: the slow ones get fewer rounds
FEWEST_ROUNDS = 2
START_S, STEP_S = 120.0, 60.0  # longest start, longest turn

Row = dict[str, Any]


class WorkerError(Exception):
    """The worker cannot run its workload; the message is the reason, in one short sentence."""


class Worker:
    def __init__(self, workload: str, method: str, batch_size: int | None = None) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, workload, method, batch_size, THREADS), daemon=True)
        self.process.start()
        theirs.close()  # so that its death reads as end of file

    def answer(self, timeout: float) -> dict[str, float]:
        if not self.connection.poll(timeout):
            raise WorkerError(f"no answer within {timeout:.0f} s")
        try:
            reply = self.connection.recv()
        except EOFError:
            self.process.join()
            raise WorkerError(f"the process died with exit code {self.process.exitcode}") from None
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def ask(self, turn: str | int) -> dict[str, float]:
        self.connection.send(turn)
        return self.answer(STEP_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def measure(workload: str, methods: list[str], *, repeats: int, batch_size: int | None = None) -> list[Row]:
    """One row per method on one workload; "plain" is always run, as the measure of the others."""
    methods = ["plain", *(m for m in methods if m != "plain")]
    workers: dict[str, Worker] = {}
    errors: dict[str, str] = {}
    memory: dict[str, float] = {}
    steps: dict[str, int] = {}
    turns: dict[str, list[dict[str, float]]] = {m: [] for m in methods}  # one entry per round taken part in

    def attempt(method: str, job: Any) -> Any:
        try:
            return job()
        except WorkerError as error:
            errors[method] = str(error)
            workers.pop(method).stop()
            return None

    try:
        for method in methods:  # one by one: several at once, with threads that wait by spinning, take minutes
            workers[method] = Worker(workload, method, batch_size)
            attempt(method, lambda m=method: workers[m].answer(START_S))
        for method in list(workers):
            if reply := attempt(method, lambda m=method: workers[m].ask("memory")):
                memory[method] = reply["memory"]
                steps[method] = math.ceil(TURN_S / reply["seconds"])
        spent = dict.fromkeys(workers, 0.0)
        for _ in range(repeats if "plain" in workers else 0):
            for method in list(workers):
                rounds = len(turns[method])
                if rounds >= FEWEST_ROUNDS and spent[method] * (rounds + 1) / rounds > BUDGET_S:
                    continue
                start = time.perf_counter()
                if reply := attempt(method, lambda m=method: workers[m].ask(steps[m])):
                    turns[method].append(reply)
                    spent[method] += time.perf_counter() - start
    finally:
        for worker in workers.values():
            worker.stop()

    if "plain" in errors:
        errors = dict.fromkeys(methods, f"the plain step failed: {errors['plain']}")
    return [
        {"workload": workload, "method": m, "error": errors[m]}
        if m in errors
        else {"workload": workload, "method": m, **summary(turns[m], turns["plain"], memory[m], memory["plain"])}
        for m in methods
    ]


def summary(turns: list[dict[str, float]], plain: list[dict[str, float]], memory: float, plain_memory: float) -> Row:
    # Every method takes part in the first rounds and then sits out, so zip pairs turns of the same round.
    cpu, wall = ([t[kind] / p[kind] for t, p in zip(turns, plain, strict=False)] for kind in ("cpu", "wall"))
    return {
        "cpu_ratio": round(float(np.median(cpu)), 3),
        "wall_ratio": round(float(np.median(wall)), 3),
        "memory_ratio": round(memory / plain_memory, 3),
        "spread": round(float(np.subtract(*np.percentile(cpu, [75, 25]))), 3),
        "cpu_seconds": round(float(np.median([t["cpu"] for t in turns])), 4),
        "memory_mib": round(memory, 1),
        "rounds": len(turns),
    }


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **versions(),
    }


def console_table(rows: list[Row]) -> Table:
    table = Table(title="A private step beside the plain step of the same batch")
    for column in ("workload", "method", "CPU", "spread", "goal", "wall", "memory", "goal", "rounds"):
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    for row in rows:
        workload = WORKLOADS[row["workload"]]
        goals = (workload.cpu_goal, workload.memory_goal) if row["method"] == "sfumato" else (None, None)
        if "error" in row:
            table.add_row(row["workload"], row["method"], "[red]fails[/]")
            continue
        cells = [f"{row['cpu_ratio']:.2f}", f"{row['spread']:.2f}", goal_cell(row["cpu_ratio"], goals[0])]
        cells += [f"{row['wall_ratio']:.2f}", f"{row['memory_ratio']:.2f}", goal_cell(row["memory_ratio"], goals[1])]
        table.add_row(row["workload"], row["method"], *cells, str(row["rounds"]), end_section=row is rows[-1])
    return table


def goal_cell(value: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f"[{'green' if value <= goal else 'red'}]{goal:.2f}[/]"


def markdown(results: dict[str, Any]) -> str:
    """One row per method and one column per workload: CPU ratio, spread, and memory ratio in brackets."""
    rows = {(row["workload"], row["method"]): row for row in results["rows"]}
    columns = [w for w in WORKLOADS if any(key[0] == w for key in rows)]
    methods = [m for m in METHODS if m != "plain" and any(key[1] == m for key in rows)]
    notes: list[str] = []

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        if "error" in row:
            notes.append(f"{row['method']} on {row['workload']}: {row['error']}.")
            return f"fails ({len(notes)})"
        return f"{row['cpu_ratio']:.2f} ± {row['spread'] / 2:.2f} [{row['memory_ratio']:.1f}]"

    lines = ["| | " + " | ".join(WORKLOADS[w].title for w in columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {m} | " + " | ".join(cell(rows.get((w, m))) for w in columns) + " |" for m in methods]
    goals = (f"<= {WORKLOADS[w].cpu_goal:.2f} [{WORKLOADS[w].memory_goal:.1f}]" for w in columns)
    lines += ["| **goal** | " + " | ".join(goals) + " |", ""]
    m = results["machine"]
    lines += [
        "CPU time of a step as a multiple of the plain step's: median over rounds ± half the distance between "
        "quartiles; in brackets the growth of peak memory, as a multiple likewise. "
        f"{m['cpu']}, {m['threads']} threads, torch {m['torch']}, Opacus {m['opacus']}, Opake {m['opake']}."
    ]
    return "\n".join(lines + [f"{i}. {note}" for i, note in enumerate(notes, 1)])


def names(text: str, known: dict[str, Any]) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Known: {', '.join(known)}.")
    return chosen


def add_output_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Where numbers go, for every benchmark that stores them as one JSON file and makes a table of it."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, help="also write everything to this JSON file")
    parser.add_argument(
        "--table", nargs="?", type=Path, const=results, help="print a stored file as Markdown, and stop"
    )


def write_json(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=7, help="rounds of turns, fewer for slow methods")
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return

    rows: list[Row] = []
    methods = names(options.methods, METHODS)
    for workload in names(options.workloads, WORKLOADS):
        print(f"{workload}: {', '.join(methods)}", file=sys.stderr)
        rows += measure(workload, methods, repeats=options.repeats)
        if options.out:  # after each workload, so that an interrupted run leaves something
            write_json(options.out, {"machine": machine(), "rows": rows})
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(console_table(rows))
        for row in rows:
            if "error" in row:
                print(f"{row['method']} on {row['workload']}: {row['error']}.")


if __name__ == "__main__":
    main()
