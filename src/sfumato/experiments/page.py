"""Writes the tables of docs/papers/<paper>.md, and the list of all, from the committed runs: none is typed by hand.

    python -m sfumato.experiments.page [docs/papers] [--check]

Only what stands between `<!-- table: <name> -->` and `<!-- /table -->` is written, and in index.md what stands between
`<!-- list: <paper> -->` and `<!-- /list -->`; the rest of a page is not touched. A page that does not exist is begun
with all tables of its paper, or the lists of all. Figures are drawn beside the pages, as SVG. In choosing.md, a folder
up, what stands between `<!-- evidence -->` and `<!-- /evidence -->` is written, where there is such a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex import figures
from sfumato.experiments.convex.comparison import CAPTION, pairs
from sfumato.experiments.convex.comparison import markdown as beside_others
from sfumato.experiments.convex.spec import Spec as ConvexSpec
from sfumato.experiments.convex.spec import convex_names, find_convex
from sfumato.experiments.convex.table import markdown as convex_markdown
from sfumato.experiments.evidence import markdown as evidence
from sfumato.experiments.papers import items, listing
from sfumato.experiments.papers import markdown as listed
from sfumato.experiments.records import COMMITTED
from sfumato.experiments.spec import Spec, find_spec, in_order, spec_names
from sfumato.experiments.table import drawn, entries, markdown

_BLOCK = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
_LIST = re.compile(r"(<!-- list: (\w+) -->\n).*?(<!-- /list -->)", re.DOTALL)
_EVIDENCE = re.compile(r"(<!-- evidence -->\n).*?(<!-- /evidence -->)", re.DOTALL)


_MEASURED = {
    "accuracy": "Test accuracy in percent",
    "loss": "Test loss per word, which is the logarithm of the perplexity",
    "perplexity": "Test perplexity per word",
}


def block(spec: Spec, runs: Path = COMMITTED) -> str:
    """What stands between the markers of one table."""
    note = f"{' '.join(spec.note.split())}\n\n" if spec.note else ""
    how = f"`sfumato reproduce {spec.name} --scale paper` makes it, `sfumato reproduce {spec.name} --show` prints it."
    found = entries(spec, "paper", runs)
    plot = spec.figure is not None and any(e.ours is not None for e in found)
    picture = f"![{spec.title}]({spec.name}.svg)\n\n" if plot else ""
    return (
        f"{spec.where}. {_MEASURED[spec.measure]}; ours is the mean over seeds, ± its standard error, and in "
        f"parentheses how many. {how}\n\n{picture}"
        f"{markdown(spec, folder=runs)}\n\n{note}"
    ).rstrip() + "\n"


def convex_block(spec: ConvexSpec, runs: Path = COMMITTED) -> str:
    """The same for a convex experiment."""
    note = f"{' '.join(spec.note.split())}\n\n" if spec.note else ""
    plot = f"![{spec.title}]({spec.name}.svg)\n\n" if figures.measured(spec, runs) else ""
    how = f"`sfumato reproduce {spec.name}` makes it, `sfumato reproduce {spec.name} --show` prints it."
    ahead = pairs(spec, runs)
    beside = f"{CAPTION}\n\n{beside_others(ahead)}\n\n" if ahead else ""
    return (
        f"{spec.where}. {spec.score}; ours is the mean over repeats, ± its standard error, and in parentheses how "
        f"many. {how}\n\n{plot}{convex_markdown(spec, runs)}\n\n{beside}{note}"
    ).rstrip() + "\n"


def filled(text: str, runs: Path = COMMITTED) -> str:
    """A page with its tables made anew."""

    def made(name: str) -> str:
        return convex_block(find_convex(name), runs) if name in convex_names() else block(find_spec(name), runs)

    return _BLOCK.sub(lambda found: f"{found[1]}\n{made(found[2])}\n{found[3]}", text)


def _specs() -> list[Spec | ConvexSpec]:
    return [find_convex(n) if n in convex_names() else find_spec(n) for n in in_order([*spec_names(), *convex_names()])]


def begun(paper: str) -> str:
    """A page with all tables of a paper, still empty."""
    specs = [spec for spec in _specs() if spec.paper == paper]
    parts = [f"## {spec.title}\n\n<!-- table: {spec.name} -->\n<!-- /table -->\n" for spec in specs]
    return f"# Paper {paper}\n\n" + "\n".join(parts)


def begun_index() -> str:
    """A page with the lists of all papers, still empty."""
    parts = [
        f"## [{p.number}]({p.number}.md): {p.title}\n\n<!-- list: {p.number} -->\n<!-- /list -->\n"
        for p in listing().paper
    ]
    return "# All tables and figures of the papers\n\n" + "\n".join(parts)


def filled_index(text: str, runs: Path = COMMITTED) -> str:
    """The page of lists made anew."""
    every = items("paper", runs, runs)

    def made(paper: str) -> str:
        return listed(item for item in every if item.paper == paper)

    return _LIST.sub(lambda found: f"{found[1]}\n{made(found[2])}\n\n{found[3]}", text)


def filled_choosing(text: str, runs: Path = COMMITTED) -> str:
    """The page of advice with its numbers made anew."""
    return _EVIDENCE.sub(lambda found: f"{found[1]}\n{evidence(runs)}\n\n{found[2]}", text)


def pages(folder: Path, runs: Path = COMMITTED) -> dict[Path, str]:
    """What each page should hold."""
    papers = sorted({spec.paper for spec in _specs()})
    paths = {folder / f"{paper}.md": paper for paper in papers}
    index, choosing = folder / "index.md", folder.parent / "choosing.md"
    advice = {choosing: filled_choosing(choosing.read_text(encoding="utf-8"), runs)} if choosing.exists() else {}
    return {
        **advice,
        index: filled_index(index.read_text(encoding="utf-8") if index.exists() else begun_index(), runs),
        **{
            path: filled(path.read_text(encoding="utf-8") if path.exists() else begun(paper), runs)
            for path, paper in paths.items()
        },
    }


def main(arguments: list[str]) -> int:
    """Write the pages; with --check, only say which are not as the runs are, with status 1."""
    check = "--check" in arguments
    places = [argument for argument in arguments if argument != "--check"]
    if len(places) > 1 or any(place.startswith("-") for place in places):
        raise InvalidArgument(f"arguments={arguments} must be a folder and --check, each if wanted.")
    folder = Path(places[0] if places else "docs/papers")
    wanted = pages(folder)
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} {'is not up to date' if check else 'written'}")
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        for spec in _specs():  # a figure shows what is in its table
            picture = folder / f"{spec.name}.svg"
            if picture.exists() and folder / f"{spec.paper}.md" not in stale:
                continue
            if isinstance(spec, Spec):
                drawn(spec, picture)
            elif figures.measured(spec):
                figures.draw(spec, picture)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
