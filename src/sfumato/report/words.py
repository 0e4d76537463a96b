"""Numbers, names and tables as a reader of the page sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfumato.privacy import budget
from sfumato.report.figures import Value
from sfumato.report.markup import Markup, tag


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[Value]]) -> Markup:
    """First column as names; in a frame of its own that scrolls, so that the page does not."""
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    body = [
        tag("tr", tag("th", plain(first), scope="row", class_="wide"), *(tag("td", plain(v)) for v in rest))
        for first, *rest in rows
    ]
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Table: {caption}")


def plain(value: Any) -> str:
    """For a cell of a table.

    >>> plain(0.123456789), plain(None), plain(1e-05), plain(48000.0)
    ('0.12346', '', '1e-05', '48000')
    """
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def at_most(epsilon: Any) -> Any:
    """Five digits, and never less than the number; a run may have none.

    >>> at_most(2.000010001), at_most(5.2), at_most(None)
    ('2.0001', '5.2', None)
    """
    if isinstance(epsilon, int | float):
        return budget.at_most(epsilon)
    return None if epsilon is None else str(epsilon)


def in_words(value: Any) -> str:
    """A table of facts on one line.

    >>> in_words({"kind": "Gaussian", "scale": 6.2133895, "seed": None})
    'Gaussian, scale 6.2134'
    """
    if isinstance(value, Mapping):
        parts = [(name, inner) for name, inner in value.items() if inner is not None]
        return ", ".join(in_words(v) if name == "kind" else f"{name} {in_words(v)}" for name, v in parts)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    return plain(value)


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
