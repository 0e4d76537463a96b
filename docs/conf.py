"""Sphinx builds the site from these pages: `make site`. Warnings are errors, so a broken link does not land."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sfumato

project = html_title = "Sfumato"
version = release = sfumato.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_copy_source = False
myst_heading_anchors = 4

default_role = "code"  # `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# What scikit-learn adds to every estimator is told in its own documentation.
_REQUESTS = ("fit", "partial_fit", "predict", "predict_proba", "score", "transform")
autodoc_default_options = {"exclude-members": ",".join(f"set_{method}_request" for method in _REQUESTS)}


def plain_bars(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """|x| is a norm in our docstrings, and a substitution to Sphinx."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def folders_as_text(app: Any, page: str, source: list[str]) -> None:
    """Pages are read beside the code, too, and link to its folders, which a site does not have."""

    def shown(link: re.Match[str]) -> str:
        return link[1] if (Path(app.srcdir) / page / ".." / link[2]).resolve().is_dir() else link[0]

    source[0] = re.sub(r"\[([^\[\]]+)\]\(([^()#]+)\)", shown, source[0])


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_bars)
    app.connect("source-read", folders_as_text)
