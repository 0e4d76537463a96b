"""The frame of a page that needs nothing else: no network, no fonts, a few lines of script for the theme."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from sfumato.report.markup import Markup, tag

GENERATOR = "sfumato report"  # by which a report is known


def framed(title: str, version: str, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """`sections` have a name in the page, a heading and what is below it; empty ones are left out."""
    parts = files("sfumato.report")
    style, script = ((parts / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    shown = [(name, heading, body) for name, heading, body in sections if body]
    links = [tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in shown]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{rules}">'),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="generator", content=GENERATOR),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", title),
            tag("button", "Dark", id="theme", type="button", hidden=True, aria_label="Change between light and dark"),
            tag("nav", tag("ul", *links), aria_label="Contents"),
        ),
        tag(
            "main",
            *(
                tag("section", tag("h2", heading, id=f"{name}-h"), inside, id=name, aria_labelledby=f"{name}-h")
                for name, heading, inside in shown
            ),
        ),
        tag(
            "footer",
            tag(
                "p",
                f"Made by sfumato {version} from files alone: released answers, public rows and what was declared. "
                "Nothing was asked of private data for it.",
            ),
        ),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
