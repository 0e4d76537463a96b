"""Writes the tables of docs/papers/<paper>.md from the committed runs: no number is typed by hand.

    python -m sfumato.experiments.page [docs/papers] [--check]

Only what stands between `<!-- table: <name> -->` and `<!-- /table -->` is written; the rest of a page is not touched. A
page that does not exist is begun with all tables of its paper.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sfumato.errors import InvalidArgument
from sfumato.experiments.records import COMMITTED
from sfumato.experiments.spec import Spec, find_spec, spec_names
from sfumato.experiments.table import markdown

_BLOCK = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def block(spec: Spec, runs: Path = COMMITTED) -> str:
    """What stands between the markers of one table."""
    note = f"{' '.join(spec.note.split())}\n\n" if spec.note else ""
    how = f"`sfumato reproduce {spec.name} --scale paper` makes it, `sfumato reproduce {spec.name} --show` prints it."
    return (
        f"{spec.where}. Test accuracy in percent; ours is the mean over seeds, ± its standard error, and in "
        f"parentheses how many. {how}\n\n{markdown(spec, folder=runs)}\n\n{note}"
    ).rstrip() + "\n"


def filled(text: str, runs: Path = COMMITTED) -> str:
    """A page with its tables made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{block(find_spec(found[2]), runs)}\n{found[3]}", text)


def begun(paper: str) -> str:
    """A page with all tables of a paper, still empty."""
    specs = [spec for spec in map(find_spec, spec_names()) if spec.paper == paper]
    parts = [f"## {spec.title}\n\n<!-- table: {spec.name} -->\n<!-- /table -->\n" for spec in specs]
    return f"# Paper {paper}\n\n" + "\n".join(parts)


def pages(folder: Path, runs: Path = COMMITTED) -> dict[Path, str]:
    """What each page should hold."""
    papers = sorted({find_spec(name).paper for name in spec_names()})
    paths = {folder / f"{paper}.md": paper for paper in papers}
    return {
        path: filled(path.read_text(encoding="utf-8") if path.exists() else begun(paper), runs)
        for path, paper in paths.items()
    }


def main(arguments: list[str]) -> int:
    """Write the pages; with --check, only say which are not as the runs are, with status 1."""
    check = "--check" in arguments
    places = [argument for argument in arguments if argument != "--check"]
    if len(places) > 1 or any(place.startswith("-") for place in places):
        raise InvalidArgument(f"arguments={arguments} must be a folder and --check, each if wanted.")
    folder = Path(places[0] if places else "docs/papers")
    stale = [p for p, text in pages(folder).items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} {'is not up to date' if check else 'written'}")
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in pages(folder).items():
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
