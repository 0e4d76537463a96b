"""The public rows of a training: those of its file, those that were made of them, and those that only judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.cli.config import Config
from sfumato.data.tables import Layout, Role, Table, layout, match, read_table
from sfumato.errors import InvalidArgument

Layouts = Mapping[Role, Layout]


def own_rows(config: Config, layouts: Layouts) -> Table:
    """Those of [data] public, their features in the order of the private ones."""
    data = config.data
    return read_table(layouts["public"], label=data.label, columns=layouts["private"].columns, classes=data.classes)


def made_rows(config: Config, layouts: Layouts) -> Table | None:
    """Those that were made of them: what [data] synthetic names, or what [synthesis] left in `out`."""
    making = config.making
    if making is not None:
        place = making.folder
    elif config.data.synthetic is not None:
        place = config.file(config.data.synthetic)
    else:
        return None
    data, columns = config.data, layouts["private"].columns
    file = next((place / name for name in ("synthetic.npz", "synthetic.csv") if (place / name).exists()), place)
    # What was made has a header row, and what [synthesis] made of a table has no column that is left out.
    code = replace(layouts["private"].encoding, columns=())
    code = code if making is None else replace(code, ignore=())
    found = layout(file, "synthetic", label=data.label, encoding=code)
    match(found, layouts["private"])
    classes = data.classes if found.columns else None
    table = read_table(found, label=data.label, columns=columns, classes=classes)
    return table if data.classes is None or found.columns else replace(table, labels=_numbered(config, file, table))


def _numbered(config: Config, file: Path, table: Table) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Labels in the order of [data] classes: images have numbers, whose names are in the provenance beside them."""
    classes = config.data.classes or []
    try:
        names = json.loads((file.parent / "provenance.json").read_text())["public"]["classes"]
        number_of = {k: float(classes.index(name)) for k, name in enumerate(names)}
        return np.array([number_of[int(label)] for label in table.labels])
    except (OSError, ValueError, LookupError, TypeError):
        raise InvalidArgument(
            f"synthetic={str(file)!r} has numbers for labels, and nothing beside it says which of classes={classes} "
            "they are: name the folder of `sfumato synthesize`, made of images in folders of these names."
        ) from None


def public_rows(config: Config, layouts: Layouts) -> tuple[Table, int]:
    """Both, and how many of them, the first ones, are of the file."""
    own, made = own_rows(config, layouts), made_rows(config, layouts)
    if made is None:
        return own, len(own.labels)
    pairs = (own.features, made.features), (own.labels, made.labels)
    return Table(*(np.concatenate(pair) for pair in pairs)), len(own.labels)


# ------------------------------------------------------------------------------------------------ who judges


def held_back(rows: int, share: float) -> int:
    """How many public rows nothing is trained on, to choose on them afterwards."""
    return min(rows - 1, max(1, round(share * rows))) if share else 0


def trained_on(config: Config, layouts: Layouts) -> int:
    """How many public rows, also where some of them have yet to be made."""
    if config.synthesis is None:
        table, own = public_rows(config, layouts)
        count = len(table.labels)
    else:
        own = len(own_rows(config, layouts).labels)
        count = own + config.synthesis.sample.n
    return count - held_back(own, config.training.choose)


def judges(config: Config, own: int) -> tuple[Tensor, Tensor]:
    """Numbers of the rows that [training] choose holds back, and of the others, among `own` of the public file.

    Rows that were made of others do not judge: nobody asks how well they are told apart.
    """
    count = held_back(own, config.training.choose)
    if config.training.choose and count < 1:
        raise InvalidArgument(f"[training] choose={config.training.choose} needs at least 2 public rows.")
    order = torch.randperm(own, generator=torch.Generator().manual_seed(config.training.seed))
    return order[:count], order[count:]
