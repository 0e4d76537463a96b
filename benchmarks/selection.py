"""How long it takes to choose from a large pool, and how well private PCA finds a subspace, beside diffprivlib's.

    python -m benchmarks.selection --diffprivlib ENV/bin/python --out benchmarks/results/selection.json
    python -m benchmarks.selection --strategies k-center,diverse-public --json
    python -m benchmarks.selection --table                                # Markdown from the stored results

The pool has 60,000 embeddings of width 64 and 10 logits each, given; so have the private rows that are asked. The time
is that of the strategy, on one thread, from embeddings to indices; the plan is made before, as by a training.
diffprivlib 0.6.6 needs scikit-learn <= 1.7, so that it runs in an environment of its own, named by its interpreter;
without one its column is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from benchmarks.engine import add_output_options, machine, names, write_json

RESULTS = Path(__file__).parent / "results" / "selection.json"
PEER = Path(__file__).with_name("selection_peer.py")
ROWS, WIDTH, CLASSES = 60_000, 64, 10
LABELS = (1000, 7000)
SECONDS_GOAL = 10.0
SEEDS, DELTA = 5, 1e-6
EPSILONS = (0.03, 0.1, 0.3, 1.0, 3.0)
LIMIT_S = 30  # of one fit of a peer
THREADS = 1

Row = dict[str, Any]


def embeddings(rows: int, seed: int) -> Tensor:
    """As a classifier's last layer has them: a cluster for each class, and variance that falls off."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    spread = torch.arange(1, WIDTH + 1) ** -0.5
    kind = torch.randint(CLASSES, (rows,), generator=generator)
    return torch.relu(centres[kind] + 2 * spread * torch.randn(rows, WIDTH, generator=generator))


# ------------------------------------------------------------------------------------------------ choosing


def strategies() -> dict[str, Any]:
    from sfumato.selection import DiversePublic, Entropy, KCenter, Margin, NearPrivate, Random, TopK

    return {
        "random": Random(),
        "entropy": Entropy(),
        "margin": Margin(),
        "k-center": KCenter(),
        "diverse-public": DiversePublic(),
        "near-private": NearPrivate(),
        "near-private-top-k": NearPrivate(voters=TopK()),
    }


def choose(chosen: list[str], rounds: int) -> list[Row]:
    from sfumato import Budget, Private, Public
    from sfumato.selection import NearPrivate, Released

    torch.manual_seed(0)
    model, pool = Released(nn.Linear(WIDTH, CLASSES)), Public(embeddings(ROWS, 0))
    rows = embeddings(ROWS, 1)
    model.of(pool)  # embeddings and logits are given
    times: dict[tuple[str, int], list[tuple[float, float]]] = {(m, n): [] for m in chosen for n in LABELS}
    for _ in range(rounds):
        for (name, n), spent in times.items():
            strategy, ask = strategies()[name], None
            if isinstance(strategy, NearPrivate):
                private = Private(rows, name="rows", size=ROWS, budget=Budget(2.0, DELTA))
                private.plan(*strategy.lines(private, pca=10.0, support=1.0))
                ask = private.ask
            wall, cpu = time.perf_counter(), time.process_time()
            indices = strategy(model, pool, n, ask)
            spent.append((time.perf_counter() - wall, time.process_time() - cpu))
            assert len(indices.unique()) == n
    return [
        {
            "strategy": name,
            "labels": n,
            "seconds": round(float(np.median([wall for wall, _ in spent])), 3),
            "fastest_seconds": round(min(wall for wall, _ in spent), 3),
            "cpu_seconds": round(float(np.median([cpu for _, cpu in spent])), 3),
            "rounds": rounds,
        }
        for (name, n), spent in times.items()
    ]


# ------------------------------------------------------------------------------------------------ private PCA


def tables() -> dict[str, tuple[np.ndarray, int]]:
    """Rows of norm at most 1, and how many directions to look for. Half of each table is public, for mean and bound.

    The narrow one has the 8 pixels that vary most in public: diffprivlib samples slowly in wide ones.
    """
    from sklearn.datasets import load_digits

    digits = load_digits().data
    digits = digits[np.random.default_rng(0).permutation(len(digits))]
    widest = np.argsort(-digits[: len(digits) // 2].var(0))[:8]
    wanted = (
        ("embeddings", embeddings(40_000, 2).double().numpy(), 10),
        ("digits", digits, 10),
        ("8 pixels of digits", digits[:, widest], 3),
    )
    found = {}
    for name, rows, components in wanted:
        public, private = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        private = private - public.mean(0)
        private = private / np.median(np.linalg.norm(public - public.mean(0), axis=1))
        found[name] = private / np.maximum(1.0, np.linalg.norm(private, axis=1, keepdims=True)), components
    return found


def captured(components: np.ndarray, exact: np.ndarray) -> float:
    """The share of the non-private subspace that lies in the private one."""
    return float(np.square(components @ exact.T).sum() / len(exact))


def sfumato(rows: np.ndarray, p: int) -> tuple[np.ndarray, list[float], str]:
    import sfumato
    from sfumato.selection import PrivatePCA

    found, seconds = np.zeros((len(EPSILONS), SEEDS, p, rows.shape[1])), []
    for i, epsilon in enumerate(EPSILONS):
        for j in range(SEEDS):
            start = time.perf_counter()
            model = PrivatePCA(p, epsilon=epsilon, delta=DELTA, bound=1.0)
            found[i, j] = model.fit(rows).components_
            seconds.append(time.perf_counter() - start)
    return found, seconds, sfumato.__version__


def diffprivlib(rows: np.ndarray, p: int, python: str) -> tuple[np.ndarray, list[float], str]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "rows.npz"), Path(folder, "components.npz")
        np.savez(source, rows=rows, epsilons=EPSILONS, seeds=range(SEEDS), components=p, limit=LIMIT_S)
        subprocess.run([python, str(PEER), str(source), str(target)], check=True)
        given = np.load(target)
        return given["components"], given["seconds"].tolist(), str(given["version"])


def compare(python: str | None) -> list[Row]:
    methods: dict[str, Callable[[np.ndarray, int], tuple[np.ndarray, list[float], str]]] = {"sfumato": sfumato}
    if python is not None:
        methods["diffprivlib"] = lambda rows, p: diffprivlib(rows, p, python)
    found = []
    for name, (rows, p) in tables().items():
        values, vectors = np.linalg.eigh(rows.T @ rows)
        exact = vectors[:, ::-1][:, :p].T
        for method, fit in methods.items():
            print(f"{method} on {name}", file=sys.stderr)
            components, seconds, version = fit(rows, p)
            shared = {"table": name, "rows": len(rows), "columns": rows.shape[1], "components": p}
            shared |= {"method": method, "version": version}
            for epsilon, fits in zip(EPSILONS, components, strict=True):
                ended = [c for c in fits if np.isfinite(c).all()]
                row: Row = shared | {"epsilon": epsilon, "fits": len(ended)}
                if len(ended) < SEEDS:
                    found.append(row | {"error": f"no answer within {LIMIT_S} s"})
                    continue
                shares = [captured(c, exact) for c in ended]
                variance = [float(np.square(rows @ c.T).sum() / values[-p:].sum()) for c in ended]
                row |= {"captured": round(float(np.mean(shares)), 4), "variance": round(float(np.mean(variance)), 4)}
                row |= {"captured_spread": round(float(np.std(shares)), 4)}
                found.append(row | {"seconds": round(float(np.median(seconds)), 3)})
    return found


# ------------------------------------------------------------------------------------------------ what it says


def markdown(results: dict[str, Any]) -> str:
    m = results["machine"]
    lines = ["| strategy | " + " | ".join(f"{n} labels, s" for n in LABELS) + " |", "| --- |" + " --- |" * len(LABELS)]
    known = {(row["strategy"], row["labels"]): row for row in results["choosing"]}
    for name in dict.fromkeys(row["strategy"] for row in results["choosing"]):
        lines.append(f"| {name} | " + " | ".join(spent(known[name, n]) for n in LABELS) + " |")
    missed = [f"{r['strategy']} ({r['labels']} labels)" for r in results["choosing"] if r["seconds"] > SECONDS_GOAL]
    lines += [
        "",
        f"From {ROWS:,} embeddings of width {WIDTH} to indices, median of {results['choosing'][0]['rounds']} rounds on "
        f"one thread (in brackets its CPU time) of {m['cpu']}; `near-private` asks {ROWS:,} private rows. Goal: under "
        f"{SECONDS_GOAL:g} s{', missed by ' + ', '.join(missed) if missed else ', reached by all'}.",
        "",
    ]
    for name in dict.fromkeys(row["table"] for row in results["pca"]):
        rows = [row for row in results["pca"] if row["table"] == name]
        methods = list(dict.fromkeys(row["method"] for row in rows))
        lines += [
            f"| epsilon: {name}, {rows[0]['rows']} rows of {rows[0]['columns']}, {rows[0]['components']} directions | "
            + " | ".join(f"{method} {next(r['version'] for r in rows if r['method'] == method)}" for method in methods)
            + " |",
            "| --- |" + " --- |" * len(methods),
        ]
        for epsilon in EPSILONS:
            cells = [row for row in rows if row["epsilon"] == epsilon]
            lines.append(f"| {epsilon:g} | " + " | ".join(map(cell, cells)) + " |")
        lines.append("")
    lines.append(
        f"The share of the leading directions that the private ones capture, mean ± standard deviation "
        f"over {SEEDS} fits, and in brackets the share of their variance. Both libraries get the same rows, of norm at "
        f"most 1, and centre nothing; Sfumato's promise is for replace-one neighbours at delta = {DELTA:g}, "
        "diffprivlib's has no delta."
    )
    return "\n".join(lines)


def spent(row: Row) -> str:
    return f"{row['seconds']:.2f} [{row['cpu_seconds']:.2f}]"


def cell(row: Row) -> str:
    if "error" in row:
        return row["error"]
    return f"{row['captured']:.3f} ± {row['captured_spread']:.3f} [{row['variance']:.3f}]"


def console(results: dict[str, Any]) -> None:
    table = Table(title=f"Choosing from {ROWS} embeddings (goal: {SECONDS_GOAL:g} s)")
    for column in ("strategy", "labels", "seconds", "fastest", "CPU"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for row in results["choosing"]:
        cells = [f"{row[key]:.2f}" for key in ("seconds", "fastest_seconds", "cpu_seconds")]
        table.add_row(row["strategy"], str(row["labels"]), *cells)
    Console().print(table)
    for row in results["pca"]:
        print(f"{row['table']}, epsilon {row['epsilon']:g}, {row['method']}: {cell(row)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--diffprivlib", metavar="PYTHON", help="the interpreter of an environment with diffprivlib")
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    known = strategies()
    chosen = list(known) if options.strategies is None else names(options.strategies, known)
    torch.set_num_threads(THREADS)
    threadpool_limits(THREADS)  # of scikit-learn's k-means
    print("choosing", file=sys.stderr)
    results: dict[str, Any] = {
        "machine": machine() | {"threads": THREADS, "load": round(os.getloadavg()[0], 1)},
        "choosing": choose(chosen, options.rounds),
    }
    results["pca"] = compare(options.diffprivlib)
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        console(results)


if __name__ == "__main__":
    main()
