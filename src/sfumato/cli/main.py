"""The `sfumato` command: one sentence on stderr for every error, and never a traceback.

Everything heavy (torch, dp-accounting, scikit-learn) is imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import sfumato
from sfumato.cli.account import account
from sfumato.cli.audit import audit
from sfumato.cli.budget import budget
from sfumato.cli.demo import demo
from sfumato.cli.init import init
from sfumato.cli.interruption import Interrupted, terminable
from sfumato.cli.predict import predict
from sfumato.cli.report import report
from sfumato.cli.reproduce import reproduce
from sfumato.cli.select import select
from sfumato.cli.synthesize import synthesize
from sfumato.cli.train import train
from sfumato.cli.tune import tune
from sfumato.errors import SfumatoError

app = typer.Typer(
    name="sfumato",
    help="Differentially private training that makes the most of public data.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command()(account)
app.command()(audit)
app.command()(budget)
app.command()(demo)
app.command()(init)
app.command()(predict)
app.command()(report)
app.command()(reproduce)
app.command()(select)
app.command()(synthesize)
app.command()(train)
app.command()(tune)

BAD_INPUT, UNEXPECTED, INTERRUPTED = 2, 1, 130


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sfumato {sfumato.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 130 for Ctrl-C or SIGTERM, 1 for a defect."""
    # Before torch's first allocation, which reads it: pages of 2 MiB, where the system has them. A training takes and
    # gives back much memory in every step, and small pages are cleared and mapped anew each time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        with terminable():
            status = app(args=arguments, prog_name="sfumato", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Interrupted as interrupted:
        return _fail(str(interrupted), INTERRUPTED)
    except SfumatoError as error:
        return _fail(str(error), BAD_INPUT)
    except OSError as error:
        return _fail(
            f"{error.filename or 'A file'} cannot be used: {error.strerror or type(error).__name__}.", BAD_INPUT
        )
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of click, of which typer may carry its own copy
            return _fail(error.format_message() or "No command was given: try sfumato --help.", BAD_INPUT)
        if os.environ.get("SFUMATO_TRACEBACK"):
            raise
        return _fail(_unexpected(error), UNEXPECTED)
    if status == INTERRUPTED:
        return _fail("Interrupted.", INTERRUPTED)
    return int(status or 0)


def _fail(sentence: str, status: int) -> int:
    said = " ".join(sentence.split())
    said = said if said[-1:] in (".", "?", "!") else f"{said}."  # as typer's own do not end
    print(f"sfumato: {said}", file=sys.stderr)
    return status


def _unexpected(error: Exception) -> str:
    """Where it happened, not what it says: the message of an error inside the door may quote a private row."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_globals.get('__name__', '?')}, line {trace.tb_lineno}" if trace is not None else "?"
    return (
        f"Unexpected {type(error).__name__} in {place}; its message is withheld, since it may quote private values: "
        "set SFUMATO_TRACEBACK=1 to see it."
    )


if __name__ == "__main__":
    sys.exit(main())
