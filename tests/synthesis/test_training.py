"""Training of a generator: the textbook loop, resumable to the last bit, on public rows only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sklearn.datasets import load_digits
from torch import Tensor

from sfumato import Budget, Private
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.public import Public
from sfumato.synthesis import Ddpm, Edm, Generator, train_generator, unet
from sfumato.synthesis.images import scaled
from sfumato.synthesis.nonleaking import NonLeaking
from sfumato.synthesis.unet import UNet


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.images / 16).float()[:, None], torch.from_numpy(data.target).long()


def network(**options: Any) -> UNet:
    torch.manual_seed(0)
    given: dict[str, Any] = {"channels": 8, "multipliers": (1, 2), "blocks": 1, "attention": (), "augment_labels": 9}
    return unet(image=(1, 8, 8), **given | options)


def trained(net: UNet | None = None, data: Any = None, **options: Any) -> Generator:
    given: dict[str, Any] = {"process": Edm(), "images": 90, "batch_size": 10, "augment_p": 0.12, "rate_ramp": 30}
    return train_generator(Public(digits() if data is None else data), network=net or network(), **given | options)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------ what it computes


def test_digits_are_learned() -> None:
    images, labels = digits()
    held_out = scaled(images[-200:]), labels[-200:]

    def mean_loss(net: torch.nn.Module) -> float:
        return float(Edm().losses(net, *held_out, generator=torch.Generator().manual_seed(0)).detach().mean())

    options: dict[str, Any] = {"images": 1600, "batch_size": 40, "learning_rate": 0.01, "rate_ramp": 200}
    generator = trained(None, (images[:-200], labels[:-200]), augment_p=0.0, **options)
    losses = generator.provenance["losses"]
    assert len(losses) == 40
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert mean_loss(generator.network) < 0.75 * mean_loss(network())


@pytest.mark.parametrize("process", [Edm(), Ddpm()])
def test_it_is_the_loop_that_everybody_writes(process: Any) -> None:
    images, labels = digits()
    ours, theirs = network(), network()
    generator = trained(ours, process=process, seed=3, ema_halflife=400, learning_rate=2e-3)

    torch.manual_seed(3)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) * 10 / 9) * (1 + math.cos(math.pi * k / 9)) / 2
    )  # the ramp is a tenth of 90 images, less than a batch
    average = torch.optim.swa_utils.AveragedModel(theirs)
    theirs.train()
    for k in range(9):
        rows = torch.randint(len(images), (10,))
        views, augment_labels = NonLeaking(p=0.12)(images[rows] * 2 - 1)
        optimizer.zero_grad()
        process.losses(theirs, views, labels[rows], augment_labels).mean().backward()
        optimizer.step()
        schedule.step()
        decay = 0.5 ** (10 / min(400, 0.05 * 10 * (k + 1)))
        with torch.no_grad():
            for mean, p in zip(average.module.parameters(), theirs.parameters(), strict=True):
                mean.mul_(decay).add_(p, alpha=1 - decay)
    for mine, expected in ((ours, theirs), (generator.network, average.module)):
        for a, b in zip(mine.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not same(weights(ours), weights(network()))
    assert not same(weights(ours), weights(generator.network))


def test_pixels_of_either_type_are_the_same() -> None:
    images, labels = digits()
    as_bytes = (images * 255).round().to(torch.uint8)
    one, other = trained(data=(as_bytes, labels)), trained(data=(as_bytes.float() / 255, labels))
    for a, b in zip(one.network.parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_labels_are_not_needed_without_classes() -> None:
    one = trained(network(classes=0), digits()[0], images=20)
    both = trained(network(classes=0), images=20)
    assert same(weights(one.network), weights(both.network))
    assert one.provenance["rows_per_class"] is None


def test_in_bfloat16_the_weights_stay_float32() -> None:
    generator = trained(images=20, autocast=torch.bfloat16)
    assert generator.autocast is torch.bfloat16
    assert {p.dtype for p in generator.network.parameters()} == {torch.float32}
    plain = trained(images=20)
    assert not same(weights(plain.network), weights(generator.network))
    assert generator.provenance["losses"] == pytest.approx(plain.provenance["losses"], rel=0.05)


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    net = network().eval()
    torch.set_rng_state(before)
    generator = trained(net, images=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert not net.training
    assert not generator.network.training
    assert all(p.grad is None for module in (net, generator.network) for p in module.parameters())


def test_seeds_matter_and_repeat() -> None:
    one, again, other = trained(images=20), trained(images=20), trained(images=20, seed=1)
    assert same(weights(one.network), weights(again.network))
    assert not same(weights(one.network), weights(other.network))


# ------------------------------------------------------------------------------------------------ resuming


class Crash(Exception):
    pass


def crash_at(net: UNet, call: int) -> None:
    count = iter(range(1, 1000))

    def hook(module: Any, inputs: Any) -> None:
        if next(count) == call:
            raise Crash

    net.register_forward_pre_hook(hook)


@pytest.mark.parametrize("process", [Edm(), Ddpm()])
def test_after_a_crash_it_ends_with_the_same_bits(process: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint.safetensors"
    options: dict[str, Any] = {"process": process, "checkpoint": path, "checkpoint_every": 30}
    whole, first, second = network(), network(), network(dropout=0.13)
    uninterrupted = trained(whole, process=process)
    crash_at(first, 8)
    with pytest.raises(Crash):
        trained(first, **options)
    steps: list[int] = []
    second.register_forward_hook(lambda *_: steps.append(1))
    resumed = trained(second, **options)
    assert len(steps) == 3  # of nine: the checkpoint was at the sixth
    assert same(weights(whole), weights(second))
    assert same(weights(uninterrupted.network), weights(resumed.network))
    assert uninterrupted.provenance == resumed.provenance
    for a, b in zip(uninterrupted.sample(4, steps=3, seed=0), resumed.sample(4, steps=3, seed=0), strict=True):
        assert torch.equal(a, b)


def test_in_slices_of_time_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    whole = trained(images=40)
    seen = []
    for _ in range(4):
        part = trained(images=40, checkpoint=path, seconds=0.0)  # one step and no more
        seen.append(part.provenance["images_seen"])
    assert seen == [10, 20, 30, 40]
    assert same(weights(whole.network), weights(part.network))
    assert part.provenance == whole.provenance


def test_stopped_between_steps_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    whole = trained(images=60)
    asked = iter([False, True, False, False, False, False])
    part = trained(images=60, checkpoint=path, stop=lambda: next(asked))
    assert part.provenance["images_seen"] == 20
    rest = trained(images=60, checkpoint=path, stop=lambda: next(asked))
    assert same(weights(whole.network), weights(rest.network))
    assert rest.provenance == whole.provenance
    assert next(asked, None) is None  # once after every step


@pytest.mark.parametrize("keep_adam", [False, True])
def test_a_finished_training_is_read_back(tmp_path: Path, keep_adam: bool) -> None:
    path = tmp_path / "checkpoint.safetensors"
    first = trained(checkpoint=path, keep_adam=keep_adam)
    with safe_open(path, framework="pt") as file:
        kinds = {name.split("/")[0] for name in file.keys()}  # noqa: SIM118
    assert kinds == {"weights", "ema", "generator", "losses"} | ({"adam"} if keep_adam else set())
    written = path.stat().st_mtime_ns
    net = network()
    crash_at(net, 1)  # not one more step
    again = trained(net, checkpoint=path, keep_adam=keep_adam)
    assert same(weights(first.network), weights(again.network))
    assert first.provenance == again.provenance
    assert path.stat().st_mtime_ns == written


def test_another_training_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    trained(images=20, checkpoint=path, seconds=0.0)
    with pytest.raises(InvalidArgument, match=r"other settings: learning_rate=0\.001 there and 0\.01 here"):
        trained(images=20, checkpoint=path, learning_rate=0.01)
    images, labels = digits()
    with pytest.raises(InvalidArgument, match="was written with other public rows: give the same again"):
        trained(data=(images.flip(0), labels), images=20, checkpoint=path)
    path.write_bytes(b"no")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        trained(images=20, checkpoint=path)


# ------------------------------------------------------------------------------------------------ what it refuses


def test_only_public_data_is_taken() -> None:
    rows = digits()
    private = Private(rows, name="people", size=len(rows[0]), budget=Budget(1.0, 1e-6))
    for given, name in ((private, "Private"), (rows, "tuple"), (rows[0], "Tensor")):
        with pytest.raises(InvalidArgument, match=f"public={name} must be a Public: what is trained on private rows"):
            train_generator(given, process=Edm(), network=network(), images=10)  # type: ignore[arg-type]


def test_provenance_names_the_rows() -> None:
    images, labels = digits()
    facts = trained(images=20).provenance
    assert facts["rows"] == 1797
    assert facts["rows_per_class"] == torch.bincount(labels).tolist()
    assert facts["settings"]["process"] == {"kind": "Edm", **vars(Edm())}
    assert facts["settings"]["augment"] == {"p": 0.12, "mirrored": 0.5}
    assert "on no others" in facts["statement"]
    assert facts["versions"]["torch"] == torch.__version__
    images[0, 0, 0, 0] = 0.5
    assert trained(data=(images, labels), images=20).provenance["sha256"] != facts["sha256"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images=0 must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a positive number"),
        ({"ema_halflife": 0}, "ema_halflife=0 must be a positive number"),
        ({"autocast": torch.float16}, "must be None or torch.bfloat16"),
        ({"augment_p": 2.0}, "p=2.0 must be a probability"),
        ({"process": "edm"}, "process='edm' must be Edm"),
        ({"net": torch.nn.Linear(2, 2)}, "network=Linear has no attribute 'image'"),
        ({"net": unet(image=(1, 8, 8), channels=8, multipliers=(1,))}, "augment_p=0.12 needs a network that is told"),
        ({"net": unet(image=(3, 8, 8), channels=8, multipliers=(1,))}, "but public has \\(1, 8, 8\\)"),
        ({"net": unet(image=(1, 8, 8), classes=9, channels=8, multipliers=(1,))}, "but network has classes=9"),
        ({"data": torch.rand(5, 1, 8, 8)}, "but public has no labels"),
        ({"data": torch.rand(5, 8)}, "give \\(N, C, H, W\\)"),
        ({"data": 2 * torch.ones(5, 1, 8, 8)}, "floats must lie in 0..1"),
        ({"data": (torch.rand(5, 1, 8, 8), torch.rand(5))}, "one whole number per image"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        trained(**options)


def test_a_loss_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    """And no checkpoint is written after it."""
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(SfumatoError, match=r"The loss is nan at step \d: lower learning_rate=1e\+30"):
        trained(learning_rate=1e30, checkpoint=path, checkpoint_every=10)
    with safe_open(path, framework="pt") as file:
        assert torch.isfinite(file.get_tensor("losses")).all()


def test_progress_shows_images_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    trained(images=20, progress=True)
    shown = capsys.readouterr().out
    assert "20/20" in shown
    assert "images/s" in shown
    assert "loss" in shown
