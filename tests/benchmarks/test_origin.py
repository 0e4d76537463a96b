"""The benchmark of origins takes both steps, and keeps one row of a kind."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.origin import markdown, on_cpu, stored


def test_it_times_both_steps_and_keeps_the_last_of_a_kind(tmp_path: Path) -> None:
    row = on_cpu("mlp", rounds=3, batch_size=8)
    assert row["low"] <= row["ratio"] <= row["high"]
    assert min(row["seconds_dp_sgd"], row["seconds_dope_sgd"]) > 0
    file = tmp_path / "origin.json"
    stored([row], file)
    stored([{**row, "batch": 9}, {**row, "ratio": 1.5}], file)
    rows = json.loads(file.read_text())
    assert [(r["batch"], r["ratio"]) for r in rows] == [(9, row["ratio"]), (8, 1.5)]
    assert "| 1.50 (" in markdown(rows)
