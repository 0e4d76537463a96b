"""`sfumato.load`: a finished training, ready to predict."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sfumato.cli.config_file import ConfigFile
from sfumato.cli.job import PREPROCESSING
from sfumato.cli.model import make_module
from sfumato.cli.sections import ModelSection
from sfumato.data import cells
from sfumato.data.encoding import word
from sfumato.data.image_files import image_files, read_images
from sfumato.data.preprocessing import Preprocessing
from sfumato.data.tables import layout, read_table
from sfumato.ensembles import evaluating
from sfumato.errors import InvalidArgument
from sfumato.reading import read
from sfumato.run import Run

_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The module with its trained weights, the Run it comes from, and how rows are made of files."""

    module: nn.Module
    run: Run
    preprocessing: Preprocessing
    classifies: bool
    kind: str  # of the model, as its config says

    def __repr__(self) -> str:
        """In one line: the weights are in `module`."""
        epsilon = math.ceil(self.run.statement["epsilon"] * 1e4) / 1e4  # never less than was spent
        return f"Trained(name={self.run.config['name']!r}, kind={self.kind!r}, epsilon={epsilon:g})"

    def rows(self, data: str | os.PathLike[str] | npt.ArrayLike) -> Tensor:
        """What the module is to be called with: of a file like those it was trained on, or of an array of features.

        A file needs no column of labels; of a folder all images are taken, in the order of their paths. An array holds
        numbers as they are in the files, before scaling.
        """
        found = _read(Path(data), self.preprocessing) if isinstance(data, str | os.PathLike) else np.asarray(data)
        return torch.from_numpy(self.preprocessing(found.astype(np.float32)))

    @torch.no_grad()
    def scores(self, data: str | os.PathLike[str] | npt.ArrayLike) -> Tensor:
        """The module's outputs, one row each: logits of a classifier."""
        device = next(self.module.parameters()).device
        with evaluating(self.module):
            return torch.cat([self.module(part.to(device)) for part in torch.split(self.rows(data), _AT_ONCE)])

    def predict(self, data: str | os.PathLike[str] | npt.ArrayLike) -> npt.NDArray[Any]:
        """One label per row: the names of classes where they have some, else their numbers; a number in regression."""
        scores = self.scores(data)
        if not self.classifies:
            return scores.squeeze(1).cpu().numpy()
        numbers = scores.argmax(1).cpu().numpy()
        classes = self.preprocessing.classes
        return numbers if classes is None else np.asarray(classes)[numbers]


def load(folder: str | os.PathLike[str], *, ema: bool = False) -> Trained:
    """What `sfumato train` left in a folder, ready to predict; `ema` takes the moving average of the weights.

    `sfumato.load("runs/adult").predict("people.csv")` has one label per row.
    """
    path = Path(folder)
    run = Run.load(path)
    for name in (PREPROCESSING, "config.json"):
        if not (path / name).exists():
            raise InvalidArgument(
                f"folder={str(path)!r} has no {name}: give one that `sfumato train` wrote, or use Run.load and your "
                "own module."
            )
    facts = json.loads((path / PREPROCESSING).read_text())
    config = json.loads((path / "config.json").read_text())
    if ema and run.ema is None:
        raise InvalidArgument(f"ema=True, and folder={str(path)!r} has no ema.safetensors: train with ema = true.")
    preprocessing = Preprocessing.from_json(facts)
    home = ConfigFile(path=path / facts["config_folder"] / "config.toml", given=frozenset())
    module = make_module(home, read(ModelSection, _given(config["model"]), "[model]"), preprocessing.shape)
    module.load_state_dict({**run.weights, **(run.ema or {})} if ema else dict(run.weights))
    classifies = config["training"]["loss"] == "cross-entropy"
    kind = config["model"]["kind"]
    return Trained(module=module.eval(), run=run, preprocessing=preprocessing, classifies=classifies, kind=kind)


def _given(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _read(path: Path, made: Preprocessing) -> npt.NDArray[Any]:
    """The features of a file; of one with named columns, with or without the label's."""
    if not path.exists():
        raise InvalidArgument(f"data={str(path)!r} does not exist: check the path.")
    if path.is_dir() and not made.columns:
        files = image_files(path, below=True)
        if not files:
            raise InvalidArgument(f"data={str(path)!r} holds no images.")
        return read_images(files, f"data={str(path)!r}", channels=made.shape[0] if len(made.shape) == 3 else None)
    if not made.columns:
        return read_table(layout(path, "test", label=None), label=None).features
    if not cells.has_cells(path):
        raise InvalidArgument(
            f"data={str(path)!r} must be a .csv or .parquet file or a dataset saved on disk: the model was trained on "
            "named columns."
        )
    code, declared = made.encoding, list(made.encoding.columns)
    rows = list(cells.rows(path, "data", declared))
    if not rows:
        raise InvalidArgument(f"data={str(path)!r} has no rows.")
    if declared and path.suffix in cells.CSV and {word(cell) for cell in rows[0]} <= set(declared):
        # Not skipped: its columns may be in another order than those that were declared.
        raise InvalidArgument(
            f"data={str(path)!r} begins with a row of column names, and the model was trained on files without one: "
            "remove that line, and keep the columns in the declared order."
        )
    if declared and len(rows[0]) == len(declared) - 1:
        declared = [name for name in declared if name != made.label]
    header = cells.names(path, "data", declared)
    if missing := [name for name in made.columns if name not in header]:
        raise InvalidArgument(f"data={str(path)!r} has no column {missing[0]!r}, which the model was trained with.")
    if any(len(row) != len(header) for row in rows):
        raise InvalidArgument(f"data={str(path)!r} has a row with more or fewer cells than columns: repair the file.")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    try:
        return np.hstack([code.encode(name, columns[name]) for name in made.columns])
    except ValueError as error:
        raise InvalidArgument(f"data={str(path)!r} has a cell that is no number: {error}.") from None
