"""Writes the table of docs/audit.md from stored verdicts: no number is typed by hand.

    sfumato audit --methods all --full --json > docs/audit.json
    python -m sfumato.audit.page [docs] [--check]

Only what stands between `<!-- table: audit -->` and `<!-- /table -->` is written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sfumato.errors import InvalidArgument

_BLOCK = re.compile(r"(<!-- table: audit -->\n).*?(<!-- /table -->)", re.DOTALL)


def markdown(verdicts: Iterable[Mapping[str, Any]]) -> str:
    """One line per verdict.

    >>> told = {"method": "dp-sgd", "audit": "canary", "claimed": 2.0, "lower_bound": 1.25, "unit": "epsilon"}
    >>> print(markdown([{**told, "confidence": 0.999999, "trials": 600, "verdict": "holds"}]))
    | method | audit | claimed | lower bound | unit | trials | false alarm | verdict |
    |---|---|---|---|---|---|---|---|
    | dp-sgd | canary | 2 | 1.25 | epsilon | 600 | 1e-06 | holds |
    """
    lines = ["| method | audit | claimed | lower bound | unit | trials | false alarm | verdict |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for one in verdicts:
        alarm = 1 - one["confidence"]
        cells = (
            *(one["method"], one["audit"], _number(one["claimed"]), _number(one["lower_bound"])),
            *(one["unit"], str(one["trials"]), f"{alarm:.1g}" if alarm > 0 else "never", one["verdict"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str, verdicts: Iterable[Mapping[str, Any]]) -> str:
    """The page with its table made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{markdown(verdicts)}\n\n{found[2]}", text)


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3g}"


def main(arguments: list[str]) -> int:
    """Write the page; with --check, only say whether it is as the verdicts are, by status 1 if not."""
    places = [argument for argument in arguments if argument != "--check"]
    if len(places) > 1 or any(place.startswith("-") for place in places):
        raise InvalidArgument(f"arguments={arguments} must be a folder and --check, each if wanted.")
    folder = Path(places[0] if places else "docs")
    page, before = folder / "audit.md", (folder / "audit.md").read_text(encoding="utf-8")
    after = filled(before, json.loads((folder / "audit.json").read_text(encoding="utf-8")))
    if "--check" in arguments:
        return int(before != after)
    page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
