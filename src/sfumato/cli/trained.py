"""What `sfumato train` left in a folder, put together again: the module with its weights, and how files become rows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sfumato.cli.config_file import ConfigFile
from sfumato.cli.model import make_module
from sfumato.cli.predict_rows import read_rows
from sfumato.cli.sections import ModelSection
from sfumato.data.preprocessing import PREPROCESSING, Preprocessing
from sfumato.ensembles import evaluating
from sfumato.errors import InvalidArgument
from sfumato.privacy.budget import at_most
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
    private: Path  # where its rows were, as its config says

    def __repr__(self) -> str:
        """In one line: the weights are in `module`."""
        shown = f"name={self.run.config['name']!r}, kind={self.kind!r}"
        if "epsilon" in self.run.statement:  # a statement about several datasets has one for each
            shown += f", epsilon={at_most(self.run.statement['epsilon'])}"
        return f"Trained({shown}{'' if self.run.statement.get('private', True) else ', private=False'})"

    def rows(self, data: str | os.PathLike[str] | npt.ArrayLike) -> Tensor:
        """What the module is to be called with: of a file like those it was trained on, or of an array of features.

        A file needs no column of labels; of a folder all images are taken, in the order of their paths. An array holds
        numbers as they are in the files, before scaling.
        """
        made = self.preprocessing
        if isinstance(data, str | os.PathLike):
            found, what = read_rows(Path(data), made).features, f"data={str(data)!r}"
        else:
            found, what = np.asarray(data), "data"
        if found.ndim < 2 or math.prod(found.shape[1:]) != math.prod(made.shape):
            raise InvalidArgument(
                f"{what} has rows of shape {found.shape[1:]}, and the model was trained on {tuple(made.shape)}: give "
                "the same features."
            )
        if made.scaling is not None and made.scaling.lower.ndim:  # limits of each feature, in the shape of the files
            found = found.reshape(len(found), *made.scaling.lower.shape)
        with np.errstate(over="ignore"):  # infinite ones are cut to the range, as in the training
            found = found.astype(np.float32)
        return torch.from_numpy(made(found))

    @torch.no_grad()
    def scores(self, data: str | os.PathLike[str] | npt.ArrayLike) -> Tensor:
        """The module's outputs, one row each: logits of a classifier."""
        device = next(self.module.parameters()).device
        with evaluating(self.module):
            return torch.cat([self.module(part.to(device)) for part in torch.split(self.rows(data), _AT_ONCE)])

    def predict(self, data: str | os.PathLike[str] | npt.ArrayLike) -> npt.NDArray[Any]:
        """One label per row: the names of classes where they have some, else their numbers; a number in regression."""
        return self.labels(self.scores(data))

    def labels(self, scores: Tensor) -> npt.NDArray[Any]:
        """What these outputs say, as `predict` does."""
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
    if (path / "checkpoint.pt").exists() and not (path / "run.json").exists():
        raise InvalidArgument(
            f"folder={str(path)!r} holds a training that has not come to its end: go on with it by `sfumato train`."
        )
    run = Run.load(path)
    facts, config = _read_json(path, PREPROCESSING), _read_json(path, "config.json")
    if ema and run.ema is None:
        raise InvalidArgument(f"ema=True, and folder={str(path)!r} has no ema.safetensors: train with ema = true.")
    try:
        preprocessing = Preprocessing.from_json(facts)
        home = ConfigFile(path=path / facts["config_folder"] / "config.toml", given=frozenset())
        model, loss, private = dict(config["model"]), config["training"]["loss"], home.file(config["data"]["private"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"folder={str(path)!r} has a {PREPROCESSING} or config.json that was not written by `sfumato train` "
            f"({type(error).__name__}: {error}): give another folder."
        ) from None
    section: ModelSection = read(ModelSection, _given(model), "[model]")
    module = make_module(home, section, preprocessing.shape)
    _fill(module, {**run.weights, **(run.ema or {})} if ema else run.weights, path, section.kind)
    return Trained(
        module=module.eval(),
        run=run,
        preprocessing=preprocessing,
        classifies=loss == "cross-entropy",
        kind=section.kind,
        private=private,
    )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        raise InvalidArgument(
            f"folder={str(folder)!r} has no {name}: give one that `sfumato train` wrote, or use Run.load and your own "
            "module."
        )
    try:
        found: dict[str, Any] = json.loads((folder / name).read_text())
    except ValueError:
        raise InvalidArgument(f"folder={str(folder)!r} has a {name} that is no JSON: give another folder.") from None
    return found


def _given(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _fill(module: nn.Module, weights: Mapping[str, Tensor], folder: Path, kind: str) -> None:
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError:  # it lists every name, over many lines
        raise InvalidArgument(
            f"folder={str(folder)!r} has weights that do not fit its model, kind={kind!r}: put both back to what they "
            "were when it was trained."
        ) from None
