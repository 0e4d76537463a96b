"""What a command has to say when it is done: JSON for programs, a small table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer


def tell(
    facts: Mapping[str, Any],
    title: str | None = None,
    *,
    as_json: bool,
    shown: Mapping[str, Any] | None = None,
    aside: bool = False,
) -> None:
    """Print the facts; `shown` takes their place for people, who get no line for what is not there.

    `aside`: for people, on stderr, where stdout holds something else.
    """
    if as_json:
        typer.echo(json.dumps(facts))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (facts if shown is None else shown).items():
        if value is not None:
            table.add_row(name.replace("_", " "), in_one_line(value))
    Console(stderr=aside, markup=False).print(table)  # names may have brackets


def in_one_line(value: Any) -> str:
    """Lists and tables, too.

    >>> in_one_line({"weight": 0.1 + 0.2, "steps": 3, "seed": None})
    'weight 0.3, steps 3'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_one_line(inner)}" for name, inner in value.items() if inner is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_one_line, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
