"""What comes after one machine: how a private step's cost grows with rows, batch, views, parameters and stored answers.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json
    python -m benchmarks.scaling --table                              # Markdown from the stored results

Everything is measured in CPU time of this process, which other work on the machine disturbs least, and as the median
of a few rounds. What cannot be measured here (many GPUs, a billion rows) is arithmetic on measured numbers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from benchmarks.engine import add_output_options, machine, write_json
from sfumato import Budget, Clip, GradientMean, Objective, Private, cross_entropy
from sfumato.data.samplers import Poisson
from sfumato.privacy import calibration
from sfumato.privacy.mechanisms import Adjacency

RESULTS = Path(__file__).parent / "results" / "scaling.json"
GPU = Path(__file__).parent / "results" / "gpu.json"
SIZES = tuple(10**k for k in range(5, 10))
BATCH, MOST = 4096, 10**6
EPSILON, EPOCHS = 2.0, 10
VIEWS, WIDTHS, BATCHES = (1, 2, 4, 8), (128, 256, 512, 1024), (256, 512, 1024, 2048)
ANSWERS = (10, 100, 1000, 10_000)
GIB = 2**30

Row = dict[str, Any]


def cpu_seconds(call: Callable[[], object], *, rounds: int, warm_up: int = 1) -> float:
    times = []
    for i in range(warm_up + rounds):
        start = time.process_time()
        call()
        if i >= warm_up:
            times.append(time.process_time() - start)
    return statistics.median(times)


def samples(rounds: int) -> Iterator[Row]:
    """One Poisson sample of the same expected batch out of ever more rows."""
    rng = np.random.Generator(np.random.Philox(0))
    for size, batch in (*((size, BATCH) for size in SIZES), (SIZES[-1], MOST)):
        sampler = Poisson(size=size, batch_size=batch)
        took = cpu_seconds(lambda s=sampler, n=size: s.draw(n, rng), rounds=rounds)
        yield {"part": "sample", "rows": size, "batch": batch, "seconds": took}


def noises() -> Iterator[Row]:
    """What the same promise costs with ever more rows: the noise on the mean of a batch, and the time of planning."""
    for size in SIZES:
        batch = size // 10_000 * 100 if size < 10**8 else MOST  # one hundredth, up to a million
        sampler = Poisson(size=size, batch_size=batch)
        steps = round(EPOCHS * size / batch)
        delta = 1 / (10 * size)
        start = time.process_time()
        found = calibration.noise_multiplier(
            epsilon=EPSILON, delta=delta, sampler=sampler, steps=steps, adjacency=Adjacency.ADD_REMOVE
        )
        yield {
            "part": "noise",
            "rows": size,
            "batch": batch,
            "steps": steps,
            "delta": delta,
            "noise_multiplier": found,
            "noise_of_the_mean": found / batch,
            "planning_seconds": time.process_time() - start,
        }


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def steps(rounds: int) -> Iterator[Row]:
    """One whole answer, by batch, views and parameters, each beside the plain gradient of as many rows."""
    for batch, views, width in (
        *((b, 1, 512) for b in BATCHES),
        *((256, k, 512) for k in VIEWS[1:]),
        *((512, 1, w) for w in WIDTHS if w != 512),
    ):
        torch.manual_seed(0)
        module = mlp(width)
        rows = (torch.randn(batch, 256), torch.randint(10, (batch,)))
        objective = Objective(module, cross_entropy)
        private = Private(rows, name="rows", size=batch, objective=objective, budget=Budget(1e6, 1e-6))
        params = objective.parameters()
        question = partial(GradientMean, params, Clip(1.0), **_views(views))
        private.plan((GradientMean, 50.0, private.everyone(), rounds + 2))
        ours = cpu_seconds(lambda a=private.ask, q=question: a(q()), rounds=rounds)
        plain = cpu_seconds(lambda o=objective, r=rows, k=views: [_gradient(o, r) for _ in range(k)], rounds=rounds)
        yield {
            "part": "step",
            "batch": batch,
            "views": views,
            "parameters": sum(p.numel() for p in module.parameters()),
            "seconds": ours,
            "plain_seconds": plain,
        }


def _views(count: int) -> dict[str, Any]:
    return {} if count == 1 else {"views": count, "augment": jittered}


def jittered(batch: Any) -> Any:
    inputs, labels = batch
    return inputs + 0.01, labels


def _gradient(objective: Objective, rows: Any) -> object:
    loss = objective.loss(objective.module, rows).mean()
    return torch.autograd.grad(loss, list(objective.module.parameters()))


def charges(rounds: int) -> Iterator[Row]:
    """One charge in a ledger's file that holds so many answers already."""
    from sfumato import Ledger

    with tempfile.TemporaryDirectory() as folder:
        for stored in ANSWERS:
            rows = torch.zeros(8, 2)
            objective = Objective(nn.Linear(2, 2), lambda module, batch: module(batch).sum(1))
            private = Private(
                rows,
                name="rows",
                size=8,
                objective=objective,
                budget=Budget(1e6, 1e-6),
                ledger=Ledger(Path(folder) / f"{stored}.db"),
            )
            private.plan((GradientMean, 500.0, private.everyone(), stored + rounds + 2))
            params = objective.parameters()
            for _ in range(stored):
                private.ask(GradientMean(params, Clip(1.0)))
            took = []
            for _ in range(rounds):
                start = time.perf_counter()
                private.ask(GradientMean(params, Clip(1.0)))
                took.append(time.perf_counter() - start)
            yield {"part": "charge", "stored": stored, "seconds": statistics.median(took)}


def measure(rounds: int) -> list[Row]:
    found = []
    for part in (samples(rounds), noises(), steps(rounds), charges(rounds)):
        for row in part:
            Console(stderr=True).print(row)
            found.append(row)
    return found


# ------------------------------------------------------------------------------------------------ the page


def page(results: dict[str, Any], gpu: list[Row]) -> str:
    """docs/scaling.md, of what was measured here and of the GPU's numbers."""
    rows, on = results["rows"], results["machine"]
    return "\n".join(
        [
            "# What comes after one machine",
            "",
            "How the cost of a private training grows, measured where that is possible, and what a billion "
            "records would "
            "take, by arithmetic on measured numbers. Made by `python -m benchmarks.scaling` and `python -m "
            "benchmarks.page`.",
            "",
            f"CPU time on {on['cpu'].split('@')[0].strip()}, torch {on['torch']}, unless a GPU is named.",
            "",
            "## More rows: sampling",
            "",
            *_table(
                ("rows", "expected batch", "CPU time of one Poisson sample, ms"),
                ((f"{r['rows']:,}", f"{r['batch']:,}", f"{1e3 * r['seconds']:.1f}") for r in _part(rows, "sample")),
            ),
            "",
            "A sampler skips from one drawn unit to the next where few are drawn: the cost is that of the batch, "
            "with a "
            "small share for the rows passed over. Memory is that of the batch, or two bytes for each row where more "
            "than one in 64 is drawn. Rows may lie in a memory-mapped array; several processes hold a part each.",
            "",
            f"## More rows: the same promise, epsilon {EPSILON:g}, {EPOCHS} passes",
            "",
            *_table(
                (
                    "rows",
                    "delta",
                    "expected batch",
                    "steps",
                    "noise multiplier",
                    "noise of the mean / clip",
                    "planned in, s",
                ),
                (
                    (
                        f"{r['rows']:,}",
                        f"{r['delta']:.0e}",
                        f"{r['batch']:,}",
                        f"{r['steps']:,}",
                        f"{r['noise_multiplier']:.2f}",
                        f"{r['noise_of_the_mean']:.1e}",
                        f"{r['planning_seconds']:.1f}",
                    )
                    for r in _part(rows, "noise")
                ),
            ),
            "",
            "Ten times the rows, with ten times the batch, make the noise of a step ten times smaller at the same "
            "epsilon: privacy is cheap where data is plenty, and batches should grow with it as far as the "
            "machines allow.",
            "",
            "## Larger batches, more views, larger models: one answer of the door",
            "",
            *_table(
                ("batch", "views", "parameters", "CPU time, s", "plain gradients of as many rows, s", "ratio"),
                (
                    (
                        f"{r['batch']:,}",
                        str(r["views"]),
                        f"{r['parameters']:,}",
                        f"{r['seconds']:.3f}",
                        f"{r['plain_seconds']:.3f}",
                        f"{r['seconds'] / r['plain_seconds']:.2f}",
                    )
                    for r in _part(rows, "step")
                ),
            ),
            "",
            "An answer includes the charge, the noise and the check of the model. Time is in proportion to batch times "
            "views, and the noise to the parameters: with few rows and many parameters it is the noise that shows. "
            "Memory is that of one micro-batch, which the engine chooses, and of the parameters.",
            "",
            "## A longer history: the ledger",
            "",
            *_table(
                ("answers stored", "one more answer of a tiny model, ms"),
                ((f"{r['stored']:,}", f"{1e3 * r['seconds']:.2f}") for r in _part(rows, "charge")),
            ),
            "",
            "A plan is charged answer by answer, durably, and its cost is known beforehand; so a charge does not "
            "get slower "
            "as they add up. This is the file's time; a database adds its network's.",
            "",
            "## More processes",
            "",
            "A step sends the summed gradient to the first process and the noisy answer back, eight bytes a "
            "parameter each "
            "way, whatever the batch. [Benchmarks](benchmarks.md#several-processes) has the measured shares of "
            "the ideal "
            "on cores of one machine; no machine with several GPUs has been measured.",
            "",
            *_billion(rows, gpu),
        ]
    )


def _billion(rows: list[Row], gpu: list[Row]) -> list[str]:
    ours = next(r for r in gpu if (r["workload"], r["method"]) == ("wrn-16-4", "sfumato"))
    text = next(r for r in gpu if (r["workload"], r["method"]) == ("gpt2", "sfumato"))
    plan = next(r for r in _part(rows, "noise") if r["rows"] == 10**9)
    sample = next(r for r in _part(rows, "sample") if (r["rows"], r["batch"]) == (10**9, MOST))
    hours = 1e9 / ours["images_per_s"] / 3600
    token_hours = 1e9 / text["images_per_s"] / 3600
    step = plan["batch"] / ours["images_per_s"]
    return [
        "## A billion records",
        "",
        "Nothing here has been run at that size. From the measured numbers:",
        "",
        f"- **Pictures** (3 x 32 x 32, WRN-16-4, one view): one pass is {hours:.1f} hours on one {ours['gpu']} at "
        f"{ours['images_per_s']:,.0f} images/s, so {EPOCHS} passes are {EPOCHS * hours:.0f} GPU-hours; K views "
        "cost K times "
        f"that. With an expected batch of {plan['batch']:,}, a step takes {step:.0f} s of one GPU, beside which "
        f"the sample ({sample['seconds']:.2f} s for a batch of {sample['batch']:,}) and the exchange between GPUs "
        "(44 MB "
        f"for 2.75M parameters) are small: the work divides among many GPUs.",
        f"- **Text** ({text['tokens_per_s'] / text['images_per_s']:.0f} tokens a record, GPT-2 of 124M "
        "parameters): one "
        f"pass is {token_hours:,.0f} GPU-hours at {text['tokens_per_s']:,.0f} tokens/s. A step exchanges 2 GB: "
        "with batches "
        f"of {plan['batch']:,} that is still well below the time of computing.",
        f"- **Privacy**: epsilon {EPSILON:g} at delta {plan['delta']:.0e} needs a noise multiplier of "
        f"{plan['noise_multiplier']:.2f} for {plan['steps']:,} steps; the noise of a step's mean is "
        f"{plan['noise_of_the_mean']:.0e} of the clip norm per coordinate.",
        "- **Storage**: 3 TB of pictures, or 1 TB of tokens of four bytes, memory-mapped and cut into a part for each "
        "process. A user's records have to lie in one part; the index of users takes 8 bytes a record.",
        "- **Users at home**: the server of [federated training](federated.md) handles one update per drawn user and "
        "round, so its cost is drawn users times parameters, whatever the number of users enrolled.",
        "- **What would have to be built**: a model that does not fit on one GPU (see [several processes]"
        "(distributed.md#sharded-parameters)), and readers that fetch a Poisson sample from object storage; "
        "anything with `len` and `[i]` is accepted as a data set today, row by row.",
        "",
    ]


def _part(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row["part"] == name]


def _table(head: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> list[str]:
    return [_line(head), _line(("---",) * len(head)), *map(_line, body)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(page(json.loads(options.table.read_text()), json.loads(GPU.read_text())))
        return
    torch.set_num_threads(1)
    results = {"machine": machine(), "rows": measure(options.rounds)}
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
