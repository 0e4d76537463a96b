"""The same on a GPU: recorded steps compute what plain ones do, resuming is exact in what is drawn, nothing waits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.public import Public
from sfumato.synthesis import AUGMENT_LABELS, Edm, Generator, train_generator, unet
from sfumato.synthesis.unet import UNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network() -> UNet:
    torch.manual_seed(0)
    made = unet(image=(3, 16, 16), channels=32, multipliers=(1, 2), blocks=1, augment_labels=AUGMENT_LABELS)
    return made.cuda()


def trained(**options: Any) -> Generator:
    images = torch.randint(256, (100, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"images": 20 * 32, "batch_size": 32, "augment_p": 0.12, "autocast": torch.bfloat16}
    public = Public((images, torch.arange(100) % 10))
    return train_generator(public, process=Edm(), network=network(), **given | options)


def test_a_recorded_step_is_the_step() -> None:
    recorded, plain = (trained(cuda_graph=graph).provenance["losses"] for graph in (None, False))
    assert recorded == pytest.approx(plain, rel=0.02)
    assert recorded != pytest.approx(trained(seed=1).provenance["losses"], rel=0.02)


def test_resumed_it_draws_the_same(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    whole = trained().provenance["losses"]
    seen = []
    while not seen or seen[-1] < 20 * 32:
        part = trained(checkpoint=path, seconds=0.2)
        seen.append(part.provenance["images_seen"])
    assert part.provenance["losses"] == pytest.approx(whole, rel=0.02)


def test_recorded_samples_are_the_samples(tmp_path: Path) -> None:
    generator = trained()
    options: dict[str, Any] = {"steps": 6, "seed": 0, "batch_size": 16}
    recorded, plain = (generator.sample(40, cuda_graph=graph, **options)[0].float() for graph in (True, False))
    assert float((recorded - plain).abs().mean()) < 1
    again = Generator.load(generator.save(tmp_path), device="cuda")
    assert float((again.sample(40, **options)[0].float() - plain).abs().mean()) < 1


def test_steps_do_not_wait_for_the_gpu() -> None:
    """However many they are, the host waits as often: for what is checked before and after."""

    def waits(steps: int) -> int:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trained(images=steps * 32)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return sum("synchroniz" in str(w.message) for w in caught)

    trained(images=5 * 32)
    assert waits(10) == waits(30)
