"""DP-SGD on MNIST at the same (epsilon, delta): Opacus beside Sfumato, several seeds each.

    SFUMATO_DATA=... python -m benchmarks.mnist_opacus [--seeds 3] [--json] [--out FILE]

Same network, initial weights, private examples, steps, learning rate, clip norm and expected batch size; each library
calibrates its own noise and draws its own Poisson batches. Sizes are chosen to finish in a few minutes on two cores, so
accuracies are below what MNIST allows.
"""

import argparse
import io
import json
import lzma
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.engine import machine

EPSILON, DELTA = 2.0, 1e-5
PRIVATE = 20_000  # the first training images
BATCH, EPOCHS = 500, 5  # 200 steps; BATCH divides PRIVATE, without which Opacus would run at another rate than asked
CLIP, RATE = 1.0, 1.0

Run = dict[str, Any]


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Private images and labels, test images and labels."""
    path = Path(os.environ.get("SFUMATO_DATA", "")) / "images" / "mnist.npz.xz"
    if not path.is_file():
        raise SystemExit("MNIST is not here: set SFUMATO_DATA to a folder that holds images/mnist.npz.xz.")
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))

    def images(x: np.ndarray) -> Tensor:
        return (torch.from_numpy(x).float().div(255) - 0.1307).div(0.3081).unsqueeze(1)

    x, y, x_test, y_test = (arrays[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    labels = torch.from_numpy(y[:PRIVATE]).long()
    return images(x[:PRIVATE]), labels, images(x_test), torch.from_numpy(y_test).long()


def network(seed: int) -> nn.Module:
    """The tanh CNN of the DP-SGD literature on MNIST (Papernot et al. 2021), 26,010 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    module.eval()
    return 100 * float(torch.cat([module(part).argmax(1) for part in x.split(1000)]).eq(y).float().mean())


def opacus(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = network(seed)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
    )
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(images), labels).backward()
            optimizer.step()
    assert engine.get_epsilon(DELTA) <= EPSILON
    return model


def sfumato(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    from functools import partial

    from sfumato import Budget, Objective, Private, cross_entropy, train
    from sfumato.algorithms.dp_sgd import dp_sgd

    model = network(seed)
    objective = Objective(model, cross_entropy)
    private = Private((x, y), name="mnist", size=PRIVATE, objective=objective, budget=Budget(EPSILON, DELTA))
    train(
        model,
        private=private,
        method=partial(dp_sgd, clip=CLIP),
        steps=EPOCHS * PRIVATE // BATCH,
        batch_size=BATCH,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        progress=False,
    )
    return model


LIBRARIES = {"opacus": opacus, "sfumato": sfumato}


def compare(libraries: list[str], seeds: int) -> list[Run]:
    x, y, x_test, y_test = load()
    runs: list[Run] = []
    for seed in range(seeds):  # library inside seed: a busy machine slows both
        for library in libraries:
            start = time.perf_counter()
            try:
                model = LIBRARIES[library](seed, x, y)
            except ImportError as error:
                runs.append({"library": library, "seed": seed, "error": str(error)})
                continue
            seconds = round(time.perf_counter() - start, 1)
            score = round(accuracy(model, x_test, y_test), 2)
            runs.append({"library": library, "seed": seed, "accuracy": score, "seconds": seconds})
    return runs


def summary(runs: list[Run]) -> list[Run]:
    rows = []
    for library in dict.fromkeys(run["library"] for run in runs):
        mine = [run for run in runs if run["library"] == library]
        if errors := [run["error"] for run in mine if "error" in run]:
            rows.append({"library": library, "error": errors[0]})
            continue
        scores = [run["accuracy"] for run in mine]
        error = float(np.std(scores, ddof=1) / len(scores) ** 0.5) if len(scores) > 1 else None
        rows.append(
            {
                "library": library,
                "accuracy": round(float(np.mean(scores)), 2),
                "standard_error": error if error is None else round(error, 2),
                "seconds": round(float(np.mean([run["seconds"] for run in mine])), 1),
                "seeds": len(mine),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--out", type=Path, help="also write summary, runs, setting and machine to this JSON file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus's, about secure mode and backward hooks
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    runs = compare(options.libraries.split(","), options.seeds)
    rows = summary(runs)
    setting = {"epsilon": EPSILON, "delta": DELTA, "private": PRIVATE, "batch": BATCH, "epochs": EPOCHS, "clip": CLIP}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(), "setting": setting, "rows": rows, "runs": runs}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"MNIST, {PRIVATE} private images, ({EPSILON:g}, {DELTA:g})-DP, test accuracy")
    for column in ("library", "accuracy", "seconds per run", "seeds"):
        table.add_column(column, justify="left" if column == "library" else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["library"], row["error"])
        else:
            spread = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2f}"
            table.add_row(row["library"], f"{row['accuracy']:.2f}{spread}", f"{row['seconds']:.0f}", str(row["seeds"]))
    Console().print(table)


if __name__ == "__main__":
    main()
