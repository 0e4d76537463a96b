"""CIFAR-10 from scratch under differential privacy: WRN-16-4, 16 views, batch 4096, epsilon 2.

    SFUMATO_DATA=... python -m benchmarks.cifar10 --checkpoint runs/cifar10.pt --out runs/cifar10.json
    SFUMATO_DATA=... python -m benchmarks.cifar10 ... --stop-after 60    # ends after a whole step; call again to resume
    python -m benchmarks.cifar10 --tiny --device cpu                     # does it work?

Of the 50,000 training images 2,000 count as public and are left out here; 48,000 are private. The folder
$SFUMATO_DATA/images/cifar10 holds lossless mosaics of 100 images per row, train_1.webp to train_5.webp and test.webp,
and labels.npz. With a checkpoint, what was spent is kept in a ledger beside it, `<checkpoint>.ledger.db`.
"""

import _thread
import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu import machine

EPSILON, DELTA, CLIP = 2.0, 1e-5, 1.0
PUBLIC = 2000
STEPS, EVALUATE_EVERY = 1100, 176
SHORT = 352  # steps, whose time is compared with other libraries'

Data = tuple[Tensor, Tensor]


def load(*, tiny: bool) -> tuple[Data, Data]:
    """Private and test images (N, 3, H, W) in uint8, with labels; made up for `tiny` where there is no data."""
    folder = Path(os.environ.get("SFUMATO_DATA", "")) / "images" / "cifar10"
    if not (folder / "labels.npz").is_file():
        if tiny:
            return _made_up(300), _made_up(100)
        raise SystemExit("CIFAR-10 is not here: set SFUMATO_DATA to a folder that holds images/cifar10/labels.npz.")
    files = ["test", "train_1"] if tiny else ["test", *(f"train_{i}" for i in range(1, 6))]
    with ThreadPoolExecutor(len(files)) as pool:
        test, *train = pool.map(lambda name: _mosaic(folder / f"{name}.webp"), files)
    labels = np.load(folder / "labels.npz")
    # Which images are public must not depend on what they show: those that the file names, else a fixed random choice.
    public = labels["public"] if "public" in labels else np.random.default_rng(0).permutation(50_000)[:PUBLIC]
    private = np.setdiff1d(np.arange(50_000), public)
    if tiny:
        private, test = private[:300], test[:100]
    images = np.concatenate(train)[private]
    return _tensors(images, labels["y_train"][private], tiny), _tensors(test, labels["y_test"][: len(test)], tiny)


def _mosaic(path: Path) -> np.ndarray:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    return np.asarray(Image.open(path)).reshape(-1, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def _tensors(images: np.ndarray, labels: np.ndarray, tiny: bool) -> Data:
    shrunk = images[:, ::4, ::4] if tiny else images
    x = torch.from_numpy(np.ascontiguousarray(shrunk.transpose(0, 3, 1, 2)))
    return x, torch.from_numpy(labels.astype(np.int64))


def _made_up(n: int) -> Data:
    rng = torch.Generator().manual_seed(n)
    return torch.randint(256, (n, 3, 8, 8), generator=rng, dtype=torch.uint8), torch.randint(10, (n,), generator=rng)


@torch.no_grad()
def accuracy(module: nn.Module, data: Data) -> float:
    """Percent."""
    x, y = data
    module.eval()
    guesses = torch.cat([module(part).argmax(1) for part in x.split(1000)])
    return 100 * float(guesses.eq(y).double().mean())


def train_once(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, or goes on where the checkpoint stands; says so where it was stopped."""
    from sfumato import Budget, Objective, Private, Public, cross_entropy, train
    from sfumato.algorithms.dp_sgd import dp_sgd
    from sfumato.augment import Augmentation
    from sfumato.checkpoint import load_checkpoint
    from sfumato.models.wide_resnet import wide_resnet
    from sfumato.training import accuracy as hits

    tiny, device, checkpoint = options.tiny, options.device, options.checkpoint
    private_data, test_data = (tuple(t.to(device) for t in data) for data in load(tiny=tiny))
    size, views, batch = len(private_data[1]), 2 if tiny else 16, 32 if tiny else 4096
    if checkpoint is not None:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = wide_resnet(depth=16, width=1 if tiny else 4, outputs=10).to(device)
    objective = Objective(model, cross_entropy, autocast=torch.bfloat16 if device == "cuda" else None)
    private = Private(
        private_data,
        name="cifar10",
        size=size,
        objective=objective,
        budget=Budget(EPSILON, DELTA),
        ledger=None if checkpoint is None else checkpoint.with_suffix(".ledger.db"),
    )
    saved = None if checkpoint is None else load_checkpoint(checkpoint)
    augment = Augmentation(pad=1 if tiny else 4, flip=True)
    method = Told(partial(dp_sgd, clip=CLIP, views=views, augment=augment), saved)
    # As Ctrl-C does: the training ends after a whole step, with the checkpoint written.
    timer = threading.Timer(options.stop_after or 0.0, _thread.interrupt_main)
    timer.daemon = True
    try:
        if options.stop_after is not None:
            timer.start()
        run = train(
            model,
            private=private,
            test=Public(test_data),
            method=method.step,
            steps=options.steps,
            batch_size=batch,
            optimizer=partial(torch.optim.SGD, lr=options.learning_rate),
            metrics={"accuracy": hits, "seconds": method.seconds},
            evaluate_every=options.evaluate_every or (1 if tiny else EVALUATE_EVERY),
            checkpoint=checkpoint,
            name="cifar10",
            progress=False,
            ema=True,
        )
    except KeyboardInterrupt:
        saved = None if checkpoint is None else load_checkpoint(checkpoint)
        stood = {"step": 0, "seconds": 0.0} if saved is None else {key: saved[key] for key in ("step", "seconds")}
        return {"stopped": True, "steps": options.steps, **stood, **machine(device)}
    finally:
        timer.cancel()

    scores = {"last": accuracy(model, test_data)}
    if averaged := getattr(run, "ema", None):
        model.load_state_dict({**model.state_dict(), **averaged})
        scores["ema"] = accuracy(model, test_data)
    for entry in run.history:
        entry["seconds"] = round(entry.pop("test_seconds"), 1)
        entry.pop("test_ema_seconds", None)
    return {
        "stopped": False,
        "test_accuracy": {which: round(score, 2) for which, score in scores.items()},
        "seconds": round(run.seconds, 1),
        f"seconds_at_{SHORT}": next((e["seconds"] for e in run.history if e["step"] == SHORT), None),
        "seconds_per_step": round(run.seconds / max(1, run.steps_taken), 4),
        "steps": options.steps,
        "steps_taken": run.steps_taken,
        "steps_lost": run.steps_lost,
        "setting": {
            "epsilon": EPSILON,
            "delta": DELTA,
            "clip": CLIP,
            "private": size,
            "batch": batch,
            "views": views,
            "learning_rate": options.learning_rate,
            "noise_multiplier": run.config["noise_multiplier"],
        },
        "history": run.history,
        "statement": dict(run.statement),
        **machine(device),
    }


class Told:
    """An algorithm that says now and then how far it is, and knows how long it has been training."""

    def __init__(self, method: Callable[..., Any], saved: Mapping[str, Any] | None) -> None:
        self._method = method
        self._done, self._before = (0, 0.0) if saved is None else (saved["step"], saved["seconds"])
        self._begun, self._start = self._done, 0.0

    def _seconds(self) -> float:
        return self._before + (time.perf_counter() - self._start if self._start else 0.0)

    def step(self, *arguments: Any) -> Any:
        self._start = self._start or time.perf_counter()
        answer = self._method(*arguments)
        self._done += 1
        if self._done % 22 == 0 or self._done <= self._begun + 2:
            print(f"[{self._seconds():6.1f} s] step {self._done}", flush=True)
        return answer

    def seconds(self, module: nn.Module, rows: Data) -> Tensor:
        """As a metric of the training, so that its checkpoint keeps them in the history."""
        return torch.full((len(rows[1]),), self._seconds(), dtype=torch.float64)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"{STEPS} by default, 4 for --tiny")
    parser.add_argument("--learning-rate", type=float, default=4.0)
    parser.add_argument("--evaluate-every", type=int, help=f"steps; {EVALUATE_EVERY} by default")
    parser.add_argument("--checkpoint", type=Path, help="kept here, and resumed from here")
    parser.add_argument("--stop-after", type=float, help="seconds of training, after which this process ends")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a thin network on small images, to try it")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (4 if options.tiny else STEPS)
    if options.stop_after is not None and options.checkpoint is None:
        raise SystemExit("--stop-after needs --checkpoint, to go on from.")
    result = train_once(options)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    if result["stopped"]:
        print(f"Stopped after step {result['step']}: call again with the same arguments to go on.")
    else:
        scores = ", ".join(f"{score:.2f} ({which})" for which, score in result["test_accuracy"].items())
        pace = f"{result['steps_taken']} steps in {result['seconds']:.0f} s, {result['seconds_per_step']:.3f} s each"
        print(f"Test accuracy {scores} after {pace}.")


if __name__ == "__main__":
    main()
