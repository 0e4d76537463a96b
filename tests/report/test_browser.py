"""The report as people see it: on a phone, a tablet and a desk, in light and dark, on paper, and with axe-core."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sfumato.report import report
from tests.browser import Page, browsing, find_chromium
from tests.report.looking import THEMES, WIDTHS, axe_findings, contrast, find_axe, picture, printed, show

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on the path (Debian: apt install chromium), nor SFUMATO_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def html(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of everything, among it a run with a name that nobody can break into lines."""
    folder = tmp_path_factory.mktemp("report")
    long = folder / ("a-very-long-name-" + "x" * 80)
    shutil.copytree(examples / "dp-sgd", long)
    return report([examples, long], beside=["000-table9"]).write(folder / "report.html")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_every_screen_in_both_themes(browser: Page, html: Path, width: int, theme: str) -> None:
    show(browser, html, width=width, dark=theme == "dark")
    assert browser.run("complaints") == []
    fetched = browser.run("performance.getEntriesByType('resource').map((e) => e.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing scrolls sideways"
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nor when all is unfolded"
    pixels = np.asarray(picture(browser))
    assert pixels.shape[1] == width
    corner = pixels[-1, 0].mean()
    assert corner > 200 if theme == "light" else corner < 60
    assert pixels.std() > 5, "something is to be seen"
    behind, letters, signs = (
        browser.run(f"[...document.querySelectorAll('{which}')].map((e) => getComputedStyle(e).{part})")
        for which, part in (("figure", "backgroundColor"), (".plot text", "fill"), (".sign", "color"))
    )
    assert len(set(behind)) == 1
    assert min(contrast(ink, behind[0]) for ink in set(letters)) >= 4.5
    assert min(contrast(ink, behind[0]) for ink in set(signs)) >= 2
    lettered = browser.run("Math.min(...[...document.querySelectorAll('.plot')].map((e) => e.getScreenCTM().a)) * 12.5")
    assert lettered >= 8.5, "letters of plots stay readable"


def test_images_are_shown(browser: Page, html: Path) -> None:
    show(browser, html, width=1280)
    browser.run("for (const image of document.images) image.loading = 'eager'")
    browser.wait("[...document.images].every((image) => image.complete)")
    assert browser.run("[...document.images].every((image) => image.naturalWidth > 0)")
    assert browser.run("document.images.length") == 25


def test_the_button_changes_the_theme(browser: Page, html: Path) -> None:
    show(browser, html, width=768)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(paper)
    browser.click("#theme")
    dark = browser.run(paper)
    assert dark != before
    assert browser.run("document.getElementById('theme').textContent") == "Light"
    browser.click("#theme")
    assert browser.run(paper) == before
    show(browser, html, width=768, dark=True)
    assert browser.run(paper) == dark, "as the system likes it"
    browser.click("#theme")
    assert browser.run(paper) == before


def test_without_script_there_is_no_button(browser: Page, html: Path) -> None:
    browser._send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(browser, html, width=768)
        root = browser._send("DOM.getDocument", depth=-1)["root"]["nodeId"]
        button = browser._send("DOM.querySelector", nodeId=root, selector="#theme[hidden]")["nodeId"]
        assert button
    finally:
        browser._send("Emulation.setScriptExecutionDisabled", value=False)


def test_paper_is_white_whatever_the_theme_and_shows_the_statement(browser: Page, html: Path) -> None:
    for theme in THEMES:
        show(browser, html, width=768, dark=theme == "dark", media="print")
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
        assert browser.run("getComputedStyle(document.getElementById('theme')).display") == "none"
    browser.run(
        "window.opened = []; addEventListener('beforeprint', () => { opened = [...document.querySelectorAll("
        "'details.printed')].map((d) => d.open); })"
    )
    assert printed(browser).startswith(b"%PDF")
    assert browser.run("opened.length") >= 2
    assert browser.run("opened.every((open) => open)"), "what is not covered is on paper, too"
    assert browser.run("[...document.querySelectorAll('details.printed')].every((d) => !d.open)"), "and then as before"


def test_a_chosen_theme_does_not_reach_paper(browser: Page, html: Path) -> None:
    show(browser, html, width=768, media="print")
    browser.run("document.documentElement.dataset.theme = 'dark'")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_axe_finds_nothing_serious(browser: Page, html: Path) -> None:
    axe, why = find_axe()
    if axe is None:
        pytest.skip(why)
    for theme in THEMES:
        show(browser, html, width=360, dark=theme == "dark")
        browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
        found = axe_findings(browser, axe, *([] if theme == "light" else ["color-contrast"]))  # the rest is the same
        assert not [one for one in found if one["impact"] in ("serious", "critical")], found
    browser.run("document.querySelector('main').innerHTML = '<p style=\"color:#777;background:#888\">unreadable</p>'")
    assert [one["rule"] for one in axe_findings(browser, axe, "color-contrast")] == ["color-contrast"]
