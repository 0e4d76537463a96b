"""`sfumato report`: runs as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of sfumato train, synthesize or select, a folder of such folders, or records of reproduce.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write: report.html, or with --json none.")
    ] = None,
    beside: Annotated[
        list[str] | None, typer.Option(help="Draw the numbers of a paper's table beside them, such as 000-table9.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the facts behind the report and nothing else.")
    ] = False,
) -> None:
    """Put runs side by side on one page: privacy statement, plots with their numbers, samples, config."""
    from sfumato.report import report as read

    found = read(runs, beside=beside or ())
    written = None if as_json and out is None else found.write(out or Path("report.html"))
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        typer.echo(f"{written}: {found.title.removeprefix('Report of ')}, {len(found.figures)} plots.")
