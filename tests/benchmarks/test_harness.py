"""The benchmark harness: methods agree, a wrong or broken one becomes a row with an error, tables come from data."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import engine, peers, worker
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["mlp", "lm"])  # the cheap ones; the benchmark itself checks all four
def test_chunked_vmap_agrees_with_vmap(name):
    worker.check(WORKLOADS[name], "vmap-chunked")


def test_losses_are_per_example():
    for workload in WORKLOADS.values():
        module, batch = workload.build(3)
        losses = workload.loss(module, batch)
        assert losses.shape == (3,)
        torch.testing.assert_close(workload.loss(module, tuple(t[1:2] for t in batch)), losses[1:2])


def test_plain_gradient_is_not_mistaken_for_a_clipped_sum():
    with pytest.raises(ValueError, match="wrong"):
        worker.check(WORKLOADS["mlp"], "plain")


def test_a_missing_method_is_one_row_with_an_error(monkeypatch):
    monkeypatch.setattr(engine, "TURN_S", 0.01)
    good, bad = engine.measure("mlp", ["nonesuch"], repeats=2, batch_size=4)
    assert good["cpu_ratio"] == good["memory_ratio"] == 1
    assert bad == {"workload": "mlp", "method": "nonesuch", "error": "KeyError: 'nonesuch'"}


def test_ratios_pair_turns_of_the_same_round():
    plain = [{"cpu": 1.0, "wall": 1.0}, {"cpu": 10.0, "wall": 5.0}, {"cpu": 100.0, "wall": 9.0}]
    twice = [{"cpu": 2.0, "wall": 1.0}, {"cpu": 20.0, "wall": 5.0}]
    row = engine.summary(twice, plain, 30.0, 20.0)
    assert (row["cpu_ratio"], row["wall_ratio"], row["memory_ratio"], row["spread"]) == (2, 1, 1.5, 0)


def test_memory_counts_what_a_step_allocates_and_frees():
    """In a process of its own, as in the benchmark: an old allocator may keep what was freed."""
    code = (
        "import torch; from benchmarks import worker; "
        "step = lambda batch: torch.ones(64 * 2**18).sum(); "  # 64 MiB
        "print(worker.measure_memory(step, ())['memory'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 80


def test_markdown_lists_failures_beside_the_goals():
    row = {"cpu_ratio": 1.234, "wall_ratio": 1.2, "memory_ratio": 1.5, "spread": 0.1, "rounds": 7}
    rows = [
        {"workload": "conv", "method": "sfumato", **row},
        {"workload": "conv", "method": "opake", "error": "opake is not installed"},
    ]
    text = engine.markdown({"machine": {"cpu": "a CPU", "threads": 2, **peers.versions()}, "rows": rows})
    assert "| sfumato | 1.23 ± 0.05 [1.5] |" in text
    assert "| **goal** | <= 1.10 [2.0] |" in text
    assert "1. opake on conv: opake is not installed." in text
    engine.console_table(rows)
