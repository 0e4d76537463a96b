"""How fast a generator trains and samples: EDM on made-up images, recorded and in bfloat16 on a GPU.

    python -m benchmarks.synthesis --device cuda                      # both networks, a minute and a half of an H200
    python -m benchmarks.synthesis --network digits --images 640      # does it work? On a CPU

Training is timed over whole steps after the first ones, which choose kernels and record; samples are timed whole, with
the recording, so that more of them look faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sfumato import Public
from sfumato.synthesis import AUGMENT_LABELS, Edm, train_generator
from sfumato.synthesis.unet import cifar_unet, ddpmpp_unet, digits_unet

# Images/s of training and of sampling on an H200 that are aimed at.
GOALS = {"cifar": (7000, 700), "ddpmpp": (2450, 250), "digits": (None, None)}
NETWORKS: dict[str, Callable[[], Any]] = {
    "cifar": cifar_unet,
    "ddpmpp": ddpmpp_unet,
    "digits": partial(digits_unet, augment_labels=AUGMENT_LABELS),
}
ROWS, FIRST, EVERY = 2000, 20, 20  # steps before the clock starts, and between its looks, which wait for the GPU


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device, batch = torch.device(options.device), options.batch
    torch.manual_seed(0)
    network = NETWORKS[name]().to(device)
    public = Public((torch.randint(256, (ROWS, *network.image), dtype=torch.uint8), torch.arange(ROWS) % 10))
    marks: list[float] = []

    def mark() -> bool:
        if len(marks) % EVERY == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        return False

    generator = train_generator(
        public,
        process=Edm(),
        network=network,
        images=max(options.images, (FIRST + EVERY + 1) * batch),
        batch_size=batch,
        augment_p=0.12,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
        stop=mark,
    )
    last = FIRST + (len(marks) - 1 - FIRST) // EVERY * EVERY
    start = time.perf_counter()
    generator.sample(options.samples)
    seconds = time.perf_counter() - start
    return {
        "network": name,
        "parameters": sum(p.numel() for p in network.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "batch": batch,
        "images_per_s": round((last - FIRST) * batch / (marks[last] - marks[FIRST]), 1),
        "samples": options.samples,
        "samples_per_s": round(options.samples / seconds, 1),
        "goal_images_per_s": GOALS[name][0],
        "goal_samples_per_s": GOALS[name][1],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """One row per network, beside what was aimed at."""
    lines = [
        "| network | parameters | device | images/s, training | goal | images/s, sampling | goal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        speeds = [_beside(r[f"{what}_per_s"], r[f"goal_{what}_per_s"]) for what in ("images", "samples")]
        lines.append(f"| {r['network']} | {r['parameters'] / 1e6:.1f}M | {r['device']} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def _beside(speed: float, goal: float | None) -> str:
    return f"{speed:,.0f} | {'–' if goal is None else f'{goal:,}'}"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, nargs="*", default=["cifar", "ddpmpp"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=60_000, help="to train on")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.network:
        rows.append(measure(name, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
