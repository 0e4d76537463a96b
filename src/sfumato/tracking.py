"""A finished training, written down for TensorBoard or MLflow: what a `Run` holds, which is public.

There is no private loss to plot: none was ever computed. What a run took in seconds stays out, too: it depends on how
many private rows were drawn. Written after the training, the trackers' own clocks do not tell it either.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from sfumato.errors import InvalidArgument
from sfumato.run import Run

_PROMISED = ("private", "dataset", "epsilon", "delta", "unit", "adjacency")
_COUNTED = ("steps_taken", "steps_lost", "steps_short")


def series(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What changed during the training, as (step, value) by name: epsilon, and metrics on public and test rows.

    >>> found = series(Run(weights={}, config={}, history=[{"step": 5, "epsilon": 0.7, "test_accuracy": 0.9}]))
    >>> found["test_accuracy"]
    [(5, 0.9)]
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for row in run.history:
        for name, value in row.items():
            if name != "step":
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    for step, *cosines in run.alignment:
        for name, value in zip(("cosine", "cosine_lowest", "cosine_highest"), cosines, strict=True):
            found.setdefault(f"alignment/{name}", []).append((int(step), float(value)))
    return found


def settings(run: Run) -> dict[str, Any]:
    """What did not change, flat: the configuration, the numbers of the privacy statement, and the steps.

    `privacy.epsilon` is that of everything asked of the dataset so far; `series` has that of this training alone.

    >>> settings(Run(weights={}, config={"method": "dp_sgd", "method_options": {"clip": 1.0}}, steps_taken=5))
    {'method': 'dp_sgd', 'method_options.clip': 1.0, 'steps_taken': 5, 'steps_lost': 0, 'steps_short': 0}
    """
    promised = {name: run.statement[name] for name in _PROMISED if name in run.statement}
    counted = {name: getattr(run, name) for name in _COUNTED}
    return {**_flat(run.config), **_flat({"privacy": promised}), **counted}


def to_tensorboard(run: Run, folder: str | os.PathLike[str]) -> Path:
    """Write scalars, the configuration and the privacy statement for `tensorboard --logdir`; needs `tensorboard`."""
    writers = _needed("torch.utils.tensorboard", package="tensorboard")
    with writers.SummaryWriter(log_dir=os.fspath(folder)) as writer:
        for name, points in series(run).items():
            for step, value in points:
                writer.add_scalar(name, value, step)
        # Text is shown as Markdown: four spaces keep lines as they are.
        writer.add_text("privacy statement", _indented(run.statement_text), run.steps_taken)
        writer.add_text("settings", _indented(json.dumps(settings(run), indent=2, default=str)), run.steps_taken)
    return Path(folder)


def to_mlflow(run: Run, *, name: str | None = None) -> str:
    """Write metrics, parameters and the privacy statement into MLflow's active run, or a new one; returns its id.

    Where they go is MLflow's own setting: `mlflow.set_tracking_uri`, `mlflow.set_experiment`. Needs `mlflow` or
    `mlflow-skinny`. `name`: of the new run, which is ended here; an active one is left open.
    """
    mlflow = _needed("mlflow", package="mlflow")
    with ExitStack() as ended:
        active = mlflow.active_run()
        if active is None:
            active = ended.enter_context(mlflow.start_run(run_name=name))
        elif name is not None:
            raise InvalidArgument(f"name={name!r} is for a new run, and MLflow has an active one: leave it out.")
        mlflow.log_params(settings(run))
        for label, points in series(run).items():
            for step, value in points:
                mlflow.log_metric(label, value, step=step)
        mlflow.log_text(run.statement_text, "privacy_statement.txt")
        mlflow.log_dict(dict(run.statement), "privacy_statement.json")
        return str(active.info.run_id)


def _needed(module: str, *, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InvalidArgument(f"{package} is not installed: install it with `pip install {package}`.") from None


def _flat(options: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
