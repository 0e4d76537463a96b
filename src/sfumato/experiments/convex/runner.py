"""Runs cells of convex experiments: many cheap repeats, in processes, with one record per cell.

**The format of a spec**, `specs/<name>.toml`. Its cells are all pairs of a row and a column::

    title, paper, where, note     as in the other experiments
    score = "accuracy"            what the numbers are, in words
    repeats = 20                  how many there are by default

    [settings]                    what all cells share: keys of `settings.Settings`
    delta = 1e-6
    data = { public = 0.001 }     keys of `settings.Data`: source, split, scaling
    options = { l2 = 0.001 }      parameters of the estimator

    [[when]]                      changes them where all of `if` holds; a list means any of its values
    if = { data = "skin", loss = ["Hinge", "Square"], epsilon = 0.1, estimator = "PPSGD" }
    data = { public = 0.0001 }

    [[row]]                       a problem
    name = "skin, hinge, epsilon 0.1"
    data = { name = "skin" }
    loss = "Hinge"                a loss of sfumato.erm; loss_options are its parameters
    epsilon = 0.1
    paper = { PPSGD = 0.9069 }    the paper's numbers, by column

    [[sweep]]                     many rows: one per value of a key, such as epsilon or data.dimension
    key = "options.reuse"         the names of the rows are `name`, or the key, and the value
    values = [0.01, 0.1, 1]
    panel = "lambda"              in a figure, the panel that the rows belong to; x, their place, is the value

    [[column]]                    a method
    name = "PPSGD"
    estimator = "PPSGD"           sfumato.erm.PPSGDClassifier or PPSGDRegressor, whichever the data needs
    options = { learning_rate = 4.0 }
    batch = 0.1                   its batch_size, as a share of the private rows
    private = false               for estimators without epsilon and delta
    compare = "PPSGD"             whose number of the paper it stands beside; its own by default

    [[column.when]]               changes for this method, such as another loss where the proof needs it
    if = { loss = "Hinge" }
    loss = "HuberisedHinge"

    [figure]                      a plot: one panel per `panel`, one curve per column
    x, y = labels; logarithmic = "x", "y" or "xy"

    [compare]                     columns set against the best of others, paired over repeats
    ours, others = names of columns; errors = names of data whose score is an error

Later ones win, key by key: [settings], the row, [[when]], the column, [[column.when]]. A new source of rows is a name
in `settings.SYNTHETIC` and a function in `problems`; a new estimator needs nothing here.

**Repeats.** Repeat r has the same private, public and test rows for all methods. A process is given one data set and
one repeat, and fits all cells of that. What is finished is written down at once, and not run again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import torch

from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.experiments.convex.estimators import make_estimator, parameters
from sfumato.experiments.convex.problems import Problem, check_there, problem
from sfumato.experiments.convex.records import LISTS, Record, all_records, has_settings, record_path, with_repeat
from sfumato.experiments.convex.settings import Data, Settings
from sfumato.experiments.convex.spec import Cell, Spec
from sfumato.experiments.records import write_record
from sfumato.experiments.runner import machine

NOTE = (
    "The rows are of a benchmark that everybody has, or made up. They count as private anew in every fit, so each has "
    "a ledger of its own; for rows that are private in truth, all fits share one. Options were not chosen privately."
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One fit. `refusal` is the sentence with which an estimator refused it."""

    entry: Mapping[str, Any]
    about: Mapping[str, Any]  # what goes into the record beside the entries
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What one process is given: all fits on the rows of one repeat."""

    data: Data
    repeat: int
    settings: tuple[Settings, ...]

    def run(self) -> list[Outcome]:
        torch.set_num_threads(1)
        rows = problem(self.data, self.repeat)
        return [fit(settings, rows, self.repeat) for settings in self.settings]


def fit(settings: Settings, rows: Problem, repeat: int) -> Outcome:
    """One fit and its score."""
    start = time.perf_counter()
    try:
        model = make_estimator(settings, classification=rows.classification, size=len(rows.y))
        about = {"parameters": parameters(model), "rows": rows.sizes}
        model.fit(rows.X, rows.y, X_public=rows.X_public, y_public=rows.y_public)
    except SfumatoError as error:
        return Outcome(entry={}, about={}, refusal=str(error))
    entry = {
        "repeats": repeat,
        "scores": rows.score(model.predict(rows.X_test)),
        "epsilons": model.epsilon_,
        "iterations": int(model.n_iter_),
        "seconds": round(time.perf_counter() - start, 3),
    }
    return Outcome(entry=entry, about={**about, "accounting": _accounting(model.ledger_)})


def _accounting(statement: Any) -> Any:
    """What the ledger says, in short; a sentence where there is no ledger."""
    if isinstance(statement, str):
        return statement
    said = statement.to_json()
    kept = {name: said[name] for name in ("private", "epsilon", "delta", "adjacency", "composition", "accountant")}
    return {**kept, "answers": sum(one["answers_counted"] for one in said["mechanisms"])}


class Runner:
    """The fits that are missing for some cells and repeats; `run` makes them."""

    def __init__(
        self, spec: Spec, cells: Sequence[Cell], repeats: Sequence[int], out: Path, *, again: bool = False
    ) -> None:
        self._spec, self._out = spec, out
        self.left_out: dict[str, str] = {}  # data sets that are not there, and where to get them
        known = all_records(out, spec)
        self._paths: dict[int, Path] = {}
        self._records: dict[int, Record] = {}
        self._settings: list[Settings] = []
        wanted: dict[tuple[str, int], Unit] = {}
        for cell in self._there(cells):
            if cell.settings in self._settings:
                continue
            number = len(self._settings)
            self._settings.append(cell.settings)
            done = self._begun(number, cell, known, again)
            for repeat in repeats:
                if repeat not in done:
                    key = (repr(cell.settings.data), repeat)
                    before = wanted[key].settings if key in wanted else ()
                    wanted[key] = Unit(data=cell.settings.data, repeat=repeat, settings=(*before, cell.settings))
        self.units = list(wanted.values())

    @property
    def fits(self) -> int:
        return sum(len(unit.settings) for unit in self.units)

    def _there(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those whose data set is there; if none is, that is an error."""
        missing: dict[Data, InvalidArgument] = {}
        for data in dict.fromkeys(cell.settings.data for cell in cells):
            try:
                check_there(data)
            except InvalidArgument as error:
                missing[data] = error
                self.left_out[data.name] = str(error)
        found = [cell for cell in cells if cell.settings.data not in missing]
        if not found:
            raise next(iter(missing.values()))
        return found

    def _begun(self, number: int, cell: Cell, known: Mapping[Path, Record], again: bool) -> list[int]:
        """The repeats that a record has already, which may have been made for another cell with the same settings."""
        path = next((p for p, record in known.items() if has_settings(record, cell.settings)), None)
        self._paths[number] = path or record_path(self._out, self._spec, cell)
        if again:
            return []
        if path is None and self._paths[number] in known:
            raise InvalidArgument(
                f"{str(self._paths[number])!r} was made with other settings than {self._spec.name} has now: give "
                "--again to replace it, or another --out."
            )
        if path is None:
            return []
        before = known[path]["parameters"]
        made = make_estimator(
            cell.settings,
            classification=before["kind"].endswith("Classifier"),
            size=known[path]["rows"]["private"],
        )
        if parameters(made) != before:
            raise InvalidArgument(
                f"{str(path)!r} was made when {type(made).__name__} had other defaults: give --again to replace it, or "
                "another --out."
            )
        self._records[number] = known[path]
        done: list[int] = list(known[path]["repeats"])
        return done

    def run(self, workers: int) -> Iterator[int]:
        """Make what is missing; yields how many fits were finished, each time some are. Refusals come at the end."""
        refused: dict[int, str] = {}
        for number, outcomes in self._outcomes(workers):
            unit = self.units[number]
            for settings, outcome in zip(unit.settings, outcomes, strict=True):
                at = self._settings.index(settings)
                if outcome.refusal is None:
                    self._write(at, settings, outcome)
                else:
                    refused[at] = outcome.refusal
            yield len(outcomes)
        if refused:
            at, sentence = next(iter(refused.items()))
            cell = next(cell for cell in self._spec.cells if cell.settings == self._settings[at])
            raise InvalidArgument(
                f"{self._spec.name}: {len(refused)} of {len(self._settings)} cells were refused, and all others are "
                f"finished; {cell.row!r} | {cell.column!r} says: {sentence}"
            )

    def _outcomes(self, workers: int) -> Iterator[tuple[int, list[Outcome]]]:
        if workers == 1 or len(self.units) < 2:
            for number, unit in enumerate(self.units):
                yield number, unit.run()
            return
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            calls = (joblib.delayed(_numbered)(number, unit) for number, unit in enumerate(self.units))
            yield from joblib.Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)(calls)

    def _write(self, at: int, settings: Settings, outcome: Outcome) -> None:
        record = self._records.get(at)
        if record is None:
            record = {
                "spec": self._spec.name,
                "settings": settings.to_json(),
                **outcome.about,
                "machine": machine(torch.device("cpu")),
                "note": NOTE,
                **{name: [] for name in LISTS},
            }
        self._records[at] = with_repeat(record, outcome.entry)
        write_record(self._paths[at], self._records[at], indent=None)


def _numbered(number: int, unit: Unit) -> tuple[int, list[Outcome]]:
    return number, unit.run()
