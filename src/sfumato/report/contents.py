"""What lies in the folders of a report: trainings, syntheses and selections, read from their JSON and never from data.

All of it is public: released answers, weights, metrics on public and test rows, statements.
"""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument

Facts = Mapping[str, Any]
_PICTURES, _PICTURE_BYTES = 60, 4 << 20  # of a selection that are shown: the best, and not more than a page bears
_ENSEMBLES = {"": "last", "ema_": "ema", "mean_": "mean", "vote_": "vote", "logits_": "logits"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A finished training: the folder of a run, or the record of an experiment."""

    name: str
    source: Path
    config: Facts  # as trained
    asked: Facts | None = None  # the config file, or an experiment's settings
    history: tuple[Mapping[str, float], ...] = ()
    alignment: tuple[tuple[float, float, float, float], ...] = ()  # step, cosine, lowest, highest
    ensembles: Mapping[str, float] = field(default_factory=dict)  # accuracy on test rows
    statement: Facts = field(default_factory=dict)
    statement_text: str = ""
    steps: Mapping[str, int] = field(default_factory=dict)  # taken, lost, short
    seconds: float | None = None  # of a record, whose rows are public in truth; a run's depend on private rows
    parameters: int | None = None
    only_trained: bool = True  # False: of `parameters` some may not have been trained
    cell: tuple[str, str, str] | None = None  # spec, row and column of an experiment
    note: str = ""

    @property
    def last(self) -> Mapping[str, float]:
        return self.history[-1] if self.history else {}

    @property
    def epsilon(self) -> float | None:
        """Of this training alone."""
        return self.last.get("epsilon")


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """Rows that a generator made of public ones."""

    name: str
    source: Path
    provenance: Facts
    grid: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A chosen image as a PNG file, and what a person called it."""

    index: int
    file: Path
    png: bytes
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Public rows that were chosen to be labelled."""

    name: str
    source: Path
    record: Facts
    chosen: int
    pictures: tuple[Picture, ...] = ()


Item = Training | Synthesis | Selection


def read_all(paths: Sequence[Path]) -> list[Item]:
    """What the paths hold, each under a name of its own; a folder of such folders stands for all of them."""
    if not paths:
        raise InvalidArgument("run is missing: give the folders of one or more runs.")
    places = list({place.resolve(): place for path in paths for place in _places(path)}.values())
    return [replace(_read(place), name=name) for place, name in zip(places, _names(places), strict=True)]


_SIGNS = {"run.json": "run", "provenance.json": "synthesis", "chosen.json": "selection"}


def _places(path: Path) -> list[Path]:
    """The JSON files that a path stands for."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidArgument(f"run={str(path)!r} does not exist: give the folder that a training wrote.")
    own = _signs(path)
    if own:
        return own
    inner = [place for folder in sorted(path.iterdir()) for place in _signs(folder)]
    if not inner:
        raise InvalidArgument(
            f"run={str(path)!r} holds no {', '.join(_SIGNS)}: give the folder that a training, a synthesis or a "
            "selection wrote, or one with such folders in it."
        )
    return inner


def _signs(folder: Path) -> list[Path]:
    """What a folder holds; of a training also the rows that [synthesis] made for it."""
    found = [folder / name for name in _SIGNS if (folder / name).is_file()]
    made = folder / "synthetic" / "provenance.json"
    return [*found, made] if folder / "run.json" in found and made.is_file() else found


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [(p.resolve().parent if p.name in _SIGNS else p.resolve().with_suffix("")).parts for p in places]
    names = []
    for k, own in enumerate(parts):
        others = [other for j, other in enumerate(parts) if j != k and other != own]
        length = next(n for n in range(1, len(own) + 1) if n == len(own) or all(o[-n:] != own[-n:] for o in others))
        names.append("/".join(own[-length:]))
    same = {name for name in names if names.count(name) > 1}  # several kinds in one folder
    return [
        f"{n} ({_SIGNS[p.name]})" if n in same and p.name in _SIGNS else n for n, p in zip(names, places, strict=True)
    ]


def _read(path: Path) -> Item:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{str(path)!r} cannot be read ({error.strerror}): give another run.") from None
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{str(path)!r} is not valid JSON: put it back as it was written.") from None
    kinds: dict[str, Callable[[Path, Facts], Item]] = {"provenance.json": _synthesis, "chosen.json": _selection}
    try:
        return kinds.get(path.name, _training)(path, _table(found))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"{str(path)!r} is no run, or damaged: give the folder that a training, a synthesis or a selection wrote."
        ) from None


# ------------------------------------------------------------------------------------------------ the kinds


def _training(path: Path, found: Facts) -> Training:
    return _record(path, found) if "spec" in found else _run(path, found)


def _run(path: Path, found: Facts) -> Training:
    folder = path.parent
    history = _history(found["history"])
    last = history[-1] if history else {}
    measured = {kind: last.get(f"test_{prefix}accuracy") for prefix, kind in _ENSEMBLES.items()}
    asked = folder / "config.json"
    parameters, only_trained = _parameters(folder, found["config"])
    return Training(
        name="",
        source=path,
        config=_table(found["config"]),
        asked=_table(json.loads(asked.read_text(encoding="utf-8"))) if asked.is_file() else None,
        history=history,
        alignment=_alignment(found.get("alignment", [])),
        ensembles={kind: value for kind, value in measured.items() if value is not None},
        statement=_statement(found.get("statement", {})),
        statement_text=_text(folder / "statement.txt"),
        steps=_steps(found),
        parameters=parameters,
        only_trained=only_trained,
    )


def _record(path: Path, found: Facts) -> Training:
    """Of `sfumato reproduce`: accuracies are in percent there."""
    if "run" not in found:
        raise InvalidArgument(
            f"{str(path)!r} is no record of a training with steps: see it by sfumato reproduce --show."
        )
    cell = found["cell"]
    config = {**_table(found["run"]), "clip": found["config"]["training"].get("clip")}
    return Training(
        name="",
        source=path,
        config={**config, "machine": found.get("machine")},
        asked=_table(found["config"]),
        history=_history(found["history"]),
        ensembles={
            kind: float(part["test"]) / 100 for kind, part in found["metrics"].items() if kind in _ENSEMBLES.values()
        },
        statement=_statement(found.get("statement", {})),
        steps=_steps(found),
        seconds=float(found["seconds"]),
        cell=(str(found["spec"]), str(cell["row"]), str(cell["column"])),
        note=str(found.get("note", "")),
    )


def _synthesis(path: Path, found: Facts) -> Synthesis:
    grid = path.parent / "grid.png"
    int(found["rows"]), str(found["statement"])  # what all of them have
    return Synthesis(name="", source=path, provenance=found, grid=_png(grid) if grid.is_file() else None)


def _selection(path: Path, found: Facts) -> Selection:
    folder, indices = path.parent, [int(i) for i in found["indices"]]
    _statement(_table(found["privacy"]).get("statement") or {})
    files = {int(p.stem): p for p in (folder / "images").glob("*.png") if p.stem.isdigit()}
    labels = _labels(folder / "labels.csv")
    pictures: list[Picture] = []
    for index in [i for i in indices if i in files][:_PICTURES]:
        picture = Picture(index=index, file=files[index], png=_png(files[index]), label=labels.get(index, ""))
        if sum(len(p.png) for p in (*pictures, picture)) > _PICTURE_BYTES:
            break
        pictures.append(picture)
    return Selection(name="", source=path, record=found, chosen=len(indices), pictures=tuple(pictures))


# ------------------------------------------------------------------------------------------------ the pieces


def _table(found: Any) -> Facts:
    if not isinstance(found, dict):
        raise TypeError
    return found


def _statement(found: Any) -> Facts:
    """Of one dataset, or of several; what it is made of is looked at, so that a page can show it."""
    lists = [_table(found).get(key, []) for key in ("mechanisms", "warnings", "statements")]
    if not all(isinstance(one, list) for one in lists):
        raise TypeError
    for line in lists[0]:
        _table(line)
    for one in lists[2]:
        _statement(one)
    return _table(found)


def _steps(found: Facts) -> dict[str, int]:
    steps = {name: int(found.get(f"steps_{name}", 0)) for name in ("taken", "lost", "short")}
    if min(steps.values()) < 0:
        raise ValueError
    return steps


def _alignment(found: Any) -> tuple[tuple[float, float, float, float], ...]:
    every = ((float(step), float(middle), float(low), float(high)) for step, middle, low, high in found)
    return tuple(entry for entry in every if all(map(math.isfinite, entry)))


def _history(found: Any) -> tuple[Mapping[str, float], ...]:
    """Evaluations in the order of their steps; a number that is not finite is left out, as a null is."""
    every = [{str(k): float(v) for k, v in entry.items() if v is not None and math.isfinite(v)} for entry in found]
    return tuple(sorted((entry for entry in every if "step" in entry), key=lambda entry: entry["step"]))


def _parameters(folder: Path, config: Facts) -> tuple[int | None, bool]:
    """How many numbers were trained: as recorded; else what the average of the weights has, or all weights."""
    recorded = config.get("parameters")
    if isinstance(recorded, int):
        return recorded, True
    for name, only_trained in (("ema.safetensors", True), ("weights.safetensors", False)):
        if (count := _entries(folder / name)) is not None:
            return count, only_trained
    return None, True


def _entries(path: Path) -> int | None:
    """From the head of a safetensors file: its tensors are not read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, 100 << 20)))
        tensors = [entry for name, entry in head.items() if name != "__metadata__"]
        return sum(math.prod(map(int, t["shape"])) for t in tensors if t["dtype"].startswith(("F", "BF")))
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None  # only a part of one plot rests on it


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _png(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG"):
        raise InvalidArgument(f"{str(path)!r} is no PNG image: put it back as it was written.")
    return content


def _labels(path: Path) -> dict[int, str]:
    """Those that a person has given so far; a file that is no such table has none."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = ((row.get("index") or "", row.get("label") or "") for row in rows)
    return {int(index): label for index, label in pairs if index.isdigit()}
