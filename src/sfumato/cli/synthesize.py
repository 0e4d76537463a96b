"""`sfumato synthesize`: public data in, a data set of synthetic rows out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.device import DeviceName, find_device
from sfumato.cli.facts import tell
from sfumato.cli.interruption import interruptible, kept
from sfumato.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from sfumato.cli.synthesize_config import SynthesisConfig


def synthesize(
    config: Annotated[Path, typer.Argument(help="A TOML file; docs/synthesis.md lists its keys.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; train nothing, write nothing.")
    ] = False,
    more: Annotated[
        int | None, typer.Option(min=1, help="Add so many rows to a finished synthesis, without training.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace what is in the folder already.")] = False,
    device: Annotated[DeviceName, typer.Option(help="Where to train.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train a generator on public rows as a config file says, and save what it makes. Costs no privacy."""
    from sfumato.cli.synthesize_config import load_synthesis_config

    checked = load_synthesis_config(config)  # before torch is loaded: a misspelt key is told at once
    if more is not None and (again or dry_run):
        raise InvalidArgument(f"--more={more} goes without --again and --dry-run: leave them out.")

    facts, title = _done(checked, find_device(device), dry_run, more, again, progress=not as_json)
    tell(facts, title, as_json=as_json, shown=_shown(facts))


def _done(
    config: SynthesisConfig, device: torch.device, dry_run: bool, more: int | None, again: bool, *, progress: bool
) -> tuple[dict[str, Any], str]:
    """What is to be said afterwards, and above it."""
    from sfumato.cli.synthesize_facts import plan, result
    from sfumato.cli.synthesize_job import add_more, execute, prepare
    from sfumato.cli.synthesize_record import Folder

    if not dry_run:
        Folder(config.folder).settle()
    if more is not None:
        return result(config, add_more(config, more, device, progress=progress)), f"{more} rows more"
    job = prepare(config, device, again=again)
    if dry_run:
        facts = {"dry_run": True, **plan(job, again=again), "would_write": [str(path) for path in job.would_write()]}
        return facts, f"Plan of {config.path} (nothing was trained or written)"
    aside = again and job.folder.provenance.exists()  # the draft is found again by --again
    with interruptible(kept(config.folder, again=again and not aside)):
        return result(config, execute(job, again=again, progress=progress)), f"Made as {config.path} says"


def _shown(facts: dict[str, Any]) -> dict[str, Any]:
    """For people: measures and seconds as lines of their own."""
    shown: dict[str, Any] = {}
    for name, value in facts.items():
        if name == "measures" and isinstance(value, dict):
            shown |= {key: f"{found['value']:.4g} by {found['by']}" for key, found in value.items()}
        elif name == "seconds" and isinstance(value, dict):
            shown |= {f"{key} seconds": f"{seconds:.1f}" for key, seconds in value.items()}
        else:
            shown[name] = value or None if isinstance(value, list) else value
    return shown
