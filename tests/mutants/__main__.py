"""`python -m tests.mutants`: all mutants and all methods; `--repeat 200`: the right ones again and again."""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sfumato.audit.verdict import Verdict, findings
from tests.mutants.mutant import killed_by
from tests.mutants.repeated import RECORD, filled, repeated, stored
from tests.mutants.suite import MUTANTS, PROCESSES, Done, done, everything, workers

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(<!-- table: mutants -->\n).*?(<!-- /table -->)", re.DOTALL)


def by_name(results: Sequence[Done]) -> dict[str, list[str]]:
    """Which audits killed each mutant; a mutant may have been put through several sets of them."""
    killed: dict[str, list[Verdict]] = {name: [] for name in _names()}
    for one in results:
        if one.job.mutant is not None:
            killed[MUTANTS[one.job.mutant].name] += one.found
    return {name: killed_by(found) for name, found in killed.items()}


def table_for_the_page(killed: dict[str, list[str]]) -> str:
    lines = ["| mutant | what is wrong | found by |", "|---|---|---|"]
    lines += [f"| {name} | {_wrong(name)} | {'; '.join(audits)} |" for name, audits in killed.items()]
    return "\n".join(lines)


def whole_suite(out: Path, page: Path | None, processes: int) -> int:
    start, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 160)
    with workers(processes) as pool:
        results = list(done(everything(), pool))
    killed = by_name(results)
    table = Table("mutant", "what is wrong", "killed by")
    for name, audits in killed.items():
        table.add_row(name, _wrong(name), "; ".join(audits) or "NOTHING")
    console.print(table)
    alarms = [verdict for one in results for verdict in findings(one.right)]
    for verdict in alarms:
        console.print(f"FALSE ALARM: {verdict.method}, {verdict.audit}: {verdict.told}")
    methods = [one for one in results if one.job.method]
    told = sum(len(one.right) for one in results)
    alive = [name for name, found in killed.items() if not found]
    console.print(
        f"{len(killed) - len(alive)} of {len(killed)} mutants killed. {len(alarms)} alarms in {told} audits of what "
        f"is right, among it the {len(methods)} methods of the package. {time.monotonic() - start:.0f} seconds, "
        f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} of one core."
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    records = [{"mutant": name, "killed_by": "; ".join(found)} for name, found in killed.items()]
    out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        text = page.read_text(encoding="utf-8")
        made = _BLOCK.sub(lambda found: f"{found[1]}\n{table_for_the_page(killed)}\n\n{found[2]}", text)
        page.write_text(filled(made, stored(RECORD)), encoding="utf-8")
    return int(bool(alive or alarms))


def _names() -> list[str]:
    return sorted({mutant.name for mutant in MUTANTS}, key=lambda name: int(name[1:]))


def _wrong(name: str) -> str:
    return next(mutant.wrong for mutant in MUTANTS if mutant.name == name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, metavar="N", help="only the fast part, of the right ones alone, N times")
    parser.add_argument("--record", type=Path, default=RECORD, help="what --repeat writes, and goes on from")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--page", type=Path, help="a page whose table of mutants is made anew")
    said = parser.parse_args()
    if said.repeat is not None:
        return repeated(said.repeat, said.record, said.processes)
    return whole_suite(said.out, said.page, said.processes)


if __name__ == "__main__":
    sys.exit(main())
