"""HTML and SVG as text, safe by construction: what is not `Markup` already is escaped where it is put in."""

from __future__ import annotations

from html import escape

_VOID = {"img", "meta", "link", "br"}


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


Attribute = str | int | float | bool | None


def tag(name: str, *inside: str, **attributes: Attribute) -> Markup:
    """An element; attributes are `class_`, `aria_label`, ...: True has no value, False and None are left out.

    >>> tag("p", "1 < 2, ", tag("b", "sure"), class_="fact")
    '<p class="fact">1 &lt; 2, <b>sure</b></p>'
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{together(*inside)}</{name}>")


def together(*parts: str) -> Markup:
    """One after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{f"{value:g}" if isinstance(value, float) else escape(str(value))}"'
