"""The labelling step: what is written, what a person does with it in a real browser, and how it is read back."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.errors import InvalidArgument
from sfumato.selection import sheet as sheet_module
from sfumato.selection.labels import oracle_labels, read_labels
from sfumato.selection.sheet import Sheet
from tests.browser import Page, browsing, find_chromium

NASTY = ["</script><script>alert(1)</script>", 'a "quoted", one', "{{DATA}}", "</script x <!-- & ünï"]
CLASSES = ["cat", "dog", *NASTY]


def pictures(n: int, channels: int = 1) -> torch.Tensor:
    rng = np.random.default_rng(n)
    return torch.from_numpy(rng.integers(0, 256, (n, channels, 6, 9), dtype=np.uint8))


def written(folder: Path, n: int = 8, **options: Any) -> Path:
    indices = [(37 * k + 11) % 101 for k in range(n)]
    return Sheet(**{"images": pictures(n), "indices": indices, "classes": CLASSES} | options).write(folder)


class _Scripts(HTMLParser):
    """What a browser takes for scripts, found by another parser."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append((dict(attrs), ""))
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._open:
            attrs, before = self.found[-1]
            self.found[-1] = (attrs, before + data)
        else:
            self.text.append(data)


def data_of(folder: Path) -> Any:
    parser = _Scripts()
    parser.feed((folder / "sheet.html").read_text(encoding="utf-8"))
    assert len(parser.found) == 2, "somebody's text has become a script"
    return json.loads(parser.found[0][1])


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_what_another_program_reads(tmp_path: Path, channels: int) -> None:
    images = pictures(5, channels)
    folder = written(tmp_path, 5, images=images, indices=[3, 100, 20, 4, 0])
    for k, index in enumerate([3, 100, 20, 4, 0]):
        with Image.open(folder / "images" / f"{index:03d}.png") as file:
            file.load()
            found = np.asarray(file).reshape(6, 9, channels)
        assert (found == images[k].permute(1, 2, 0).numpy()).all()


def test_floats_are_rounded_to_the_nearest_pixel(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 0.499 / 255, 0.501 / 255, 254.4 / 255, 1.0]).reshape(1, 1, 1, 5)
    folder = written(tmp_path, 1, images=values, indices=[0])
    with Image.open(folder / "images" / "0.png") as file:
        assert np.asarray(file).tolist() == [[0, 0, 1, 254, 255]]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    folder = written(tmp_path)
    page = (folder / "sheet.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=|https?:|//[a-z]|@import|url\(", page.split('<script type="application')[0])
    for point in data_of(folder)["points"]:
        assert point["src"].startswith("data:image/png;base64,")


def test_many_images_stay_beside_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet_module, "INLINE_BYTES", 100)
    folder = written(tmp_path)
    assert all((folder / point["src"]).is_file() for point in data_of(folder)["points"])


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    title = " ".join(NASTY)
    folder = written(tmp_path, title=title, names=NASTY * 2, facts={NASTY[0]: NASTY[2]})
    data = data_of(folder)
    assert data["classes"] == CLASSES
    assert [point["name"] for point in data["points"]] == NASTY * 2
    assert data["facts"] == [[NASTY[0], NASTY[2]]]
    parser = _Scripts()
    parser.feed((folder / "sheet.html").read_text(encoding="utf-8"))
    assert title in "".join(parser.text), "the title is shown as it was given"


def test_the_record_keeps_what_it_was_given(tmp_path: Path) -> None:
    folder = written(tmp_path, provenance={"strategy": "random", "statement": {"epsilon": 1.5}})
    record = json.loads((folder / "chosen.json").read_text())
    assert (record["strategy"], record["statement"]["epsilon"]) == ("random", 1.5)
    assert record["indices"] == [int(i) for i in re.findall(r"^(\d+),$", (folder / "labels.csv").read_text(), re.M)]
    assert record["classes"] == CLASSES


def test_writing_again_keeps_labels_and_the_sheet(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "labels.csv").write_text("index,label\n11,dog\n")
    page = (folder / "sheet.html").read_bytes()
    (folder / "sheet.html").unlink()
    written(tmp_path)
    assert (folder / "labels.csv").read_text() == "index,label\n11,dog\n"
    assert (folder / "sheet.html").read_bytes() == page


def test_other_sheets_have_other_labels(tmp_path: Path) -> None:
    """The browser keeps the labels of all sheets of a machine in one place."""
    others = [
        {},
        {"indices": [50, 48, 85, 21, 58, 95, 31, 11]},
        {"classes": ["cat", "dog"]},
        {"images": 0.5 + pictures(8) * 0.0},
    ]
    found = [data_of(written(tmp_path / str(k), **options))["id"] for k, options in enumerate(others)]
    assert len(set(found)) == 4
    assert data_of(written(tmp_path / "again", facts={"said": "elsewhere"}))["id"] == found[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"classes": ["cat"]}, "two different"),
        ({"classes": ["cat", "cat"]}, "two different"),
        ({"classes": ["cat", " dog"]}, "' dog'"),
        ({"classes": ["cat", "d\nog"]}, "one line"),
        ({"classes": ["cat", ""]}, "''"),
        ({"indices": [1, 2, 3, 4, 5, 6, 7, 7]}, "twice"),
        ({"indices": [1, 2, 3, 4, 5, 6, 7, -7]}, "indices"),
        ({"indices": [1, 2]}, "one each"),
        ({"names": ["a"]}, "names"),
        ({"images": torch.zeros(8, 2, 4, 4)}, "1 or 3 channels"),
        ({"images": torch.zeros(8, 16)}, "(8, 16)"),
        ({"images": torch.full((8, 1, 2, 2), 1.01)}, "0..1"),
        ({"images": torch.full((8, 1, 2, 2), torch.nan)}, "0..1"),
        ({"images": torch.zeros(8, 1, 2, 2, dtype=torch.int64)}, "int64"),
    ],
)
def test_what_cannot_be_labelled_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        written(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------ what is read back


def read(tmp_path: Path, text: str, chosen: tuple[int, ...] = (9, 2, 5)) -> Any:
    path = tmp_path / "labels.csv"
    path.write_bytes(text.encode())
    return read_labels(path, chosen=chosen, classes=CLASSES)


def test_labels_come_back_in_chosen_order_with_their_images(tmp_path: Path) -> None:
    found = read(tmp_path, "index,label\n5,cat\n9,dog\n")
    assert (found.indices.tolist(), found.labels.tolist(), found.missing) == ([9, 5], [1, 0], (2,))
    pool = torch.arange(12.0).reshape(12, 1, 1, 1)
    images, labels = found.public(pool).batch()
    assert (images.flatten().tolist(), labels.tolist()) == ([9.0, 5.0], [1, 0])


@pytest.mark.parametrize(
    "text",
    [
        "index,label\n2,cat\n",
        "index,label\n9,\n2,cat\n5,\n",  # the template, filled in
        "\ufeffindex;label\r\n2;cat\r\n\r\n",  # by a spreadsheet
        ' Index , Label \n 2 ,"cat"\n,\n',
        "index,label\n002,cat",
    ],
)
def test_the_same_label_however_it_is_saved(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)
    assert (found.indices.tolist(), found.labels.tolist(), found.missing) == ([2], [0], (9, 5))


def test_any_class_survives_the_file(tmp_path: Path) -> None:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["index", "label"])
    rows.writerows(enumerate(CLASSES))
    assert read(tmp_path, text.getvalue(), tuple(range(len(CLASSES)))).labels.tolist() == list(range(len(CLASSES)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("index,label\n9,cat\n2,cow\n", "line 3: label 'cow' is not a class"),
        ("index,label\n9,Cat\n", "line 2: label 'Cat'"),
        ("index,label\n9,0\n", "line 2: label '0'"),
        ("index,label\n\n\n7,cat\n", "line 4: index '7'"),
        ("index,label\n-2,cat\n", "line 2: index '-2'"),
        ("index,label\n2.0,cat\n", "line 2: index '2.0'"),
        (f"index,label\n{'9' * 6000},cat\n", "line 2: index '9999"),
        ("index,label\n,cat\n", "line 2: index ''"),
        ("index,label\n9,cat\n2,cat\n9,cat\n", "line 4: index 9 is on line 2 already"),
        ("index,label\n9,cat\n9,dog\n", "line 3: index 9 is on line 2 already"),
        ("index,label\n9,\n9,dog\n", "line 3: index 9 is on line 2 already"),
        ("index,label\n9,cat,dog\n", "line 2: has 3 cells"),
        ("9,cat\n", "line 1: must be the header"),
        ("", "line 1: must be the header"),
        ("index,label\n9,\n2,\n", "no label yet"),
        ('index,label\n9,"cat\n', "not a CSV file"),
    ],
)
def test_wrong_labels_are_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert len(str(caught.value)) < 400


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        read_labels(tmp_path / "no.csv", chosen=[1], classes=CLASSES)
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read_labels(tmp_path / "image.csv", chosen=[1], classes=CLASSES)


def test_the_oracle_knows_the_pool(tmp_path: Path) -> None:
    known = np.arange(10) % 3
    found = oracle_labels(known, chosen=[7, 0, 5], classes=3)
    assert (found.indices.tolist(), found.labels.tolist(), found.missing) == ([7, 0, 5], [1, 0, 2], ())
    for wrong, said in [
        (known[:6], "6 labels"),
        (known + 1, "0 to 2"),
        (known - 1, "0 to 2"),
        (known / 2, "float64"),
        (known[:, None], r"\(10, 1\)"),
    ]:
        with pytest.raises(InvalidArgument, match=said):
            oracle_labels(wrong, chosen=[7, 0, 5], classes=3)


# ------------------------------------------------------------------------------------------------ a person labels

needs_browser = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on the path (Debian: apt install chromium), nor SFUMATO_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


def said(page: Page) -> str:
    found: str = page.run("document.getElementById('left').textContent")
    return found


def saved(page: Page, folder: Path) -> Path:
    """The file that the button downloads."""
    folder.mkdir(exist_ok=True)
    page.save_downloads_to(folder)
    page.click("#save")
    deadline = time.monotonic() + 60
    while not (path := folder / "labels.csv").exists():
        assert time.monotonic() < deadline, "nothing was downloaded"
        time.sleep(0.02)
    return path


def click(page: Page, image: int, label: int) -> None:
    page.click(f".tile:nth-child({image + 1})")
    page.click(f"#classes button:nth-child({label + 1})")


@needs_browser
@pytest.mark.parametrize("inline", [True, False])
def test_five_images_are_labelled_reloaded_and_read_back(
    tmp_path: Path, browser: Page, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    if not inline:
        monkeypatch.setattr(sheet_module, "INLINE_BYTES", 0)
    images = pictures(8 + inline)
    folder = written(tmp_path / "sheet", len(images), images=images, names=(NASTY * 3)[: len(images)], title=NASTY[0])
    record = json.loads((folder / "chosen.json").read_text())
    browser.open((folder / "sheet.html").as_uri())
    browser.wait("[...document.images].every((image) => image.complete && image.naturalWidth === 9)")  # they are shown
    assert said(browser) == f"0 labelled, {len(images)} left"
    given = {1: 0, 6: 1, 0: 2, 3: 3, 7: 5}
    for image, label in given.items():
        click(browser, image, label)
    assert said(browser) == f"5 labelled, {len(images) - 5} left"

    browser.reload()
    assert said(browser) == f"5 labelled, {len(images) - 5} left"
    shown = browser.run("[...document.querySelectorAll('.tile b')].map((b) => b.textContent)")
    assert shown == [CLASSES[given[k]] if k in given else "" for k in range(len(images))]

    path = saved(browser, tmp_path / "downloads")
    found = read_labels(path, chosen=record["indices"], classes=record["classes"])
    assert found.indices.tolist() == [record["indices"][k] for k in sorted(given)]
    assert found.labels.tolist() == [given[k] for k in sorted(given)]
    assert len(found.missing) == len(images) - 5


@needs_browser
def test_labelling_by_keyboard(tmp_path: Path, browser: Page) -> None:
    folder = written(tmp_path / "sheet", 7)
    browser.open((folder / "sheet.html").as_uri())
    labels = "JSON.stringify(labels)"
    for key in ("1", "0", "9", "x"):  # the last two are no classes
        browser.press(key)
    assert browser.run(labels) == "[1,0,-1,-1,-1,-1,-1]"
    browser.press("ArrowRight")
    browser.press("5")  # number 3, and on to 4
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("2")  # number 2, and on to 4, the next without a label
    assert browser.run(labels) == "[1,0,2,5,-1,-1,-1]"
    browser.press("3")
    for _ in range(20):
        browser.press("ArrowLeft")
    browser.press("Delete")
    assert browser.run(labels) == "[-1,0,2,5,3,-1,-1]"
    assert said(browser) == "4 labelled, 3 left"
    browser.reload()
    assert browser.run(labels) == "[-1,0,2,5,3,-1,-1]"
    assert browser.run("current") == 0, "it goes on at the first that has no label"


@needs_browser
def test_arrows_move_in_the_grid_and_labelled_ones_can_be_hidden(tmp_path: Path, browser: Page) -> None:
    folder = written(tmp_path / "sheet", 40)
    browser.look_like(width=1000, height=700)
    browser.open((folder / "sheet.html").as_uri())
    columns = browser.run("tiles.filter((t) => t.offsetTop === tiles[0].offsetTop).length")
    assert columns > 3
    browser.press("ArrowDown")
    assert browser.run("current") == columns
    browser.press("ArrowUp")
    assert browser.run("current") == 0
    browser.press("1")
    browser.click("#hide")
    browser.press("ArrowLeft")
    assert browser.run("current") == 1, "what is hidden is passed over"


@needs_browser
def test_it_fits_a_phone_by_day_and_by_night(tmp_path: Path, browser: Page) -> None:
    folder = written(tmp_path / "sheet", 30, title="A title " * 20, names=["name" * 30] * 30)
    colours = []
    for dark in (False, True):
        browser.look_like(width=360, height=640, dark=dark)
        browser.open((folder / "sheet.html").as_uri())
        assert browser.run("document.documentElement.scrollWidth") <= 360
        small = "[...document.querySelectorAll('#classes button')].filter((b) => b.offsetHeight < 44).length"
        assert browser.run(small) == 0, "a thumb must hit them"
        colours.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        click(browser, 3, 1)
    assert colours[0] != colours[1]
    assert browser.run("labels[3]") == 1
    browser.look_like(width=1000, height=700)


@needs_browser
def test_what_is_kept_is_believed_only_where_it_fits(tmp_path: Path, browser: Page) -> None:
    folder = written(tmp_path / "sheet", 3, indices=[4, 5, 6], classes=["cat", "dog", "cow"])
    browser.open((folder / "sheet.html").as_uri())
    for kept, labels in [
        ({"4": "dog", "5": "horse", "99": "cat", "__proto__": "cat"}, "[1,-1,-1]"),
        ("no JSON", "[-1,-1,-1]"),
    ]:
        text = json.dumps(kept) if isinstance(kept, dict) else kept
        browser.run(f"localStorage.setItem(STORE, {json.dumps(text)})")
        browser.reload()
        assert browser.run("JSON.stringify(labels)") == labels
    assert browser.run("document.getElementById('warning').hidden")


@needs_browser
def test_a_browser_that_keeps_nothing_says_so(tmp_path: Path, browser: Page) -> None:
    folder = written(tmp_path / "sheet", 3)
    browser.open((folder / "sheet.html").as_uri())
    browser.run("localStorage.clear(); Storage.prototype.setItem = () => { throw new DOMException('full'); }; 0")
    browser.press("1")
    assert "save labels.csv before" in browser.run("document.getElementById('warning').textContent")
    assert read_labels(saved(browser, tmp_path / "saved"), chosen=[11, 48, 85], classes=CLASSES).labels.tolist() == [1]
