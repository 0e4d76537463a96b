"""One PPSGD fit on adult: how long it takes beside the same loop in Opacus, and how many steps its accounting allows.

    SFUMATO_DATA=... python -m benchmarks.erm --out benchmarks/results/erm.json   # a minute or two on one core
    python -m benchmarks.erm --methods sfumato-planned,opacus --json
    python -m benchmarks.erm --table                                              # Markdown from the stored results

All methods take 500 steps of 260 rows in the mean, on 26,000 private rows of 123 columns (adult, in the a9a coding, or
made-up rows of its shape where it is not there), on one thread, and take turns in one process. A fit of Sfumato is all
of `fit`: checks, coordinates, sampling, noise, the ledger and its statement; calibration is cached, as for any second
fit, and what it takes the first time is told apart. Opacus is given its noise, and computes epsilon once, at the end.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.engine import add_output_options, machine, names, write_json

RESULTS = Path(__file__).parent / "results" / "erm.json"
ROWS, PUBLIC, COLUMNS = 26_000, 26, 123
STEPS, BATCH = 500, 260
EPSILON, DELTA = 0.5, 1e-6
GROWTH, RATIO = 0.3, 10.0  # alpha and phi of paper 001
SECONDS_GOAL, SPEED_GOAL, STEPS_GOAL = 0.5, 5.0, 4.0

Row = dict[str, Any]
Rows = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Rows, Rows, str]:
    """Private rows, public rows, and what they are."""
    from sfumato.data.tabular import adult_a
    from sfumato.errors import InvalidArgument

    try:
        table = adult_a()
        X, y, name = table.X, table.y, "adult"
    except InvalidArgument:
        rng = np.random.default_rng(0)
        X = (rng.random((ROWS + PUBLIC, COLUMNS)) < 14 / COLUMNS).astype(np.float64)
        y, name = np.where(X[:, :20].sum(1) > X[:, 20:40].sum(1), 1, -1), "made-up rows of adult's shape"
    order = np.random.default_rng(0).permutation(len(y))[: ROWS + PUBLIC]
    X = X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    private, public = order[PUBLIC:], order[:PUBLIC]
    return (X[private], y[private]), (X[public], y[public]), name


# ------------------------------------------------------------------------------------------------ fits


def sfumato(private: Rows, public: Rows, **options: Any) -> int:
    from sfumato.erm import Hinge, PPSGDClassifier

    model = PPSGDClassifier(
        epsilon=EPSILON, delta=DELTA, loss=Hinge(), max_iter=STEPS, batch_size=BATCH, classes=(-1, 1), **options
    )
    return int(model.fit(*private, *public).n_iter_)


def planned(private: Rows, public: Rows) -> int:
    """As it is by default: coordinates and first weights from public rows, and planned noise."""
    return sfumato(private, public)


def adaptive(private: Rows, public: Rows) -> int:
    """The paper's rules: noise and clip norm follow the public gradient, under a filter."""
    return sfumato(private, public, growth=GROWTH, shrink=GROWTH, growth_ratio=RATIO, head_start=False)


def on_disk(private: Rows, public: Rows) -> int:
    """By default, with a ledger that outlasts a crash."""
    with tempfile.TemporaryDirectory() as folder:
        return sfumato(private, public, ledger=Path(folder) / "ledger.db")


def opacus(private: Rows, public: Rows) -> int:
    """Lines 2 to 24 of Algorithm 1: noisy steps, and after each the public gradient and the two rules."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    X, y, X_public, y_public = (torch.from_numpy(np.asarray(v)).float() for v in (*private, *public))
    module = nn.Linear(COLUMNS, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    rate, noise, clip = 2.0, 3.61, 1.0  # the noise of 500 such steps at this budget
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(X, y), batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=clip,
    )

    def hinge(scores: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets * scores[:, 0]).clamp_min(0).mean()

    parameters, steps = list(module.parameters()), 0
    dimension = sum(p.numel() for p in parameters)
    while steps < STEPS:
        for rows, targets in loader:
            optimizer.zero_grad()
            hinge(model(rows), targets).backward()
            optimizer.step()
            steps += 1
            scores = torch.nn.functional.linear(X_public, *parameters)
            gradients = torch.autograd.grad(hinge(scores, y_public), parameters)
            length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            if RATIO * length < math.sqrt(dimension) * optimizer.noise_multiplier * clip / BATCH:
                optimizer.noise_multiplier = max(noise / 2, optimizer.noise_multiplier / math.sqrt(1 + GROWTH))
            if steps == STEPS:
                break
    engine.get_epsilon(DELTA)
    return steps


METHODS: dict[str, Callable[[Rows, Rows], int]] = {
    "sfumato-planned": planned,
    "sfumato-adaptive": adaptive,
    "sfumato-on-disk": on_disk,
    "opacus": opacus,
}


def measure(methods: list[str], rounds: int) -> list[Row]:
    private, public, name = load()
    turns: dict[str, list[tuple[float, float]]] = {m: [] for m in methods}
    first, steps, errors = {}, {}, {}
    for number in range(rounds + 1):
        for method in methods:
            if method in errors:
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                steps[method] = METHODS[method](private, public)
            except ImportError as error:
                errors[method] = str(error)
                continue
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if number == 0:
                first[method] = spent[0]
            else:
                turns[method].append(spent)
    return [
        {"method": m, "rows": name, "error": errors[m]}
        if m in errors
        else {
            "method": m,
            "rows": name,
            "seconds": round(float(np.median([wall for wall, _ in turns[m]])), 3),
            "fastest_seconds": round(min(wall for wall, _ in turns[m]), 3),
            "cpu_seconds": round(float(np.median([cpu for _, cpu in turns[m]])), 3),
            "fastest_cpu_seconds": round(min(cpu for _, cpu in turns[m]), 3),
            "first_seconds": round(first[m], 3),
            "steps": steps[m],
            "rounds": rounds,
        }
        for m in methods
    ]


# ------------------------------------------------------------------------------------------------ accounting


def accounting() -> list[Row]:
    """At the noise and batch of the paper's 500 steps, how many steps do a filter and a plan allow?"""
    from sfumato.data.samplers import FixedSize, Poisson
    from sfumato.erm.budgets import filtered_noise
    from sfumato.privacy import accounting as costs
    from sfumato.privacy import calibration, tcdp
    from sfumato.privacy.budget import Budget
    from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

    rows = []
    for epsilon in (0.1, 0.5):
        budget, total = Budget(epsilon, DELTA), tcdp.budget(epsilon, DELTA)
        noise = tcdp.step_noise(total.rho / STEPS, BATCH / ROWS, total.omega)
        for sampler in (FixedSize(size=ROWS, batch_size=BATCH), Poisson(size=ROWS, batch_size=BATCH)):
            # The filter is fixed before the run: the one made for the steps that this noise turns out to allow.
            allowed = 4 * STEPS
            for _ in range(3):
                (order,) = filtered_noise(budget, sampler, allowed, Adjacency.REPLACE_ONE)[1].orders
                once = Mechanism(question="gradient", noise=Gaussian(noise), sampler=sampler)
                divergence = float(costs.renyi([once], [order], Adjacency.REPLACE_ONE)[0])
                allowed = math.floor(costs.renyi_budget(epsilon, DELTA, order) / divergence)
            row = {"epsilon": epsilon, "sampler": type(sampler).__name__, "noise": round(noise, 2), "tcdp": STEPS}
            row |= {"filter": allowed, "filter_ratio": round(allowed / STEPS, 1)}
            if isinstance(sampler, Poisson):  # of batches of a fixed size no tight composition is known
                plan = calibration.steps(
                    epsilon=epsilon,
                    delta=DELTA,
                    noise_multiplier=noise,
                    sampler=sampler,
                    adjacency=Adjacency.REPLACE_ONE,
                )
                row |= {"plan": plan, "plan_ratio": round(plan / STEPS, 1)}
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------ what it says


def summary(fits: list[Row]) -> Row:
    """The two goals: seconds of a fit, and how many times faster than Opacus it is."""
    known = {row["method"]: row for row in fits if "error" not in row}
    result: Row = {}
    for method in known:
        if method != "opacus" and "opacus" in known:
            result[f"{method}: times faster than opacus"] = round(
                known["opacus"]["cpu_seconds"] / known[method]["cpu_seconds"], 1
            )
    return result


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| fit | seconds | CPU seconds | fastest | the first | times faster than Opacus |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["fits"]:
        if "error" in row:
            lines.append(f"| {row['method']} | {row['error']} | | | | |")
            continue
        times = results["summary"].get(f"{row['method']}: times faster than opacus", "")
        cells = [f"{row[key]:.2f}" for key in ("seconds", "cpu_seconds", "fastest_cpu_seconds", "first_seconds")]
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {times} |")
    lines += [
        "",
        "| epsilon | batches | noise | steps by tCDP | by a filter | by a plan |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["accounting"]:
        plan = f"{row['plan']} ({row['plan_ratio']}x)" if "plan" in row else "-"
        lines.append(
            f"| {row['epsilon']:g} | {row['sampler']} | {row['noise']} | {row['tcdp']} | {row['filter']} "
            f"({row['filter_ratio']}x) | {plan} |"
        )
    m = results["machine"]
    lines += ["", f"{results['fits'][0]['rows']}; one thread of {m['cpu']}, torch {m['torch']}, Opacus {m['opacus']}."]
    return "\n".join(lines)


def console(results: dict[str, Any]) -> None:
    table = Table(title=f"One PPSGD fit: {ROWS} rows, {STEPS} steps of {BATCH} (goal: {SECONDS_GOAL} s)")
    for column in ("method", "seconds", "CPU", "fastest CPU", "first"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in results["fits"]:
        if "error" in row:
            table.add_row(row["method"], row["error"])
            continue
        cells = [f"{row[key]:.3f}" for key in ("seconds", "cpu_seconds", "fastest_cpu_seconds", "first_seconds")]
        table.add_row(row["method"], *cells)
    Console().print(table)
    for text, value in results["summary"].items():
        print(f"{text}: {value} (goal: {SPEED_GOAL:g})")
    for row in results["accounting"]:
        print(
            f"epsilon {row['epsilon']:g}, {row['sampler']}: {row['filter_ratio']} times the steps (goal {STEPS_GOAL:g})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=7)
    add_output_options(parser, RESULTS)
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    methods = names(options.methods, METHODS)
    warnings.simplefilter("ignore")  # Opacus's, about secure mode and backward hooks
    torch.set_num_threads(1)
    print("fits", file=sys.stderr)
    fits = measure(methods, options.rounds)
    print("accounting", file=sys.stderr)
    results = {
        "machine": machine() | {"threads": 1, "load": round(os.getloadavg()[0], 1)},
        "setting": {"rows": ROWS, "columns": COLUMNS, "steps": STEPS, "batch": BATCH, "epsilon": EPSILON},
        "fits": fits,
        "summary": summary(fits),
        "accounting": accounting(),
    }
    if options.out:
        write_json(options.out, results)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        console(results)


if __name__ == "__main__":
    main()
