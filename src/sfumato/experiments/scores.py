"""How good the last weights, their averages and their ensembles are, and which of them public rows choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.augment import mirrored
from sfumato.ensembles import majority_vote, mean_logits
from sfumato.experiments.data import Batch, Rows
from sfumato.experiments.spec import CANDIDATES, REPORTED
from sfumato.objective import Objective
from sfumato.run import Run
from sfumato.text import word_loss

Scores = dict[str, dict[str, float]]


def quality(objective: Objective, rows: Batch) -> float:
    """Accuracy, or for text the loss per word."""
    if rows[1].ndim == 1:
        return accuracy(objective, rows)
    return round(word_loss(objective.module, [objective.parameters()], rows), 6)


def accuracy(objective: Objective, rows: Batch) -> float:
    """Percent."""
    return _percent(_outputs(objective, objective.parameters(), rows[0]).argmax(1), rows[1])


def all_scores(objective: Objective, run: Run, rows: Rows, *, mirrors: bool = False) -> Scores:
    """By candidate: percent on the test rows and, if there are any, on those held out. The test rows choose nothing.

    For text it is the loss per word, and nobody votes. `mirrors`: images were trained on mirrored, too.
    """
    parts = {"test": rows.test} | ({} if rows.hold_out is None else {"hold_out": rows.hold_out})
    if rows.words is not None:
        return {
            name: {part: round(word_loss(objective.module, weights, batch), 6) for part, batch in parts.items()}
            for name, weights in _ensembles(run).items()
        }
    inputs, labels = (torch.cat([part[i] for part in parts.values()]) for i in (0, 1))
    found = _labels(objective, run, inputs)
    if mirrors and run.ema is not None:
        both = mean_logits(objective.module, [run.ema], inputs, autocast=objective.autocast, views=[mirrored])
        found["mirrored"] = both.argmax(1)
    sizes = [len(y) for _, y in parts.values()]
    return {
        name: {
            part: _percent(guesses, truth)
            for part, guesses, truth in zip(
                parts, torch.split(found[name], sizes), torch.split(labels, sizes), strict=True
            )
        }
        for name in REPORTED
        if name in found
    }


def choice(scores: Scores, *, lowest: bool = False) -> str | None:
    """The best average on the rows held out; of equals the simplest, which stands first. None if no rows were.

    `lowest`: the best is the smallest, as of losses.
    """
    held_out = {name: scores[name]["hold_out"] for name in CANDIDATES if "hold_out" in scores.get(name, {})}
    best = min if lowest else max
    return best(held_out, key=lambda name: held_out[name]) if held_out else None


def _ensembles(run: Run) -> dict[str, list[Mapping[str, Tensor]]]:
    """The weights of every candidate."""
    found: dict[str, list[Mapping[str, Tensor]]] = {"last": [run.weights]}
    if run.ema is not None:
        found["ema"] = [run.ema]
    if run.iterates is not None and len(run.iterates):
        found["mean"], found["logits"] = [run.iterates.mean()], list(run.iterates)
    return found


def _labels(objective: Objective, run: Run, inputs: Tensor) -> dict[str, Tensor]:
    singles = {"last": run.weights} | ({} if run.ema is None else {"ema": run.ema})
    iterates = run.iterates
    if iterates is not None and len(iterates):
        singles["mean"] = iterates.mean()
    found = {name: _outputs(objective, weights, inputs).argmax(1) for name, weights in singles.items()}
    if iterates is not None and len(iterates):
        # Each iterate is run once; vote and mean are taken of the outputs, as if a network had learned them by heart.
        outputs = [{"outputs": _outputs(objective, weights, inputs)} for weights in iterates]
        rows = torch.arange(len(inputs), device=inputs.device)
        found["vote"] = majority_vote(_Learned(outputs[0]["outputs"]), outputs, rows)
        found["logits"] = mean_logits(_Learned(outputs[0]["outputs"]), outputs, rows).argmax(1)
    return found


def _outputs(objective: Objective, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    return mean_logits(objective.module, [weights], inputs, autocast=objective.autocast)


class _Learned(nn.Module):
    """Gives row i of its one parameter for input i."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs, requires_grad=False)

    def forward(self, rows: Tensor) -> Any:
        return self.outputs[rows]


def _percent(guesses: Tensor, labels: Tensor) -> float:
    return round(100 * float((guesses == labels).double().mean()), 4)
