"""Draws the ideas of the five papers, computed by the library on made-up rows: docs/papers/idea-00*.svg.

    python -m docs.ideas [folder]

Seeds are fixed, so that the same pictures come out again: a quarter of a minute on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import torch

from docs.ideas import dope_sgd, mirror, multiplicity, ppsgd, selection
from docs.ideas.drawing import STYLE, keep

IDEAS: dict[str, ModuleType] = {
    "000": dope_sgd,
    "001": ppsgd,
    "002": multiplicity,
    "003": mirror,
    "004": selection,
}
PAPERS = Path(__file__).parents[1] / "papers"


def main(folder: Path = PAPERS) -> None:
    torch.set_num_threads(1)  # sums in another order round otherwise
    for number, idea in IDEAS.items():
        found = idea.compute()
        with mpl.rc_context(STYLE):
            keep(f"idea-{number}", idea.picture(found), found, folder / f"idea-{number}.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
