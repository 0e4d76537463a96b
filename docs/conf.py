"""Sphinx builds the site from these pages: `make site`. Warnings are errors, so a broken link does not land."""

from __future__ import annotations

from typing import Any

import sfumato

project = "Sfumato"
version = release = sfumato.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Sfumato"
html_copy_source = False

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
# Pages are read on their own, too, so they link to files of the repository, which the site brings along.
suppress_warnings = ["myst.header"]

default_role = "code"  # `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
nitpicky = False

# What scikit-learn adds to every estimator is told in its own documentation.
autodoc_default_options = {
    "exclude-members": ",".join(
        f"set_{method}_request" for method in ("fit", "score", "predict", "predict_proba", "transform", "partial_fit")
    )
}


def plain_bars(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """|x| is a norm in our docstrings, and a substitution to Sphinx."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_bars)
