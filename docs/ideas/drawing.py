"""What the pictures share: colours that colour-blind people tell apart, one size of text, and how they are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's, as in the report; each also has a sign or a line of its own.
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22201d"
GREY, PALE = "#767676", "#d8d8d8"
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.edgecolor": GREY,
    "figure.facecolor": "white",  # also on a dark page
}
WIDE = 7.2  # inches, which is about 700 pixels on a page


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """All that a picture shows, as plain numbers of five digits."""
    five = np.vectorize(lambda value: float(f"{value:.5g}"))
    return {name: five(np.asarray(value, dtype=float)).tolist() for name, value in found.items()}


def plane(axes: Any, title: str) -> None:
    """A panel whose axes have no numbers: only where things lie is told."""
    axes.set(title=title, xticks=[], yticks=[], aspect="equal")


def legend(figure: Figure, panels: Iterable[Any], columns: int) -> None:
    """One for the whole picture, below it."""
    pairs = [pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    found = {label: handle for handle, label in pairs}
    spaces = {"columnspacing": 1.0, "handletextpad": 0.4, "handlelength": 1.6}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, **spaces)


def keep(name: str, figure: Figure, found: Any, path: Path) -> None:
    """As SVG with the numbers in it. The same numbers give the same file under one version of matplotlib."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(path, metadata={"Date": None, "Description": json.dumps(numbers(vars(found)))})


def kept(path: Path) -> dict[str, Any]:
    """The numbers in a committed picture."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{path.name} holds no numbers"
    return dict(json.loads(found[1].replace("&quot;", '"')))
