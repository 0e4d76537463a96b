"""Writes docs/benchmarks.md from the stored JSON, so that no number is typed by hand.

python -m benchmarks.page
"""

import json
from pathlib import Path

from benchmarks.engine import RESULTS, markdown

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MNIST = RESULTS.with_name("mnist_opacus.json")


def page() -> str:
    mnist = json.loads(MNIST.read_text())
    setting = mnist["setting"]
    rows = [
        f"| {r['library']} | {r['accuracy']:.2f} ± {r['standard_error']:.2f} | {r['seconds']:.0f} | {r['seeds']} |"
        for r in mnist["rows"]
    ]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "`make bench` makes the files in `benchmarks/results`; `python -m benchmarks.page` makes this page.",
            "",
            "## The private step beside the plain step, on a CPU",
            "",
            markdown(json.loads(RESULTS.read_text())),
            "",
            "All methods of a workload take turns in one run, each in its own process. Every private method computes "
            "the sum of per-example gradients clipped to norm 1, without noise, and is compared with `vmap` before it "
            "is timed.",
            "",
            f"## DP-SGD on MNIST at epsilon {setting['epsilon']:g}, delta {setting['delta']:g}",
            "",
            f"{setting['private']} private images, expected batch {setting['batch']}, {setting['epochs']} epochs, "
            f"clip norm {setting['clip']:g}: the same network, steps and learning rate in both libraries; each "
            "calibrates its own noise to the same promise.",
            "",
            "| library | test accuracy (mean ± standard error) | seconds per run | seeds |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
