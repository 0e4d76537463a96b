"""Take the pictures of docs/report.md anew: `python -m tests.report.pictures`. It trains for a minute or two."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from PIL import Image

from sfumato.report import report
from tests.browser import browsing
from tests.report.examples import make_examples
from tests.report.looking import THEMES, WIDTHS, picture, show

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
LARGEST = 150_000  # bytes of one
_SHOWN = {360: ("#plots", 1250), 768: ("body", 1500), 1280: ("#runs", 1600)}  # where it begins, and how much


def name(width: int, theme: str) -> str:
    return f"report-{width}-{theme}.png"


def take(html: Path, out: Path) -> list[Path]:
    """One picture for each screen and theme."""
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as page:
        for width in WIDTHS:
            for theme in THEMES:
                show(page, html, width=width, dark=theme == "dark")
                start, height = _SHOWN[width]
                top = page.run(f"Math.max(0, document.querySelector('{start}').getBoundingClientRect().top)")
                path = out / name(width, theme)
                # Rare colours are the signs: a palette of the most frequent ones would lose them.
                few = picture(page, top=top, height=height).quantize(256, Image.Quantize.MAXCOVERAGE)
                few.save(path, optimize=True)
                taken.append(path)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        runs = make_examples(Path(folder), good=True)
        html = report([runs]).write(Path(folder) / "report.html")
        for path in take(html, out):
            print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
