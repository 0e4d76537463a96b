"""The commented config that `sfumato init` writes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from sfumato.cli.init_look import Seen
from sfumato.cli.sections import CNN_SIDE


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a person said, or let be."""

    private: str
    public: str
    test: str | None
    name: str
    size: int
    epsilon: float
    out: str
    ledger: str = "ledger.db"


def config_text(seen: Seen, wishes: Wishes) -> str:
    """A file that `sfumato train` takes as it is."""
    return "\n".join([*_data(seen, wishes), *_model(seen), *_privacy(wishes), *_training(seen, wishes)])


def delta_of(size: int) -> float:
    """The power of ten below 1/size, and one below that if it is near.

    >>> delta_of(30000), delta_of(1000)
    (1e-05, 0.0001)
    """
    return float(f"1e-{math.floor(math.log10(size)) + 1}")


def batch_of(size: int) -> int:
    """The power of two nearest to a sixteenth of the rows; of few rows up to half, which costs little time.

    >>> batch_of(31500), batch_of(1300), batch_of(100)
    (2048, 512, 64)
    """
    return min(size, 1 << round(math.log2(max(size / 16, min(512, size / 2)))))


def _data(seen: Seen, wishes: Wishes) -> list[str]:
    lines = [
        "# What sfumato init made of the public rows. Nothing here was learned from a private row; keep it so.",
        "# Every key: docs/config.md. See what it will cost: sfumato train THIS_FILE --dry-run",
        "",
        "[data]",
        _line("private", wishes.private),
        _line("public", wishes.public, f"{seen.rows} rows that are no secret; those people are not protected"),
    ]
    if wishes.test is not None:
        lines.append(_line("test", wishes.test, "rows of yet other people, to measure on"))
    else:
        lines.append('# test = "test.csv"          # rows of yet other people, to measure on')
    lines += [
        _line("name", wishes.name, "what the ledger calls the private rows: always the same for the same rows"),
        _line("size", wishes.size, "declared by you, not counted"),
    ]
    if seen.columns is not None:
        lines.append(_line("columns", list(seen.columns), "the files have no header row"))
    if seen.label is not None:
        lines.append(_line("label", seen.label, "what is predicted"))
    if seen.classes is not None:
        lines.append(_line("classes", list(seen.classes), "all there can be, in the order of the outputs"))
    if seen.missing:
        lines.append(_line("missing", list(seen.missing), "cells that mean: not known"))
    if seen.ignore:
        lines.append(_line("ignore", list(seen.ignore), "columns that are left out"))
    if seen.range is not None:
        found = "" if seen.eight_bit else ": as in public rows, so widen it if private values may lie outside"
        lines.append(_line("range", list(seen.range), f"mapped to 0..1, and cut there{found}"))
    if seen.ranges:
        lines += ["", "# Lowest and highest of public rows: widen them to what you know of the column. Mapped to 0..1."]
        lines += ["[data.ranges]", *(_line(name, list(pair)) for name, pair in seen.ranges.items())]
    if seen.categories:
        lines += ["", "# Words of public rows: add those you know of. Any other word has a slot of its own."]
        lines += ["[data.categories]", *(_line(name, list(words)) for name, words in seen.categories.items())]
    return lines


def _model(seen: Seen) -> list[str]:
    image = seen.image
    if image is not None and min(image[1:]) >= CNN_SIDE:
        kind, others = "cnn", 'or "mlp", "module:function", ...'
    elif image is not None:
        kind, others = "mlp", f'or "module:function", ...; "cnn" needs {CNN_SIDE} x {CNN_SIDE} pixels at least'
    else:
        kind, others = "mlp" if len(seen.shape) > 1 else "linear", 'or "mlp", "module:function", ...'
    lines = ["", "[model]", _line("kind", kind, others)]
    lines.append(_line("outputs", seen.outputs, "a number" if seen.regression else "classes"))
    return lines if image is None else [*lines, _line("shape", list(image), "channels, height, width")]


def _privacy(wishes: Wishes) -> list[str]:
    return [
        "",
        "[privacy]",
        _line("epsilon", wishes.epsilon, "what this training may cost"),
        _line("delta", delta_of(wishes.size), "below 1/size"),
        _line("ledger", wishes.ledger, "remembers what was spent: keep it"),
        f"# {_line('budget', 4 * wishes.epsilon, 'of all that is ever asked of these rows; fixed at first use')}",
    ]


def _training(seen: Seen, wishes: Wishes) -> list[str]:
    lines = [
        "",
        "[training]",
        _line("out", wishes.out, "the folder for weights, metrics, statement and model card"),
        _line("method", "shrunk-origin", "uses the public rows as far as they help; dp-sgd does without them"),
        _line("steps", 100),
        _line("batch_size", batch_of(wishes.size), "expected rows per step: larger is more precise, and slower"),
        _line("clip", 1.0, "the longest gradient that one row contributes"),
        _line("learning_rate", 0.5),
        _line("momentum", 0.9),
        _line("ema", True, "also keep an average of the weights, which is free"),
    ]
    if seen.regression:
        lines.append(_line("loss", "squared-error", "scale the numbers to predict to about 0..1 yourself"))
    lines += ["", "[method]", _line("public_batch", min(640, seen.rows))]
    lines += ["", "# Plain training on the public rows first, which costs no privacy.", "[warmup]", _line("steps", 100)]
    return [*lines, _line("batch_size", min(100, seen.rows)), *_synthesis(seen), ""]


def _synthesis(seen: Seen) -> list[str]:
    """To be taken up by who wants it: it takes its time, and public rows of some worth."""
    image = seen.image is not None
    if len(seen.shape) > 1 and (seen.regression or seen.image is None or seen.image[0] not in (1, 3)):
        return []
    lines = ["", "# More public rows, made of the public ones before the training: remove the signs. Costs no privacy."]
    if image:
        lines += ["# [synthesis.generator]", f"# {_line('size', 'digits', 'the smallest; cifar is for a GPU')}"]
        lines.append(f"# {_line('images', 80000, 'to train on, each as often as it is seen')}")
    return [*lines, "# [synthesis.sample]", f"# {_line('n', 2 * seen.rows, 'how many rows to make')}"]


def _line(key: str, value: Any, why: str = "") -> str:
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
    text = f"{name} = {_toml(value)}"
    return f"{text:<27}  # {why}" if why else text


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{int(value)}.0" if value == int(value) and abs(value) < 1e15 else repr(value)
    return json.dumps(value)
