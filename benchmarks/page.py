"""Writes docs/benchmarks.md, docs/scaling.md and the README's block on the GPU from the stored JSON: no number by hand.

python -m benchmarks.page
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import ask, distributed, engine, gpt2_finetune, gpu, origin, scaling, selection, synthesis
from benchmarks.gpu import Row, times

ROOT = Path(__file__).parent.parent
PAGE, SCALING, README = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scaling.md", ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- gpu -->\n).*?(<!-- /gpu -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """What the three files should hold."""
    return {
        PAGE: page(),
        SCALING: scaling.page(_stored("scaling"), _stored("gpu")),
        README: filled(README.read_text()),
    }


def filled(text: str) -> str:
    """The text with its block on the GPU made anew, if it has one."""
    sentences = headline(_stored("gpu"), _stored("cifar10"))
    return BLOCK.sub(lambda found: f"{found[1]}{sentences}\n{found[2]}", text)


def page() -> str:
    mnist, cifar, rows = _stored("mnist_opacus"), _stored("cifar10"), _stored("gpu")
    setting = mnist["setting"]
    libraries = [
        f"| {r['library']} | {r['accuracy']:.2f} ± {r['standard_error']:.2f} | {r['seconds']:.0f} | {r['seeds']} |"
        for r in mnist["rows"]
    ]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "`make bench` and, on a GPU, `python -m benchmarks.gpu` and `python -m benchmarks.cifar10` make the files "
            "in `benchmarks/results`; `python -m benchmarks.page` makes this page.",
            "",
            "## The private step on a GPU",
            "",
            "<!-- gpu -->",
            headline(rows, cifar),
            "<!-- /gpu -->",
            "",
            gpu.markdown(rows),
            "",
            "A method and the ceiling take turns in one process, and a ratio is the median over these rounds. Every "
            "method runs in the fastest of the variants that were tried: rows per pass, memory layout and, for Opacus "
            "and Opake, the network with or without weight standardisation. Memory is what torch reserves of the GPU "
            "beyond what was reserved before the method was built.",
            "",
            "## What the door costs",
            "",
            ask.markdown(_stored("ask")),
            "",
            "One step asks: the question is checked, the answer counted in a ledger file, the noise drawn from a "
            "cipher and rounded to a grid. The other takes the same clipped sum, adds `torch.randn` and counts "
            "nothing. They take turns; the overhead is the median of their ratios, with a 95 % band. "
            "`python -m benchmarks.ask --device cuda --batch 4096 --views 16 --store` adds a row.",
            "",
            *_cifar10(cifar),
            "## Diffusion models of public images",
            "",
            synthesis.markdown(made := _stored("synthesis")),
            "",
            "32 x 32 images, batches of 256, bfloat16, the whole step recorded; samples by Heun's method in 18 steps, "
            "35 evaluations of the network each. Sampling is timed with the recording of the network, over "
            f"{made[0]['samples']:,} images; more of them make up for it. "
            "`python -m benchmarks.synthesis --device cuda` measures it.",
            "",
            "## GPT-2 on private text at epsilon 1",
            "",
            gpt2_finetune.markdown(_stored("gpt2_finetune")),
            "",
            "## The private step beside the plain step, on a CPU",
            "",
            engine.markdown(_stored("engine")),
            "",
            "All methods of a workload take turns in one run, each in its own process. Every private method computes "
            "the sum of per-example gradients clipped to norm 1, without noise, and is compared with `vmap` before it "
            "is timed.",
            "",
            "## A step of DOPE-SGD beside one of DP-SGD",
            "",
            origin.markdown(_stored("origin")),
            "",
            "The same step with and without a public origin to clip around, which was taken before: both ask the door, "
            "draw noise and move the weights, and take turns in one process. CPU time of all threads, on a GPU the "
            "clock; the ratio is the median of neighbours', with a 95 % band, and its goal 1.05. Where gradients stay "
            "factors, in linear layers and late convolutions, one more product of matrices tells how long they are "
            "around an origin: up to a third of what such a layer needs without one. "
            "`python -m benchmarks.origin --store` measures it.",
            "",
            f"## DP-SGD on MNIST at epsilon {setting['epsilon']:g}, delta {setting['delta']:g}",
            "",
            f"{setting['private']} private images, expected batch {setting['batch']}, {setting['epochs']} epochs, "
            f"clip norm {setting['clip']:g}: the same network, steps and learning rate in both libraries; each "
            "calibrates its own noise to the same promise.",
            "",
            "| library | test accuracy (mean ± standard error) | seconds per run | seeds |",
            "| --- | --- | --- | --- |",
            *libraries,
            "",
            "## Choosing public rows to label, and private PCA",
            "",
            selection.markdown(_stored("selection")),
            "",
            "## Several processes",
            "",
            distributed.markdown(_stored("distributed")),
            "",
        ]
    )


def _stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def headline(rows: list[Row], cifar: dict[str, Any]) -> str:
    """A sentence per workload, of the figures that are there."""
    sentences = [_images(rows), _sequences(rows), "" if cifar["stopped"] else _training(cifar)]
    return " ".join(filter(None, sentences))


def _images(rows: list[Row]) -> str:
    ours = [row for row in rows if (row["workload"], row["method"]) == ("wrn-16-4", "sfumato") and "ratio" in row]
    if not ours:
        return ""
    peers = {"Opacus": "opacus", "`torch.func.vmap`": "vmap", "Opake": "opake"}
    row = ours[0]
    return (
        f"On one {row['gpu']} a whole private step of WRN-16-4 with {row['views']} views per example runs at "
        f"{row['ratio']:.2f} of the speed of the fastest non-private step{_multiples(rows, row, peers)}."
    )


def _sequences(rows: list[Row]) -> str:
    row = next((row for row in rows if (row["workload"], row["method"]) == ("gpt2", "sfumato")), {})
    if "ratio" not in row:
        return ""
    text = f"GPT-2 (124M parameters) trains privately at {row['ratio']:.2f} of the speed of the fastest plain training"
    ghost = times(rows, "gpt2", "sfumato-untied", "opacus-ghost")
    if ghost is None:
        return f"{text}."
    return f"{text}; as Opacus can run it, with an untied head, at {ghost:.1f} times the speed of its ghost clipping."


def _multiples(rows: list[Row], row: Row, peers: dict[str, str]) -> str:
    known = {name: times(rows, row["workload"], row["method"], method) for name, method in peers.items()}
    texts = [f"{value:.1f} times that of {name}" for name, value in known.items() if value is not None]
    if not texts:
        return ""
    return ": " + (f"{', '.join(texts[:-1])} and {texts[-1]}" if texts[1:] else texts[0])


def _training(cifar: dict[str, Any]) -> str:
    setting, scores = cifar["setting"], cifar["test_accuracy"]
    return (
        f"CIFAR-10 from scratch at epsilon {setting['epsilon']:g}, delta {setting['delta']:g}, reaches "
        f"{scores.get('ema', scores['last']):.1f}% test accuracy after {cifar['steps_taken']} steps of "
        f"{setting['batch']} images with {setting['views']} views, one run of {cifar['seconds'] / 60:.1f} minutes."
    )


def _cifar10(cifar: dict[str, Any]) -> list[str]:
    """A section of the page, if the training was ended."""
    if cifar["stopped"]:
        return []
    setting = cifar["setting"]
    rows = [
        f"| {entry['step']} | {entry['epsilon']:.2f} | {100 * entry['test_accuracy']:.1f} | "
        f"{100 * entry['test_ema_accuracy']:.1f} | {entry['seconds']:.0f} |"
        for entry in cifar["history"]
    ]
    return [
        f"## CIFAR-10 from scratch at epsilon {setting['epsilon']:g}, delta {setting['delta']:g}",
        "",
        f"WRN-16-4 on {setting['private']} private images, expected batch {setting['batch']}, {setting['views']} "
        f"views, clip norm {setting['clip']:g}, learning rate {setting['learning_rate']:g}, one run on one "
        f"{cifar['gpu']}.",
        "",
        "| step | epsilon so far | test accuracy | with averaged weights | seconds |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
