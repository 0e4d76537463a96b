"""All tables and figures of the papers are listed, each with a state that its records give it."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest

from sfumato.errors import InvalidArgument
from sfumato.experiments.convex.spec import convex_names, load_convex
from sfumato.experiments.convex.table import entries as convex_entries
from sfumato.experiments.page import begun_index, filled_index
from sfumato.experiments.papers import FILE, Cells, Item, counts, footnotes, items, listing, markdown, names, of_spec
from sfumato.experiments.records import COMMITTED, all_records, by_settings
from sfumato.experiments.spec import find_spec, spec_names

NUMBERED = {"000": (12, 6), "001": (2, 3), "002": (16, 8), "003": (2, 7), "004": (0, 5)}  # tables and figures


def by_name(folder: Path) -> dict[str, Item]:
    return {item.name: item for item in items("paper", folder, folder)}


def test_every_table_and_figure_is_listed_and_no_other() -> None:
    assert {p.number: (p.tables, p.figures) for p in listing().paper} == NUMBERED
    found = {
        match[1] for name in names() if (match := re.match(r"(\d{3}-(?:table|figure)\d+)(?:[a-z]|-[a-z]+)?$", name))
    }
    kinds = ("table", "figure")
    wanted = {
        f"{paper}-{kind}{number}"
        for paper, each in NUMBERED.items()
        for kind, count in zip(kinds, each, strict=True)
        for number in range(1, count + 1)
    }
    assert found == wanted
    ours = {name for name in names() if not re.match(r"\d{3}-", name)}
    assert ours <= {*spec_names(), *convex_names()}


def test_what_has_a_spec_has_no_other_entry() -> None:
    entries = [item.name for item in listing().item]
    entries += [f"{paper.number}-{part}" for paper in listing().paper for part in paper.without_results]
    assert sorted(entries) == sorted(set(entries))
    assert not set(entries) & {*spec_names(), *convex_names()}, "it has a spec now: delete its entry"


def test_reasons_are_five_words_and_data_is_used_and_readers_exist() -> None:
    assert [item.name for item in listing().item if len(item.reason.split()) > 5] == []
    needed = {name for item in listing().item for name in item.needs}
    needed |= {one.name for one in listing().data if one.spec_name}
    assert needed == {one.name for one in listing().data}
    for one in listing().data:
        module, _, function = one.reader.rpartition(".")
        assert not one.reader or callable(getattr(importlib.import_module(module), function))


def test_stand_ins_are_what_the_specs_have() -> None:
    for one in listing().stand_in:
        assert {cell.settings["paper"].data.name for cell in find_spec(one.spec).cells} == {one.here}
    elsewhere = {one.spec for one in listing().stand_in}
    mnist = {
        name for name in spec_names() if {c.settings["paper"].data.name for c in find_spec(name).cells} == {"mnist"}
    }
    assert elsewhere == mnist  # of no paper here is MNIST all the data


def test_records_hold_what_figures_are_said_to_have_in_them() -> None:
    committed, seen = by_settings(all_records(COMMITTED, "paper").values()), 0
    for item in listing().item:
        if item.runs_of is None:
            continue
        for cell in find_spec(item.runs_of.spec).select(list(item.runs_of.rows), list(item.runs_of.columns)):
            for record in committed.get(cell.settings["paper"], ()):
                held = record[item.runs_of.key]
                measured = (
                    {"test_loss"} if "text" in record else {"test_loss", "test_accuracy"}
                )  # words have no classes
                wanted = {"metrics": {"last", "ema", "vote"}, "history": {"step", *measured}}
                assert wanted[item.runs_of.key] <= set(held if item.runs_of.key == "metrics" else held[-1]), item.name
                seen += 1
    assert seen


def test_states_follow_the_records(tmp_path: Path) -> None:
    before = by_name(tmp_path)
    every = {*spec_names(), *convex_names()}
    assert {before[name].state for name in every} == {"ready"}
    assert before["001-table2"].needs == ("IPUMS-US", "MiniBooNE")
    shutil.copytree(COMMITTED / "000-table7", tmp_path / "000-table7")
    after = by_name(tmp_path)
    assert {name for name in names() if after[name] != before[name]} == {"000-table7"}
    assert after["000-table7"].progress == "measured"
    for record in (tmp_path / "000-table7" / "paper").glob("epsilon-0.5-dope-sgd-seed*.json"):
        record.unlink()
    assert by_name(tmp_path)["000-table7"].progress == "partly, 11 of 12"


def test_figures_follow_the_records_that_hold_them(tmp_path: Path) -> None:
    record = "003-table1/paper/dp-sgd-warm-sigma-1.51-seed0.json"
    (tmp_path / record).parent.mkdir(parents=True)
    shutil.copy(COMMITTED / record, tmp_path / record)
    found = by_name(tmp_path)
    for name in ("003-figure3", "003-figure6", "003-table1-loss"):
        assert (found[name].progress, found[name].runs_of) == ("partly, 1 of 6", "003-table1")


def test_a_spec_whose_data_is_nowhere_needs_data(tmp_path: Path) -> None:
    text = """
title = "One"
paper = "001"
where = "Table 2"
score = "Accuracy"
[settings]
loss = "logistic"
estimator = "OnlyPub"
private = false
[[column]]
name = "OnlyPub"
[[row]]
name = "a"
data = { name = "ipums-us" }
[[row]]
name = "b"
data = { name = "mini-boo-ne" }
"""
    states = []
    for second in ("mini-boo-ne", "skin"):
        path = tmp_path / "one.toml"
        path.write_text(text.replace("mini-boo-ne", second))
        spec = load_convex(path)
        states.append(of_spec(Cells(spec, spec.cells, convex_entries(spec, tmp_path))))
    assert [(item.state, item.needs) for item in states] == [
        ("needs data", ("IPUMS-US", "MiniBooNE")),
        ("ready", ("IPUMS-US",)),
    ]
    assert "sfumato.data.tabular.ipums_us reads it" in states[1].why


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('needs = ["Purchase10"]', 'needs = ["Purchase"]', "did you mean 'Purchase10'?"),
        ('needs = ["Purchase10"]', 'needs = ["Purchase10"]\nreason = "none"', "'000-table10' must have one of"),
        ('needs = ["Purchase10"]', "", "'000-table10' must have one of"),
        ("[[stand_in]]", "[[standin]]", "did you mean 'stand_in'?"),
        ("tables = 12", 'tables = "12"', "[[paper]] '000' tables='12' must be a whole number"),
    ],
)
def test_a_wrong_file_is_told_in_a_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "papers.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        listing(path)


def test_the_page_lists_all_and_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    page = filled_index("By hand.\n" + begun_index(), tmp_path)
    assert page.startswith("By hand.\n")
    assert filled_index(page, tmp_path) == page
    for item in items("paper", tmp_path, tmp_path):
        rows = page.count(f"\n| {item.name} |") + page.count(f"\n| [{item.name}](")
        assert rows == (item.state != "no result"), item.name
    shutil.copytree(COMMITTED / "000-table7", tmp_path / "000-table7")
    now = filled_index(page, tmp_path)
    assert now != page
    assert "| [000-table7](000.md) | measured |" in now


def test_lists_are_followed_by_counts_and_footnotes() -> None:
    common = {"paper": "009", "title": "drawing", "where": "Figure 1"}
    two = [
        Item(name="009-figure1", state="no result", **common),
        Item(name="009-figure2", state="needs data", needs=("EMNIST",), **common),
    ]
    assert counts(two) == "1 need data, 1 without a result"
    assert footnotes(two) == ["Missing: EMNIST (no copy at hand, no reader yet).", "No results: figure 1 (drawing)."]
    assert "| 009-figure2 | needs data | drawing; needs EMNIST |" in markdown(two)
