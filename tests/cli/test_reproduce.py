"""`sfumato reproduce`: the list, the tables and a cell that is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.experiments.convex.spec import convex_names
from sfumato.experiments.papers import names, numbers
from sfumato.experiments.spec import in_order, spec_names

Sfumato = Callable[..., Any]


def test_the_list_and_the_tables_need_no_torch() -> None:
    code = (
        "import sys; from sfumato.cli.main import main; "
        "assert main(['reproduce']) == 0 and main(['reproduce', '000-table1', '--show', '--json']) == 0; "
        "assert main(['reproduce', '001-table2', '--show', '--json']) == 0; "
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in spec_names())


def test_the_list_as_json_has_all_and_counts_as_the_tables_do(sfumato: Sfumato) -> None:
    listed = {one["name"]: one for one in json.loads(sfumato("reproduce", "--json").out)}
    assert in_order(listed) == names()
    assert {*spec_names(), *convex_names()} < set(listed)
    for name in ("000-table9", "001-figure3"):
        cells = json.loads(sfumato("reproduce", name, "--show", "--json").out)
        measured = sum(cell["ours"] is not None for cell in cells)
        assert (listed[name]["cells"], listed[name]["measured"]) == (len(cells), measured)
    assert listed["000-table10"]["needs"] == ["Purchase10"]


def test_a_paper_is_listed_alone(sfumato: Sfumato) -> None:
    both = [json.loads(sfumato("reproduce", *paper, "--json").out) for paper in ([], ["002"])]
    assert both[1] == [one for one in both[0] if one["paper"] == "002"]
    assert 0 < len(both[1]) < len(both[0])


@pytest.mark.parametrize("paper", numbers())
def test_the_list_of_a_paper_is_one_screen(sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch, paper: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = sfumato("reproduce", paper).out.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    of_spec = {name for name in (*spec_names(), *convex_names()) if name.startswith(paper)}
    assert of_spec <= {line.split()[0] for line in lines if line.strip()}


def test_the_list_at_smoke_scale_looks_elsewhere(sfumato: Sfumato, tmp_path: Path) -> None:
    listed = json.loads(sfumato("reproduce", "--scale", "smoke", "--out", tmp_path, "--json").out)
    assert {one["measured"] for one in listed} == {0}
    assert "state at smoke scale" in sfumato("reproduce", "001", "--scale", "smoke", "--out", tmp_path).out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("000-table10", "Purchase10 (no copy at hand"),
        ("002-table4", "not planned"),
        ("003-figure3", "run or show 003-table1,"),
        ("000-figure1", "no result"),
        ("banana", "`sfumato reproduce` lists them all."),
    ],
)
def test_what_cannot_be_run_says_why(sfumato: Sfumato, name: str, said: str) -> None:
    for arguments in (["--show"], ["--scale", "smoke"]):
        result = sfumato("reproduce", name, *arguments)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert name in result.err
        assert said in result.err


def test_a_table_is_shown_beside_the_paper(sfumato: Sfumato, tmp_path: Path) -> None:
    shown = json.loads(sfumato("reproduce", "000-table1", "--show", "--json", "--out", tmp_path).out)
    assert [set(cell) for cell in shown] == [{"row", "column", "paper", "ours", "stderr", "seeds"}] * 6
    assert [cell["paper"] for cell in shown] == [64.9, 68.1, 72.0, 73.7, 74.8, 75.1]
    assert {(cell["ours"], cell["stderr"], cell["seeds"]) for cell in shown} == {(None, None, 0)}
    text = sfumato("reproduce", "000-table1", "--show", "--out", tmp_path)
    assert text.status == 0
    assert "64.9" in text.out
    assert "not run" in text.out


def test_a_cell_is_run_and_shown(sfumato: Sfumato, tmp_path: Path) -> None:
    chosen = ("--row", "DP-SGD warm", "--column", "sigma 1.51")
    run = ("reproduce", "003-table1", "--scale", "smoke", *chosen, "--out", tmp_path, "--device", "cpu")
    first = sfumato(*run)
    assert first.status == 0, first.err
    assert "DP-SGD warm | sigma 1.51 | seed 0" in first.out
    assert "handwritten digits" in first.out
    second = json.loads(sfumato(*run, "--seeds", 2, "--json").out)
    assert [(c["seed"], c["ran"]) for c in second["cells"]] == [(0, False), (1, True)]
    (cell,) = [c for c in second["table"] if c["ours"] is not None]
    assert (cell["row"], cell["column"], cell["seeds"]) == ("DP-SGD warm", "sigma 1.51", 2)
    assert cell["stderr"] is not None
    assert cell["ours"] > 40
    records = sorted((tmp_path / "003-table1" / "smoke").iterdir())
    assert [r.name for r in records] == [f"dp-sgd-warm-sigma-1.51-seed{k}.json" for k in (0, 1)]
    shown = json.loads(
        sfumato("reproduce", "003-table1", "--show", "--scale", "smoke", "--out", tmp_path, "--json").out
    )
    assert shown == second["table"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["000-tabel1", "--show"], "did you mean '000-table1'"),
        (["000-table1"], "--scale is missing"),
        (["--show"], "need the name"),
        (["002", "--show"], "need the name"),
        (["000-table1", "--scale", "smoke", "--row", "lukewarm"], "no cell"),
        (["004-figure1", "--scale", "smoke", "--row", "lukewarm"], "more: --show prints them all"),
        (["000-table1", "--scale", "medium"], "smoke"),
    ],
)
def test_wrong_commands_are_one_sentence(sfumato: Sfumato, arguments: list[str], said: str) -> None:
    result = sfumato("reproduce", *arguments)
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_question_has_no_full_stop(sfumato: Sfumato) -> None:
    assert sfumato("reproduce", "000-tabel1").err.endswith("did you mean '000-table1'?\n")


def test_what_was_run_here_is_shown_at_smoke_scale(
    sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ("--row", "DP-SGD warm", "--column", "sigma 1.51")
    run = sfumato("reproduce", "003-table1", "--scale", "smoke", *chosen, "--device", "cpu", "--json")
    shown = sfumato("reproduce", "003-table1", "--scale", "smoke", "--show", "--json")
    assert json.loads(shown.out) == json.loads(run.out)["table"]
    assert any(cell["ours"] is not None for cell in json.loads(shown.out))


def test_missing_data_and_devices_are_told(sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    result = sfumato("reproduce", "000-table1", "--scale", "paper", "--out", tmp_path, "--device", "cpu")
    assert result.status == 2
    assert "SFUMATO_DATA" in result.err
    if not torch.cuda.is_available():
        result = sfumato("reproduce", "000-table1", "--scale", "smoke", "--out", tmp_path, "--device", "cuda")
        assert result.status == 2
        assert "--device cpu" in result.err
