"""The benchmark of large pages: its processes differ in the switch alone, and its table is made from data."""

import os

import pytest

from benchmarks import large_pages


def test_each_process_has_its_own_switch_and_the_callers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv(large_pages.SWITCH, "as it was")
    monkeypatch.setattr(large_pages, "Worker", lambda *of: seen.append((os.environ[large_pages.SWITCH], *of)))
    for large in (False, True):
        large_pages.worker("mlp", "plain", large=large)
    assert seen == [("0", "mlp", "plain"), ("1", "mlp", "plain")]
    assert os.environ[large_pages.SWITCH] == "as it was"


def test_the_table_is_made_from_data() -> None:
    rows = [
        {"workload": "mlp", "method": m, "gain": gain, "spread": 0.1} for m, gain in (("plain", 1.2), ("sfumato", 1))
    ]
    machine = {"cpu": "a CPU", "threads": 1, "torch": "2"}
    text = large_pages.markdown({"machine": machine, "rounds": 9, "rows": rows})
    assert "| plain | 1.20 ± 0.05 |" in text
    assert "| sfumato | 1.00 ± 0.05 |" in text
    assert "Median of 9 rounds" in text
