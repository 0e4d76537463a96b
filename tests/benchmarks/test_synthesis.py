"""The benchmark of generators runs: on a CPU its numbers are compared with nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.synthesis import main, markdown


def test_it_counts_images_and_samples(tmp_path: Path) -> None:
    out = tmp_path / "synthesis.json"
    options = ["--network", "digits", "--batch", "4", "--images", "200", "--samples", "6", "--device", "cpu"]
    (row,) = main([*options, "--out", str(out)])
    assert row["images_per_s"] > 0
    assert row["samples_per_s"] > 0
    assert json.loads(out.read_text()) == [row]
    assert f"| {row['images_per_s']:,.0f} | – |" in markdown([row])
    assert f"| {row['samples_per_s']:,.0f} | 700 |" in markdown([{**row, "goal_samples_per_s": 700}])
