"""Table 7 of paper 000 as an experiment: its three columns at smoke scale, and the rehearsal on public users."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.federated import rehearsal
from sfumato.errors import InvalidArgument
from sfumato.experiments.data import load_rows
from sfumato.experiments.records import all_records
from sfumato.experiments.runner import jobs, run_job
from sfumato.experiments.settings import read_settings
from sfumato.experiments.spec import find_spec
from sfumato.experiments.table import entries

COLUMNS = ["DP-SGD (all)", "DP-SGD (only-private)", "DOPE-SGD"]


def test_the_spec_has_the_papers_cells() -> None:
    spec = find_spec("000-table7")
    assert sorted({cell.column for cell in spec.cells}) == sorted(COLUMNS)
    assert [cell.paper for cell in spec.cells if cell.column == "DOPE-SGD"] == [84.7, 85.2, 86.0, 87.1]
    for cell in spec.cells:
        settings = cell.settings["paper"]
        assert settings.federated is not None
        assert settings.data.public / (settings.data.public + settings.data.private) == 0.02
        assert (settings.data.public + settings.data.private) // settings.federated.rows_per_user == 6000


def test_the_columns_differ_in_who_is_behind_the_door(tmp_path: Path) -> None:
    spec = find_spec("000-table7")
    cells = spec.select(["epsilon 4"], [])
    for job in jobs(spec, cells, "smoke", [0], tmp_path, again=False):
        record = run_job(job, device=torch.device("cpu"))
        assert record["statement"]["unit"] == "user"
        assert 3.9 < record["statement"]["epsilon"] <= 4.0
        assert record["steps_taken"] == 10
        assert record["metrics"]["last"]["test"] > 10, "of ten classes"
    found = {r["cell"]["column"]: r["run"] for r in all_records(tmp_path, "smoke").values()}
    assert {column: run["sampler"]["size"] for column, run in found.items()} == dict(
        zip(COLUMNS, (280, 240, 240), strict=True)
    )
    assert {column: run["public_users"] for column, run in found.items()} == dict(
        zip(COLUMNS, (0, 40, 40), strict=True)
    )
    names = [found[column]["method"]["name"] for column in COLUMNS]
    assert names == ["dp_sgd", "dp_sgd_beside_public", "dope_sgd"]


def test_what_makes_no_sense_is_refused() -> None:
    raw = json.loads(json.dumps(find_spec("000-table7").cells[0].settings["smoke"].to_json()))
    raw["federated"]["rows_per_user"] = 0
    with pytest.raises(InvalidArgument, match="rows_per_user=0"):
        read_settings(raw, "here")


def test_the_rehearsal_reads_public_rows_only() -> None:
    """Private rows are replaced by NaN: were one read, the rehearsal's rows would show it."""
    settings = find_spec("000-table7").cells[0].settings["smoke"]
    rows = load_rows(settings.data, torch.device("cpu"))
    x, y = rows.private
    blinded = replace(rows, private=(torch.full_like(x, torch.nan), y))
    tried, made = rehearsal(settings, blinded, 0)
    parts = (made.private, made.public, made.test)
    assert all(bool(torch.isfinite(part[0]).all()) for part in parts)
    assert len(made.private[1]) == settings.data.private
    known = {row.numpy().tobytes() for row in rows.public[0]}
    seen = [{row.numpy().tobytes() for row in part[0]} for part in parts]
    assert set.union(*seen) <= known
    assert not seen[0] & seen[2], "the test is of rows that nobody trained on"
    assert tried.data.public == len(made.public[1])


def test_dope_is_above_both_columns_as_measured() -> None:
    """From the committed runs: by more than three standard errors of the difference, at every epsilon."""
    found = {(e.row, e.column): e for e in entries(find_spec("000-table7"), "paper")}
    for row in ("epsilon 0.5", "epsilon 1", "epsilon 2", "epsilon 4"):
        dope = found[row, "DOPE-SGD"]
        for column in COLUMNS[:2]:
            other = found[row, column]
            assert None not in (dope.ours, other.ours, dope.stderr, other.stderr)
            assert dope.ours - other.ours > 3 * (dope.stderr**2 + other.stderr**2) ** 0.5, (row, column)
