"""The examples in the README and the docs run as they stand; links and named tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {}
    for block in blocks:  # one page is one session
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    missing = [link for link in links if link and not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_benchmark_page_is_made_from_the_stored_results() -> None:
    from benchmarks.page import pages

    for path, text in pages().items():
        assert path.read_text() == text, path.name


def test_the_tables_of_the_papers_are_made_from_the_committed_runs() -> None:
    from sfumato.experiments.page import pages

    for path, text in pages(ROOT / "docs" / "papers").items():
        assert path.read_text() == text, path.name
