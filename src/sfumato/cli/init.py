"""`sfumato init`: a commented config, from what public rows show and what a person declares."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli.facts import tell
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    from sfumato.cli.init_look import Seen


def init(
    data: Annotated[
        list[Path], typer.Argument(metavar="PRIVATE PUBLIC [TEST]", help="Files or folders: the public one is read.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The config file to write.")] = Path("config.toml"),
    size: Annotated[int | None, typer.Option(help="How many rows are private: declared, never counted.")] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict; by default the last one.")] = None,
    columns: Annotated[str | None, typer.Option(help="Names, with commas, for files without a header row.")] = None,
    ignore: Annotated[str | None, typer.Option(help="Columns to leave out, with commas.")] = None,
    name: Annotated[str | None, typer.Option(help="What the ledger calls the private rows.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="What the training may cost; 2 by default.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; ask nothing.")] = False,
) -> None:
    """Write a commented config by looking at the public rows; of private rows at most the header is read."""
    from sfumato.cli.init_look import look, names_of
    from sfumato.cli.init_text import Wishes, config_text

    private, public, test = _roles(data)
    asks = sys.stdin.isatty() and not (yes or as_json)
    declared, left_out = _listed(columns), _listed(ignore)
    if out.exists():
        raise InvalidArgument(f"out={str(out)!r} exists already: name another file with -o, or remove it.")
    if not out.parent.is_dir():
        raise InvalidArgument(f"out={str(out)!r} lies in a folder that does not exist: make it first.")
    if asks and label is None and public.is_file() and public.suffix != ".npz":
        known = names_of(public, declared)
        label = typer.prompt(f"Column to predict, of {', '.join(known)}", default=known[-1])
    seen = look(public, label=label, columns=declared, ignore=left_out)
    read_of_private = _check_private(private, seen)
    if size is None:
        if not asks:
            raise InvalidArgument("--size is missing: declare about how many rows are private; they are never counted.")
        size = typer.prompt("About how many private rows (declared, never counted)", type=int)
    if epsilon is None:
        epsilon = typer.prompt("Epsilon of the training", default=2.0) if asks else 2.0
    if size < 2:
        raise InvalidArgument(f"--size={size} must be at least 2 private rows.")
    if not 0 < epsilon < float("inf"):
        raise InvalidArgument(f"--epsilon={epsilon} must be a positive, finite number.")
    name = name or private.stem
    folder = re.sub(r"[^\w-]+", "-", name).strip("-") or "private"
    wishes = Wishes(
        private=_beside(private, out),
        public=_beside(public, out),
        test=None if test is None else _beside(test, out),
        name=name,
        size=size,
        epsilon=epsilon,
        out=f"runs/{folder}",
    )
    out.write_text(config_text(seen, wishes), encoding="utf-8")
    facts = {
        "wrote": str(out),
        "looked_at": f"{public}: {seen.rows} public rows",
        "of_private": read_of_private,
        "label": seen.label,
        "outputs": seen.outputs,
        "numbers": list(seen.ranges) or None,
        "categories": list(seen.categories) or None,
        "ignored": list(seen.ignore) or None,
        "next": f"sfumato train {out} --dry-run",
    }
    tell(facts, as_json=as_json)


def _roles(data: list[Path]) -> tuple[Path, Path, Path | None]:
    """Which file is which; refused before anything is looked at, if a public one is the private one."""
    from sfumato.data.tables import same_rows

    if not 2 <= len(data) <= 3:
        raise InvalidArgument(
            f"init was given {len(data)} file(s): name the private, the public and, if there is one, the test file; "
            "only the public one is looked at."
        )
    private, public, test = data[0], data[1], data[2] if len(data) == 3 else None
    for role, path in (("private", private), ("public", public), ("test", test)):
        if path is not None and not path.exists():
            raise InvalidArgument(f"{role}={str(path)!r} does not exist: check the path.")
    if same_rows(public, "public", private) or (test is not None and same_rows(test, "test", private)):
        raise InvalidArgument(f"private={str(private)!r} is also public or test: public rows are other people's.")
    return private, public, test


def _check_private(private: Path, seen: Seen) -> str:
    """Compare the header of the private file with the public one; without a header row, nothing of it is read."""
    from sfumato.data import cells

    if seen.columns is not None or not cells.has_cells(private):
        return "nothing was read"
    header = cells.names(private, "private")
    wanted = [*seen.ranges, *seen.categories, *seen.ignore, *([] if seen.label is None else [seen.label])]
    if missing := [name for name in wanted if name not in header]:
        raise InvalidArgument(  # what its first line has instead may be someone's row
            f"private={str(private)!r} has no column {missing[0]!r}, but public data has: check its header row, or "
            "give --columns if the files have none."
        )
    return "the header row alone was read"


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _beside(path: Path, out: Path) -> str:
    """As the config names it: relative to itself, if the file lies in its folder or below."""
    found = os.path.relpath(path, out.parent)
    return str(path.resolve()) if found.startswith("..") else found
