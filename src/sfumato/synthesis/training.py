"""Training of a diffusion model on public images: Adam, a moving average of the weights, labelled augmentation.

The loop never waits for the GPU: rows lie on it, forward and backward are one CUDA graph, and what is drawn comes from
torch's own generators there. A checkpoint holds all that changes, so that a resumed training ends with the same bits.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sfumato
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.generators import own_generators
from sfumato.gradients.graphs import Graphs
from sfumato.nn.modes import being_trained
from sfumato.public import Public
from sfumato.synthesis import store
from sfumato.synthesis.generator import Generator, described, image_of, prepared
from sfumato.synthesis.images import PublicImages, scaled
from sfumato.synthesis.nonleaking import AUGMENT_LABELS, NonLeaking
from sfumato.synthesis.process import Process
from sfumato.synthesis.progress import Tell, bar
from sfumato.synthesis.unet import UNet

_BETAS = (0.9, 0.99)  # of Adam: trainings of minutes want a shorter memory than EDM's 0.999
_EMA_RAMP = 0.05  # half-life of the average, as a share of the images seen, until it is what was asked for
_HISTORY = 100  # mean losses kept
_STATEMENT = (
    "Trained on the public rows named here and on no others; that the network's first weights owe nothing to private "
    "data is the word of who gave them."
)


def train_generator(
    public: Public,
    *,
    process: Process,
    network: nn.Module,
    images: int,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    rate_ramp: int = 80_000,
    ema_halflife: int = 500_000,
    augment_p: float = 0.0,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    checkpoint_every: int = 500_000,
    checkpoint_seconds: float = 60.0,
    keep_adam: bool = False,
    seconds: float | None = None,
    stop: Callable[[], bool] | None = None,
    progress: bool = False,
    cuda_graph: bool | None = None,
) -> Generator:
    """Train the network, in place, to undo a process's noise on public images; the generator has averaged weights.

    Args:
        public: images (N, C, H, W), uint8 or floats in 0..1, with their labels if the network has classes. All rows
            are kept on the network's device; batches are drawn from them with replacement.
        network: with first weights that owe nothing to private data, such as random ones: nothing here can tell.
        images: how many images to train on in all, counted each time they are seen; rounded up to whole batches.
        learning_rate: of Adam. It rises for the first `rate_ramp` images, or a tenth of all if that is less, and falls
            to zero along half a cosine.
        ema_halflife: of the average of the weights, in images; at most a twentieth of those seen so far.
        augment_p: how likely each part of `NonLeaking` is, whose labels the network has to take; 0 for none at all.
        autocast: `torch.bfloat16` on a GPU; the generator samples with it as well.
        seed: of batches, noise levels, noise, augmentation and dropout.
        checkpoint: a file that is written every `checkpoint_every` images, every `checkpoint_seconds`, and at the end.
            If it is there already, the training goes on from it, exactly.
        keep_adam: keep Adam's state in the last checkpoint too, which without it is half the size.
        seconds: stop after about so long, with a checkpoint to go on from.
        stop: asked after every step; True ends the training there, with a checkpoint to go on from.
        cuda_graph: on a GPU, record the step and replay it, unless False. A network whose Python code draws random
            numbers of its own needs False.

    >>> from sfumato.synthesis.edm import Edm
    >>> from sfumato.synthesis.unet import unet
    >>> network = unet(image=(1, 8, 8), classes=2, channels=16, multipliers=(1,), blocks=1, attention=())
    >>> public = Public((torch.rand(20, 1, 8, 8), torch.tensor([0, 1] * 10)))
    >>> generator = train_generator(public, process=Edm(), network=network, images=40, batch_size=10)
    >>> generator.provenance["rows"], generator.provenance["images_seen"]
    (20, 40)
    """
    _check(
        whole={"images": images, "batch_size": batch_size, "checkpoint_every": checkpoint_every},
        positive={
            "learning_rate": learning_rate,
            "ema_halflife": ema_halflife,
            "checkpoint_seconds": checkpoint_seconds,
        },
        autocast=autocast,
    )
    rows = PublicImages.of(public)
    rows.check_fit(image_of(network), int(network.classes))  # type: ignore[arg-type]
    augment = _augmentation(augment_p, network)
    network = prepared(network)
    settings = {
        "process": described(process),
        "network": asdict(network.shape) if isinstance(network, UNet) else type(network).__name__,
        "images": images,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "rate_ramp": rate_ramp,
        "ema_halflife": ema_halflife,
        "augment": None if augment is None else asdict(augment),
        "autocast": None if autocast is None else str(autocast),
        "seed": seed,
    }
    provenance = {"statement": _STATEMENT, **rows.facts(), "settings": settings, "versions": _versions()}
    steps = math.ceil(images / batch_size)
    state = _State(network, steps, learning_rate)
    identity = {"settings": settings, "sha256": provenance["sha256"]}
    step = _Step(process, network, state, autocast, recorded=cuda_graph is not False)
    rows = rows.to(state.device)
    labelled = rows.labels if network.classes else None
    every = max(1, checkpoint_every // batch_size)
    start = saved = time.perf_counter()

    with own_generators(seed), being_trained(network):
        if checkpoint is not None and checkpoint.exists():
            state.restore(checkpoint, identity)
        with _told(images, shown=progress, done=state.step * batch_size) as tell:
            while state.step < steps:
                drawn = torch.randint(len(rows.images), (batch_size,), device=state.device)
                views, augment_labels = scaled(rows.images[drawn]), None
                if augment is not None:
                    views, augment_labels = augment(views)
                seen = (state.step + 1) * batch_size
                state.losses[state.step] = step(views, None if labelled is None else labelled[drawn], augment_labels)
                state.update(
                    rate=learning_rate * _share(state.step, steps, min(rate_ramp, images // 10) / batch_size),
                    keep=0.5 ** (batch_size / min(ema_halflife, _EMA_RAMP * seen)),
                )
                tell(seen, state.last_loss)
                now = time.perf_counter()
                ends = seconds is not None and now - start >= seconds
                ends = ends or (stop is not None and stop())
                due = ends or state.step % every == 0 or now - saved >= checkpoint_seconds
                if checkpoint is not None and state.step < steps and due:
                    state.save(checkpoint, identity, adam=True)
                    saved = time.perf_counter()
                if ends:
                    break
        finished = state.step == steps
        state.check_finite()
        if checkpoint is not None and finished and state.moved:
            state.save(checkpoint, identity, adam=keep_adam)
    provenance |= {"images_seen": state.step * batch_size, "losses": state.history()}
    return Generator(network=state.averaged(), process=process, provenance=_as_json(provenance), autocast=autocast)


class _State:
    """All that changes while training, and so what a checkpoint holds."""

    def __init__(self, network: nn.Module, steps: int, learning_rate: float) -> None:
        self._network, self._learning_rate = network, learning_rate
        self._own = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not self._own:
            raise InvalidArgument("network has no trainable parameters: set requires_grad on those to be trained.")
        self.params: list[Tensor] = list(self._own.values())
        self.device = self.params[0].device
        # Like the parameters in memory, which the fused Adam wants; filled in place, also by a recording.
        self.grads = [torch.zeros_like(p) for p in self.params]
        self._ema = {name: p.detach().clone() for name, p in self._own.items()}
        self._adam = torch.optim.Adam(self.params, lr=learning_rate, betas=_BETAS, fused=self.device.type == "cuda")
        self.losses = torch.zeros(steps, device=self.device)
        self.step, self.moved = 0, False

    @torch.no_grad()
    def update(self, *, rate: float, keep: float) -> None:
        """One step of Adam along `grads`, and of the average, which keeps so much of what it was."""
        for p, gradient in zip(self.params, self.grads, strict=True):
            p.grad = gradient
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        torch._foreach_lerp_(list(self._ema.values()), self.params, 1 - keep)
        self.step, self.moved = self.step + 1, True

    def last_loss(self) -> str:
        return f"loss {float(self.losses[self.step - 1]):.3f}"

    def history(self) -> list[float]:
        """Mean losses of the parts of the training, at most a hundred, first to last."""
        parts = min(_HISTORY, self.step)
        return [round(float(part.double().mean()), 6) for part in self.losses[: self.step].cpu().tensor_split(parts)]

    def check_finite(self) -> None:
        if not bool(torch.isfinite(self.losses[: self.step]).all()):
            first = int((~torch.isfinite(self.losses[: self.step])).nonzero()[0])
            raise SfumatoError(
                f"The loss is {float(self.losses[first])} at step {first + 1}: lower learning_rate="
                f"{self._learning_rate}, and move away a checkpoint that was written before."
            )

    def averaged(self) -> nn.Module:
        """A copy of the network with averaged weights."""
        network = copy.deepcopy(self._network)
        own = dict(network.named_parameters())
        store.put_into({name: own[name] for name in self._ema}, self._ema, "the average")
        return network

    def save(self, path: Path, identity: Mapping[str, Any], *, adam: bool) -> None:
        self.check_finite()
        tensors = {f"weights/{name}": t for name, t in self._network.state_dict().items()}
        tensors |= {f"ema/{name}": t for name, t in self._ema.items()}
        tensors |= {f"generator/{name}": t for name, t in _generators(self.device).items()}
        tensors["losses"] = self.losses[: self.step]
        if adam:
            for i, kept in self._adam.state_dict()["state"].items():
                tensors |= {f"adam/{i}/{name}": t for name, t in kept.items()}
        store.write(path, tensors, {"step": self.step, **identity})

    def restore(self, path: Path, identity: Mapping[str, Any]) -> None:
        tensors, facts = store.read(path)
        for name, value in _as_json(identity).items():
            if facts.get(name) != value:
                raise InvalidArgument(
                    f"checkpoint={str(path)!r} was written with other {_difference(name, facts.get(name), value)}: "
                    "give the same again, or name another file."
                )
        kept = {
            kind: {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}
            for kind in ("weights/", "ema/", "generator/", "adam/")
        }
        what = f"checkpoint={str(path)!r}"
        store.put_into(self._network.state_dict(), kept["weights/"], what)
        store.put_into(self._ema, kept["ema/"], what)
        self.step = int(facts["step"])
        self.losses[: self.step] = tensors["losses"].to(self.device)
        if self.step < len(self.losses):
            self._restore_adam(kept["adam/"])
            _set_generators(kept["generator/"], self.device)

    def _restore_adam(self, kept: Mapping[str, Tensor]) -> None:
        def of(i: int, p: Tensor) -> dict[str, Tensor]:
            moments = {name: torch.empty_like(p).copy_(kept[f"{i}/{name}"]) for name in ("exp_avg", "exp_avg_sq")}
            return {"step": kept[f"{i}/step"], **moments}

        with torch.no_grad():
            state = {i: of(i, p) for i, p in enumerate(self.params)}
        self._adam.load_state_dict({**self._adam.state_dict(), "state": state})


class _Step:
    """The mean loss of a batch, with its gradient left in the state; on a GPU replayed from a recording."""

    def __init__(
        self, process: Process, network: nn.Module, state: _State, autocast: torch.dtype | None, *, recorded: bool
    ) -> None:
        self._process, self._network, self._state, self._autocast = process, network, state, autocast
        self._graphs = Graphs() if recorded and state.device.type == "cuda" else None

    def __call__(self, images: Tensor, labels: Tensor | None, augment_labels: Tensor | None) -> Tensor:
        batch = (images, labels, augment_labels)
        if self._graphs is None:
            return self._compute(batch)["loss"]
        # Nothing but the batch's numbers changes from step to step, so there is one recording.
        return self._graphs.run("step", self._compute, batch, always=True, keep=self._state)["loss"]

    def _compute(self, batch: tuple[Tensor, Tensor | None, Tensor | None]) -> dict[str, Tensor]:
        kind, state = self._autocast, self._state
        with torch.enable_grad(), torch.autocast(state.device.type, kind, enabled=kind is not None):
            loss = self._process.losses(self._network, *batch).mean()
        found = torch.autograd.grad(loss, state.params, allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(state.grads, found)
        return {"loss": loss.detach()}


@contextmanager
def _told(images: int, *, shown: bool, done: int) -> Iterator[Tell]:
    """A bar; where there is no terminal to draw it on, a line for every tenth."""
    if sys.stdout.isatty() or not shown:
        with bar("generator", images, shown=shown, done=done) as tell:
            yield tell
        return
    start, tenths = time.perf_counter(), 10 * done // images

    def line(now_done: int, fact: Callable[[], str]) -> None:
        nonlocal tenths
        seen = min(now_done, images)
        if 10 * seen // images > tenths:
            tenths = 10 * seen // images
            text = f"generator {seen}/{images}, {fact()}"
            print(f"{text}, {(now_done - done) / max(1e-9, time.perf_counter() - start):,.0f} images/s", flush=True)

    yield line


def _share(step: int, steps: int, ramp: float) -> float:
    """Of the learning rate: a linear ramp of so many steps times half a cosine."""
    return min(1.0, (step + 1) / max(1.0, ramp)) * (1 + math.cos(math.pi * step / steps)) / 2


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states if device.type != "cuda" else {**states, "cuda": torch.cuda.get_rng_state(device)}


def _set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _augmentation(p: float, network: nn.Module) -> NonLeaking | None:
    augment = NonLeaking(p=p)
    if not p:
        return None
    if network.augment_labels != AUGMENT_LABELS:
        raise InvalidArgument(
            f"augment_p={p} needs a network that is told of the augmentation: give unet(augment_labels="
            f"{AUGMENT_LABELS}), or augment_p=0."
        )
    return augment


def _check(*, whole: Mapping[str, int], positive: Mapping[str, float], autocast: torch.dtype | None) -> None:
    for name, value in whole.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"{name}={value} must be a whole number of at least 1.")
    for name, number in positive.items():
        if not (math.isfinite(number) and number > 0):
            raise InvalidArgument(f"{name}={number} must be a positive number.")
    if autocast not in (None, torch.bfloat16):
        raise InvalidArgument(f"autocast={autocast} must be None or torch.bfloat16: float16 would need losses scaled.")


def _difference(name: str, theirs: Any, mine: Any) -> str:
    if not (isinstance(theirs, dict) and isinstance(mine, dict)):
        return "public rows" if name == "sha256" else name
    first = next((key for key in mine if theirs.get(key) != mine[key]), None)
    return name if first is None else f"{name}: {first}={theirs.get(first)} there and {mine[first]} here"


def _versions() -> dict[str, str]:
    return {"sfumato": sfumato.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(facts))
    return kept
