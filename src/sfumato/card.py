"""A model card: what a person who is handed the weights has to know, as Markdown. Public quantities only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.privacy.budget import at_most
from sfumato.run import Run

_HIDDEN = ("step", "epsilon")


def card(run: Run, *, data: Mapping[str, str] | None = None, model: str | None = None) -> str:
    """The README.md of a run's folder; `data` says which public rows took part, `model` what kind of model it is.

    >>> text = card(Run(weights={}, config={"method": "dp_sgd"}, history=[{"step": 1, "test_accuracy": 0.912}]))
    >>> print(next(line for line in text.splitlines() if "accuracy" in line))
    | test accuracy | 0.912 |
    """
    promise = run.statement
    parts = ["---\nlibrary_name: pytorch\ntags:\n- differential-privacy\n- sfumato\n---", f"# {_title(promise)}"]
    parts += [f"> **Warning.** {text}" for text in promise.get("warnings", ())]
    if promise:
        parts += ["## Privacy", _privacy(promise)]
    parts += ["## What is public", _public(promise, data or {})]
    if run.metrics:
        before = {f"{k}, before the first private answer": v for k, v in run.before.items() if k.startswith("test_")}
        parts += ["## How good it is", _table({k: v for k, v in (run.metrics | before).items() if k not in _HIDDEN})]
    parts += ["## How it was trained", _table({**({} if model is None else {"model": model}), **_training(run)})]
    parts += ["## How to use it", '```python\nimport sfumato\n\nmodel = sfumato.load(".")  # this folder\n```']
    parts.append(
        "`model.predict(...)` takes a file of the form that it was trained on, or an array of rows; `model.module` is "
        "the torch module. From the shell: `sfumato predict . people.csv`. What it is applied to is not protected by "
        "the statement: a prediction for a private row is to be kept as private as the row."
    )
    if run.statement_text:
        parts += ["## The whole privacy statement", f"```text\n{run.statement_text.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _title(promise: Mapping[str, Any]) -> str:
    if not promise:
        return "A model that was trained without private data"
    kind = "privately" if promise.get("private") else "but NOT privately"
    return f"A model trained {kind} on {promise['dataset']}"


def _privacy(promise: Mapping[str, Any]) -> str:
    budget = promise["budget"]
    facts = {
        "epsilon": at_most(promise["epsilon"]),
        "delta": promise["delta"],
        "whom it protects": f"one {promise['unit']}",
        "neighbouring datasets": promise["adjacency"],
        "budget of the dataset": f"epsilon {budget['epsilon']:g}, delta {budget['delta']:g}",
        "accountant": promise["accountant"],
    }
    return _table(facts)


def _public(promise: Mapping[str, Any], data: Mapping[str, str]) -> str:
    lines = [f"- {name}: `{value}`" for name, value in data.items()]
    lines.append("- declared, not counted: size, classes, columns, categories and ranges")
    if promise:
        lines.append(f"- private: the rows of `{promise['dataset']}`; the weights know them by noisy answers only")
    return "\n".join(lines)


def _training(run: Run) -> dict[str, Any]:
    wanted = ("method", "parameters", "noise_multiplier", "clip", "optimizer", "chosen")
    found = {name: run.config[name] for name in wanted if run.config.get(name) is not None}
    return {**found, "steps": run.steps_taken}  # and not how long they took, which tells how many rows there were


def _table(facts: Mapping[str, Any]) -> str:
    shown = {name.replace("_", " "): f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in facts.items()}
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in shown.items())])
