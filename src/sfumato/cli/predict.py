"""`sfumato predict`: the model of a run, applied to a file of rows."""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.facts import tell
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.cli.predict_rows import Found
    from sfumato.cli.trained import Trained

_STDOUT = Path("-")
_HEADERS = {f"{of},prediction{more}" for of in ("row", "file") for more in ("", ",probability")}  # of such a file


def predict(
    run: Annotated[Path, typer.Argument(help="The folder that sfumato train wrote.")],
    data: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows, in a format that sfumato train reads; labels may be missing.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The CSV file to write; - prints it instead.")] = Path(
        "predictions.csv"
    ),
    score: Annotated[
        bool, typer.Option("--score", help="Compare with the labels in FILE: accuracy and loss, told without noise.")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of the weights.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse words that \\[data.categories] did not declare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Apply the model of a run to the rows of a file: each row's label with its probability, or its number.

    What predictions for other people tell of the private rows is covered by
    the privacy statement, at no further cost. The rows of FILE are not: a
    prediction for a private row is made of that row itself, and to be kept
    as private as the row.
    """
    _check_out(out)

    from sfumato.cli.predict_rows import holds_private, read_rows
    from sfumato.cli.trained import load

    model = load(run, ema=ema)
    private = holds_private(data, model.private)
    if private and score:  # before a label is read
        raise InvalidArgument(
            f"data={str(data)!r} holds the private rows of this run, whose score would be told without noise: score "
            "rows of other people."
        )
    found = read_rows(data, model.preprocessing, labels=score, private=private)
    if strict and found.undeclared:
        column, count = next(iter(found.undeclared.items()))
        words = "words" if private else f"{count} words"
        raise InvalidArgument(
            f"data={str(data)!r} has {words} in column {column!r} that the training did not declare: leave --strict "
            "out to take them as any other word, as it did."
        )
    outputs = model.scores(found.features)
    if bad := (~outputs.isfinite().all(1)).nonzero().flatten().tolist():
        which = "a row" if private else f"row {bad[0] + 1}"
        raise InvalidArgument(
            f"data={str(data)!r}: the model has no finite output for {which}: look for a cell that is nan, or for a "
            "training that diverged."
        )
    predictions = list(_predictions(model, outputs, found))
    facts: dict[str, Any] = {
        "run": str(run),
        "data": str(data),
        "array": found.array,
        "rows": None if private else len(predictions),  # counts of private rows would be told without noise
        "predicted": None if private else _summary(model, predictions),
        **(_score(model, outputs, found, data) if score else {}),
        "undeclared_words": None if private else found.undeclared or None,
        "epsilon": model.run.statement.get("epsilon"),
        "delta": model.run.statement.get("delta"),
        "private": model.run.statement.get("private"),
        "out": None if out == _STDOUT else str(out),
        "note": "These are the private rows: keep their predictions as private as they are." if private else None,
    }
    if out != _STDOUT:
        with out.open("w", newline="", encoding="utf-8") as file:
            _write(file, predictions)
    elif as_json:
        facts["predictions"] = predictions
    else:
        _print(predictions)
    tell(facts, f"Predicted by {run}", as_json=as_json, aside=out == _STDOUT)


def _check_out(out: Path) -> None:
    """Before anything is computed: there is a place for it, and no other file is lost."""
    if out == _STDOUT:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidArgument(f"--out={str(out)!r} must name a file in a folder that exists.")
    if out.is_file() and out.stat().st_size:  # a pipe is no such file: to read from it would take forever
        with out.open(encoding="utf-8", errors="replace") as file:
            if file.readline(100).rstrip("\r\n") not in _HEADERS:
                raise InvalidArgument(f"--out={str(out)!r} holds something else than predictions: name another file.")


def _predictions(model: Trained, outputs: Tensor, found: Found) -> Iterable[dict[str, Any]]:
    import torch

    labels = model.labels(outputs)
    # Of a float32, no digits that say nothing.
    said = labels.tolist() if model.classifies else [float(str(number)) for number in labels]
    chances = torch.softmax(outputs.double(), 1).amax(1).tolist() if model.classifies else None
    for k, label in enumerate(said):
        name: dict[str, Any] = {"row": k + 1} if found.files is None else {"file": found.files[k]}
        probability = {} if chances is None else {"probability": round(chances[k], 6)}
        yield {**name, "prediction": label, **probability}


def _summary(model: Trained, predictions: list[dict[str, Any]]) -> dict[str, Any]:
    said = [line["prediction"] for line in predictions]
    if model.classifies:
        return {str(label): count for label, count in sorted(Counter(said).items())}
    return {"lowest": min(said), "mean": sum(said) / len(said), "highest": max(said)}


def _score(model: Trained, outputs: Tensor, found: Found, data: Path) -> dict[str, float]:
    """By the training's own losses, on outputs that are there already."""
    import torch

    from sfumato.objective import cross_entropy, squared_error

    assert found.labels is not None
    labels = torch.from_numpy(found.labels)
    same = torch.nn.Identity()
    if not model.classifies:
        if not bool(labels.isfinite().all()):
            raise InvalidArgument(f"data={str(data)!r} has labels that are not finite: remove their rows.")
        return {"loss": float(squared_error(same, (outputs, labels.float())).mean())}
    classes = outputs.shape[1]
    if not bool(((labels == labels.floor()) & (labels >= 0) & (labels < classes)).all()):
        raise InvalidArgument(
            f"data={str(data)!r} has labels other than the whole numbers from 0 to {classes - 1}, which the model's "
            "classes have: renumber them, or leave the score out."
        )
    hits = (outputs.argmax(1) == labels).double()
    return {"accuracy": float(hits.mean()), "loss": float(cross_entropy(same, (outputs, labels.long())).mean())}


def _print(predictions: list[dict[str, Any]]) -> None:
    try:
        _write(sys.stdout, predictions)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; what Python still holds for it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(file: Any, predictions: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(predictions[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(predictions)
