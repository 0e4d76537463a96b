"""Samples of a generator, the public rows made of them, and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato.errors import InvalidArgument
from sfumato.objective import Objective, cross_entropy
from sfumato.public import Public
from sfumato.synthesis import AUGMENT_LABELS, Churn, Ddpm, Edm, Generator, Synthetic, unet
from sfumato.synthesis.unet import UNet


def shaken(**options: Any) -> UNet:
    torch.manual_seed(0)
    given: dict[str, Any] = {"channels": 8, "multipliers": (1, 2), "blocks": 1, "attention": ()}
    network = unet(image=(1, 8, 8), **given | options)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return network


def make(**options: Any) -> Generator:
    given: dict[str, Any] = {"network": shaken(), "process": Edm(), "provenance": {"rows": 5, "statement": "public"}}
    return Generator(**given | options)


class Known(nn.Module):
    """F of EDM for images of one grey per class: white less a tenth per class."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.image, self.classes, self.augment_labels = (1, 4, 4), classes, AUGMENT_LABELS
        self.weight = nn.Parameter(torch.ones(()))
        self.augment_labels_seen: list[Tensor | None] = []

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None, augment_labels: Tensor | None) -> Tensor:
        self.augment_labels_seen.append(augment_labels)
        sigma = (4 * c_noise).exp()
        c_skip, c_out, c_in, _ = (c[:, None, None, None] for c in Edm().preconditioning(sigma))
        grey = 1 - 0.1 * (torch.zeros(len(x)) if labels is None else labels.float())
        return self.weight * (grey[:, None, None, None] - c_skip * x / c_in) / c_out


class Zeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.classes, self.augment_labels = (1, 8, 8), 0, 0
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.weight * x


# ------------------------------------------------------------------------------------------------ samples


def test_samples_are_what_the_network_knows_of_their_class() -> None:
    network = Known()
    images, labels = make(network=network).sample(8, steps=5, batch_size=3, seed=0)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    expected = ((2 - 0.1 * labels) * 127.5).round().to(torch.uint8)
    assert images.dtype == torch.uint8
    assert ((images.int() - expected.int()[:, None, None, None]).abs() <= 1).all()
    assert network.augment_labels_seen == [None] * 9 * 3  # labels of the augmentation are zero, in every evaluation


def test_labels_can_be_chosen() -> None:
    images, labels = make(network=Known()).sample(3, steps=5, labels=torch.tensor([2, 2, 0]))
    assert labels.tolist() == [2, 2, 0]
    assert images[0].float().mean() == pytest.approx(1.8 * 127.5, abs=1)
    assert images[2].float().mean() == pytest.approx(255, abs=1)


def test_pixels_have_the_deviation_of_the_data() -> None:
    """With F = 0 they are independent and normal."""
    images, labels = make(network=Zeros(), process=Edm(sigma_data=0.25)).sample(300, steps=30, seed=1)
    assert labels.tolist() == [0] * 300
    assert float(images.float().std()) == pytest.approx(0.25 * 127.5, rel=0.03)
    assert float(images.float().mean()) == pytest.approx(127.5, abs=1)


def test_seeds_repeat() -> None:
    generator = make()
    same = torch.zeros(5, dtype=torch.long)
    one, again, other = (generator.sample(5, labels=same, steps=3, seed=s, batch_size=2)[0] for s in (1, 1, 2))
    fresh = [generator.sample(5, steps=3)[0] for _ in range(2)]
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(*fresh)
    assert len(one.flatten(1).unique(dim=0)) == 5  # batches do not repeat each other


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    make().sample(2, steps=2, stochastic=Churn())
    assert torch.equal(torch.get_rng_state(), before)


def test_guides_and_fresh_noise_change_samples() -> None:
    generator = make(network=Zeros(), process=Edm(sigma_data=0.25))
    options: dict[str, Any] = {"steps": 80, "seed": 0}
    plain = generator.sample(50, **options)[0].float()

    def brighter(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        """The score of N(0.2, .25^2) less that of N(0, .25^2), noised."""
        return torch.ones_like(x) * (0.2 / (0.25**2 + sigma.square()))[:, None, None, None]

    guided = generator.sample(50, guide=brighter, **options)[0].float()
    assert float((guided - plain).mean()) == pytest.approx(0.2 * 127.5, rel=0.05)
    noisy = generator.sample(50, stochastic=Churn(S_churn=20, S_noise=1.0), **options)[0].float()
    assert float((noisy - plain).abs().mean()) > 10
    assert float(noisy.std()) == pytest.approx(0.25 * 127.5, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0 and batch_size=1000 must be whole numbers"),
        ({"n": 2, "labels": torch.tensor([1])}, "must be n=2 classes below 10"),
        ({"n": 1, "labels": torch.tensor([10])}, "from 10 to 10 must be n=1 classes below 10"),
        ({"n": 1, "steps": 1}, "steps=1 must be a whole number of at least 2"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make().sample(**options)


def test_a_network_says_what_it_takes() -> None:
    with pytest.raises(InvalidArgument, match="network=Linear has no attribute 'image'"):
        make(network=nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------ public rows


def test_samples_become_public_rows_that_say_where_they_come_from() -> None:
    generator = make()
    objective = Objective(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), cross_entropy)
    public = generator.public(12, steps=2, seed=4, stochastic=Churn(), objective=objective)
    assert isinstance(public, Public)
    assert isinstance(public, Synthetic)
    images, labels = public.batch()
    expected = generator.sample(12, steps=2, seed=4, stochastic=Churn())
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])
    assert public.objective is objective
    facts = public.provenance
    assert facts["generator"] == generator.provenance
    assert (facts["rows"], facts["steps"], facts["seed"], facts["labels"]) == (12, 2, 4, "balanced")
    assert facts["stochastic"] == vars(Churn())
    assert "answers who gave them" in facts["statement"]
    json.dumps(facts)


def test_without_a_seed_the_one_drawn_is_kept() -> None:
    generator = make()
    public = generator.public(3, steps=2)
    again = generator.public(3, steps=2, seed=public.provenance["seed"])
    assert torch.equal(public.batch()[0], again.batch()[0])


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize(("process", "autocast"), [(Edm(sigma_data=0.4), None), (Ddpm(T=100), torch.bfloat16)])
def test_it_is_read_back_to_the_last_bit(process: Any, autocast: Any, tmp_path: Path) -> None:
    generator = make(process=process, autocast=autocast, network=shaken(augment_labels=9, dropout=0.2))
    folder = generator.save(tmp_path / "deep" / "folder")
    again = Generator.load(folder)
    assert again.process == process
    assert again.autocast is autocast
    assert again.provenance == generator.provenance
    assert isinstance(again.network, UNet)
    assert isinstance(generator.network, UNet)
    assert again.network.shape == generator.network.shape
    assert not again.network.training
    for a, b in zip(generator.sample(3, steps=3, seed=0), again.sample(3, steps=3, seed=0), strict=True):
        assert torch.equal(a, b)


def test_weights_can_be_halved_and_split(tmp_path: Path) -> None:
    generator = make()
    whole, small = generator.save(tmp_path / "whole"), tmp_path / "small"
    generator.save(small, dtype=torch.float16, part_bytes=20_000)
    files = sorted(small.glob("*.safetensors"))
    assert len(files) > 2
    assert sum(f.stat().st_size for f in files) < 0.7 * (whole / "weights.safetensors").stat().st_size
    assert not list(small.glob(".*"))
    again = Generator.load(small)
    for a, b in zip(generator.network.parameters(), again.network.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.detach().half().float(), b.detach())


def test_other_networks_are_given_to_load(tmp_path: Path) -> None:
    network = Known()
    with torch.no_grad():
        network.weight.fill_(0.5)
    folder = make(network=network).save(tmp_path)
    with pytest.raises(InvalidArgument, match="network=None does not do"):
        Generator.load(folder)
    again = Generator.load(folder, network=Known())
    assert float(next(again.network.parameters()).detach()) == 0.5
    with pytest.raises(InvalidArgument, match=r"does not fit the network: .* is in one of them only"):
        Generator.load(folder, network=shaken())


def test_what_cannot_be_written_or_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"holds no generator\.json"):
        Generator.load(tmp_path)
    with pytest.raises(InvalidArgument, match=r"dtype=torch\.int8 must be"):
        make().save(tmp_path, dtype=torch.int8)
    folder = make().save(tmp_path / "one")
    (folder / "weights.safetensors").write_bytes(b"no")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Generator.load(folder)
