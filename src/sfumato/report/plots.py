"""The plots of a report, as data. Each is left out where no run has what it shows."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.report.contents import Training
from sfumato.report.figures import Axis, Figure, Series, Value, finite
from sfumato.report.papers import PaperPoint

_METRICS = {  # what a run is judged by: the first that it has
    "test_accuracy": ("Accuracy on test rows", True),
    "public_accuracy": ("Accuracy on public rows, which may have been trained on", True),
    "test_loss": ("Loss on test rows", False),
    "public_loss": ("Loss on public rows, which may have been trained on", False),
}
_BINS = 60  # of steps, where there are more


def plots(trainings: Sequence[Training], papers: Sequence[PaperPoint]) -> list[Figure]:
    """In the order of the page."""
    found = [*_epsilon(trainings), *_metrics(trainings, papers), *_ensembles(trainings)]
    return [*found, *_alignment(trainings), *_geometry(trainings)]


def headline(training: Training) -> str | None:
    """By what a run is judged."""
    return next((metric for metric in _METRICS if metric in training.last), None)


def before(training: Training) -> float | None:
    """The same before the first private answer: what public data alone gave."""
    first = training.history[0] if training.history else {}
    return first.get(headline(training) or "") if first.get("step") == 0 else None


def _epsilon(trainings: Sequence[Training]) -> list[Figure]:
    series, rows = [], []
    for k, training in enumerate(trainings):
        known = [entry for entry in training.history if "epsilon" in entry and entry["step"] > 0]
        if known:
            points = finite([(0.0, 0.0), *((entry["step"], entry["epsilon"]) for entry in known)])
            series.append(Series(name=training.name, points=points, style=k))
            rows += [(training.name, int(step), epsilon) for step, epsilon in points]
    if not series:
        return []
    return [
        Figure(
            key="epsilon",
            title="Epsilon over time",
            about="About what each training alone had cost after so many steps; the statement counts all that was ever "
            "asked of the dataset.",
            x=Axis(label="step", lowest=0.0),
            y=Axis(label="epsilon", lowest=0.0),
            series=tuple(series),
            columns=("run", "step", "epsilon"),
            rows=tuple(rows),
        )
    ]


def _metrics(trainings: Sequence[Training], papers: Sequence[PaperPoint]) -> list[Figure]:
    """A metric against epsilon, one plot for each that some run is judged by."""
    found = []
    for metric, (title, percent) in _METRICS.items():
        series: list[Series] = []
        rows: list[tuple[Value, ...]] = []
        for k, training in enumerate(trainings):
            known = [entry for entry in training.history if metric in entry and "epsilon" in entry]
            if headline(training) == metric and known:
                points = finite([(entry["epsilon"], entry[metric]) for entry in known])
                series.append(Series(name=training.name, points=points, style=k))
                rows += [(training.name, int(e["step"]), e["epsilon"], e[metric], None) for e in known]
        beside = papers if metric == "test_accuracy" else ()
        if not series and not beside:
            continue
        series += _from_papers(beside)
        rows += [(f"{p.where}: {p.row}, {p.column}", None, p.epsilon, p.ours, p.paper) for p in beside]
        also = " Grey signs are a paper's numbers: hollow as printed, filled as measured here." if beside else ""
        found.append(
            Figure(
                key=f"{metric.replace('_', '-')}-against-epsilon",
                title=f"{title}, against epsilon",
                about=f"Every evaluation of a training at what it had cost until then.{also}",
                x=Axis(label="epsilon", lowest=0.0),
                y=Axis(label=title.split(",")[0].lower(), percent=percent, lowest=None if percent else 0.0),
                series=tuple(series),
                columns=("run", "step", "epsilon", metric, *(("printed in the paper",) if beside else ())),
                rows=tuple(row if beside else row[:4] for row in rows),
            )
        )
    return found


def _from_papers(papers: Sequence[PaperPoint]) -> list[Series]:
    """One for each column of a table as printed, and one with the same sign as measured."""
    found = []
    for k, name in enumerate(dict.fromkeys(f"{p.where}: {p.column}" for p in papers)):
        own = [p for p in papers if f"{p.where}: {p.column}" == name]
        printed = sorted((p.epsilon, p.paper) for p in own if p.paper is not None)
        measured = sorted((p.epsilon, p.ours) for p in own if p.ours is not None)
        for points, how in ((printed, "as printed"), (measured, "as measured here")):
            if points:
                hollow = how == "as printed"
                label = f"{name}, {how}"
                found.append(Series(name=label, points=tuple(points), style=k, line=False, quiet=True, hollow=hollow))
    return found


_KINDS = {
    "last": "last weights",
    "ema": "moving average of the weights",
    "mean": "mean of the last weights",
    "vote": "vote of the last weights",
    "logits": "mean output of the last weights",
}


def _ensembles(trainings: Sequence[Training]) -> list[Figure]:
    able = [training for training in trainings if len(training.ensembles) > 1]
    if not able:
        return []
    series = []
    for k, (kind, name) in enumerate(_KINDS.items()):
        beside = 0.05 * k  # so that signs of nearly equal values are all seen
        points = [(t.ensembles[kind], row + beside) for row, t in enumerate(able) if kind in t.ensembles]
        if points:
            series.append(Series(name=name, points=finite(points), style=k, line=False))
    return [
        Figure(
            key="ensembles",
            title="Ensembles of iterates",
            about="Accuracy on test rows of what can be made of the weights for no privacy at all. To choose among "
            "them by test rows would flatter the choice: choose on public rows that were held out.",
            x=Axis(label="accuracy on test rows", percent=True),
            y=Axis(label="run", names=tuple(t.name for t in able)),
            series=tuple(series),
            columns=("run", "ensemble", "test_accuracy"),
            rows=tuple((t.name, _KINDS[kind], value) for t in able for kind, value in t.ensembles.items()),
        )
    ]


def _alignment(trainings: Sequence[Training]) -> list[Figure]:
    series: list[Series] = []
    rows: list[tuple[Value, ...]] = []
    for k, training in enumerate(trainings):
        if training.alignment:
            binned = _binned(training.alignment)
            points = tuple((step, middle) for step, middle, _, _ in binned)
            band = tuple((low, high) for _, _, low, high in binned)
            series.append(Series(name=training.name, points=points, band=band, style=k))
            rows += [(training.name, int(step), *values) for step, *values in training.alignment]
    if not series:
        return []
    return [
        Figure(
            key="agreement",
            title="Agreement of private and public gradients",
            about="The cosine of the angle between both, before noise, as far as noisy answers tell; the band holds "
            "it in 95 % of all cases at least. Near 1 public data shows the way, near 0 it does not. Where there are "
            "many steps, their means are drawn.",
            x=Axis(label="step", lowest=0.0),
            y=Axis(label="cosine", lowest=-1.0, highest=1.0),
            series=tuple(series),
            columns=("run", "step", "cosine", "lowest", "highest"),
            rows=tuple(rows),
        )
    ]


def _binned(entries: Sequence[tuple[float, float, float, float]]) -> list[tuple[float, ...]]:
    size = math.ceil(len(entries) / _BINS)
    parts = [entries[k : k + size] for k in range(0, len(entries), size)]
    return [tuple(map(statistics.fmean, zip(*part, strict=True))) for part in parts]


# ------------------------------------------------------------------------------------------------ signal and noise


def geometry(training: Training) -> dict[str, float] | None:
    """How long the mean gradient can be and how much noise lies on it, from what was declared: no row is looked at."""
    noise, clip = training.config.get("noise_multiplier"), clip_norm(training.config)
    batch, steps = expected_batch(training.config.get("sampler")), training.steps.get("taken")
    numbers = (noise, clip, batch)
    if not all(isinstance(v, int | float) and 0 < v < math.inf for v in numbers) or not steps:
        return None
    assert noise is not None
    assert clip is not None
    assert batch is not None
    one = noise * clip / batch  # standard deviation of the mean of a step, in every coordinate
    found = {"clip": clip, "noise_multiplier": noise, "batch": batch, "steps": float(steps)}
    found |= {"noise_one_direction": one, "noise_of_all_steps": one / math.sqrt(steps)}
    if training.parameters:
        found |= {"parameters": float(training.parameters), "noise_length": one * math.sqrt(training.parameters)}
    return found


def clip_norm(config: Mapping[str, Any]) -> float | None:
    """Of a run's config: as measured or given; of a stack of methods, the innermost one clips.

    >>> clip_norm({"method_options": {"decay_steps": 9, "method": {"name": "dp_sgd", "clip": "Clip(norm=2.0)"}}})
    2.0
    """
    options = config.get("method_options")
    while isinstance(options, Mapping) and isinstance(options.get("method"), Mapping):
        options = options["method"]
    for found in (config.get("clip"), options.get("clip") if isinstance(options, Mapping) else None):
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        if isinstance(found, str) and (norm := re.match(r"Clip\(norm=([0-9.e+-]+)", found)):
            return float(norm[1])
    return None


def expected_batch(sampler: Any) -> float | None:
    """The declared denominator of a mean: the batch, or all units where all take part."""
    if not isinstance(sampler, Mapping):
        return None
    found = sampler.get("batch_size", sampler.get("size"))
    return float(found) if isinstance(found, int | float) else None


_PARTS = {
    "clip": "the longest that the exact mean can be: the clip norm C",
    "noise_one_direction": "noise along one direction: σC/B",
    "noise_length": "length of the noise in all d directions: σC√d/B",
    "noise_of_all_steps": "noise along one direction in the mean of all T steps: σC/(B√T)",
}


def _geometry(trainings: Sequence[Training]) -> list[Figure]:
    able = [(t, facts) for t in trainings if (facts := geometry(t)) is not None]
    if not able:
        return []
    series = []
    for k, (part, name) in enumerate(_PARTS.items()):
        points = [(facts[part], float(row)) for row, (_, facts) in enumerate(able) if part in facts]
        if points:
            series.append(Series(name=name, points=finite(points), style=k, line=False))
    vague = [t.name for t, _ in able if not t.only_trained]
    also = f" For {', '.join(vague)} d counts all weights that were saved, also those not trained." if vague else ""
    columns = ("noise_multiplier", "batch", "steps", "parameters", *_PARTS)
    return [
        Figure(
            key="signal-and-noise",
            title="Signal against noise",
            about="What a step adds to the weights' gradient, from what was declared beforehand: noise multiplier σ, "
            "clip norm C, expected batch B, T steps, d trained parameters. Noise in all directions together may be "
            f"longer than the signal: what counts is the noise along the directions that matter.{also}",
            x=Axis(label="length, in units of the gradient", logarithmic=True),
            y=Axis(label="run", names=tuple(t.name for t, _ in able)),
            series=tuple(series),
            columns=("run", *(name.replace("_", " ") for name in columns)),
            rows=tuple((t.name, *(facts.get(name) for name in columns)) for t, facts in able),
        )
    ]
