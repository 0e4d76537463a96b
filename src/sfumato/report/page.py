"""The sections of a report as HTML; one that has nothing to show is empty."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sfumato.report.chosen_map import places
from sfumato.report.contents import Selection, Synthesis, Training
from sfumato.report.figures import Figure, Value
from sfumato.report.markup import Markup, tag, together
from sfumato.report.plots import before, headline
from sfumato.report.promises import Promise, add_up
from sfumato.report.svg import WIDTH, draw, key
from sfumato.report.words import at_most, in_words, listed, plain, table

_FEW = 2  # statements that are shown one by one; of more there is a table
_ROWS = 300  # of a table in the page; the file to download has all


# ------------------------------------------------------------------------------------------------ what is promised


def statements(promises: Sequence[Promise], without: Sequence[str]) -> Markup:
    """All of them, each with its warnings first; `without` are trainings that have none."""
    warned = [
        _warning(
            f"The dataset {name!r} has statements of several ledgers, which know nothing of each other: if it is the "
            "same data, what they cost adds up."
        )
        for name in add_up(promises)
    ]
    warned += [_warning(f"{name} has no privacy statement: nothing is promised for it.") for name in without]
    few = len(promises) <= _FEW
    rows = [(p.dataset, *_numbers(p).values(), listed(p.runs)) for p in promises]
    names = ("dataset", *(_numbers(promises[0]) if promises else ()), "covers")
    compared = [] if few else [table("All statements", names, rows)]
    return together(*warned, *compared, *(_statement(p, few=few) for p in promises))


def _numbers(promise: Promise) -> dict[str, str]:
    s = promise.statement
    budget = s.get("budget")
    found = {
        "epsilon": at_most(s.get("epsilon")),
        "delta": s.get("delta"),
        "unit of privacy": s.get("unit"),
        "neighbouring datasets": s.get("adjacency"),
        "budget (epsilon)": budget.get("epsilon") if isinstance(budget, Mapping) else None,
        "private": "yes" if promise.private else "NO",
    }
    return {name: plain(value) for name, value in found.items()}


def _statement(promise: Promise, *, few: bool) -> Markup:
    """Its numbers and what is promised, and folded up all else; one of many is folded up as a whole."""
    said = [str(text) for text in promise.statement.get("warnings") or ()]
    if not promise.private and not any(text.startswith("NOT PRIVATE") for text in said):
        said.insert(0, "NOT PRIVATE: the statement of this run is void.")
    first, rest = _paragraphs(promise.text)
    facts = tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in _numbers(promise).items() if v))
    heading = f"The dataset {promise.dataset}"
    closed = [
        *([] if few else first),
        *rest,
        _asked(promise.statement.get("mechanisms") or ()),
    ]
    whole = tag("details", tag("summary", "The whole statement" if few else heading), *closed, class_="printed")
    if not few:
        return together(*map(_warning, said), whole)
    covers = tag("p", f"Covers {listed(promise.runs)}.", class_="faint")
    shown = [tag("h3", heading), *map(_warning, said), tag("div", facts, class_="numbers"), covers]
    return together(*shown, *first, whole)


def _paragraphs(text: str) -> tuple[list[Markup], list[Markup]]:
    """What is promised and its numbers, and everything else; the title and warnings stand above already."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    kept = [part for part in parts if not part.startswith(("WARNING.", "Privacy statement for"))]
    first = [part for part in kept if part.startswith(("What is promised.", "The numbers.", "There is no promise"))]
    return [tag("p", part) for part in first], [_paragraph(part) for part in kept if part not in first]


def _paragraph(part: str) -> Markup:
    before, *items = re.split(r"^- ", part, flags=re.MULTILINE)
    listed = tag("ul", *(tag("li", item.strip()) for item in items)) if items else ""
    return together(tag("p", before.strip()) if before.strip() else "", listed)


def _asked(lines: Sequence[Mapping[str, Any]]) -> Markup:
    if not lines:
        return Markup("")
    names = ("plan", "note", "question", "noise", "sample", "answers", "planned at")
    rows = [
        (
            line.get("plan"),
            line.get("note") or None,
            line.get("question"),
            in_words(line.get("noise")),
            in_words(line.get("sampler")),
            f"{line.get('answers_counted')} of {line.get('times_planned')}",
            line.get("created"),
        )
        for line in lines
    ]
    return table("What was asked", names, rows)


def _warning(text: str) -> Markup:
    first, colon, rest = text.partition(": ")
    loud = first.isupper() and bool(colon)
    return tag("p", tag("strong", f"{first}: "), rest, class_="warning") if loud else tag("p", text, class_="warning")


# ------------------------------------------------------------------------------------------------ runs and plots


def overview(trainings: Sequence[Training]) -> Markup:
    """One line per run."""
    if not trainings:
        return Markup("")
    names = (
        "run",
        "method",
        "epsilon of it alone",
        "judged by",
        "before",
        "after",
        "noise multiplier",
        "steps",
    )
    timed = any(t.seconds for t in trainings)
    rows: list[tuple[Value, ...]] = []
    for t in trainings:
        metric = headline(t)
        lost, short = t.steps.get("lost", 0), t.steps.get("short", 0)
        also = (f", {lost} lost" if lost else "") + (f", {short} short" if short else "")
        rows.append(
            (
                t.name,
                method_of(t.config),
                at_most(t.epsilon),
                None if metric is None else metric.replace("_", " "),
                before(t),
                None if metric is None else t.last[metric],
                t.config.get("noise_multiplier"),
                f"{t.steps.get('taken', 0)}{also}",
                *([t.seconds or None] if timed else []),
            )
        )
    return table("All runs", (*names, "seconds") if timed else names, rows)


def method_of(config: Mapping[str, Any]) -> str | None:
    """The stack of methods, outermost first.

    >>> method_of({"method": "MirrorDescent", "method_options": {"method": {"name": "dp_sgd"}}})
    'MirrorDescent on dp_sgd'
    """
    if "finetuned" in config:
        return "fine-tuned on public labels"
    found, options = [config.get("method")], config.get("method_options")
    while isinstance(options, Mapping) and isinstance(options.get("method"), Mapping):
        options = options["method"]
        found.append(options.get("name"))
    return " on ".join(str(name) for name in found if name) or None


def figures(found: Iterable[Figure]) -> Markup:
    shown = [_figure(figure) for figure in found]
    return tag("div", *shown, class_="plots") if shown else Markup("")


def _figure(figure: Figure) -> Markup:
    legend = [tag("li", key(series), tag("span", series.name)) for series in figure.series]
    saved = f"data:text/csv;charset=utf-8,{quote(figure.to_csv(), errors='replace')}"
    return tag(
        "figure",
        tag("h3", figure.title),
        draw(figure),
        tag("ul", *legend, class_="legend"),
        tag("figcaption", figure.about),
        tag(
            "details",
            tag("summary", "The numbers behind it"),
            tag(
                "p",
                tag("a", f"{figure.key}.csv", href=saved, download=f"{figure.key}.csv"),
                f", {len(figure.rows)} rows",
                class_="download",
            ),
            table(figure.title, figure.columns, figure.rows[:_ROWS]),
            tag("p", f"The first {_ROWS} rows: the file has all.") if len(figure.rows) > _ROWS else "",
        ),
        id=figure.key,
    )


# ------------------------------------------------------------------------------------------------ public rows


def syntheses(found: Iterable[Synthesis]) -> Markup:
    return together(*map(_synthesis, found))


def _synthesis(one: Synthesis) -> Markup:
    p = one.provenance
    public = p.get("public") if isinstance(p.get("public"), Mapping) else {}
    assert isinstance(public, Mapping)
    measures = p.get("measures") or {}
    numbers = {"rows made": p["rows"], "public rows": public.get("rows"), "trained on": public.get("trained_on")}
    facts = [tag("div", tag("dt", k), tag("dd", plain(v))) for k, v in numbers.items() if v is not None]
    alt = f"A grid of samples that {one.name} made, one row per class."
    rows = [(k, in_words(v)) for k, v in measures.items()] if isinstance(measures, Mapping) else []
    return together(
        tag("h3", one.name),
        tag("p", str(p["statement"])),
        tag("div", tag("dl", *facts), class_="numbers"),
        tag("img", src=_image(one.grid), alt=alt, class_="samples") if one.grid is not None else "",
        table(f"What the rows of {one.name} are worth", ("measure", "value"), rows) if rows else "",
    )


def selections(found: Iterable[Selection]) -> Markup:
    return together(*map(_selection, found))


def _selection(one: Selection) -> Markup:
    settings = one.record.get("settings")
    strategy = settings.get("strategy") if isinstance(settings, Mapping) else None
    by = f" by {strategy}" if isinstance(strategy, str) else ""
    shown = len(one.pictures)
    return together(
        tag("h3", one.name),
        tag("p", f"{one.chosen} public rows were chosen{by}. {one.record['privacy'].get('text', '')}"),
        _map(one),
        tag("p", f"The best {shown} of {one.chosen}, best first:", class_="faint") if shown else "",
        tag(
            "ol",
            *(
                tag(
                    "li",
                    tag("img", src=_image(p.png), alt=f"Chosen image {p.index}", loading="lazy"),
                    f"{p.index}{f': {p.label}' if p.label else ''}",
                )
                for p in one.pictures
            ),
            class_="chosen",
        )
        if shown
        else "",
    )


def _map(one: Selection) -> Markup:
    found = places(one.pictures)
    if not found:
        return Markup("")
    size, side = 26, WIDTH - 34
    images = [
        tag("image", href=_image(p.png), x=round(4 + x * side, 1), y=round(4 + y * side, 1), width=size, height=size)
        for p, (x, y) in zip(one.pictures, found, strict=True)
    ]
    about = f"The {len(found)} best of what {one.name} chose; images that look alike lie close together"
    return tag(
        "figure",
        tag("svg", *images, viewBox=f"0 0 {WIDTH} {WIDTH}", role="img", aria_label=about, class_="plot"),
        tag("figcaption", f"{about}, by the two principal components of their pixels."),
        class_="map",
    )


def _image(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


# ------------------------------------------------------------------------------------------------ how it was made


def configs(trainings: Iterable[Training], others: Iterable[Synthesis | Selection]) -> Markup:
    """Of every run, closed."""
    shown = []
    for t in trainings:
        parts = [("As trained", t.config), ("As asked for", t.asked), ("Versions", t.statement.get("versions"))]
        shown.append(_config(t.name, str(t.source), parts, t.note))
    for other in others:
        facts = other.provenance.get("config") if isinstance(other, Synthesis) else other.record.get("settings")
        shown.append(_config(other.name, str(other.source), [("As asked for", facts)], ""))
    return together(*shown)


def _config(name: str, source: str, parts: Sequence[tuple[str, Any]], note: str) -> Markup:
    inside = [
        part
        for heading, facts in parts
        if facts
        for part in (tag("h3", heading), tag("pre", json.dumps(facts, indent=2, ensure_ascii=False)))
    ]
    return tag(
        "details",
        tag("summary", name),
        tag("p", f"Read from {source}.", class_="faint"),
        tag("p", note) if note else "",
        *inside,
    )
