"""A trained generator of images: samples, more public rows made of them, and what it was trained on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.gradients.graphs import Graphs
from sfumato.nn.modes import recurring_shapes
from sfumato.objective import Batch, Objective
from sfumato.synthesis import store
from sfumato.synthesis.ddpm import Ddpm
from sfumato.synthesis.edm import Edm
from sfumato.synthesis.heun import Churn, Guide, heun
from sfumato.synthesis.images import pixels
from sfumato.synthesis.process import Process
from sfumato.synthesis.progress import bar
from sfumato.synthesis.synthetic import Synthetic
from sfumato.synthesis.unet import Shape, UNet

_STEPS, _BATCH = 18, 1000  # of samples, unless others are asked for
_SAMPLES = (
    "Samples of a generator that was trained on public rows only; for its first weights, and for a guide, answers who "
    "gave them."
)


class Sampling(TypedDict, total=False):
    """The options of `Generator.sample`, but for its seed."""

    labels: Tensor | None
    steps: int
    batch_size: int
    guide: Guide | None
    stochastic: Churn | None
    progress: bool
    cuda_graph: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Generator:
    """What `train_generator` returns: a network with averaged weights, and the process that it undoes.

    >>> from sfumato.synthesis.unet import unet
    >>> network = unet(image=(1, 8, 8), channels=16, multipliers=(1,), blocks=1, attention=())
    >>> generator = Generator(network=network, process=Edm(), provenance={})
    >>> images, labels = generator.sample(4, steps=4, seed=0)
    >>> images.shape, images.dtype, labels.tolist()
    (torch.Size([4, 1, 8, 8]), torch.uint8, [0, 1, 2, 3])
    """

    network: nn.Module
    process: Process
    provenance: Mapping[str, Any]
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        image_of(self.network)
        self.network.eval()

    @property
    def image(self) -> tuple[int, ...]:
        """The shape (C, H, W) of its images."""
        return image_of(self.network)

    @property
    def classes(self) -> int:
        """How many classes it knows; 0 if it was trained without labels."""
        return int(self.network.classes)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def sample(
        self,
        n: int,
        *,
        labels: Tensor | None = None,
        steps: int = _STEPS,
        seed: int | None = None,
        batch_size: int = _BATCH,
        guide: Guide | None = None,
        stochastic: Churn | None = None,
        progress: bool = False,
        cuda_graph: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """n uint8 images and their labels, on the host.

        Args:
            labels: one class per image; by default all classes in turn, so that they are balanced. Without classes
                they are zeros.
            steps: of the sampler, each of two evaluations of the network.
            seed: the same images again, for the same n and batch_size.
            guide: added to the score, see `heun`.
            stochastic: algorithm 2's fresh noise; None for the deterministic algorithm 1.
            cuda_graph: on a GPU, record the network and replay it.
        """
        if not isinstance(n, int) or n < 1 or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgument(f"n={n} and batch_size={batch_size} must be whole numbers of at least 1.")
        wanted = self._labels(n, labels)
        # Batches of one size, which a recording wants; the last may have a few rows too many.
        batches = math.ceil(n / batch_size)
        size = math.ceil(n / batches)
        padded = torch.cat([wanted, wanted.new_zeros(batches * size - n)]).reshape(batches, size)
        entropy = np.random.SeedSequence().entropy if seed is None else seed
        denoiser = _Denoiser(self, recorded=cuda_graph and self.device.type == "cuda")
        made: list[Tensor] = []
        with recurring_shapes(), bar("samples", n, shown=progress) as tell:
            for k, part in enumerate(padded.to(self.device)):
                generator = torch.Generator(self.device).manual_seed(_seed(entropy, k))
                noise = torch.randn(size, *self.image, device=self.device, generator=generator)
                if noise.is_cuda:
                    noise = noise.contiguous(memory_format=torch.channels_last)
                x = heun(
                    denoiser,
                    noise,
                    part if self.classes else None,
                    steps=steps,
                    sigma_min=self.process.sigma_min,
                    sigma_max=self.process.sigma_max,
                    churn=stochastic,
                    guide=guide,
                    generator=generator,
                )
                made.append(pixels(x).contiguous().cpu())
                tell(min(n, (k + 1) * size), lambda: "")
        return torch.cat(made)[:n], wanted

    def public(
        self,
        n: int,
        *,
        seed: int | None = None,
        objective: Objective | None = None,
        augment: Callable[[Batch], Batch] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Synthetic:
        """Samples as public data, which say where they come from; `objective` and `augment` as for any `Public`."""
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        images, classes = self.sample(n, seed=seed, **sampling)
        guide, stochastic = sampling.get("guide"), sampling.get("stochastic")
        provenance = {
            "statement": _SAMPLES,
            "rows": n,
            "labels": "balanced" if sampling.get("labels") is None else "given",
            "steps": sampling.get("steps", _STEPS),
            "seed": seed,
            "batch_size": sampling.get("batch_size", _BATCH),
            "guide": None if guide is None else repr(guide),
            "stochastic": None if stochastic is None else asdict(stochastic),
            "generator": dict(self.provenance),
        }
        data = (images, classes) if self.classes else images
        return Synthetic(data, provenance=provenance, objective=objective, seed=seed, augment=augment)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        part_bytes: int | None = None,
    ) -> Path:
        """Write generator.json and the weights.

        `dtype`: torch.float16 or bfloat16 for half the size. `part_bytes`: split the weights into files no larger.
        """
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise InvalidArgument(f"dtype={dtype} must be None, torch.float32, torch.float16 or torch.bfloat16.")
        path = Path(folder)
        state = {name: t.detach().to(dtype) if dtype else t.detach() for name, t in self.network.state_dict().items()}
        parts = store.in_parts(state, part_bytes)
        names = [f"weights-{i:02}.safetensors" if len(parts) > 1 else "weights.safetensors" for i in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            store.write(path / name, part, {})
        facts = {
            "network": asdict(self.network.shape) if isinstance(self.network, UNet) else None,
            "process": described(self.process),
            "autocast": None if self.autocast is None else str(self.autocast),
            "weights": names,
            "provenance": dict(self.provenance),
        }
        store.put(path / "generator.json", (json.dumps(facts, indent=2) + "\n").encode())
        return path

    @staticmethod
    def load(
        folder: str | os.PathLike[str], *, network: nn.Module | None = None, device: torch.device | str = "cpu"
    ) -> Generator:
        """Read back what `save` wrote. A network that `unet` did not make is to be given; its weights are replaced."""
        path = Path(folder)
        if not (path / "generator.json").exists():
            raise InvalidArgument(
                f"folder={str(path)!r} holds no generator.json: give a folder that a Generator wrote."
            )
        facts = json.loads((path / "generator.json").read_text())
        if network is None:
            if facts["network"] is None:
                raise InvalidArgument(
                    f"network=None does not do for folder={str(path)!r}, whose network was not made by unet: give one."
                )
            network = UNet(Shape(**{name: _tuple(value) for name, value in facts["network"].items()}))
        state: dict[str, Tensor] = {}
        for name in facts["weights"]:
            state |= store.read(path / name)[0]
        store.put_into(network.state_dict(), state, f"folder={str(path)!r}")
        return Generator(
            network=prepared(network.to(device)),
            process=_process(facts["process"]),
            provenance=facts["provenance"],
            autocast=torch.bfloat16 if facts["autocast"] else None,
        )

    def _labels(self, n: int, labels: Tensor | None) -> Tensor:
        if labels is None:
            return torch.arange(n) % max(1, self.classes)
        labels = torch.as_tensor(labels).cpu().long()
        if labels.shape != (n,) or not 0 <= int(labels.min()) <= int(labels.max()) < max(1, self.classes):
            raise InvalidArgument(
                f"labels of the shape {tuple(labels.shape)} from {int(labels.min())} to {int(labels.max())} must be "
                f"n={n} classes below {max(1, self.classes)}."
            )
        return labels


class _Denoiser:
    """D(x; sigma) of a generator, with the augmentation's labels zero; on a GPU recorded once and replayed."""

    def __init__(self, generator: Generator, *, recorded: bool) -> None:
        self._generator = generator
        self._graphs = Graphs() if recorded else None

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        inputs = (x, sigma, labels)
        if self._graphs is None:
            return self._compute(inputs)["D"]
        return self._graphs.run("D", self._compute, inputs, always=True, keep=self._generator)["D"]

    def _compute(self, inputs: tuple[Tensor, Tensor, Tensor | None]) -> dict[str, Tensor]:
        x, sigma, labels = inputs
        of = self._generator
        with torch.no_grad(), torch.autocast(x.device.type, of.autocast, enabled=of.autocast is not None):
            return {"D": of.process.denoised(of.network, x, sigma, labels, None)}


def image_of(network: nn.Module) -> tuple[int, ...]:
    """The shape of a network's images; it also has to say how many classes and labels of an augmentation it takes."""
    missing = [name for name in ("image", "classes", "augment_labels") if not hasattr(network, name)]
    if missing:
        raise InvalidArgument(
            f"network={type(network).__name__} has no attribute {missing[0]!r}: make it by unet(...), or give it "
            "image, classes and augment_labels, which say what it takes."
        )
    shape: Any = network.image
    return tuple(shape)


def prepared(network: nn.Module) -> nn.Module:
    """Weights of convolutions channels-last on a GPU, as its images are."""
    parameter = next(network.parameters(), None)
    if parameter is None:
        raise InvalidArgument(f"network={type(network).__name__} has no parameters: give one that can be trained.")
    return network.to(memory_format=torch.channels_last) if parameter.is_cuda else network  # type: ignore[call-overload]


def described(process: Process) -> dict[str, Any]:
    """A process as JSON has it."""
    if not isinstance(process, Edm | Ddpm):
        raise InvalidArgument(f"process={process!r} must be Edm(...) or Ddpm(...).")
    return {"kind": type(process).__name__, **asdict(process)}


def _process(facts: Mapping[str, Any]) -> Process:
    settings = {name: value for name, value in facts.items() if name != "kind"}
    return Ddpm(**settings) if facts["kind"] == Ddpm.__name__ else Edm(**settings)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _seed(entropy: Any, batch: int) -> int:
    return int(np.random.SeedSequence(entropy, spawn_key=(batch,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
