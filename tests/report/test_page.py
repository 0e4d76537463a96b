"""The page as text: nothing of a file becomes HTML, nothing is fetched, and the numbers can be taken away."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from PIL import Image

from sfumato.errors import InvalidArgument
from sfumato.report import report
from sfumato.report.chosen_map import places
from sfumato.report.contents import Selection, read_all
from sfumato.report.markup import tag
from tests.report.looking import THEMES, WIDTHS
from tests.report.pictures import LARGEST, PICTURES, name

Changed = Callable[..., Path]
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & ünï ​ \ud800"
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Elements with their attributes; every one must be closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attrs)))
        if name not in VOID:
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == name]


def nasty(value: Any) -> Any:
    """The same with every text replaced."""
    if isinstance(value, dict):
        return {key: nasty(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [nasty(inner) for inner in value]
    return NASTY if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_html(examples: Path, tmp_path: Path) -> None:
    evil = tmp_path / "<script>alert(3)</script>"[:-9]  # a slash cannot stand in a name
    shutil.copytree(examples, evil)
    for path in evil.rglob("*.json"):
        if "generator" not in path.parts:
            path.write_text(json.dumps(nasty(json.loads(path.read_text()))))
    for path in evil.rglob("statement.txt"):
        path.write_text(f"What is promised. {NASTY[:-1]}\n\n- {NASTY[:-1]}\n- b")
    indices = json.loads((evil / "to_label" / "chosen.json").read_text())["indices"]
    (evil / "to_label" / "labels.csv").write_text(f"index,label\n{indices[0]},{NASTY[:-1].replace(',', '')}\n")
    (evil / "dp-sgd").rename(evil / "<img src=x onerror=alert(4)>")
    plain, page = Reader(report([examples]).to_html()), Reader(report([evil]).to_html())
    assert len(page.named("script")) == 1
    assert len(page.named("img")) == len(plain.named("img"))
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    assert any("alert(1)" in text for text in page.texts), "it is shown as text"
    assert any("onerror=alert(4)" in text for text in page.texts)


def test_attributes_cannot_be_left() -> None:
    assert tag("a", "x", href='"><b>') == '<a href="&quot;&gt;&lt;b&gt;">x</a>'
    assert tag("p", hidden=True, id=None) == "<p hidden></p>"


def test_nothing_is_fetched(examples: Path) -> None:
    page = Reader(report([examples]).to_html())
    sources = [a[key] or "" for _, a in page.found for key in ("src", "href", "srcset", "action", "data") if key in a]
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)
    style = (Path(report.__code__.co_filename).parent / "page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    (rules,) = [a["content"] or "" for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert rules.startswith("default-src 'none'; img-src data:;")
    assert "unsafe-inline" not in rules.partition("script-src")[2]


def test_links_within_the_page_lead_somewhere(examples: Path) -> None:
    page = Reader(report([examples]).to_html())
    ids = [a["id"] for _, a in page.found if "id" in a]
    assert len(set(ids)) == len(ids)
    assert {(a["href"] or "")[1:] for a in page.named("a") if (a["href"] or "").startswith("#")} <= set(ids)


def test_headings_go_down_step_by_step(examples: Path) -> None:
    levels = [int(name[1]) for name, _ in Reader(report([examples]).to_html()).found if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_the_numbers_of_every_plot_can_be_downloaded(examples: Path) -> None:
    found = report([examples])
    links = [a for a in Reader(found.to_html()).named("a") if "download" in a]
    assert [link["download"] for link in links] == [f"{figure.key}.csv" for figure in found.figures]
    for link, figure in zip(links, found.figures, strict=True):
        text = unquote((link["href"] or "").partition(",")[2])
        header, *rows = csv.reader(io.StringIO(text))
        assert tuple(header) == figure.columns
        assert rows == [["" if value is None else str(value) for value in row] for row in figure.rows]
        assert len(rows) > 1


def test_every_plot_says_what_it_shows(examples: Path) -> None:
    plots = [a for a in Reader(report([examples]).to_html()).named("svg") if a.get("role") == "img"]
    labels = [a["aria-label"] or "" for a in plots]
    assert len(labels) == 6, "five plots and the map"
    last = json.loads((examples / "averaged" / "run.json").read_text())["metrics"]["test_accuracy"]
    assert f"{100 * last:.6g} %" in labels[1]
    assert all(a["alt"] for a in Reader(report([examples]).to_html()).named("img"))


def test_the_same_files_give_the_same_page(examples: Path) -> None:
    assert report([examples]).to_html() == report([examples]).to_html()


def test_the_statement_stands_at_the_top_with_its_whole_text(examples: Path) -> None:
    page = Reader(report([examples / "averaged"]).to_html())
    shown = " ".join(" ".join(page.texts).split())
    text = (examples / "averaged" / "statement.txt").read_text()
    for part in re.split(r"\n\n|\n- ", text):
        if not part.startswith("Privacy statement for"):
            assert " ".join(part.split()) in shown, part
    assert shown.index("What is promised.") < shown.index("Epsilon over time")


def test_samples_and_chosen_images_are_in_the_page(examples: Path) -> None:
    page = report([examples]).to_html()
    for path in (examples / "synthetic" / "grid.png", *(examples / "to_label" / "images").glob("*.png")):
        assert base64.b64encode(path.read_bytes()).decode() in page, path.name


# ------------------------------------------------------------------------------------------------ the map


def selection(folder: Path) -> Selection:
    (found,) = read_all([folder])
    assert isinstance(found, Selection)
    return found


def test_images_that_look_alike_lie_close_together(examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chosen"
    shutil.copytree(examples / "to_label", folder)
    files = sorted((folder / "images").iterdir())
    for k, path in enumerate(files):  # three kinds: black, bright above, bright on the left
        image = Image.new("L", (8, 8))
        box = {1: (0, 0, 8, 4), 2: (0, 0, 4, 8)}.get(k % 3)
        if box is not None:
            image.paste(200 + k % 5, box)
        image.save(path)
    where = dict(
        zip((int(p.file.stem) for p in selection(folder).pictures), places(selection(folder).pictures), strict=True)
    )
    kinds = [[where[int(path.stem)] for path in files[k::3]] for k in range(3)]
    within = max(abs(a[i] - b[i]) for kind in kinds for a in kind for b in kind for i in range(2))
    centres = [tuple(sum(p[i] for p in kind) / len(kind) for i in range(2)) for kind in kinds]
    apart = min(max(abs(a[i] - b[i]) for i in range(2)) for a in centres for b in centres if a != b)
    assert within < 0.1 < 0.5 < apart
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in where.values())


def test_no_map_where_there_is_no_plane(examples: Path, tmp_path: Path) -> None:
    pictures = selection(examples / "to_label").pictures
    assert places(pictures[:2]) == []
    same = [pictures[0]] * 4
    assert places(same) == []
    folder = tmp_path / "sizes"
    shutil.copytree(examples / "to_label", folder)
    Image.new("L", (5, 9)).save(next((folder / "images").iterdir()))
    assert places(selection(folder).pictures) == []
    assert "</html>" in report([folder]).to_html()


# ------------------------------------------------------------------------------------------------ the file


def test_only_a_report_is_replaced(examples: Path, tmp_path: Path) -> None:
    found = report([examples / "dp-sgd"])
    out = found.write(tmp_path / "new" / "report.html")
    assert out.read_text() == found.to_html()
    assert report([examples / "dope-sgd"]).write(out) == out
    assert "Report of dope-sgd" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    other = tmp_path / "thesis.html"
    other.write_text("years of work")
    with pytest.raises(InvalidArgument, match=r"thesis\.html' exists and is no report"):
        found.write(other)
    assert other.read_text() == "years of work"
    with pytest.raises(InvalidArgument, match="is a folder"):
        found.write(tmp_path)


def test_a_report_needs_no_torch(examples: Path) -> None:
    code = (
        "import sys; from sfumato.report import report; "
        f"assert '</html>' in report([{str(examples)!r}], beside=['000-table9']).to_html(); "
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pictures_of_the_docs_are_there_and_small() -> None:
    taken = [PICTURES / name(width, theme) for width in WIDTHS for theme in THEMES]
    page = (PICTURES.parent / "report.md").read_text()
    for path in taken:
        assert path.stat().st_size <= LARGEST, path.name
        assert f"pictures/{path.name}" in page
        with Image.open(path) as image:
            assert image.width == int(path.name.split("-")[1])
