"""A report: what the runs hold, as plots and statements, for people (HTML) and programs (JSON)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sfumato
from sfumato.errors import InvalidArgument
from sfumato.experiments.spec import spec_names
from sfumato.reading import suggestion
from sfumato.report import page
from sfumato.report.contents import Item, Selection, Synthesis, Training, read_all
from sfumato.report.figures import Figure
from sfumato.report.frame import GENERATOR, framed
from sfumato.report.papers import paper_points
from sfumato.report.plots import headline, plots
from sfumato.report.promises import Promise, promises


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was read, and the plots that can be made of it."""

    trainings: tuple[Training, ...]
    syntheses: tuple[Synthesis, ...]
    selections: tuple[Selection, ...]
    promises: tuple[Promise, ...]
    figures: tuple[Figure, ...]

    @property
    def title(self) -> str:
        items: list[Item] = [*self.trainings, *self.syntheses, *self.selections]
        return f"Report of {items[0].name}" if len(items) == 1 else f"Report of {len(items)} runs"

    @property
    def without(self) -> list[str]:
        """Trainings for which nothing is promised."""
        return [training.name for training in self.trainings if not training.statement]

    def to_html(self) -> str:
        """One page that needs no other file."""
        others: list[Synthesis | Selection] = [*self.syntheses, *self.selections]
        sections = [
            ("privacy", "Privacy statement", page.statements(self.promises, self.without)),
            ("runs", "Runs", page.overview(self.trainings)),
            ("plots", "Plots", page.figures(self.figures)),
            ("samples", "Synthetic rows", page.syntheses(self.syntheses)),
            ("selection", "Rows to label", page.selections(self.selections)),
            ("config", "Config and versions", page.configs(self.trainings, others)),
        ]
        return framed(self.title, sfumato.__version__, sections)

    def to_json(self) -> dict[str, Any]:
        """The facts behind the page; a number that is not finite becomes null."""
        found = {
            "statements": [promise.to_json() for promise in self.promises],
            "without_statement": self.without,
            "runs": [_facts(training) for training in self.trainings],
            "figures": [figure.to_json() for figure in self.figures],
            "syntheses": [
                {"name": s.name, "rows": s.provenance["rows"], "measures": s.provenance.get("measures")}
                for s in self.syntheses
            ],
            "selections": [
                {"name": s.name, "chosen": s.chosen, "privacy": s.record["privacy"].get("text")}
                for s in self.selections
            ],
        }
        plain: dict[str, Any] = _finite(found)
        return plain

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Whole or not at all; a file that is no report stays."""
        out = Path(path)
        if out.is_dir():
            raise InvalidArgument(f"out={str(out)!r} is a folder: give the name of an HTML file.")
        if out.exists() and GENERATOR.encode() not in out.read_bytes()[:4096]:
            raise InvalidArgument(f"out={str(out)!r} exists and is no report: choose another name.")
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{out.name}.part")
        part.write_text(self.to_html(), encoding="utf-8", errors="replace", newline="\n")
        return part.replace(out)


def report(runs: Sequence[str | os.PathLike[str]], *, beside: Sequence[str] = ()) -> Report:
    """Read the folders of runs, or records of experiments; `beside` names papers' tables to draw beside them.

    >>> from sfumato.experiments.records import COMMITTED
    >>> found = report([COMMITTED / "000-table9" / "paper" / "epsilon-1-dp-sgd-cold-seed0.json"])
    >>> [figure.key for figure in found.figures]
    ['epsilon', 'test-accuracy-against-epsilon', 'ensembles', 'signal-and-noise']
    """
    for name in beside:
        if name not in spec_names():
            raise InvalidArgument(f"beside={name!r} is no table of a paper{suggestion(name, spec_names())}")
    items = read_all([Path(run) for run in runs])
    trainings = tuple(item for item in items if isinstance(item, Training))
    return Report(
        trainings=trainings,
        syntheses=tuple(item for item in items if isinstance(item, Synthesis)),
        selections=tuple(item for item in items if isinstance(item, Selection)),
        promises=tuple(promises(items)),
        figures=tuple(plots(trainings, paper_points(trainings, beside))),
    )


def _facts(training: Training) -> dict[str, Any]:
    return {
        "name": training.name,
        "source": str(training.source),
        "method": page.method_of(training.config),
        "epsilon": training.epsilon,
        "judged_by": headline(training),
        "metrics": dict(training.last),
        "ensembles": dict(training.ensembles),
        "steps": dict(training.steps),
        "seconds": training.seconds,
        "config": training.config,
        "asked": training.asked,
        "versions": training.statement.get("versions"),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
